"""Defines what an operator sets for single models, and finds which of it holds for a request or an engine."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kvparams.instances import Role
from kvparams.routing.admission import RoleLimits
from kvparams.routing.managers.mode_selector import ManagerMode

__all__ = ["ModelSettings", "SettingsByModel", "with_policies_of"]

_REMEMBERED: Final = 1024
"""Models: a client's invented names do not fill the memory."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A `ModelSettings` holds what is set for one model; what is left out is as for all models."""

    policy: str | None = None
    """A name in the entry-point group `kvparams.policies`, for all roles but encode."""
    modes: tuple[ManagerMode, ...] = ()
    """How requests for the model are coordinated."""
    limits: Mapping[Role, RoleLimits] = field(default_factory=dict[Role, RoleLimits])
    """What one instance that serves the model may run at a time."""

    def with_defaults(self, usual: "ModelSettings") -> "ModelSettings":
        """Returns all that holds for the model, where `usual` holds for models without an entry."""
        limits = {
            role: _with_defaults(self.limits.get(role, RoleLimits()), usual.limits.get(role, RoleLimits()))
            for role in (*usual.limits, *self.limits)
        }
        return ModelSettings(self.policy or usual.policy, self.modes or usual.modes, limits)


_NO_SETTINGS: Final = ModelSettings()
_NOTHING: Final[Mapping[str, ModelSettings]] = {}


class SettingsByModel:
    """The entries that are in force, by the name of a model.

    A LoRA adapter without an entry has that of its base model.
    """

    def __init__(self, entries: Mapping[str, ModelSettings] = _NOTHING) -> None:
        self._entries = entries
        self._names: dict[str, str | None] = {}
        """The name of its entry, for each model that was asked for."""
        self.base_model_of: Callable[[str], str | None] = lambda adapter: None
        """Returns the base model of a LoRA adapter; the fleet knows it."""

    @property
    def entries(self) -> Mapping[str, ModelSettings]:
        """The entries."""
        return self._entries

    def replace(self, entries: Mapping[str, ModelSettings]) -> None:
        """Replaces all entries."""
        self._entries = entries
        self._names.clear()

    def forget_adapters(self) -> None:
        """Forgets the base models that were asked for: engines may serve others now."""
        self._names.clear()

    def entry_name(self, model: str | None) -> str | None:
        """Returns the name of the entry that holds for requests for a model; None if there is none."""
        if model is None:
            return None
        found = self._names.get(model, "")
        if found != "":
            return found
        name = model if model in self._entries else self.base_model_of(model)
        if name not in self._entries:
            name = None
        if len(self._names) >= _REMEMBERED:
            self._names.clear()
        self._names[model] = name
        return name

    def find(self, model: str | None) -> ModelSettings:
        """Returns what is set for a model; nothing is where it has no entry."""
        name = self.entry_name(model)
        return _NO_SETTINGS if name is None else self._entries[name]

    def limits_of(self, role: Role, models: Collection[str] | None, usual: RoleLimits) -> RoleLimits | None:
        """Returns the limits of an instance by the models that it serves; None if they are the usual ones.

        Where the entries of several of its models set limits, the lowest figure of each kind holds.
        """
        limits = [self._entries[each].limits.get(role) for each in self._entries.keys() & (models or ())]
        found = [_with_defaults(each, usual) for each in limits if each is not None]
        if not found:
            return None
        requests = [each.requests for each in found if each.requests is not None]
        tokens = [each.tokens for each in found if each.tokens is not None]
        return RoleLimits(min(requests, default=None), min(tokens, default=None))


def _with_defaults(limits: RoleLimits, usual: RoleLimits) -> RoleLimits:
    return RoleLimits(
        usual.requests if limits.requests is None else limits.requests,
        usual.tokens if limits.tokens is None else limits.tokens,
    )


def with_policies_of(
    entries: Mapping[str, ModelSettings], started: Mapping[str, ModelSettings]
) -> Mapping[str, ModelSettings]:
    """Returns the entries with the policies of the start: these do not change while a proxy runs."""
    policies = {name: each.policy for name, each in started.items() if each.policy is not None}
    names = dict.fromkeys((*entries, *policies))
    return {name: replace(entries.get(name, _NO_SETTINGS), policy=policies.get(name)) for name in names}
