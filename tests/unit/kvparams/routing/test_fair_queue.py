"""Tests the fair queue's laws, and compares it with a naive queue that sorts everything each time."""

from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvparams.routing import fair_queue
from kvparams.routing.admission import QueueLimits
from kvparams.routing.fair_queue import FairQueue, OverflowReason, Ticket

TENANTS = st.sampled_from(["", "ann", "bob", "cy"])
PRIORITIES = st.integers(-1, 1)
COSTS = st.sampled_from([1, 2, 7])
LANES = st.sampled_from(["", "x"])
FOREVER = 1e9


@dataclass
class Entry:
    """One who waits in the naive queue."""

    number: int
    tenant: str
    priority: int
    cost: float
    deadline: float
    lane: str

    @property
    def flow(self) -> tuple[int, str]:
        return self.priority, self.tenant


class Naive:
    """The same, said as plainly as possible."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.entries: list[Entry] = []
        self.clocks: dict[tuple[int, str], float] = {}
        self.levels: dict[int, float] = {}

    def push(self, entry: Entry) -> None:
        if not any(other.flow == entry.flow for other in self.entries):
            self.clocks[entry.flow] = max(self.clocks.get(entry.flow, 0), self.levels.get(entry.priority, 0))
        self.entries.append(entry)

    def overflow(self, newest: Entry) -> tuple[Entry, OverflowReason] | None:
        others = [entry for entry in self.entries if entry is not newest]
        mine = sum(entry.tenant == newest.tenant for entry in others)
        if self.limits.per_tenant is not None and mine >= self.limits.per_tenant:
            self.remove(newest)
            return newest, OverflowReason.TENANT
        if len(self.entries) <= self.limits.waiting:
            return None
        lowest = min(entry.priority for entry in self.entries)
        flows = [entry.flow for entry in self.entries if entry.priority == lowest]
        most = max(flows.count(flow) for flow in flows)
        if flows.count(newest.flow) == most:
            tenants = {entry.tenant for entry in self.entries}
            crowd = len(tenants) > 1 and mine * len(tenants) >= len(others)
            self.remove(newest)
            return newest, OverflowReason.TENANT if crowd else OverflowReason.QUEUE
        return newest, OverflowReason.TENANT  # somebody of the longest: told apart by the machine

    def remove(self, entry: Entry) -> None:
        self.entries.remove(entry)
        if not any(other.priority == entry.priority for other in self.entries):
            self.levels.pop(entry.priority, None)
            self.clocks = {flow: clock for flow, clock in self.clocks.items() if flow[0] != entry.priority}

    def take(self, entry: Entry) -> None:
        clock = self.clocks[entry.flow]
        self.levels[entry.priority] = max(self.levels.get(entry.priority, 0), clock)
        self.clocks[entry.flow] = clock + entry.cost
        self.remove(entry)

    def order(self, lane: str) -> list[Entry]:
        """A whole lane in the order it would be taken, nothing coming or going meanwhile."""
        left = [entry for entry in self.entries if entry.lane == lane]
        clocks = dict(self.clocks)
        ordered: list[Entry] = []
        while left:
            firsts = {entry.flow: entry for entry in reversed(left)}.values()
            head = min(firsts, key=lambda entry: (-entry.priority, clocks[entry.flow], entry.number))
            clocks[head.flow] += head.cost
            left.remove(head)
            ordered.append(head)
        return ordered

    def heads(self) -> list[Entry]:
        lanes = {entry.lane for entry in self.entries}
        heads = [self.order(lane)[0] for lane in lanes]
        return sorted(heads, key=lambda entry: (-entry.priority, self.clocks[entry.flow], entry.number))


class QueueMachine(RuleBasedStateMachine):
    """Both queues, the same done to each."""

    limits = QueueLimits(waiting=8)

    def __init__(self) -> None:
        super().__init__()
        self.naive = Naive(self.limits)
        self.queue: FairQueue[Entry] = FairQueue(self.limits)
        self.tickets: dict[int, Ticket[Entry]] = {}
        self.numbers = 0
        self.now = 0.0

    def left(self, ticket: Ticket[Entry]) -> None:
        assert not ticket.waiting
        del self.tickets[ticket.item.number]

    @rule(tenant=TENANTS, priority=PRIORITIES, cost=COSTS, lane=LANES, wait=st.integers(1, 9))
    def push(self, tenant: str, priority: int, cost: int, lane: str, wait: int) -> None:
        self.numbers += 1
        entry = Entry(self.numbers, tenant, priority, cost, self.now + wait, lane)
        foreseen = self.queue.would_overflow(tenant, priority)
        ticket = self.queue.push(entry, tenant=tenant, priority=priority, cost=cost, deadline=entry.deadline, lane=lane)
        self.tickets[entry.number] = ticket
        self.naive.push(entry)
        expected = self.naive.overflow(entry)
        over = self.queue.evict_overflow(ticket)
        assert foreseen is (over[1] if over is not None and over[0] is ticket else None)
        if expected is None or over is None:
            assert over is expected is None
            return
        loser, full = over
        assert full is expected[1]
        if expected[0] not in self.naive.entries:
            assert loser is ticket
        else:  # somebody else: the newest of a longest flow of the lowest priority
            entries = self.naive.entries
            lowest = min(e.priority for e in entries)
            sizes = {e.flow: sum(o.flow == e.flow for o in entries) for e in entries if e.priority == lowest}
            assert sizes[loser.item.flow] == max(sizes.values()) > sizes.get(entry.flow, 0)
            assert loser.item is [e for e in entries if e.flow == loser.item.flow][-1]
            self.naive.remove(loser.item)
        self.left(loser)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(list(self.tickets.values())))
        self.queue.cancel(ticket)
        self.queue.cancel(ticket)  # again, for nothing
        self.naive.remove(ticket.item)
        self.left(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """Any head; or after it was passed, one behind it."""
        head = data.draw(st.sampled_from(self.queue.lane_heads()))
        order = self.naive.order(head.item.lane)
        passed = data.draw(st.integers(0, len(order) - 1))
        with closing(self.queue.iter_lane(head.lane)) as line:
            found = [ticket for _, ticket in zip(range(passed + 1), line, strict=False)]
        assert [ticket.item for ticket in found] == order[: passed + 1]
        assert [ticket.item for ticket in self.queue.iter_lane(head.lane)] == order
        ticket = found[-1]
        assert self.queue.take(ticket) is ticket.item
        self.naive.take(ticket.item)
        self.left(ticket)

    @rule(later=st.integers(0, 4))
    def wait(self, later: int) -> None:
        self.now += later
        due = self.queue.pop_expired(self.now)
        expected = [entry for entry in self.naive.entries if entry.deadline <= self.now]
        assert {ticket.item.number for ticket in due} == {entry.number for entry in expected}
        assert [ticket.deadline for ticket in due] == sorted(ticket.deadline for ticket in due)
        for entry in expected:
            self.naive.remove(entry)
        for ticket in due:
            self.left(ticket)

    @invariant()
    def is_the_same(self) -> None:
        entries = self.naive.entries
        assert [ticket.item for ticket in self.queue.list_waiting()] == entries
        assert len(self.queue) == len(entries) <= self.limits.waiting
        assert [ticket.item for ticket in self.queue.lane_heads()] == self.naive.heads()
        assert self.queue.next_deadline() == min((entry.deadline for entry in entries), default=None)
        assert self.queue.tenant_count == len({entry.tenant for entry in entries})
        for tenant in ("", "ann", "bob", "cy"):
            assert self.queue.count_waiting(tenant) == sum(entry.tenant == tenant for entry in entries)

    @invariant()
    def keeps_nothing_of_those_who_left(self) -> None:
        assert kept(self.queue) <= 8 * len(self.queue) + 20  # of which the twelve flows there can be


class SharedMachine(QueueMachine):
    limits = QueueLimits(waiting=8, per_tenant=3)


def kept(queue: FairQueue[Any]) -> int:
    """How much the queue holds on to, the dead included."""
    inside: Any = queue
    flows = [entry[3] for heap in inside._lanes.values() for entry in heap]
    tickets = sum(len(line) for flow in flows for line in flow.lanes.values())
    levels = sum(len(level.flows) for level in inside._levels.values())
    return len(inside._deadlines) + len(flows) + tickets + levels


@pytest.mark.hypothesis
@pytest.mark.parametrize("machine", [QueueMachine, SharedMachine])
def test_it_is_what_a_naive_queue_is(machine: type[QueueMachine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "_SLACK", 2)  # so that what is given up is swept out often
    budget = settings(stateful_step_count=40)
    run_state_machine_as_test(machine, settings=budget)  # pyright: ignore[reportUnknownMemberType]


class CarelessMachine(QueueMachine):
    """The control: a queue whose tenants pay for what they gave up."""

    @precondition(lambda self: self.tickets)
    @rule()
    def pay(self) -> None:
        ticket = self.queue.lane_heads()[0]
        ticket.flow.clock += ticket.cost


def test_the_machine_sees_a_clock_that_goes_wrong() -> None:
    budget = settings(max_examples=200, deadline=None, database=None, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CarelessMachine, settings=budget)  # pyright: ignore[reportUnknownMemberType]


def push(queue: FairQueue[str], item: str, tenant: str = "", priority: int = 0, cost: float = 1) -> Ticket[str]:
    return queue.push(item, tenant=tenant, priority=priority, cost=cost, deadline=FOREVER)


def drained(queue: FairQueue[str]) -> list[str]:
    """Everyone, as they are served."""
    return [queue.take(queue.lane_heads()[0]) for _ in range(len(queue))]


@pytest.mark.parametrize(("tenant", "place"), [("quiet", 1), ("flood", 500)])
def test_who_floods_the_queue_waits_for_himself(tenant: str, place: int) -> None:
    """The second row is the control: one of the flood's own comes last."""
    queue: FairQueue[str] = FairQueue(QueueLimits())
    for _ in range(500):
        push(queue, "flood", "flood")
    push(queue, "late", tenant)
    assert drained(queue).index("late") == place


def test_a_flood_makes_room_for_the_others_until_shares_are_even() -> None:
    queue: FairQueue[str] = FairQueue(QueueLimits(waiting=10))
    for _ in range(10):
        assert queue.evict_overflow(push(queue, "flood", "flood")) is None
    refused = queue.evict_overflow(push(queue, "flood", "flood"))
    assert refused is not None
    assert refused[1] is OverflowReason.QUEUE  # nobody else is there: it is the queue that is full
    for number in range(5):
        over = queue.evict_overflow(push(queue, str(number), "quiet"))
        assert over is not None
        assert (over[0].item, over[1]) == ("flood", OverflowReason.TENANT)
    for tenant in ("quiet", "flood"):
        newest = push(queue, "more", tenant)
        assert queue.evict_overflow(newest) == (newest, OverflowReason.TENANT)
    assert sorted(drained(queue)) == [*"01234", *["flood"] * 5]


def test_a_higher_priority_goes_first_and_finds_room() -> None:
    queue: FairQueue[str] = FairQueue(QueueLimits(waiting=3))
    for number in range(3):
        queue.evict_overflow(push(queue, f"low {number}"))
    over = queue.evict_overflow(push(queue, "high", priority=1))
    assert over is not None
    assert over[0].item == "low 2"
    low = push(queue, "low 3")
    assert queue.evict_overflow(low) == (low, OverflowReason.QUEUE)
    assert drained(queue) == ["high", "low 0", "low 1"]


@given(
    costs=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=5, max_size=60),
    steps=st.integers(2, 60),
)
def test_in_any_stretch_of_time_two_who_wait_get_the_same(costs: list[tuple[int, int]], steps: int) -> None:
    """What start-time fair queueing promises: the difference is at most one of the dearest of each."""
    queue: FairQueue[str] = FairQueue(QueueLimits())
    for ann, bob in costs:
        push(queue, "ann", "ann", cost=ann)
        push(queue, "bob", "bob", cost=bob)
    ahead = [0.0]  # of ann
    while queue.count_waiting("ann") and queue.count_waiting("bob") and len(ahead) <= steps:
        head = queue.lane_heads()[0]
        ahead.append(head.cost if queue.take(head) == "ann" else -head.cost)
    so_far = list(accumulate(ahead))
    assert max(so_far) - min(so_far) <= max(ann for ann, _ in costs) + max(bob for _, bob in costs)


def test_one_at_a_time_is_no_way_around_a_share() -> None:
    """A tenant is remembered while it is ahead, even when nothing of it waits."""
    queue: FairQueue[str] = FairQueue(QueueLimits())
    for _ in range(100):
        push(queue, "ann", "ann", cost=1)
    push(queue, "bob", "bob", cost=10)
    served = {"ann": 0.0, "bob": 0.0}
    while queue.count_waiting("ann"):
        head = queue.lane_heads()[0]
        served[queue.take(head)] += head.cost
        if not queue.count_waiting("bob"):
            push(queue, "bob", "bob", cost=10)
    assert abs(served["ann"] - served["bob"]) <= 11


def test_whoever_comes_and_goes_leaves_nothing_behind() -> None:
    queue: FairQueue[str] = FairQueue(QueueLimits())
    push(queue, "stays")
    for number in range(20_000):
        queue.cancel(push(queue, "goes", f"tenant {number}", priority=number % 3))
    assert kept(queue) < 1000
    for number in range(20_000):
        push(queue, "once", f"tenant {number}", cost=1000)  # it is ahead for long, and never comes again
        push(queue, "stays")
        for _ in range(2):
            queue.take(queue.lane_heads()[0])
    assert len(queue) == 1
    assert kept(queue) < 3 * 4096
