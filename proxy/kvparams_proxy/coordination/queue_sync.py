"""Shares the queues for room: which legs wait at which proxy, so that limits and tenants' shares hold over the site.

Each proxy keeps the waiting legs of all in one order. Where a leg ends, its proxy decides who is next: if that is a leg
of another proxy, it holds the room and offers it, and releases it when the other has taken it, or has not answered. So
no other proxy takes the room meanwhile.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Final

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.replication.entries import Entry, LegDequeued, LegQueued, RoomOffered
from kvparams.replication.siblings import Sibling
from kvparams_proxy.coordination.load_sync import EngineNames
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.leg_queue import LegWaiter, RemoteLeg, RemoteQueue
from kvparams_proxy.fleet.slow_start import CallLater, CancellableTimer

__all__ = ["QueueSync"]

_MOST_LEGS: Final = 1 << 14
"""Of one sibling that wait at a time; of more, nothing is believed."""
_OFFER_S: Final = 0.05
"""For so long room is held for a leg of another proxy."""
_IGNORED_S: Final = 1.0
"""For so long nothing is offered to a proxy that has not taken what was offered."""


class _Offer:
    """Room that is held."""

    __slots__ = ("instance", "timer")

    def __init__(self, instance: Instance, timer: CancellableTimer) -> None:
        self.instance = instance
        self.timer = timer


class QueueSync:
    """Tells this proxy's waiting legs (`QueueObserver`), and applies those of siblings."""

    def __init__(
        self,
        fleet: Fleet,
        own_id: int,
        names: EngineNames,
        publish: Callable[[Entry], None],
        now: Callable[[], float],
        call_later: CallLater,
    ) -> None:
        """`fleet` tells its queues to this object from now on.

        Args:
            fleet: whose legs wait.
            own_id: the number of this proxy.
            names: of the fleet's members.
            publish: tells the siblings.
            now: the event loop's.
            call_later: likewise.
        """
        self._fleet = fleet
        self._own_id = own_id
        self._names = names
        self._publish = publish
        self._now = now
        self._call_later = call_later
        self._numbers = count(1)
        self._own: dict[LegWaiter, LegQueued] = {}
        self._own_numbers: dict[int, tuple[Role, LegWaiter]] = {}
        self._queues: dict[int, RemoteQueue] = {}
        self._legs: dict[int, dict[int, tuple[Role, RemoteLeg]]] = {}
        """The waiting legs of siblings: sibling, leg."""
        self._places: dict[RemoteLeg, tuple[int, int]] = {}
        """The same the other way round."""
        self._offers: dict[RemoteLeg, _Offer] = {}
        fleet.watch_queues(self)

    def leg_queued(self, role: Role, waiter: LegWaiter) -> None:
        """See `QueueObserver`."""
        facts = waiter.facts
        priority = max(-(1 << 63), min(facts.priority, (1 << 63) - 1))
        entry = LegQueued(
            next(self._numbers), role.value, priority, facts.prompt_tokens, facts.tenant, facts.model or ""
        )
        self._own[waiter] = entry
        self._own_numbers[entry.leg] = role, waiter
        self._publish(entry)

    def leg_dequeued(self, role: Role, waiter: LegWaiter, *, granted: bool) -> None:
        """See `QueueObserver`."""
        entry = self._own.pop(waiter, None)
        if entry is not None:
            del self._own_numbers[entry.leg]
            self._publish(LegDequeued(entry.leg, granted))

    def offer_room(self, role: Role, leg: RemoteLeg, instance: Instance) -> None:
        """See `QueueObserver`."""
        self._offers[leg] = _Offer(instance, self._call_later(_OFFER_S, partial(self._withdraw, leg)))
        member = self._fleet.member(instance)
        engine = self._names.find_key(member)
        if engine is not None:
            sibling, number = self._places[leg]
            self._publish(RoomOffered(sibling, number, engine))

    def snapshot(self) -> Iterator[Entry]:
        """Yields the legs of this proxy that wait. Some may have ended when the next one is asked for."""
        for waiter, entry in list(self._own.items()):
            if self._own.get(waiter) is entry:
                yield entry

    def apply(self, sibling: Sibling, entry: LegQueued | LegDequeued | RoomOffered) -> None:
        """Applies an entry of a sibling.

        Raises:
            ValueError: the entry names a role that there is not.
        """
        if isinstance(entry, RoomOffered):
            self._accept(entry)
            return
        legs = self._legs.setdefault(sibling.id, {})
        if isinstance(entry, LegDequeued):
            found = legs.pop(entry.leg, None)
            if found is not None:
                self._drop(*found, granted=entry.granted)
        elif entry.leg not in legs and len(legs) < _MOST_LEGS:
            role = Role(entry.role)
            leg = RemoteLeg(self._queues.setdefault(sibling.id, RemoteQueue()), _facts(entry))
            legs[entry.leg] = role, leg
            self._places[leg] = sibling.id, entry.leg
            self._fleet.push_remote(role, leg)

    def forget_legs(self, sibling: Sibling) -> None:
        """Forgets the legs that wait at a sibling."""
        self._queues.pop(sibling.id, None)
        for role, leg in self._legs.pop(sibling.id, {}).values():
            self._drop(role, leg, granted=False)

    def close(self) -> None:
        """Releases all room that is held."""
        for leg in list(self._offers):
            self._release(leg)

    def _accept(self, offer: RoomOffered) -> None:
        own = self._own_numbers.get(offer.leg) if offer.proxy == self._own_id else None
        member = self._names.members.get(offer.engine)
        if own is not None and member is not None:
            self._fleet.accept_offer(*own, member)

    def _drop(self, role: Role, leg: RemoteLeg, *, granted: bool) -> None:
        del self._places[leg]
        self._fleet.drop_remote(role, leg, granted=granted)
        self._release(leg)

    def _withdraw(self, leg: RemoteLeg) -> None:
        """Takes an offer back that was not answered."""
        leg.queue.ignored_until = self._now() + _IGNORED_S
        self._release(leg)

    def _release(self, leg: RemoteLeg) -> None:
        offer = self._offers.pop(leg, None)
        if offer is not None:
            offer.timer.cancel()
            leg.is_offered = False
            self._fleet.release(offer.instance, leg.facts)


def _facts(entry: LegQueued) -> RequestFacts:
    return RequestFacts(
        request_id="",
        transfer_id="",
        model=entry.model or None,
        prompts=1,
        choices=1,
        token_ids=None,
        cache_salt=None,
        tenant=entry.tenant,
        priority=entry.priority,
        prompt_tokens=entry.tokens,
    )
