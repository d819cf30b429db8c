"""Attributes a failed decode leg to one engine: the fleet's side of `kvparams_proxy.fleet.pair_failures`."""

from collections.abc import Callable, Collection, Mapping

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.breaker import BreakerLimits, BreakerState
from kvparams.routing.pairing import PairTarget
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.pair_failures import PairFailures
from kvparams_proxy.fleet.state_log import EngineStateLog

__all__ = ["FailureAttributor"]


class FailureAttributor:
    """Tracks and logs the pairs of one fleet that fail together."""

    def __init__(
        self, limits: BreakerLimits, members: Mapping[str, Member], states: EngineStateLog, now: Callable[[], float]
    ) -> None:
        """`members` is the fleet's own mapping; it is only read."""
        self.has_failures = False
        """Whether any pair has failed; without one, nothing here needs to be asked or told."""
        self._pairs = PairFailures(limits)
        self._members = members
        self._states = states
        self._now = now

    @property
    def separated_pairs(self) -> int:
        """Returns how many pairs are set apart."""
        return self._pairs.separated_count

    def ids_to_avoid(self, avoid: Collection[str], facts: RequestFacts, beside: PairTarget) -> Collection[str]:
        """Returns the ids to avoid in a choice beside `beside`, with those of instances that fail together with it."""
        now = self._now()
        if isinstance(beside, Instance):
            return {*avoid, *self._pairs.separated_from(beside, now)}
        partners = [
            member.instance
            for member in self._members.values()
            if member.instance.role is beside and member.available and member.serves(facts.model)
        ]
        role = Role.DECODE if beside is Role.PREFILL else Role.PREFILL
        return {*avoid, *self._pairs.without_partner(role, partners, now)}

    def record_choice(self, instance: Instance, beside: PairTarget) -> None:
        """Notes that an instance was given a leg."""
        if isinstance(beside, Instance):
            prefill, decode = (beside, instance) if instance.role is Role.DECODE else (instance, beside)
            self._pairs.record_choice(prefill, decode, self._now())

    def is_to_blame(self, decode: Member, prefill: Instance, why: str) -> bool:
        """Counts a decode leg that failed before its first byte; returns whether its own engine is to blame.

        Args:
            decode: the member that ran the leg. One whose breaker is not closed is to blame: it is on trial itself.
            prefill: the instance whose KV the leg was to fetch.
            why: the evidence, for the log.
        """
        if decode.breaker.state is not BreakerState.CLOSED:
            return True
        producer = self._members.get(prefill.id)
        if producer is None or producer.instance is not prefill:
            return False  # the KV has gone with its engine
        now = self._now()
        blamed = self._pairs.record_failure(prefill, decode.instance, now)
        self.has_failures = True
        wait_s = self._pairs.separated_until(prefill, decode.instance) - now
        if wait_s > 0:
            self._states.log_pair(prefill, decode.instance, wait_s, why)
        return blamed

    def record_fetch(self, prefill: Instance, decode: Instance) -> None:
        """Notes that a decode engine has fetched the KV of a prefill engine."""
        if self._pairs.record_success(prefill, decode):
            self._states.log_pair(prefill, decode, None)
        self.has_failures = bool(self._pairs)

    def forget(self, instance: Instance) -> None:
        """Forgets what is known of one incarnation."""
        self._pairs.forget(instance)
        self.has_failures = bool(self._pairs)
