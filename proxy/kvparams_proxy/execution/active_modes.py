"""Holds the active request manager modes, which can be switched while the proxy runs.

A request keeps the manager that it began with; a switch affects later requests.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from kvparams.instances import RequestFacts, Role
from kvparams.routing.managers.factory import create_manager
from kvparams.routing.managers.interface import DisaggregatedRequestManager
from kvparams.routing.managers.mode_selector import ActiveManager, ManagerMode, ModeSelector
from kvparams.routing.model_settings import ModelSettings, SettingsByModel
from kvparams.signing.signer import Signer
from kvparams_proxy.config.settings import Settings

__all__ = ["ActiveModes", "needed_roles", "required_roles"]

_log: Final = logging.getLogger(__name__)


def required_roles(choice: ModeSelector) -> frozenset[Role]:
    """Returns the roles without which some request would be refused."""
    return frozenset(role for each in choice.active for role in each.manager.roles)


def needed_roles(settings: Settings) -> frozenset[Role]:
    """Returns the roles without which a proxy that starts with these settings would refuse some request."""
    return frozenset[Role]().union(*ActiveModes(settings.modes, models=SettingsByModel(settings.models)).role_groups)


class ActiveModes:
    """The active modes of one proxy: those for all models, and those of models that have modes of their own."""

    def __init__(
        self, modes: Sequence[ManagerMode], signer: Signer | None = None, models: SettingsByModel | None = None
    ) -> None:
        """Creates the managers of these modes, and of those of `models`.

        Raises:
            PluginError: a manager is not registered, or cannot be loaded.
            ValueError: an option of one is wrong, or they are no choice; see `ModeSelector`.
        """
        self._signer = signer
        self._models = models or SettingsByModel()
        self._choice = self._made(modes, ())
        self._by_entry: dict[str | None, ModeSelector] = {}
        self._by_entry = self._made_by_entry(self._models.entries)
        self._changed: Callable[[Collection[frozenset[Role]]], None] | None = None
        self.switch_count = 0
        """How often they were replaced."""

    @property
    def active(self) -> tuple[ManagerMode, ...]:
        """The active modes, in the order in which they were named."""
        return tuple(each.mode for each in self._choice.active)

    def active_for(self, model: str | None) -> tuple[ManagerMode, ...]:
        """The active modes for requests for a model."""
        return tuple(each.mode for each in self._choice_for(model).active)

    @property
    def roles(self) -> frozenset[Role]:
        """See `required_roles`: the roles for models without modes of their own."""
        return required_roles(self._choice)

    @property
    def role_groups(self) -> frozenset[frozenset[Role]]:
        """The roles for models without modes of their own, and those for each of the other models."""
        return frozenset((self.roles, *map(required_roles, self._by_entry.values())))

    def set_change_listener(self, changed: Callable[[Collection[frozenset[Role]]], None]) -> None:
        """Sets a listener that hears `role_groups` now and after every switch."""
        self._changed = changed
        changed(self.role_groups)

    def select_manager(self, request: RequestFacts, endpoint: str, stream: bool) -> DisaggregatedRequestManager:
        """Selects the manager that coordinates this request."""
        choice = self._choice if not self._by_entry else self._choice_for(request.model)
        return choice.select_manager(request, endpoint, stream)

    def name_of(self, manager: DisaggregatedRequestManager, model: str | None) -> str | None:
        """Returns the name of the mode that has this manager; None if none of the model's modes has it."""
        return next((each.mode.use for each in self._choice_for(model).active if each.manager is manager), None)

    def replace(self, modes: Sequence[ManagerMode], source: str) -> None:
        """Replaces the modes from the next request on. Raises as the constructor does; then nothing has changed."""
        self._choice = self._made(modes, self._choice.active)
        self.switch_count += 1
        _log.info("%s: modes are now %s", source, ", ".join(mode.use for mode in modes))
        if self._changed is not None:
            self._changed(self.role_groups)

    def replace_models(self, entries: Mapping[str, ModelSettings], source: str) -> None:
        """Replaces what is set for models. Raises as the constructor does; then nothing has changed."""
        before = {name: choice.active for name, choice in self._by_entry.items()}
        self._by_entry = self._made_by_entry(entries)
        self._models.replace(entries)
        if {name: choice.active for name, choice in self._by_entry.items()} == before:
            return
        self.switch_count += 1
        _log.info(
            "%s: models with modes of their own are now %s", source, ", ".join(map(repr, self._by_entry)) or "none"
        )
        if self._changed is not None:
            self._changed(self.role_groups)

    def _choice_for(self, model: str | None) -> ModeSelector:
        return self._by_entry.get(self._models.entry_name(model), self._choice)

    def _made_by_entry(self, entries: Mapping[str, ModelSettings]) -> dict[str | None, ModeSelector]:
        """Returns the managers for models that have modes of their own."""
        before = self._by_entry
        return {
            name: self._made(each.modes, before[name].active if name in before else ())
            for name, each in entries.items()
            if each.modes
        }

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
