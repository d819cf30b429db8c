"""The ways to all engines: a pool, or another `Upstream`, for each member of the fleet, as long as legs run on it."""

from collections.abc import Callable

from kvparams.instances import Instance
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.upstream.interface import Upstream

__all__ = ["UpstreamPools"]


class UpstreamPools:
    """The upstreams of one fleet's instances, by id. A `kvparams_proxy.fleet.fleet_members.FleetListener`."""

    def __init__(self, make: Callable[[Instance], Upstream]) -> None:
        """`make` opens a pool; it knows how each engine wants to be spoken to."""
        self._make = make
        self._now: dict[str, Upstream] = {}
        self._all: dict[Member, Upstream] = {}

    def __getitem__(self, id: str) -> Upstream:
        return self._now[id]

    def for_member(self, member: Member) -> Upstream:
        """Returns the pool of a member that is in the fleet or still runs a leg, even if its id has been reused."""
        return self._all[member]

    def get(self, id: str) -> Upstream | None:
        """Returns the pool of an instance, or None where it has left."""
        return self._now.get(id)

    def joined(self, member: Member) -> None:
        """Opens the upstream of a new member. An earlier one of the same id may still have legs."""
        pool = self._make(member.instance)
        self._now[member.instance.id] = self._all[member] = pool

    def left(self, member: Member) -> None:
        """Closes the upstream of a member whose last leg has ended."""
        pool = self._all.pop(member, None)
        if pool is None:
            return
        if self._now.get(member.instance.id) is pool:
            del self._now[member.instance.id]
        pool.close()

    @property
    def open_connections(self) -> int:
        """The number of connections to all engines, idle ones included."""
        return sum(pool.open_connections for pool in self._all.values())

    def close(self) -> None:
        """Closes all connections; running exchanges are told that they were cut off."""
        for pool in self._all.values():
            pool.close()
