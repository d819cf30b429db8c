"""The version of this distribution; the protocol's versions stand in `kvparams.params`."""

__all__ = ["__version__"]

__version__ = "0.1.0"
