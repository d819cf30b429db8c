"""Which engine a failed decode leg is held against: the fleet's side of `kvparams_proxy.fleet.pairs`."""

from collections.abc import Callable, Collection, Mapping

from kvparams.breaker import BreakerLimits, BreakerState
from kvparams.pairing import Beside
from kvparams.scheduling import Instance, RequestFacts, Role
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.pairs import PairFailures
from kvparams_proxy.fleet.state_log import EngineStateLog

__all__ = ["Blame"]


class Blame:
    """The pairs of one fleet that fail together, kept true and told to the log."""

    def __init__(
        self, limits: BreakerLimits, members: Mapping[str, Member], states: EngineStateLog, now: Callable[[], float]
    ) -> None:
        """`members` is the fleet's own mapping; it is only read."""
        self.watches = False
        """Whether any pair has failed; without one, nothing here needs to be asked or told."""
        self._pairs = PairFailures(limits)
        self._members = members
        self._states = states
        self._now = now

    @property
    def pairs_apart(self) -> int:
        """Returns how many pairs are set apart."""
        return self._pairs.apart

    def avoid(self, avoid: Collection[str], facts: RequestFacts, beside: Beside) -> Collection[str]:
        """Returns the ids to avoid in a choice beside `beside`, with those of instances that fail together with it."""
        now = self._now()
        if isinstance(beside, Instance):
            return {*avoid, *self._pairs.apart_from(beside, now)}
        partners = [
            member.instance
            for member in self._members.values()
            if member.instance.role is beside and member.available and member.serves(facts.model)
        ]
        role = Role.DECODE if beside is Role.PREFILL else Role.PREFILL
        return {*avoid, *self._pairs.without_partner(role, partners, now)}

    def chosen(self, instance: Instance, beside: Beside) -> None:
        """Notes that an instance was given a leg."""
        if isinstance(beside, Instance):
            prefill, decode = (beside, instance) if instance.role is Role.DECODE else (instance, beside)
            self._pairs.chosen(prefill, decode, self._now())

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
        blamed = self._pairs.failed(prefill, decode.instance, now)
        self.watches = True
        wait_s = self._pairs.until(prefill, decode.instance) - now
        if wait_s > 0:
            self._states.pair(prefill, decode.instance, wait_s, why)
        return blamed

    def fetched(self, prefill: Instance, decode: Instance) -> None:
        """Notes that a decode engine has fetched the KV of a prefill engine."""
        if self._pairs.worked(prefill, decode):
            self._states.pair(prefill, decode, None)
        self.watches = bool(self._pairs)

    def forget(self, instance: Instance) -> None:
        """Forgets what is known of one incarnation."""
        self._pairs.forget(instance)
        self.watches = bool(self._pairs)
