"""Combines the sources' declarations of engines, and applies them to the fleet.

All changes of the fleet's membership go through here. Each is one call without a wait, so that no request sees half of
one.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams.routing.model_settings import ModelSettings
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.registry.credentials import NO_CREDENTIALS, EngineCredentials
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, SpecRules
from kvparams_proxy.fleet.registry.reconcile import FleetChanges, OwnedInstance, reconcile

__all__ = ["Registry", "SourceState"]

_log = logging.getLogger(__name__)


class SourceState:
    """The state of one source."""

    __slots__ = ("applied_count", "conflicts", "desired_specs", "problems", "refused_count", "unreachable")

    def __init__(self) -> None:
        self.desired_specs: tuple[InstanceSpec, ...] = ()
        """What it wants, in its last version that could be used."""
        self.applied_count = 0
        """Versions that were put to use."""
        self.refused_count = 0
        """Versions that could not be used; the one before stays in force."""
        self.problems: tuple[str, ...] = ()
        """What is wrong with its last version; empty when that is in force."""
        self.conflicts: tuple[str, ...] = ()
        """Ids that it wants and that belong to another source."""
        self.unreachable: str | None = None
        """Why it cannot be asked, if so: its last set is in force all the same."""


class Registry:
    """Records the members of the fleet and the source that owns each."""

    def __init__(
        self,
        fleet: Fleet,
        rules: SpecRules,
        local: str | None = None,
        switch: Callable[[str, Sequence[ManagerMode]], None] = lambda source, modes: None,
        switch_models: Callable[[str, Mapping[str, ModelSettings]], None] = lambda source, models: None,
    ) -> None:
        """Creates a registry for an empty `fleet` that nothing else changes.

        `local`: the id of the instance beside this proxy, if it is a sidecar. No other instance is taken for its role,
        so that all sidecars can follow one file of the whole fleet. `switch` hears of modes that a source wants from
        now on; of none, that it does not mind. `switch_models` hears what it wants for single models.
        """
        self.fleet: Final = fleet
        self.switch_modes: Final = switch
        self.switch_models: Final = switch_models
        self._local = local
        self.spec_rules = rules
        """How entries are read now; the fleet file may change them."""
        self._owned: dict[str, OwnedInstance] = {}
        self._sources: dict[str, SourceState] = {}
        self._said: dict[str, bool] = {}
        """Drained or not by `drain`, against what its source says."""

    @property
    def owned(self) -> Mapping[str, OwnedInstance]:
        """The instances in the fleet, by id."""
        return MappingProxyType(self._owned)

    @property
    def sources(self) -> Mapping[str, SourceState]:
        """The sources that have published, by name, in the order of their first publication."""
        return MappingProxyType(self._sources)

    def credentials_for(self, id: str) -> EngineCredentials:
        """Returns the instance's credentials. They are known before the fleet's listeners hear that it has joined."""
        owned = self._owned.get(id)
        return NO_CREDENTIALS if owned is None else owned.spec.credentials

    def publish(self, source: str, desired: Sequence[InstanceSpec], *, partly: bool = False) -> FleetChanges:
        """Applies the complete set of a source, in which ids are unique, and returns the changes.

        `partly`: it is on the way to a new version that is not reached yet; see `portions`.
        """
        state = self._sources.setdefault(source, SourceState())
        state.desired_specs = tuple(entry for entry in desired if not self.is_local(entry))
        state.applied_count += not partly
        state.problems = ()
        if state.unreachable is not None:
            _log.info("%s can be reached; it names %d engines", source, len(state.desired_specs))
            state.unreachable = None
        changes = self._apply(source, state)
        if changes.removes:  # somebody else may have waited for one of these ids
            for name, other in self._sources.items():
                if name != source and other.conflicts:
                    self._apply(name, other)
        return changes

    def is_local(self, entry: InstanceSpec) -> bool:
        """Returns whether the role of `entry` is reserved for the engine beside this proxy."""
        local = self._owned.get(self._local) if self._local is not None else None
        return local is not None and local.spec.role is entry.role

    def report_invalid(self, source: str, problems: tuple[str, ...]) -> None:
        """Records that a source's new version cannot be used: its last set stays in force."""
        state = self._sources.setdefault(source, SourceState())
        state.refused_count += 1
        state.problems = problems
        for problem in problems:
            _log.warning("%s is not used; the fleet stays unchanged: %s", source, problem)

    def report_unreachable(self, source: str, why: str) -> None:
        """Records that a source cannot be asked: its last set stays in force, and probes decide who is usable."""
        state = self._sources.setdefault(source, SourceState())
        if state.unreachable != why:
            _log.warning("%s: %s; the fleet stays as it is", source, why)
        state.unreachable = why

    def drain(self, id: str, on: bool) -> None:
        """Starts or ends draining of an instance. This holds until its source says something else about draining.

        Raises:
            KeyError: no instance has this id.
        """
        self._said[self._owned[id].spec.id] = on
        self.fleet.drain(id, on, "by the admin API" if on else "its drain was ended by the admin API")

    def _apply(self, source: str, state: SourceState) -> FleetChanges:
        changes = reconcile(self._owned, source, state.desired_specs)
        for entry in changes.adds:
            self._owned[entry.id] = OwnedInstance(source, entry)
            self.fleet.add(entry.make_instance(), f"named by {source}")
            self._drain_as_said(source, entry)
        for entry in changes.replaces:
            self._take_word(source, entry)
            self.fleet.replace(entry.make_instance(), f"{source} has changed its entry")
            self._drain_as_said(source, entry)
        for entry in changes.drains:
            self._take_word(source, entry)
            self.fleet.drain(
                entry.id, entry.drain, f"by {source}" if entry.drain else f"its drain was ended by {source}"
            )
        for id in changes.removes:
            self.fleet.remove(id, f"{source} no longer has it")
            del self._owned[id]
            self._said.pop(id, None)
        for id in changes.conflicts:
            if id not in state.conflicts:
                _log.warning(
                    "%s has an instance %s that belongs to %s; it is ignored", source, id, self._owned[id].source
                )
        state.conflicts = changes.conflicts
        return changes

    def _take_word(self, source: str, entry: InstanceSpec) -> None:
        if entry.drain is not self._owned[entry.id].spec.drain:
            self._said.pop(entry.id, None)
        self._owned[entry.id] = OwnedInstance(source, entry)

    def _drain_as_said(self, source: str, entry: InstanceSpec) -> None:
        if self._said.get(entry.id, entry.drain):
            self.fleet.drain(entry.id, True, f"by {source}" if entry.drain else "by the admin API, before")
