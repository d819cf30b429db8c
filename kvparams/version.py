"""The version of this distribution; the protocol's versions stand in `kvparams.params`."""

from typing import Final

__all__ = ["__version__"]

__version__: Final = "0.1.0"
