"""What the proxy knows of its engines: who they are, who is ready, how much runs on each.

The one rule: load is counted at the moment of choice and given back by whoever chose. Everything that several proxy
processes would have to share is behind this object, which is passed in and never global.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from secrets import token_hex
from typing import Final

from kvparams.scheduling import Instance, RequestFacts, Role, SchedulingPolicy
from kvparams_proxy.errors import ProxyError

__all__ = ["Fleet", "Member"]

_REMEMBERED: Final = 1024


class Member:
    """One instance and what is known about it now: a `kvparams.scheduling.Candidate`."""

    __slots__ = ("in_flight", "instance", "models", "ready")

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.ready = True
        """Whether it may be chosen: until the first probe says otherwise, yes."""
        self.models: frozenset[str] | None = None
        """The models it serves; None as long as it has not said."""
        self.in_flight = 0


class Fleet:
    """The engines behind one proxy."""

    def __init__(self, instances: Iterable[Instance], policies: Mapping[Role, SchedulingPolicy]) -> None:
        """`policies` says for each role how to choose; ids must be unique."""
        self._members: dict[str, Member] = {}
        self._policies = dict(policies)
        self._turns = dict.fromkeys(Role, 0)
        self._candidates: dict[tuple[Role, str | None], list[Member]] = {}
        for instance in instances:
            if instance.id in self._members:
                raise ValueError(f"two instances are called {instance.id!r}")
            self._members[instance.id] = Member(instance)

    @property
    def members(self) -> Iterable[Member]:
        """All of them, in the order they were named."""
        return self._members.values()

    def learn(self, member: Member, ready: bool, models: frozenset[str] | None) -> None:
        """A probe has found out how a member is. One that comes back is another incarnation."""
        if ready and not member.ready:
            member.instance = replace(member.instance, incarnation=token_hex(8))
        if (member.ready, member.models) != (ready, models):
            member.ready, member.models = ready, models
            self._candidates.clear()

    def require(self, roles: Iterable[Role], model: str | None) -> None:
        """Refuse a request whose later legs nobody could run, before its first one costs anything.

        Raises:
            ProxyError: 503 naming the role that is missing.
        """
        for role in roles:
            if (role, model) not in self._candidates:
                self._list(role, model)

    def choose(self, role: Role, request: RequestFacts) -> Instance:
        """Take an instance for one leg; its load counts until `release`.

        Raises:
            ProxyError: 503 naming the role that is missing.
        """
        candidates = self._candidates.get((role, request.model)) or self._list(role, request.model)
        turn = self._turns[role]
        self._turns[role] = turn + 1
        chosen = self._policies[role].choose(candidates, request, turn)
        chosen.in_flight += 1
        return chosen.instance

    def release(self, instance: Instance) -> None:
        """Give back what `choose` counted."""
        self._members[instance.id].in_flight -= 1

    def unreachable(self, instance: Instance) -> None:
        """No connection could be made: do not choose it again before a probe has found it alive."""
        member = self._members[instance.id]
        self.learn(member, False, member.models)

    def know_model(self, model: str) -> bool:
        """Whether a request for this model can be served at all. True as long as an engine has not said what it has."""
        if (Role.PREFILL, model) in self._candidates:
            return True
        members = self._members.values()
        return not members or any(_serves(member, model) for member in members)

    def models(self) -> list[str]:
        """What the engines say they serve, sorted."""
        return sorted({model for member in self._members.values() for model in member.models or ()})

    def missing_roles(self) -> list[Role]:
        """Roles that nobody ready has."""
        ready = {member.instance.role for member in self._members.values() if member.ready}
        return [role for role in Role if role not in ready]

    def _list(self, role: Role, model: str | None) -> list[Member]:
        """Who may be chosen, remembered until something changes. A client's invented models do not fill the memory."""
        found = [m for m in self._members.values() if m.instance.role is role and m.ready and _serves(m, model)]
        if not found:
            raise ProxyError(503, "service_unavailable", self._why_none(role), code=f"no_{role}_instance")
        if len(self._candidates) >= _REMEMBERED:
            self._candidates.clear()
        self._candidates[role, model] = found
        return found

    def _why_none(self, role: Role) -> str:
        known = [member for member in self._members.values() if member.instance.role is role]
        if not known:
            return f"no {role} instance is configured"
        ready = sum(member.ready for member in known)
        if not ready:
            return f"none of the {len(known)} {role} instances is reachable"
        return f"none of the {ready} {role} instances that are ready serves this model"


def _serves(member: Member, model: str | None) -> bool:
    return model is None or member.models is None or model in member.models
