"""Tests the fleet under any sequence of operations: load comes back, limits hold, each waiter is served once.

Waiters answer from inside their calls, in all the ways that an executor may, so the fleet is re-entered wherever it
can be.
"""

from typing import Any, Literal

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvparams.instances import Instance, RequestFacts, Role, RoundRobin
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.breaker import BreakerLimits, BreakerState
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from tests.support.proxy.clock import Clock

LIMITS = RoleLimits(requests=2, tokens=100)
QUEUE = QueueLimits(waiting=5, wait_s=8.0)
Reaction = Literal["keep", "end", "fail", "ask", "leave"]
REACTIONS = st.sampled_from(["keep", "keep", "keep", "end", "fail", "ask", "leave"])
IDS = st.sampled_from(["d0", "d1", "d2", "d3"])
MODELS = st.sampled_from([None, frozenset("a"), frozenset("ab")])


class Leg:
    """A request that asks for one instance, and what became of it."""

    def __init__(
        self, machine: "FleetMachine", facts: RequestFacts, avoid: tuple[str, ...], reaction: Reaction
    ) -> None:
        self.machine = machine
        self.facts = facts
        self.avoid = avoid
        self.reaction: Reaction = reaction
        self.began = machine.clock.time
        self.state = "new"
        self.instance: Instance | None = None
        self.trial: tuple[Member, int] | None = None

    def granted(self, instance: Instance) -> None:
        assert self.state == "waiting"
        self.take(instance)
        if self.reaction == "end":
            self.machine.end(self)
        elif self.reaction == "fail":
            self.machine.end(self)
            self.machine.fleet.record_failure(instance, connected=False)
        elif self.reaction == "ask":
            self.machine.begin(self.facts._replace(), (), "keep")
        elif self.reaction == "leave":
            self.machine.give_up_any()

    def refused(self, error: ProxyError) -> None:
        assert self.state == "waiting"
        assert error.status in (429, 503)
        assert error.retry_after_s is not None
        assert 1 <= error.retry_after_s <= 60
        self.state = "over"
        if self.reaction in ("end", "fail"):
            self.machine.end_any()
        elif self.reaction == "leave":
            self.machine.give_up_any()

    def take(self, instance: Instance) -> None:
        """It was given an instance: was that allowed?"""
        machine = self.machine
        self.state, self.instance = "running", instance
        member = machine.fleet.member(instance)
        assert member.instance is instance
        assert member.ready
        assert not member.draining
        assert not member.has_left
        assert member.serves(self.facts.model)
        if instance.role is Role.DECODE:
            assert member.in_flight <= (LIMITS.requests or 0)
            assert member.tokens <= (LIMITS.tokens or 0) or member.tokens == self.facts.prompt_tokens
        if member.breaker.state is BreakerState.HALF_OPEN and member.trial is self.facts:
            self.trial = member, member.breaker.opened
            assert not any(leg.trial == self.trial for leg in machine.running)
        elif member.breaker.state is not BreakerState.CLOSED:
            same = [m for m in machine.fleet.members if m.instance.role is instance.role and m.serves(self.facts.model)]
            assert not any(one.available for one in same)
            assert member.is_usable(1) or not any(one.is_usable(1) for one in same)
            assert not (member.breaker.state is BreakerState.OPEN and member.busy)
        machine.running.append(self)


class FleetMachine(RuleBasedStateMachine):
    """Decode has limits, prefill has none."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.fleet = Fleet(
            [Instance(id, "b", Role.PREFILL if id == "p0" else Role.DECODE, "u", "nixl") for id in ("p0", "d0", "d1")],
            {role: RoundRobin() for role in Role},
            self.clock.now,
            self.clock.call_later,
            limits={Role.DECODE: LIMITS},
            queue=QUEUE,
            breaker=BreakerLimits(consecutive=2, window=6, failures=4, open_s=1.0, longest_s=4.0),
            slow_start_s=3.0,
        )
        self.fleet.add_listener(self)
        self.known = dict.fromkeys(self.fleet.members, 0)
        """How often each was said to have left."""
        self.running: list[Leg] = []
        self.asked: list[Leg] = []

    def joined(self, member: Member) -> None:
        assert member not in self.known
        self.known[member] = 0

    def left(self, member: Member) -> None:
        self.known[member] += 1
        assert member.in_flight == 0

    @property
    def waiting(self) -> list[Leg]:
        return [leg for leg in self.asked if leg.state == "waiting"]

    def begin(self, facts: RequestFacts, avoid: tuple[str, ...], reaction: Reaction, role: Role = Role.DECODE) -> None:
        leg = Leg(self, facts, avoid, reaction)
        self.asked.append(leg)
        leg.state = "waiting"  # what is granted meanwhile may refuse it already
        foreseen = self.foreseen(role, facts)
        try:
            instance = self.fleet.acquire(role, facts, avoid, leg)
        except ProxyError as error:
            assert leg.state == "waiting"
            self.refuse(leg, error, None if avoid else foreseen)
            return
        assert avoid or foreseen is None
        if instance is not None:
            assert leg.state == "waiting"
            leg.take(instance)
        else:
            assert role is Role.DECODE

    def foreseen(self, role: Role, facts: RequestFacts) -> ProxyError | None:
        """What is said of a request before its first leg: the same as later, or nothing."""
        try:
            self.fleet.check_admission([role], facts)
        except ProxyError as error:
            return error
        return None

    def refuse(self, leg: Leg, error: ProxyError, foreseen: ProxyError | None) -> None:
        assert foreseen is None or (foreseen.body(), foreseen.headers()) == (error.body(), error.headers())
        leg.refused(error)

    def end(self, leg: Leg) -> None:
        assert leg.instance is not None
        leg.state = "over"
        self.running.remove(leg)
        self.fleet.release(leg.instance, leg.facts)

    def end_any(self) -> None:
        if self.running:
            self.end(self.running[0])

    def give_up_any(self) -> None:
        if self.waiting:
            leg = self.waiting[-1]
            leg.state = "over"
            self.fleet.cancel_wait(leg)

    def member(self, id: str) -> Member | None:
        return next((member for member in self.fleet.members if member.instance.id == id), None)

    @rule(
        tenant=st.sampled_from(["", "ann", "bob"]),
        priority=st.integers(0, 1),
        tokens=st.sampled_from([0, 10, 60, 150]),
        model=st.sampled_from([None, "a", "b"]),
        avoid=st.sampled_from([(), ("d0",), ("d0", "d1")]),
        reaction=REACTIONS,
        role=st.sampled_from([Role.DECODE, Role.DECODE, Role.PREFILL]),
        number=st.integers(1, 4),
    )
    def ask(
        self,
        tenant: str,
        priority: int,
        tokens: int,
        model: str | None,
        avoid: tuple[str, ...],
        reaction: Reaction,
        role: Role,
        number: int,
    ) -> None:
        for _ in range(number):
            facts = RequestFacts("r", "t", model, 1, 1, None, None, tenant, priority, tokens)
            self.begin(facts, avoid, reaction, role)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["well", "well", "badly", "busy", "unseen", "left"]), late=st.booleans())
    def finish(self, data: st.DataObject, how: str, late: bool) -> None:
        """A leg ends; how is told before it is released, or after."""
        leg = data.draw(st.sampled_from(self.running))
        assert leg.instance is not None
        if late:
            self.end(leg)
        if how == "well":
            self.fleet.record_success(leg.instance)
        elif how != "left":
            self.fleet.record_failure(leg.instance, connected=how != "unseen", busy=how == "busy")
        if not late and leg.state == "running":
            self.end(leg)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        leg = data.draw(st.sampled_from(self.waiting))
        leg.state = "over"
        self.fleet.cancel_wait(leg)
        self.fleet.cancel_wait(leg)

    @rule(id=IDS, ready=st.booleans(), models=MODELS)
    def learn(self, id: str, ready: bool, models: frozenset[str] | None) -> None:
        member = self.member(id)
        if member is not None:
            self.fleet.record_probe(member, ready, models)

    @rule(id=IDS, on=st.booleans())
    def drain(self, id: str, on: bool) -> None:
        if self.member(id) is not None:
            self.fleet.drain(id, on)

    @rule(id=IDS, ready=st.booleans())
    def come(self, id: str, ready: bool) -> None:
        """It is added, or replaced where it is there."""
        one = Instance(id, "b", Role.DECODE, "u", "nixl")
        member = self.fleet.add(one) if self.member(id) is None else self.fleet.replace(one)
        assert member in self.known
        self.fleet.record_probe(member, ready, None)

    @rule(id=IDS)
    def go(self, id: str) -> None:
        if self.member(id) is not None:
            self.fleet.remove(id)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 3.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.clock.pass_time(seconds)

    @invariant()
    def load_is_what_runs(self) -> None:
        for member in self.known:
            legs = [leg for leg in self.running if leg.instance and self.fleet.member(leg.instance) is member]
            assert member.in_flight == len(legs)
            assert member.tokens == sum(leg.facts.prompt_tokens for leg in legs)
            assert self.known[member] == (member.has_left and not legs)

    @invariant()
    def the_queue_is_who_waits(self) -> None:
        waiting = self.waiting
        assert self.fleet.health()[Role.DECODE].waiting == len(waiting) <= QUEUE.waiting
        assert all(self.clock.time - leg.began < QUEUE.wait_s for leg in waiting)
        assert not waiting or any(member.instance.role is Role.DECODE and member.ready for member in self.fleet.members)

    @invariant()
    def room_is_not_left_empty(self) -> None:
        """Whatever its size, an idle instance could run it: nobody who waits is left to one."""
        decode = [m for m in self.fleet.members if m.instance.role is Role.DECODE]
        able = ([m for m in decode if m.is_usable(suspicion)] for suspicion in range(3))
        candidates = next((found for found in able if found), decode[:0])
        for leg in self.waiting:
            if leg.facts.model is None:
                preferred = [m for m in candidates if m.instance.id not in leg.avoid] or candidates
                assert all(member.in_flight for member in preferred)

    def teardown(self) -> None:
        """Everything ends: nothing is left."""
        while self.running:
            self.end_any()
            self.clock.pass_time(0.0)
        self.clock.pass_time(100.0)
        while self.running:
            self.end_any()
        assert all(leg.state == "over" for leg in self.asked)
        for member in self.known:
            assert (member.in_flight, member.tokens) == (0, 0)
            assert self.known[member] == member.has_left
        inside: Any = self.fleet
        assert not inside._earlier
        assert not inside._roles[Role.DECODE]._room._tickets
        self.fleet.close()
        assert self.clock.pending == 0


@pytest.mark.hypothesis
def test_a_fleet_loses_nobody_and_nothing() -> None:
    budget = settings(stateful_step_count=40)
    run_state_machine_as_test(FleetMachine, settings=budget)  # pyright: ignore[reportUnknownMemberType]


class ForgetfulMachine(FleetMachine):
    """The control: a request that does not give back its load."""

    def end(self, leg: Leg) -> None:
        if leg.facts.prompt_tokens == 60 and leg.facts.tenant == "ann":
            leg.state = "over"
            self.running.remove(leg)
        else:
            super().end(leg)


def test_the_machine_sees_load_that_does_not_come_back() -> None:
    budget = settings(max_examples=200, deadline=None, database=None, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(ForgetfulMachine, settings=budget)  # pyright: ignore[reportUnknownMemberType]
