"""Holds the active request manager modes, which can be switched while the proxy runs.

A request keeps the manager that it began with; a switch affects later requests.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvparams.instances import RequestFacts, Role
from kvparams.routing.managers.factory import create_manager
from kvparams.routing.managers.interface import DisaggregatedRequestManager
from kvparams.routing.managers.mode_selector import ActiveManager, ManagerMode, ModeSelector
from kvparams.signing.signer import Signer

__all__ = ["ActiveModes", "required_roles"]

_log: Final = logging.getLogger(__name__)


def required_roles(choice: ModeSelector) -> frozenset[Role]:
    """Returns the roles without which some request would be refused."""
    return frozenset(role for each in choice.active for role in each.manager.roles)


class ActiveModes:
    """The active modes of one proxy."""

    def __init__(self, modes: Sequence[ManagerMode], signer: Signer | None = None) -> None:
        """Creates the managers of these modes.

        Raises:
            PluginError: a manager is not registered, or cannot be loaded.
            ValueError: an option of one is wrong, or they are no choice; see `ModeSelector`.
        """
        self._signer = signer
        self._choice = self._made(modes, ())
        self._changed: Callable[[frozenset[Role]], None] | None = None
        self.switch_count = 0
        """How often they were replaced."""

    @property
    def active(self) -> tuple[ManagerMode, ...]:
        """The active modes, in the order in which they were named."""
        return tuple(each.mode for each in self._choice.active)

    @property
    def roles(self) -> frozenset[Role]:
        """See `required_roles`."""
        return required_roles(self._choice)

    def set_change_listener(self, changed: Callable[[frozenset[Role]], None]) -> None:
        """Sets a listener that hears the required roles now and after every switch."""
        self._changed = changed
        changed(self.roles)

    def select_manager(self, request: RequestFacts, endpoint: str, stream: bool) -> DisaggregatedRequestManager:
        """Selects the manager that coordinates this request."""
        return self._choice.select_manager(request, endpoint, stream)

    def replace(self, modes: Sequence[ManagerMode], source: str) -> None:
        """Replaces the modes from the next request on. Raises as the constructor does; then nothing has changed."""
        self._choice = self._made(modes, self._choice.active)
        self.switch_count += 1
        _log.info("%s: modes are now %s", source, ", ".join(mode.use for mode in modes))
        if self._changed is not None:
            self._changed(self.roles)

    def _made(self, modes: Sequence[ManagerMode], before: Iterable[ActiveManager]) -> ModeSelector:
        """Returns the managers. One that stays active keeps its state."""
        kept = {(each.mode.use, *sorted(map(repr, each.mode.options.items()))): each.manager for each in before}
        active: list[ActiveManager] = []
        for mode in modes:
            key = (mode.use, *sorted(map(repr, mode.options.items())))
            if key not in kept:
                kept[key] = create_manager(mode.use, self._signer, mode.options)
            active.append(ActiveManager(mode, kept[key]))
        return ModeSelector(active)
