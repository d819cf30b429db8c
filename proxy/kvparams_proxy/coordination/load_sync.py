"""Shares the load on engines: the legs and prompt tokens that each proxy has there now.

Loads are states, not changes: a message that is lost is made good by the next one, and the load of a proxy that has
ended is subtracted at once.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kvparams.replication.entries import EngineLoad, engine_key
from kvparams.replication.siblings import Sibling
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member

__all__ = ["EngineNames", "LoadSync"]

_MOST_ENGINES: Final = 1 << 14
"""With load of one sibling at a time; of more, nothing is believed."""


class EngineNames:
    """The members of the fleet by the keys that proxies use for them: a `FleetListener`."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self._keys: dict[Member, int] = {}

    def key_of(self, member: Member) -> int:
        """Returns the key of a member that has joined and not left."""
        return self._keys[member]

    def find_key(self, member: Member) -> int | None:
        """Returns the key of a member, or None if it has not joined or has left."""
        return self._keys.get(member)

    def joined(self, member: Member) -> None:
        """See `FleetListener`."""
        instance = member.instance
        key = self._keys[member] = engine_key(instance.id, instance.url, instance.role)
        self.members[key] = member

    def left(self, member: Member) -> None:
        """See `FleetListener`."""
        key = self._keys.pop(member, None)
        if key is not None and self.members.get(key) is member:
            del self.members[key]


class LoadSync:
    """The loads of all proxies of a site, this one's included."""

    def __init__(
        self, fleet: Fleet, names: EngineNames, publish_soon: Callable[[], None], siblings: Mapping[int, Sibling]
    ) -> None:
        """Creates it.

        Args:
            fleet: whose members' load is shared.
            names: of these members.
            publish_soon: called when `changed_loads` has something to say.
            siblings: those that live; each has the loads that it told.
        """
        self._fleet = fleet
        self._names = names
        self._publish_soon = publish_soon
        self._siblings = siblings
        self._changed: set[Member] = set()

    def load_changed(self, member: Member) -> None:
        """Hears that this proxy has more or fewer legs there."""
        if not self._changed:
            self._publish_soon()
        self._changed.add(member)

    def changed_loads(self) -> Iterable[EngineLoad]:
        """Returns the loads that have changed since the last call."""
        changed = [self._load(member) for member in self._changed]
        self._changed.clear()
        return [load for load in changed if load is not None]

    def loads(self) -> Iterable[EngineLoad]:
        """Returns all of this proxy's loads that are not zero."""
        loads = (self._load(member) for member in self._fleet.members if member.own_in_flight)
        return [load for load in loads if load is not None]

    def apply(self, sibling: Sibling, load: EngineLoad) -> None:
        """Applies the new load of a sibling on one engine."""
        before = sibling.loads.get(load.engine, (0, 0))
        now = (load.in_flight, load.tokens)
        if now == before or (before == (0, 0) and len(sibling.loads) >= _MOST_ENGINES):
            return
        if load.in_flight:
            sibling.loads[load.engine] = now
        else:
            sibling.loads.pop(load.engine, None)
            now = (0, 0)
        member = self._names.members.get(load.engine)
        if member is not None:
            in_flight = max(0, member.elsewhere + now[0] - before[0])
            tokens = max(0, member.elsewhere_tokens + now[1] - before[1])
            self._fleet.set_elsewhere(member, in_flight, tokens)

    def replace(self, sibling: Sibling, loads: Mapping[int, tuple[int, int]]) -> None:
        """Applies all loads of a sibling; it has no others."""
        for engine in [engine for engine in sibling.loads if engine not in loads]:
            self.apply(sibling, EngineLoad(engine, 0, 0))
        for engine, (in_flight, tokens) in loads.items():
            self.apply(sibling, EngineLoad(engine, in_flight, tokens))

    def joined(self, member: Member) -> None:
        """Adds up what siblings have said of an engine that has joined here."""
        key = self._names.key_of(member)
        loads = [each.loads[key] for each in self._siblings.values() if key in each.loads]
        if loads:
            self._fleet.set_elsewhere(member, sum(load[0] for load in loads), sum(load[1] for load in loads))

    def _load(self, member: Member) -> EngineLoad | None:
        key = self._names.find_key(member)
        if key is None:
            return None
        return EngineLoad(key, member.own_in_flight, member.own_tokens)
