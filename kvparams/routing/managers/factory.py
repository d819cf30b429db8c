"""Managers by name: ours and those of third parties, in the entry-point group `kvparams.managers`.

    [project.entry-points."kvparams.managers"]
    nearest_pair = "their_package.managers:NearestPair"

A manager is made from a signer and options, and from nothing else; making one checks both.
"""

from collections.abc import Mapping
from typing import Protocol, cast

from kvparams import plugins
from kvparams.routing.managers.interface import DisaggregatedRequestManager
from kvparams.routing.managers.manager_options import ManagerOptions
from kvparams.signing.signer import Signer

__all__ = ["ManagerFactory", "create_manager", "manager_names"]


class ManagerFactory(Protocol):
    """A `ManagerFactory` is a registered class whose `__init__` takes these two arguments, or a function."""

    def __call__(self, signer: Signer | None, options: ManagerOptions) -> DisaggregatedRequestManager:
        """The manager.

        Args:
            signer: signs the documents of all legs; None where they are not signed.
            options: what the operator has said to it.

        Raises:
            ValueError: an option cannot be this; the message says what it must be.
        """
        ...


def manager_names() -> list[str]:
    """Every manager that is registered, sorted."""
    return plugins.plugin_names("managers")


def create_manager(
    name: str, signer: Signer | None = None, options: Mapping[str, object] | None = None
) -> DisaggregatedRequestManager:
    """The manager of this name.

    Raises:
        PluginError: it is not registered, or cannot be loaded.
        ValueError: an option is unknown, or cannot be this.
    """
    given = ManagerOptions(options)
    manager = cast("ManagerFactory", plugins.load_plugin("managers", name))(signer, given)
    given.reject_unread()
    return manager
