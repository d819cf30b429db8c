"""Managers by name: ours and those of third parties, in the entry-point group `kvparams.managers`.

    [project.entry-points."kvparams.managers"]
    nearest_pair = "their_package.managers:NearestPair"

The one rule: a manager is made from a signer and options, and from nothing else; making one checks both.
"""

from collections.abc import Mapping
from typing import Protocol, cast

from kvparams import plugins
from kvparams.managers.interface import DisaggregatedRequestManager
from kvparams.managers.options import Options
from kvparams.trust.signing import Signer

__all__ = ["Maker", "made", "names"]


class Maker(Protocol):
    """What is registered: a class whose `__init__` takes these two, or a function."""

    def __call__(self, signer: Signer | None, options: Options) -> DisaggregatedRequestManager:
        """The manager.

        Args:
            signer: signs the documents of all legs; None where they are not signed.
            options: what the operator has said to it.

        Raises:
            ValueError: an option cannot be this; the message says what it must be.
        """
        ...


def names() -> list[str]:
    """Every manager that is registered, sorted."""
    return plugins.names("managers")


def made(
    name: str, signer: Signer | None = None, options: Mapping[str, object] | None = None
) -> DisaggregatedRequestManager:
    """The manager of this name.

    Raises:
        PluginError: it is not registered, or cannot be loaded.
        ValueError: an option is unknown, or cannot be this.
    """
    given = Options(options)
    manager = cast("Maker", plugins.load("managers", name))(signer, given)
    given.check()
    return manager
