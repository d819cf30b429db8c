"""Enters engines' KV events into the prefix index, a bounded number in one turn of the event loop.

Requests have priority: a turn takes about a millisecond, however many events engines send.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Final, NamedTuple

from kvparams.kv_events.model import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVCacheEvent
from kvparams_proxy.fleet.kv_events.subscriber import KVEventSubscriber, PublisherEndpoint, ReceivedBatch
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = ["KVEventConsumer", "KVEventStats"]

_log: Final = logging.getLogger(__name__)
_TURN_S: Final = 0.001
_BLOCKS: Final = 512
"""Of one event that are entered at once: some 0.2 ms."""
_LOOK_S: Final = 0.25
"""How often an engine that has not yet said what it serves is looked at."""


class KVEventStats(NamedTuple):
    """Statistics of one engine's KV events."""

    connected: bool
    batches: int
    refused: int
    """Messages that were no events."""
    gaps: int
    """Times that something was lost and no replay brought it."""
    restarts: int


class KVEventConsumer:
    """Consumes the KV events of a fleet's engines, in the event loop. A `fleet_members.FleetListener`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, prefixes: PrefixCacheModel) -> None:
        self._loop = loop
        self._prefixes = prefixes
        self._listening: KVEventSubscriber | None = None
        self._members: dict[Member, str] = {}
        """Who is listened to, and what requests call its model."""
        self.is_owner: Callable[[Member], bool] = lambda member: True
        """Whether this proxy listens to an engine, and not another one that tells it what the engine says."""
        self._left_to_others: dict[Member, str] = {}
        """Those that others listen to."""
        self._unnamed: set[Member] = set()
        """Who has not said yet what it serves: its blocks could not be found."""
        self._timer: asyncio.TimerHandle | None = None
        self._rest: Iterator[tuple[Member, EventBatch | None]] = iter(())
        """What is left of what was taken."""
        self._further = False
        """Whether there will be a further turn for it."""
        self._closed = False

    def joined(self, member: Member) -> None:
        """See `FleetListener`."""
        if member.instance.kv_events is not None:
            self._unnamed.add(member)
            self._look()

    def left(self, member: Member) -> None:
        """See `FleetListener`."""
        self._unnamed.discard(member)
        if self._left_to_others.pop(member, None) is not None:
            self._prefixes.event_sources.remove(member)
        if self._members.pop(member, None) is not None and self._listening is not None:
            self._listening.unsubscribe(member)
            self._prefixes.event_sources.remove(member)

    def stats(self) -> dict[str, KVEventStats]:
        """The statistics of each engine that publishes, by its id."""
        found = {member.instance.id: KVEventStats(False, 0, 0, 0, 0) for member in self._unnamed}
        if self._listening is not None:
            for member in self._members:
                found[member.instance.id] = KVEventStats(*self._listening.counts(member))
        return found

    @property
    def unplaced_blocks(self) -> int:
        """The number of blocks that could not be placed."""
        return self._prefixes.event_sources.unplaced_blocks

    def reassign(self) -> None:
        """Begins and ends subscriptions, because `is_owner` may say something else now. Beliefs stay."""
        for member, model in list(self._left_to_others.items()):
            if self.is_owner(member):
                del self._left_to_others[member]
                self._begin(member, model)
        for member, model in list(self._members.items()):
            if not self.is_owner(member) and self._listening is not None:
                del self._members[member]
                self._listening.unsubscribe(member)
                self._left_to_others[member] = model

    def close(self) -> None:
        """Ends all subscriptions."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._listening is not None:
            self._listening.close()

    def _look(self) -> None:
        """Subscribes to the publishers whose models are known."""
        self._timer = None
        for member in list(self._unnamed):
            if member.base_model is None:
                continue
            self._unnamed.discard(member)
            self._begin(member, member.base_model)
        if self._unnamed and not self._closed:
            self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _begin(self, member: Member, model: str) -> None:
        if not self.is_owner(member):
            self._left_to_others[member] = model
            return
        instance = member.instance
        listening = self._listening
        if listening is None:
            listening = self._listening = KVEventSubscriber(self._ready)
        self._members[member] = model
        self._prefixes.event_sources.add(member, lambda: listening.request_full_replay(member))
        listening.subscribe(member, PublisherEndpoint(instance.kv_events or "", instance.kv_events_replay))

    def _ready(self) -> None:
        """Schedules `_enter` in the event loop; the subscriber's thread calls it."""
        try:
            self._loop.call_soon_threadsafe(self._enter)
        except RuntimeError:  # the loop is closed: nobody waits
            return

    def _enter(self) -> None:
        """Enters new events, after those that are still pending."""
        if not self._further:
            self._turn()

    def _turn(self) -> None:
        """Enters a part of the pending events. The rest follows in further turns, never two of them at once."""
        self._further = False
        until = perf_counter() + _TURN_S
        while not self._closed:
            for member, batch in self._rest:
                model = self._members.get(member)
                if model is not None:
                    self._apply(member, batch, model)
                if perf_counter() > until:
                    self._further = True
                    self._loop.call_soon(self._turn)
                    return
            said = None if self._listening is None else self._listening.take_batch()
            if said is None:
                return
            self._rest = _parts(said)

    def _apply(self, member: Member, batch: EventBatch | None, model: str) -> None:
        try:
            if batch is not None and member.adapters:
                batch = replace(batch, events=tuple(_as_requested(event, member, model) for event in batch.events))
            self._prefixes.event_sources.apply(member, batch, model)
        except ValueError as error:  # an engine's hashes may be anything
            _log.warning("a KV event of %s cannot be used: %s", member.instance.id, error)
        except Exception:  # noqa: BLE001  a fault of the proxy: what others say is entered all the same
            _log.exception("a KV event of %s could not be processed", member.instance.id)


def _as_requested(event: KVCacheEvent, member: Member, model: str) -> KVCacheEvent:
    """Returns an event whose LoRA adapter has the name by which requests ask for it: see `probe_answers`."""
    if isinstance(event, BlockStored) and event.lora is not None and event.lora not in member.adapters:
        asked = f"{model}:{event.lora}"
        if asked in member.adapters:
            return event._replace(lora=asked)
    return event


def _parts(said: ReceivedBatch) -> Iterator[tuple[Member, EventBatch | None]]:
    """Splits a batch into parts that are small enough to be entered at once."""
    who, batch = said
    if not isinstance(who, Member):
        return
    if batch is None:
        yield who, None
        return
    for event in batch.events:
        for part in _pieces(event):
            yield who, replace(batch, events=(part,))


def _pieces(event: KVCacheEvent) -> Iterator[KVCacheEvent]:
    if isinstance(event, AllBlocksCleared) or event.blocks <= _BLOCKS:
        yield event
        return
    for at in range(0, event.blocks, _BLOCKS):
        end = at + _BLOCKS
        hashes = event.hashes[at * event.width : end * event.width]
        if isinstance(event, BlockRemoved):
            yield event._replace(hashes=hashes)
        else:
            yield _piece(event, hashes, at, end)


def _piece(event: BlockStored, hashes: bytes, at: int, end: int) -> BlockStored:
    front = event.hashes[(at - 1) * event.width : at * event.width] if at else event.parent
    size = 4 * (event.block_size or 0)
    return event._replace(
        hashes=hashes,
        parent=front,
        tokens=None if event.tokens is None else event.tokens[at * size : end * size],
        extras=None if event.extras is None else event.extras[at:end],
    )
