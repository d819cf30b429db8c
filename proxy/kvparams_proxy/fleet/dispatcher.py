"""Assigns instances to the legs of one role: limits, slow start, and the queue for room.

`candidates.py` selects the instances that may be chosen.

A leg gets an instance only when that has room. Until then it waits, and the instances it could run on are reserved from
the legs behind it.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from typing import Final

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.breaker import BreakerState
from kvparams.routing.fair_queue import Ticket
from kvparams.routing.pairing import PairKey
from kvparams_proxy.fleet.adapter_loads import AdapterLegs, with_adapter_loads, with_free_slots
from kvparams_proxy.fleet.candidates import Candidates
from kvparams_proxy.fleet.instance_limits import InstanceLimits
from kvparams_proxy.fleet.leg_choosers import LegChoosers
from kvparams_proxy.fleet.leg_queue import LegQueue, LegWaiter, QueuedLeg, QueueObserver, RemoteLeg
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.slow_start import CallLater, SlowStart

__all__ = ["Dispatcher"]

_CLOSED: Final = BreakerState.CLOSED
_PASSED: Final = 4
"""So many in a row that found no room are looked past."""


class Dispatcher(Candidates):
    """Dispatches the legs of one role."""

    def __init__(
        self,
        role: Role,
        choosers: LegChoosers,
        members: Mapping[str, Member],
        limits: InstanceLimits,
        queue: QueueLimits,
        slow_start_s: float,
        now: Callable[[], float],
        call_later: CallLater,
    ) -> None:
        """Creates the dispatcher of one role. `members` is the fleet's own mapping, of all roles."""
        super().__init__(role, members, now)
        self.needs_notice = False
        """Whether more than the policy has a say now: a limit, a slow start, an open breaker, adapters, caches."""
        self.has_limits = limits.exist
        """Whether anybody ever waits here."""
        self.panic_legs = 0
        """Counts the legs that were given to suspected instances because no other could be given any."""
        self.adapter_legs: Final = AdapterLegs()
        self.load_changed: Callable[[Member], None] | None = None
        """Told of members that were chosen, where other proxies should know."""
        self.trial_began: Callable[[], None] = self.forget_candidates
        """Called when an instance is chosen for its trial; the fleet has all roles forget their candidates."""
        self._careful = False
        """Whether a slow start, a breaker that is not closed, an adapter, or what is cached has a say now."""
        self._choosers = choosers
        self._prefixes = choosers.prefixes
        self._limits = limits
        self._fits = limits.have_room
        self._named: frozenset[str] | None = None
        """Models that some instance has named; None until they are asked for."""
        self._slow = SlowStart(slow_start_s, now, call_later, self._time_passed)
        self._room = LegQueue(role, queue, limits.count_tokens, now, call_later, self._time_passed)
        self._serving = False

    @property
    def waiting_legs(self) -> int:
        """The number of legs that wait for room."""
        return len(self._room) - self._room.remote_legs

    # what a request needs

    def admit(self, facts: RequestFacts) -> None:
        """Refuses a request that would be refused if it asked for an instance now. Nothing is taken or kept for it.

        Raises:
            ProxyError: as for `acquire`.
        """
        candidates = self.candidates_for(facts)
        if not self.has_limits:
            return
        error = self._room.would_refuse(facts)
        if error is not None and not any(self._fits(member, facts.prompt_tokens) for member in candidates):
            raise error

    def acquire(
        self,
        facts: RequestFacts,
        avoid: Collection[str],
        waiter: LegWaiter,
        beside: PairKey | Role | None = None,
        near: Collection[str] = (),
    ) -> Instance | None:
        """See `Fleet.acquire`; `beside` only where it matters."""
        if near and not self._room:  # nobody is passed
            candidates = self.candidates_for(facts, beside, avoid)
            those = self._near(self._preferred(candidates, avoid, facts.model, beside), candidates, near)
            chosen = self._choose(those, candidates, facts, ()) if those else None
            if chosen is not None:
                return chosen.instance
        if self._needs_care(facts, avoid, beside):
            return self._acquire_with_care(facts, avoid, waiter, beside)
        candidates = self._candidates.get(facts.model) or self.candidates(facts.model)
        chooser = self._choosers.find(facts.model)
        turn = chooser.turn
        chooser.turn = turn + 1
        chosen = chooser.policy.choose(candidates, facts, turn)
        if self.has_limits and not self._fits(chosen, facts.prompt_tokens):
            return self._acquire_with_care(facts, avoid, waiter, beside)
        self._count(chosen, facts)
        return chosen.instance

    def _near(self, preferred: list[Member], candidates: list[Member], near: Collection[str]) -> list[Member]:
        """Returns the preferred members whose ids are in `near` and that have not much more load than others."""
        most = 2 * min(each.in_flight for each in candidates) + 1
        return [each for each in preferred if each.instance.id in near and each.in_flight <= most]

    def cancel_wait(self, waiter: LegWaiter) -> bool:
        """See `Fleet.cancel_wait`; whether it waited here."""
        if not self._room.cancel(waiter):
            return False
        self._serve()  # it may have been in others' way
        return True

    # what the fleet tells

    def released(self, member: Member, facts: RequestFacts) -> None:
        """Handles the release of a leg: waiting legs may have room now."""
        if self._prefixes is not None:
            self._prefixes.leg_released(member, facts)
        if self.has_limits:
            self._room.record_leg_end()
            if self._room:
                self._serve()

    def room_made(self) -> None:
        """Handles legs of other proxies that have ended: waiting legs may have room now."""
        if self.has_limits and self._room:
            self._serve()

    def push_remote(self, leg: RemoteLeg) -> None:
        """Adds a leg that waits at another proxy."""
        model = leg.facts.model
        self._room.push_remote(leg, self._queue_model(model))

    def drop_remote(self, leg: RemoteLeg, *, granted: bool) -> None:
        """Removes a leg that waits no longer at another proxy."""
        self._room.drop_remote(leg, granted=granted)
        self.room_made()

    def accept_offer(self, waiter: LegWaiter, member: Member) -> None:
        """Grants a waiting leg the room that another proxy holds for it. Does nothing if it waits no longer."""
        ticket = self._room.find(waiter)
        if ticket is None or not member.available or member not in self._find(ticket.item.facts.model):
            return
        facts = ticket.item.facts
        self._room.take(ticket)
        chooser = self._choosers.find(facts.model)
        if chooser.prefixes is not None:
            chooser.choose([member], with_adapter_loads(facts, [member]))
        self.adapter_legs.begin(member, facts.model)
        self._count(member, facts)
        waiter.granted(member.instance)

    def watch_queue(self, observer: QueueObserver) -> None:
        """Tells `observer` which legs wait, from now on."""
        self._room.observer = observer

    def begin_slow_start(self, member: Member) -> None:
        """Begins the slow start of a member that is about to become ready."""
        self._slow.begin(member)

    def startup_complete(self) -> None:
        """See `Fleet.startup_complete`."""
        self._slow.startup_complete()
        self.changed()

    def changed(self) -> None:
        """Readiness, models, breakers, drains or members of this role have changed."""
        self._candidates.clear()
        self._named = None
        self._limits.members_changed(self._members.values())
        self._guard()
        if self._room:
            self._room.refuse_where(
                lambda item: None if self._could(item) else self._absent_for(item.facts, item.paired_with)
            )
            self._serve()

    def model_settings_changed(self) -> None:
        """The limits of models have changed: waiting legs may have room now."""
        self._limits.settings_changed(self._members.values())
        self.has_limits = self._limits.exist
        self.changed()

    def limits_of(self, member: Member) -> RoleLimits:
        """Returns what a member may run at a time."""
        return self._limits.of(member)

    def close(self) -> None:
        """Refuses all waiting legs and cancels all timers."""
        self._slow.close()
        self._room.close()

    # choosing

    def _acquire_with_care(
        self, facts: RequestFacts, avoid: Collection[str], waiter: LegWaiter, beside: PairKey | Role | None
    ) -> Instance | None:
        model = facts.model
        candidates = self.candidates_for(facts, beside, avoid)
        if not self._room:
            preferred = self._preferred(candidates, avoid, model, beside)
            chosen = self._choose(preferred, candidates, facts, ())
            if chosen is not None:
                return chosen.instance
        others = bool(self._room)
        self._room.push(waiter, facts, avoid, self._queue_model(model), beside)
        # Others wait, and still it may be next: by its priority, or because it can run where they cannot.
        instance = self._serve(waiter) if others else None
        if instance is None:
            self._room.enforce_limits(waiter)
        return instance

    def _choose(
        self, preferred: list[Member], candidates: list[Member], facts: RequestFacts, kept: Collection[Member]
    ) -> Member | None:
        """Takes one of `preferred` that has room and is not kept for others; its load counts."""
        roomy = self._with_room(preferred, candidates, facts, kept)
        if not roomy:
            return None
        chosen = self._choosers.find(facts.model).choose(roomy, with_adapter_loads(facts, roomy))
        self.adapter_legs.begin(chosen, facts.model)
        self._count(chosen, facts)
        if chosen.breaker.state is not BreakerState.CLOSED:
            if chosen.breaker.allows_requests:
                chosen.breaker.begin_trial()
                chosen.trial = facts
                self.trial_began()
            else:
                self.panic_legs += 1
        return chosen

    def _with_room(
        self, preferred: list[Member], candidates: list[Member], facts: RequestFacts, kept: Collection[Member]
    ) -> list[Member]:
        """Returns those of `preferred` that have room, are not kept for others, and are within their slow start."""
        roomy = preferred
        if self.has_limits:
            tokens = facts.prompt_tokens
            roomy = [member for member in preferred if self._fits(member, tokens) and member not in kept]
        if self._slow.active:
            warm = self._slow.within_share(roomy, candidates)
            roomy = warm if warm or self.has_limits else roomy
        return with_free_slots(self.role, roomy, facts.model)

    def _needs_care(self, facts: RequestFacts, avoid: Collection[str], beside: PairKey | Role | None) -> bool:
        """Returns whether more than the policy has a say in the choice for a request."""
        has_queue = self.has_limits and bool(self._room)
        return self._careful or bool(avoid) or beside is not None or bool(facts.restrictions) or has_queue

    def _count(self, chosen: Member, facts: RequestFacts) -> None:
        chosen.in_flight += 1
        chosen.tokens += facts.prompt_tokens
        if self.load_changed is not None:
            self.load_changed(chosen)

    def _has_trouble(self) -> bool:
        """Returns whether a breaker is not closed or adapters are served. A large fleet changes many times a second."""
        role = self.role
        for member in self._members.values():
            if member.instance.role is role and (
                member.breaker.state is not _CLOSED or member.adapter_slots is not None
            ):
                return True
        return False

    def _queue_model(self, model: str | None) -> str | None:
        """Returns the model whose queue a leg waits in. Those that no instance has named share the queue named ""."""
        if self._named is None:
            members = [each for each in self._members.values() if each.instance.role is self.role]
            self._named = frozenset(each for member in members for each in member.models or ())
        return model if model is None or model in self._named else ""

    def _could(self, item: QueuedLeg) -> bool:
        return bool(self._find_for(item.facts, item.paired_with, item.avoid))

    def _guard(self) -> None:
        self._careful = self._prefixes is not None or self._slow.active or self._has_trouble()
        self.needs_notice = self.has_limits or self._careful

    # those who wait

    def _serve(self, arriving: LegWaiter | None = None) -> Instance | None:
        """Grants room to waiting legs while there is some. Returns the instance, if `arriving` was granted one."""
        if self._serving:  # called by somebody who was just granted: the loop below goes on
            return None
        self._serving = True
        given: Instance | None = None
        try:
            while self._room and (granted := self._next()) is not None:
                waiter, instance = granted
                if waiter is arriving:
                    given = instance
                else:
                    waiter.granted(instance)
        finally:
            self._serving = False
        return given

    def _next(self) -> tuple[LegWaiter, Instance] | None:
        """Selects the next waiting leg for which there is room, and its instance."""
        kept = set[Member]()
        for head in self._room.lane_heads():
            served = self._first_of(head, kept)
            if served is not None:
                ticket, instance = served
                return self._room.take(ticket), instance
        return None

    def _first_of(self, head: Ticket[QueuedLeg], kept: set[Member]) -> tuple[Ticket[QueuedLeg], Instance] | None:
        """Returns the first leg of a lane for which there is room. Each leg that is passed over keeps an instance."""
        with closing(self._room.iter_lane(head)) as line:
            for passed, ticket in enumerate(line):
                item = ticket.item
                candidates = self._find_for(item.facts, item.paired_with, item.avoid)
                if isinstance(item.waiter, RemoteLeg):
                    if not self._offer(item.waiter, candidates, kept):
                        break
                    continue
                preferred = self._preferred(candidates, item.avoid, item.facts.model, item.paired_with)
                chosen = self._choose(preferred, candidates, item.facts, kept)
                if chosen is not None:
                    return ticket, chosen.instance
                if passed == _PASSED or not self._keep(preferred, kept):
                    kept.update(preferred)
                    break
        return None

    def _offer(self, leg: RemoteLeg, candidates: list[Member], kept: set[Member]) -> bool:
        """Offers room to a leg of another proxy whose turn it is, and holds the room until that proxy has answered.

        Returns whether there may be room for those behind it.
        """
        observer = self._room.observer
        if observer is None or leg.is_offered or self._now() < leg.queue.ignored_until:
            return True
        tokens = leg.facts.prompt_tokens
        roomy = [member for member in candidates if member not in kept and self._fits(member, tokens)]
        if not roomy:
            return self._limits.count_tokens
        chosen = min(roomy, key=lambda member: member.in_flight)
        self._count(chosen, leg.facts)
        leg.is_offered = True
        observer.offer_room(self.role, leg, chosen.instance)
        return True

    def _keep(self, preferred: list[Member], kept: set[Member]) -> bool:
        """Keeps an instance for a leg without room. Returns whether other instances may have room for those behind it.

        Where only its tokens do not fit, that is the one that will have room first: nothing is given to it until then,
        so the turn comes, and meanwhile the others need not idle.
        """
        if not self._limits.count_tokens:
            return False
        free = [member for member in preferred if member not in kept and self._fits(member, 1)]
        if len(free) > 1:
            kept.add(min(free, key=lambda member: member.tokens))
        return len(free) > 1

    def _time_passed(self) -> None:
        """Handles the progress of a slow start, and waits that took too long."""
        if not self._slow.active:
            self._guard()
        self._serve()
