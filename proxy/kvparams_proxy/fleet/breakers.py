"""The breakers of the fleet's members: what legs tell them, and the timers that half open them.

A half-open breaker has one trial at a time. A trial whose leg gave no result makes room for another.
"""

from collections.abc import Callable
from functools import partial

from kvparams.instances import RequestFacts
from kvparams.routing.breaker import Breaker, BreakerLimits, BreakerState
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.slow_start import CallLater, CancellableTimer

__all__ = ["Breakers"]


class Breakers:
    """The breakers of all members of one fleet."""

    def __init__(
        self, limits: BreakerLimits, now: Callable[[], float], call_later: CallLater, changed: Callable[[Member], None]
    ) -> None:
        """`changed` is called when a member may be given work again."""
        self._limits = limits
        self._now = now
        self._call_later = call_later
        self._changed = changed
        self._timers: dict[Member, CancellableTimer] = {}
        self._closed = False

    def new(self) -> Breaker:
        """Creates the breaker of a new member."""
        return Breaker(self._limits)

    def succeeded(self, member: Member) -> None:
        """Records the success of a leg."""
        if member.breaker.record_success():
            member.trial = None
            self._changed(member)

    def trial_answered(self, member: Member) -> None:
        """Records that the trial of a half-open breaker goes well so far."""
        member.trial = None
        member.breaker.end_trial()
        self._changed(member)

    def failed(self, member: Member) -> bool:
        """Records the failure of a leg. Returns whether it opened the breaker; the caller notifies others."""
        now = self._now()
        if not member.breaker.record_failure(now):
            return False
        member.trial = None
        self._set_timer(member, member.breaker.half_open_at - now)
        return True

    def probed_well(self, member: Member) -> None:
        """Records a successful probe, which brings a waiting trial forward."""
        if member.breaker.state is BreakerState.OPEN:
            now = self._now()
            member.breaker.record_probe_success(now)
            self._set_timer(member, member.breaker.half_open_at - now)

    def restarted(self, member: Member) -> None:
        """Resets the breaker of a new incarnation. The caller notifies others."""
        now = self._now()
        member.breaker.record_restart(now)
        if member.breaker.poll(now):
            self.forget(member)

    def released(self, member: Member, facts: RequestFacts) -> None:
        """Records that a leg has ended; its result is reported in this turn or never."""
        if member.trial is facts:
            self._call_later(0.0, partial(self._end_trial, member, facts))

    def forget(self, member: Member) -> None:
        """Forgets the timer of a breaker that has nothing to wait for; its member may have left."""
        timer = self._timers.pop(member, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Cancels all timers."""
        self._closed = True
        for member in list(self._timers):
            self.forget(member)

    def _set_timer(self, member: Member, delay_s: float) -> None:
        self.forget(member)
        if not self._closed:
            self._timers[member] = self._call_later(max(0.0, delay_s), partial(self._half_open, member))

    def _half_open(self, member: Member) -> None:
        del self._timers[member]
        if member.breaker.poll(max(self._now(), member.breaker.half_open_at)):  # a timer may be a rounding early
            self._changed(member)

    def _end_trial(self, member: Member, facts: RequestFacts) -> None:
        if member.trial is facts:  # it told nothing
            member.trial = None
            member.breaker.end_trial()
            self._changed(member)
