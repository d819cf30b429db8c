"""Health of the engines of a role, computed from the counts of their states. `/health` answers with it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from kvparams.instances import Role
from kvparams.routing.pairing import PairKey, pair_key
from kvparams_proxy.fleet.member import Member, MemberState

__all__ = ["SPLIT_ROLES", "HealthStatus", "RoleHealth", "has_usable_pair", "health_by_role", "unserved_groups"]

SPLIT_ROLES: Final = frozenset((Role.PREFILL, Role.DECODE))
"""The roles whose engines have to be paired."""


class HealthStatus(StrEnum):
    """The health of one role."""

    OK = "ok"
    """At least one engine does what it should."""
    DEGRADED = "degraded"
    """No engine does, but some can be used: requests are given to engines whose breakers are not closed."""
    UNAVAILABLE = "unavailable"
    """No engine can be given work: requests are refused."""


class RoleHealth(NamedTuple):
    """Counts the instances of one role by state."""

    total: int
    ready: int
    """Instances that do what they should."""
    draining: int
    broken: int
    """Instances that answer probes while their legs fail. They get few legs, or more where nobody is ready."""
    waiting: int
    """Legs that wait for room on one of them."""
    usable: int
    """Instances that can be given legs: those that are ready, and those that are broken and have not said themselves
    that they are busy."""

    @property
    def status(self) -> HealthStatus:
        """Returns what that means for requests that need this role."""
        if self.ready:
            return HealthStatus.OK
        return HealthStatus.DEGRADED if self.usable else HealthStatus.UNAVAILABLE


def health_by_role(
    members: Iterable[Member], needed: Collection[Role], waiting: Mapping[Role, int]
) -> dict[Role, RoleHealth]:
    """Counts the members of each role that is needed or that somebody has, and the legs that wait for it."""
    found: dict[Role, list[Member]] = {role: [] for role in Role}
    for member in members:
        found[member.instance.role].append(member)
    return {role: _count(mine, waiting[role]) for role, mine in found.items() if mine or role in needed}


def has_usable_pair(members: Iterable[Member]) -> bool:
    """Returns whether a prefill and a decode engine that can be given work may be paired."""
    keys: dict[Role, set[PairKey]] = {role: set() for role in Role}
    for member in members:
        if member.is_usable():
            keys[member.instance.role].add(pair_key(member.instance))
    return bool(keys[Role.PREFILL] & keys[Role.DECODE])


def unserved_groups(
    groups: Collection[frozenset[Role]], health: Mapping[Role, RoleHealth], *, has_pair: bool
) -> list[frozenset[Role]]:
    """Returns the groups of roles whose requests are refused now.

    Args:
        groups: the roles that requests need together: those of most, and of models with modes of their own.
        health: of all these roles.
        has_pair: see `has_usable_pair`.
    """
    gone = {role for role, found in health.items() if found.status is HealthStatus.UNAVAILABLE}
    return [group for group in groups if group & gone or (group >= SPLIT_ROLES and not has_pair)]


def _count(members: Sequence[Member], waiting: int) -> RoleHealth:
    states = [member.state for member in members]
    return RoleHealth(
        total=len(states),
        ready=states.count(MemberState.READY),
        draining=states.count(MemberState.DRAINING),
        broken=states.count(MemberState.BROKEN),
        waiting=waiting,
        usable=sum(member.is_usable() for member in members),
    )
