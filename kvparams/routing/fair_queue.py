"""A bounded queue with priorities, fair shares and deadlines.

Each tenant of a priority has a clock of its own that goes on by the cost of whatever it is served; next is the tenant
whose clock is furthest behind (start-time fair queueing, the clock kept by tenant, so that what is given up costs
nothing). A higher priority is served first. Within a priority no tenant gets more than its share while others wait, and
within a tenant and lane the order is first in, first out.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Generator, Hashable, Iterator
from enum import StrEnum
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, TypeVar

from kvparams.routing.admission import QueueLimits

__all__ = ["FairQueue", "OverflowReason", "Ticket"]

T = TypeVar("T")

_SLACK: Final = 64
"""What is given up stays in the queue's structures until it outnumbers those who wait by this."""
_IDLE_TENANTS: Final = 4096
"""Tenants remembered at most while they have nothing waiting."""


class OverflowReason(StrEnum):
    """An `OverflowReason` names the limit that is reached."""

    QUEUE = "queue"
    TENANT = "tenant"
    """The tenant's share of it."""


class Ticket(Generic[T]):
    """A `Ticket` is a request that waits in the queue."""

    __slots__ = ("cost", "deadline", "flow", "item", "lane", "number", "waiting")

    def __init__(
        self, item: T, flow: "_TenantFlow[T]", lane: Hashable, cost: float, deadline: float, number: int
    ) -> None:
        self.item = item
        self.flow = flow
        self.lane = lane
        self.cost = cost
        self.deadline = deadline
        self.number = number
        """Of arrival."""
        self.waiting = True
        """False once it has left the queue, in whatever way."""


class _TenantFlow(Generic[T]):
    """A `_TenantFlow` holds the waiting requests of a tenant at one priority."""

    __slots__ = ("clock", "lanes", "priority", "tenant", "waiting")

    def __init__(self, tenant: str, priority: int) -> None:
        self.tenant = tenant
        self.priority = priority
        self.clock = 0.0
        self.waiting = 0
        self.lanes: dict[Hashable, deque[Ticket[T]]] = {}
        """In the order of arrival, those that have left among them."""


class _PriorityLevel(Generic[T]):
    """A `_PriorityLevel` holds the tenants that wait at one priority."""

    __slots__ = ("by_waiting", "clock", "flows", "most", "prune_at", "waiting")

    def __init__(self) -> None:
        self.clock = 0.0
        """That of the tenant served last: where one who comes new begins."""
        self.flows: dict[str, _TenantFlow[T]] = {}
        """Those who wait, and those who have been served ahead of the others."""
        self.by_waiting: dict[int, dict[str, _TenantFlow[T]]] = {}
        self.most = 0
        """That of the longest flow: the greatest key of `by_waiting`."""
        self.waiting = 0
        self.prune_at = _SLACK

    def count(self, flow: _TenantFlow[T], by: int) -> None:
        """Adds `by` (1 or -1) to the number of requests that wait in `flow`."""
        if flow.waiting:
            before = self.by_waiting[flow.waiting]
            del before[flow.tenant]
            if not before:
                del self.by_waiting[flow.waiting]
        flow.waiting += by
        self.waiting += by
        if flow.waiting:
            self.by_waiting.setdefault(flow.waiting, {})[flow.tenant] = flow
        if flow.waiting > self.most or self.most not in self.by_waiting:
            self.most = flow.waiting

    def prune(self) -> None:
        """Forget idle tenants whose clock tells nothing any more."""
        if len(self.flows) <= self.prune_at:
            return
        ahead = {t: f for t, f in self.flows.items() if f.waiting or f.clock > self.clock}
        if len(ahead) > _IDLE_TENANTS:
            ahead = {t: f for t, f in ahead.items() if f.waiting}
        self.flows = ahead
        self.prune_at = max(_SLACK, 2 * len(ahead))


class FairQueue(Generic[T]):
    """Every operation costs O(log n), amortised; `lane_heads` besides for each lane, `iter_lane` for each one it gives.

    Lanes are for those who cannot take each other's place (another model, say): each has a head of its own, while
    shares and priorities are counted over all of them.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._levels: dict[int, _PriorityLevel[T]] = {}
        self._priorities: list[int] = []
        """The keys of `_levels`, ascending."""
        self._tenants: dict[str, int] = {}
        self._lanes: dict[Hashable, list[tuple[int, float, int, _TenantFlow[T]]]] = {}
        """For each lane a heap of (-priority, clock, number of its head, flow). What stands there may be out of date,
        but only too small: it is put right when it comes to the top."""
        self._deadlines: list[tuple[float, int, Ticket[T]]] = []
        self._number = 0
        self._live = 0
        self._dead = 0

    def __len__(self) -> int:
        return self._live

    def list_waiting(self) -> list[Ticket[T]]:
        """Everyone, in the order of arrival. O(n log n)."""
        return sorted((t for _, _, t in self._deadlines if t.waiting), key=lambda ticket: ticket.number)

    def count_waiting(self, tenant: str) -> int:
        """Returns the number of waiting requests of a tenant."""
        return self._tenants.get(tenant, 0)

    @property
    def tenant_count(self) -> int:
        """Returns the number of tenants with waiting requests."""
        return len(self._tenants)

    def push(
        self, item: T, *, tenant: str, priority: int, cost: float, deadline: float, lane: Hashable = None
    ) -> Ticket[T]:
        """Join the queue. If it is still waiting when all have been served who can be, ask `evict_overflow`.

        Args:
            item: whatever waits.
            tenant: shares are by tenant.
            priority: a higher one is always served first.
            cost: what it takes of the tenant's share, more than 0.
            deadline: when `pop_expired` tells it.
            lane: see the class.
        """
        flow = self._flow(tenant, priority)
        self._number += 1
        ticket = Ticket(item, flow, lane, cost, deadline, self._number)
        self._tenants[tenant] = self._tenants.get(tenant, 0) + 1
        self._levels[priority].count(flow, 1)
        self._live += 1
        line = flow.lanes.get(lane)
        if line is None:
            line = flow.lanes[lane] = deque()
            heappush(self._lanes.setdefault(lane, []), (-priority, flow.clock, ticket.number, flow))
        line.append(ticket)
        heappush(self._deadlines, (deadline, ticket.number, ticket))
        return ticket

    def evict_overflow(self, newest: Ticket[T]) -> tuple[Ticket[T], OverflowReason] | None:
        """Hold the bounds after `newest` has joined: who has to go for it, and why. That one has left the queue."""
        over = self.find_overflow(newest)
        if over is not None:
            self.cancel(over[0])
        return over

    def find_overflow(self, newest: Ticket[T]) -> tuple[Ticket[T], OverflowReason] | None:
        """Returns who has to go for `newest`, which has joined, and why; None while the bounds hold. Cancel that one.

        In a full queue the newest of the tenant who has most waiting goes, in the lowest priority: a flood fills only
        what the others leave.
        """
        flow = newest.flow
        mine = self._tenants[flow.tenant] - 1  # before it came
        if self._limits.per_tenant is not None and mine >= self._limits.per_tenant:
            return newest, OverflowReason.TENANT
        if self._live <= self._limits.waiting:
            return None
        level = self._levels[self._priorities[0]]
        if flow.priority == self._priorities[0] and flow.waiting == level.most:
            many = len(self._tenants) > 1 and mine * len(self._tenants) >= self._live - 1
            return newest, OverflowReason.TENANT if many else OverflowReason.QUEUE
        victim = self._newest(next(iter(level.by_waiting[level.most].values())))
        return victim, OverflowReason.TENANT

    def would_overflow(self, tenant: str, priority: int) -> OverflowReason | None:
        """Why one who joined now and was not served would have to go: what `evict_overflow` would say of it. O(1)."""
        mine = self._tenants.get(tenant, 0)
        if self._limits.per_tenant is not None and mine >= self._limits.per_tenant:
            return OverflowReason.TENANT
        if self._live < self._limits.waiting or (self._priorities and priority > self._priorities[0]):
            return None
        level = self._levels.get(priority)
        if level is not None:
            flow = level.flows.get(tenant)
            if (0 if flow is None else flow.waiting) + 1 < level.most:
                return None
        tenants = len(self._tenants) + (not mine)
        return OverflowReason.TENANT if tenants > 1 and mine * tenants >= self._live else OverflowReason.QUEUE

    def cancel(self, ticket: Ticket[T]) -> None:
        """It waits no longer, and its tenant has had nothing for it. No-op when it does not wait. O(1), amortised."""
        if not ticket.waiting:
            return
        ticket.waiting = False
        flow = ticket.flow
        level = self._levels[flow.priority]
        level.count(flow, -1)
        if not level.waiting:  # nobody is ahead of anybody any more
            del self._levels[flow.priority]
            del self._priorities[bisect_left(self._priorities, flow.priority)]
        left = self._tenants[flow.tenant] - 1
        if left:
            self._tenants[flow.tenant] = left
        else:
            del self._tenants[flow.tenant]
        self._live -= 1
        self._dead += 1
        if self._dead > self._live + _SLACK:
            self._compact()

    def lane_heads(self) -> list[Ticket[T]]:
        """The head of each lane, who is next first."""
        found: list[tuple[int, float, int, Ticket[T]]] = []
        for lane in list(self._lanes):
            head = self._head(lane)
            if head is not None:
                found.append((-head.flow.priority, head.flow.clock, head.number, head))
        if len(found) > 1:
            found.sort()
        return [entry[3] for entry in found]

    def iter_lane(self, lane: Hashable) -> Generator[Ticket[T]]:
        """A lane from its head on, in the order of service if nobody comes or goes. Close it before anybody does."""
        aside: list[tuple[int, float, int, _TenantFlow[T]]] = []
        begun: list[tuple[int, float, int, Ticket[T], Iterator[Ticket[T]]]] = []
        """The next of each flow that has been seen: a heap as those of `_lanes`."""
        try:
            while True:
                head = self._head(lane) if lane in self._lanes else None
                if head is not None:
                    first = -head.flow.priority, head.flow.clock, head.number
                    if not begun or first < begun[0]:
                        aside.append(heappop(self._lanes[lane]))
                        behind = (ticket for ticket in head.flow.lanes[lane] if ticket.waiting)
                        heappush(begun, (*first, next(behind), behind))
                if not begun:
                    return
                minus_priority, clock, _, ticket, behind = heappop(begun)
                yield ticket
                after = next(behind, None)
                if after is not None:
                    heappush(begun, (minus_priority, clock + ticket.cost, after.number, after, behind))
        finally:
            for entry in aside:
                heappush(self._lanes.setdefault(lane, []), entry)

    def take(self, ticket: Ticket[T]) -> T:
        """Removes a ticket that `lane_heads` or `iter_lane` gave, and advances its tenant's clock by its cost."""
        flow = ticket.flow
        level = self._levels[flow.priority]
        level.clock = max(level.clock, flow.clock)
        flow.clock += ticket.cost
        self.cancel(ticket)
        return ticket.item

    def pop_expired(self, now: float) -> list[Ticket[T]]:
        """Removes and returns the tickets whose deadline has come."""
        due: list[Ticket[T]] = []
        while self._deadlines and (not self._deadlines[0][2].waiting or self._deadlines[0][0] <= now):
            ticket = heappop(self._deadlines)[2]
            if ticket.waiting:
                due.append(ticket)
                self.cancel(ticket)
        return due

    def next_deadline(self) -> float | None:
        """The earliest of those who wait."""
        while self._deadlines and not self._deadlines[0][2].waiting:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _flow(self, tenant: str, priority: int) -> _TenantFlow[T]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _PriorityLevel()
            insort(self._priorities, priority)
        flow = level.flows.get(tenant)
        if flow is None:
            level.prune()
            flow = level.flows[tenant] = _TenantFlow(tenant, priority)
        if not flow.waiting:
            flow.clock = max(flow.clock, level.clock)
        return flow

    def _head(self, lane: Hashable) -> Ticket[T] | None:
        heap = self._lanes[lane]
        while heap:
            minus_priority, clock, number, flow = heap[0]
            line = flow.lanes[lane]
            while line and not line[0].waiting:
                line.popleft()
            if not line:
                heappop(heap)
                del flow.lanes[lane]
            elif (clock, number) != (flow.clock, line[0].number):
                heapreplace(heap, (minus_priority, flow.clock, line[0].number, flow))
            else:
                return line[0]
        del self._lanes[lane]
        return None

    def _newest(self, flow: _TenantFlow[T]) -> Ticket[T]:
        lasts: list[Ticket[T]] = []
        for line in flow.lanes.values():
            while line and not line[-1].waiting:
                line.pop()
            if line:
                lasts.append(line[-1])
        return max(lasts, key=lambda ticket: ticket.number)

    def _compact(self) -> None:
        """Drop those that have left, everywhere."""
        self._dead = 0
        self._deadlines = [entry for entry in self._deadlines if entry[2].waiting]
        heapify(self._deadlines)
        lanes: dict[Hashable, list[tuple[int, float, int, _TenantFlow[T]]]] = {}
        for lane, heap in self._lanes.items():
            kept: list[tuple[int, float, int, _TenantFlow[T]]] = []
            for entry in heap:
                flow = entry[3]
                line = deque(ticket for ticket in flow.lanes[lane] if ticket.waiting)
                if line:
                    flow.lanes[lane] = line
                    kept.append((-flow.priority, flow.clock, line[0].number, flow))
                else:
                    del flow.lanes[lane]
            if kept:
                heapify(kept)
                lanes[lane] = kept
        self._lanes = lanes
