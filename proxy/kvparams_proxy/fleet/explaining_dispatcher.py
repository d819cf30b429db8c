"""Explains which instance a leg would get now, by the rules of `Dispatcher`. Nothing is taken."""

from collections.abc import Collection

from kvparams.instances import RequestFacts, Role
from kvparams.routing.pairing import PairKey
from kvparams_proxy.fleet.adapter_loads import with_adapter_loads
from kvparams_proxy.fleet.dispatcher import Dispatcher
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.routing_decision import RouteExplanation

__all__ = ["ExplainingDispatcher"]


class ExplainingDispatcher(Dispatcher):
    """A dispatcher that also explains its choices."""

    def explain(
        self,
        facts: RequestFacts,
        avoid: Collection[str] = (),
        beside: PairKey | Role | None = None,
        near: Collection[str] = (),
    ) -> RouteExplanation:
        """Explains what `acquire` would return now. See `Fleet.explain`; `beside` only where it matters."""
        candidates = self.candidates_for(facts, beside, avoid)
        chooser = self._choosers.find(facts.model)
        turn = chooser.turn
        preferred = self._preferred(candidates, avoid, facts.model, beside)
        those = self._near(preferred, candidates, near) if near and not self._room else []
        free = self._with_room(those, candidates, facts, ()) or self._with_room(preferred, candidates, facts, ())
        able = free or preferred
        if not (those or self._needs_care(facts, avoid, beside)):
            tried = chooser.policy.choose(candidates, facts, turn)
            if not self.has_limits or self._fits(tried, facts.prompt_tokens):
                able = [tried]
            else:
                turn += 1
        excluded = {
            member.instance.id: "its pairs fail" if member not in preferred else self._why_not(member, facts)
            for member in candidates
            if member not in (free or preferred)
        }
        by_cache = None
        facts = with_adapter_loads(facts, candidates)
        if chooser.prefixes is None:
            chosen = chooser.policy.choose(able, facts, turn).instance
        else:
            decision = chooser.prefixes.explain(chooser.policy, able, facts, turn).decision
            by_cache = chooser.prefixes.explain(chooser.policy, candidates, facts, turn)._replace(decision=decision)
            chosen = decision.chosen
        waits = not free or self._others_wait_for(candidates)
        return RouteExplanation(chosen, candidates, by_cache, waits, excluded)

    def _others_wait_for(self, candidates: Collection[Member]) -> bool:
        """Returns whether some leg waits for one of these members."""
        ours = set(candidates)
        items = (head.item for head in self._room.lane_heads())
        return any(not ours.isdisjoint(self._find_for(each.facts, each.paired_with, each.avoid)) for each in items)

    def _why_not(self, member: Member, facts: RequestFacts) -> str:
        if self.has_limits and not self._fits(member, facts.prompt_tokens):
            return "no room"
        return "slow start" if self._slow.active else "another one is preferred"
