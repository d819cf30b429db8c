"""The candidates for the legs of one role: who may be given work, for which model, beside which other engine."""

from collections.abc import Callable, Collection, Mapping
from math import ceil
from typing import Final

from kvparams.instances import RequestFacts, Role
from kvparams.routing.pairing import PairKey, pair_key
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.adapter_loads import base_model_of
from kvparams_proxy.fleet.leg_queue import unavailable_error
from kvparams_proxy.fleet.member import Member

__all__ = ["Candidates"]

_REMEMBERED: Final = 1024
"""Lists of candidates: a client's invented models do not fill the memory."""
_ABSENT_RETRY_S: Final = 5
"""How long an engine needs to come back, nobody knows."""
_SUSPICION: Final = 3
"""How many degrees of suspicion there are: see `Member.is_usable`."""


class Candidates:
    """The candidates of one role, remembered until something changes."""

    def __init__(self, role: Role, members: Mapping[str, Member], now: Callable[[], float]) -> None:
        """`members` is the fleet's own mapping, of all roles; it is only read."""
        self.role: Final = role
        self._members = members
        self._now = now
        self._candidates: dict[object, list[Member]] = {}
        """By model, and by who runs the other leg where that matters."""

    def candidates(self, model: str | None, beside: PairKey | Role | None = None) -> list[Member]:
        """Returns the members that may be chosen, regardless of room. The result is cached until something changes.

        Raises:
            ProxyError: 503 naming the role: there is nobody.
        """
        found = self._find(model, beside)
        if not found:
            raise self._absent(model, beside)
        return found

    def candidates_for(
        self, facts: RequestFacts, beside: PairKey | Role | None = None, avoid: Collection[str] = ()
    ) -> list[Member]:
        """Returns the members that may be chosen for this request, regardless of room.

        Raises:
            ProxyError: 503 naming the role: there is nobody, or nobody among those that the request is restricted to.
        """
        found = self._find_for(facts, beside, avoid)
        if not found:
            raise self._absent_for(facts, beside)
        return found

    def has_cached_candidates(self, model: str | None) -> bool:
        """Returns whether candidates for this model are cached. False does not mean that there are none."""
        return model in self._candidates

    def has_candidates(self, model: str | None, avoid: Collection[str] = ()) -> bool:
        """Returns whether there are candidates that are neither suspected nor to be avoided."""
        return any(member.available and member.instance.id not in avoid for member in self._find(model))

    def pair_keys(self, model: str | None, avoid: Collection[str]) -> set[PairKey]:
        """Returns the pair keys of candidates that are neither suspected nor to be avoided."""
        return self._keys(self.role, model, avoid, 0)

    def forget_candidates(self) -> None:
        """Forgets the remembered candidates: fewer instances may be chosen than before."""
        self._candidates.clear()

    # inside

    def _find(self, model: str | None, beside: PairKey | Role | None = None) -> list[Member]:
        """Returns the candidates, if there are any.

        Where nobody is available, instances that answer probes are taken although their breakers are not closed, as
        Envoy does below its panic threshold: to refuse everybody helps nobody, and they may well work again. The
        threshold is zero here: as long as one instance is well, the others are tried with one leg at a time. Instances
        that have said that they are busy are believed until their breakers are half open.
        """
        kind = model if beside is None else (model, beside)
        found = self._candidates.get(kind)
        if found is not None:
            return found
        found = []
        for suspicion in range(_SUSPICION):
            found = self._able(self.role, model, suspicion)
            if beside is not None:
                one = {beside} if isinstance(beside, PairKey) else self._keys(beside, model, (), suspicion)
                found = [member for member in found if pair_key(member.instance) in one]
            if found or (isinstance(beside, PairKey) and self._sound_pairs(model)):
                break  # a request leaves for a pair that is well rather than use a suspect: `Fleet.should_fail_over`
        if found:
            if len(self._candidates) >= _REMEMBERED:
                self._candidates.clear()
            self._candidates[kind] = found
        return found

    def _find_for(self, facts: RequestFacts, beside: PairKey | Role | None, avoid: Collection[str]) -> list[Member]:
        """Returns the candidates for this request, if there are any. See `InstanceRestriction`."""
        found = self._find(facts.model, beside)
        restriction = facts.restrictions.get(self.role) if facts.restrictions else None
        if restriction is None:
            return found
        named = [member for member in found if member.instance.id in restriction.ids]
        if restriction.is_required:
            return named
        return [member for member in named if member.instance.id not in avoid] or found

    def _able(self, role: Role, model: str | None, suspicion: int) -> list[Member]:
        members = self._members.values()
        found = [m for m in members if m.instance.role is role and m.is_usable(suspicion) and m.serves(model)]
        if not found and role is Role.ENCODE and model is not None:
            base = base_model_of(members, model)  # an adapter leaves encodings as they are, in all but few engines
            if base is not None:
                found = [m for m in members if m.instance.role is role and m.is_usable(suspicion) and m.serves(base)]
        return found

    def _keys(self, role: Role, model: str | None, avoid: Collection[str], suspicion: int) -> set[PairKey]:
        return {pair_key(m.instance) for m in self._able(role, model, suspicion) if m.instance.id not in avoid}

    def _sound_pairs(self, model: str | None) -> bool:
        """Returns whether a prefill and a decode instance that are not suspected may be paired."""
        other = Role.DECODE if self.role is Role.PREFILL else Role.PREFILL
        return bool(self._keys(self.role, model, (), 0) & self._keys(other, model, (), 0))

    def _preferred(
        self, candidates: list[Member], avoid: Collection[str], model: str | None, beside: PairKey | Role | None
    ) -> list[Member]:
        """Returns the preferred candidates, in three tiers.

        First come those that have not failed this request and have such partners, then those that have not failed it,
        then all of them.
        """
        if not avoid:
            return candidates
        fresh = [member for member in candidates if member.instance.id not in avoid]
        if isinstance(beside, Role) and fresh:
            keys = self._keys(beside, model, avoid, 0) or self._keys(beside, model, avoid, _SUSPICION)
            fresh = [member for member in fresh if pair_key(member.instance) in keys] or fresh
        return fresh or candidates

    def _absent_for(self, facts: RequestFacts, beside: PairKey | Role | None) -> ProxyError:
        """Returns the error that explains why there is no candidate for this request."""
        if facts.restrictions and self._find(facts.model, beside):
            why = f"none of the {self.role} instances that this request may use is ready"
            return unavailable_error(why, f"no_{self.role}_instance", _ABSENT_RETRY_S)
        return self._absent(facts.model, beside)

    def _absent(self, model: str | None, beside: PairKey | Role | None = None) -> ProxyError:
        """Returns the error that explains why there is no candidate for this model."""
        if beside is not None and self._find(model):
            whom = (
                f"the other leg's engine, {beside.describe()}" if isinstance(beside, PairKey) else f"any {beside} one"
            )
            keys = "check `connector`, `group` and `compatibility`"
            why = f"no {self.role} instance that is ready may be paired with {whom}: {keys}"
            return unavailable_error(why, f"no_{self.role}_instance", _ABSENT_RETRY_S)
        known = [member for member in self._members.values() if member.instance.role is self.role]
        alive = [member for member in known if member.ready]
        full = [member for member in alive if not (member.draining or member.is_usable())]
        after = _ABSENT_RETRY_S
        if not known:
            why = f"no {self.role} instance is configured"
        elif not alive:
            why = f"none of the {len(known)} {self.role} instances is reachable"
        elif all(member.draining for member in alive):
            why = f"the {len(alive)} ready {self.role} instances are being drained"
        elif any(member.serves(model) for member in full):
            why = f"the reachable {self.role} instances are busy; try again later"
            after = max(1, min(60, ceil(min(member.breaker.half_open_at for member in full) - self._now())))
        else:
            why = f"none of the {len(alive)} ready {self.role} instances serves this model"
        return unavailable_error(why, f"no_{self.role}_instance", after)
