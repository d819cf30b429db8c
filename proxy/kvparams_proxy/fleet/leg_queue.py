"""The queue of legs that wait for room on an instance of one role, and the errors of those that are refused.

Each waiter hears exactly once how its wait ended, unless it gives up.
"""

from collections.abc import Callable, Collection, Generator
from typing import Final, NamedTuple, Protocol

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.admission import DrainRate, QueueLimits, retry_after_s
from kvparams.routing.fair_queue import FairQueue, OverflowReason, Ticket
from kvparams.routing.pairing import PairKey
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.slow_start import CallLater, CancellableTimer

__all__ = ["LegQueue", "LegWaiter", "QueueObserver", "QueuedLeg", "RemoteLeg", "RemoteQueue", "unavailable_error"]

_REMOTE_WAITS: Final = 1.5
"""A leg of another proxy is forgotten after so many times the longest wait: its proxy has long refused it."""


class LegWaiter(Protocol):
    """A leg that waits for an instance, compared by identity.

    Exactly one of both methods is called, unless it gives up; neither may raise.
    """

    @property
    def facts(self) -> RequestFacts:
        """The request that the leg belongs to."""
        ...

    def granted(self, instance: Instance) -> None:
        """Called when an instance has room; its load counts from now on."""
        ...

    def refused(self, error: ProxyError) -> None:
        """Called when the deadline has passed, no instance is left, or the leg had to make room in the queue."""
        ...


class QueueObserver(Protocol):
    """Hears of this proxy's waiting legs, to tell other proxies."""

    def leg_queued(self, role: Role, waiter: LegWaiter) -> None:
        """Hears that a leg waits that may run on any instance of its role and model."""
        ...

    def offer_room(self, role: Role, leg: "RemoteLeg", instance: Instance) -> None:
        """Hears that room is held for a leg of another proxy: it is to be released when that proxy has answered."""
        ...

    def leg_dequeued(self, role: Role, waiter: LegWaiter, *, granted: bool) -> None:
        """Hears that a leg waits no longer."""
        ...


class RemoteQueue:
    """The queue of another proxy."""

    __slots__ = ("ignored_until",)

    def __init__(self) -> None:
        self.ignored_until = 0.0
        """Until then no room is left to it: it has not taken what it was left."""


class RemoteLeg:
    """A leg that waits at another proxy. It has its place in the order, and is given nothing here."""

    __slots__ = ("facts", "is_offered", "queue")

    def __init__(self, queue: RemoteQueue, facts: RequestFacts) -> None:
        self.queue = queue
        self.facts = facts
        self.is_offered = False
        """Whether room is held for it."""


class QueuedLeg(NamedTuple):
    """A waiting leg, with the conditions of its choice."""

    waiter: LegWaiter | RemoteLeg
    facts: RequestFacts
    avoid: Collection[str]
    """See `Fleet.acquire`."""
    paired_with: PairKey | Role | None = None
    """See `Fleet.acquire`; None where it does not matter."""


class LegQueue:
    """The queue of one role."""

    def __init__(
        self,
        role: Role,
        limits: QueueLimits,
        by_tokens: bool,
        now: Callable[[], float],
        call_later: CallLater,
        expired: Callable[[], None],
    ) -> None:
        """`by_tokens`: whether shares are counted in tokens or in legs; `expired` is called when some had to go."""
        self._role = role
        self._wait_s = limits.wait_s
        self._waits = limits.waiting > 0
        self._by_tokens = by_tokens
        self._now = now
        self._call_later = call_later
        self._expired = expired
        self._queue: FairQueue[QueuedLeg] = FairQueue(limits)
        self._tickets: dict[LegWaiter | RemoteLeg, Ticket[QueuedLeg]] = {}
        self.observer: QueueObserver | None = None
        self.remote_legs = 0
        """Of those that wait, those of other proxies."""
        self._rate = DrainRate()
        self._timer: CancellableTimer | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._tickets)

    def push(
        self,
        waiter: LegWaiter,
        facts: RequestFacts,
        avoid: Collection[str],
        model: str | None,
        beside: PairKey | Role | None = None,
    ) -> None:
        """Adds a leg.

        `model` stands for all models with the same candidates. If the leg still waits after all possible legs have been
        served, call `enforce_limits`.

        Raises:
            ProxyError: 503, because the fleet was closed.
        """
        if self._closed:
            raise _closed()
        self._tickets[waiter] = self._queue.push(
            QueuedLeg(waiter, facts, avoid, beside),
            tenant=facts.tenant,
            priority=facts.priority,
            cost=max(1, facts.prompt_tokens) if self._by_tokens else 1,
            deadline=self._now() + self._wait_s,
            lane=(model, frozenset(avoid), beside, *facts.restrictions.items()),
        )
        if self._timer is None:
            self._timer = self._call_later(self._wait_s, self._expire)
        if self.observer is not None and not (avoid or facts.restrictions) and beside is None:
            self.observer.leg_queued(self._role, waiter)

    def find(self, waiter: LegWaiter) -> Ticket[QueuedLeg] | None:
        """Returns the ticket of a leg, or None if it does not wait."""
        return self._tickets.get(waiter)

    def push_remote(self, leg: RemoteLeg, model: str | None) -> None:
        """Adds a leg that waits at another proxy. One of this proxy's legs may have to make room for it."""
        if self._closed:
            return
        facts = leg.facts
        ticket = self._tickets[leg] = self._queue.push(
            QueuedLeg(leg, facts, ()),
            tenant=facts.tenant,
            priority=facts.priority,
            cost=max(1, facts.prompt_tokens) if self._by_tokens else 1,
            deadline=self._now() + _REMOTE_WAITS * self._wait_s,
            lane=(model, frozenset[str](), None),
        )
        self.remote_legs += 1
        over = self._queue.find_overflow(ticket)
        if over is not None and not isinstance(over[0].item.waiter, RemoteLeg):
            self._queue.cancel(over[0])
            self._refuse(over[0], self._full(over[1], over[0].item.facts.tenant))

    def drop_remote(self, leg: RemoteLeg, *, granted: bool) -> None:
        """Removes a leg that waits no longer at another proxy. Its tenant is charged if it was granted."""
        ticket = self._tickets.pop(leg, None)
        if ticket is None:
            return
        self.remote_legs -= 1
        if granted:
            self._queue.take(ticket)
        else:
            self._queue.cancel(ticket)

    def enforce_limits(self, waiter: LegWaiter) -> None:
        """Enforces the limits after this leg has entered: it or another may be refused.

        Raises:
            ProxyError: 429 or 503, because it may not wait.
        """
        ticket = self._tickets.get(waiter)
        over = None if ticket is None else self._queue.find_overflow(ticket)
        if over is None or isinstance(over[0].item.waiter, RemoteLeg):  # its own proxy sends that one away
            return
        loser, full = over
        self._queue.cancel(loser)
        error = self._full(full, loser.item.facts.tenant)
        if loser is ticket:
            del self._tickets[waiter]
            self._dequeued(waiter, granted=False)
            raise error
        self._refuse(loser, error)

    def would_refuse(self, facts: RequestFacts) -> ProxyError | None:
        """Returns the error that `enforce_limits` would give to a leg that entered now and found no room.

        Returns None where it might wait.
        """
        if self._waits and not self._tickets:
            return None
        full = self._queue.would_overflow(facts.tenant, facts.priority)
        return None if full is None else self._full(full, facts.tenant)

    def cancel(self, waiter: LegWaiter) -> bool:
        """Cancels a wait. Returns whether the leg waited."""
        ticket = self._tickets.pop(waiter, None)
        if ticket is None:
            return False
        self._queue.cancel(ticket)
        self._dequeued(waiter, granted=False)
        return True

    def lane_heads(self) -> list[Ticket[QueuedLeg]]:
        """Returns the first leg of each lane, in the order of service."""
        return self._queue.lane_heads()

    def iter_lane(self, head: Ticket[QueuedLeg]) -> Generator[Ticket[QueuedLeg]]:
        """Yields the legs that wait in one lane, from its head on. Close the generator before a leg is served."""
        return self._queue.iter_lane(head.lane)

    def take(self, ticket: Ticket[QueuedLeg]) -> LegWaiter:
        """Removes a leg that is served."""
        waiter = self._queue.take(ticket).waiter
        if isinstance(waiter, RemoteLeg):
            raise TypeError("a leg of another proxy is granted nothing here")
        del self._tickets[waiter]
        self._dequeued(waiter, granted=True)
        return waiter

    def record_leg_end(self) -> None:
        """Records the end of a leg, for estimates of the waiting time."""
        self._rate.record_departure(self._now())

    def refuse_where(self, why: Callable[[QueuedLeg], ProxyError | None]) -> None:
        """Refuses all legs for which there is an error."""
        for ticket in self._queue.list_waiting():
            if isinstance(ticket.item.waiter, RemoteLeg):
                continue
            if ticket.waiting and (error := why(ticket.item)) is not None:
                self._queue.cancel(ticket)
                self._refuse(ticket, error)

    def close(self) -> None:
        """Refuses all legs and cancels the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._closed = True
        self.refuse_where(lambda item: _closed())

    def _refuse(self, ticket: Ticket[QueuedLeg], error: ProxyError) -> None:
        """Tells a leg that is already out of the queue why it is refused, unless it gave up meanwhile."""
        waiter = ticket.item.waiter
        if self._tickets.get(waiter) is ticket:
            del self._tickets[waiter]
            if isinstance(waiter, RemoteLeg):
                self.remote_legs -= 1
            else:
                self._dequeued(waiter, granted=False)
                waiter.refused(error)

    def _dequeued(self, waiter: LegWaiter, *, granted: bool) -> None:
        if self.observer is not None:
            self.observer.leg_dequeued(self._role, waiter, granted=granted)

    def _expire(self) -> None:
        self._timer = None
        now = self._now()
        message = f"no {self._role} instance had room for this request in {self._wait_s:g} s; try again later"
        due = self._queue.pop_expired(now)
        error = unavailable_error(message, "queue_timeout", self._retry_after_s(now))
        for ticket in due:
            self._refuse(ticket, error)
        deadline = self._queue.next_deadline()
        if deadline is not None and self._timer is None:
            self._timer = self._call_later(max(0.0, deadline - now), self._expire)
        self._expired()

    def _full(self, full: OverflowReason, tenant: str) -> ProxyError:
        now = self._now()
        if full is OverflowReason.QUEUE:
            message = f"every {self._role} instance is busy and the queue is full; try again later"
            return unavailable_error(message, "queue_full", self._retry_after_s(now))
        message = "too many of your requests are waiting; try again later"
        ahead = max(1, self._queue.count_waiting(tenant)) * max(1, self._queue.tenant_count)
        after = retry_after_s(ahead, self._rate.per_s(now))
        return ProxyError(429, "rate_limit_error", message, code="rate_limited", retry_after_s=after)

    def _retry_after_s(self, now: float) -> int:
        return retry_after_s(len(self._queue) + 1, self._rate.per_s(now))


def unavailable_error(message: str, code: str, retry_after_s: int) -> ProxyError:
    """Returns an error of status 503."""
    return ProxyError(503, "service_unavailable", message, code=code, retry_after_s=retry_after_s)


def _closed() -> ProxyError:
    return unavailable_error("the proxy is shutting down", "shutting_down", 1)
