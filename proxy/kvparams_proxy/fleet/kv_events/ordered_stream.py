"""Orders the events of one publisher. A replay fills gaps; without one, earlier events are discarded.

This class does no I/O. The owner of the sockets passes in messages, sends the requested replays, and reports time-outs.
"""

from collections.abc import Callable
from typing import Final, cast

from kvparams.kv_events import AllBlocksCleared, EventBatch, SequenceTracker

__all__ = ["OrderedEventStream", "batch_weight"]

_HELD: Final = 1024
"""Batches that may wait for a replay: some seconds of a busy engine."""
_HELD_WEIGHT: Final = 1 << 17
"""Of these together."""
_UNIT_BYTES: Final = 256
"""What weighs as much as a block: about one of 32 tokens with its hash."""


def batch_weight(batch: EventBatch | None) -> int:
    """Estimates the memory that a batch takes, in blocks, whatever its publisher has filled it with."""
    if batch is None:
        return 1
    blocks = sum(1 if isinstance(event, AllBlocksCleared) else 1 + event.blocks for event in batch.events)
    return 1 + blocks + _bytes(batch.events) // _UNIT_BYTES


def _bytes(value: object) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, tuple):
        return sum(8 + _bytes(each) for each in cast("tuple[object, ...]", value) if each is not None)
    return 8


class OrderedEventStream:
    """See the module."""

    __slots__ = (
        *("_asked", "_brought", "_held", "_held_weight", "_replays", "_tell", "_tracker"),
        *("gaps", "restarts", "replay_wanted_from"),
    )

    def __init__(self, tell: Callable[[EventBatch | None], None], *, replays: bool) -> None:
        """Creates the stream of a publisher that was not heard yet.

        Args:
            tell: hears every batch once, in order; None: what was told before holds no longer.
            replays: whether the publisher can be asked for what it has said.
        """
        self._tell = tell
        self._replays = replays
        self._tracker = SequenceTracker()
        self._asked: int | None = None
        """From which number on a replay is running."""
        self._brought = False
        """Whether it has brought anything."""
        self._held: list[EventBatch] = []
        """What came meanwhile."""
        self._held_weight = 0
        self.replay_wanted_from: int | None = None
        """A replay from this number on is to be asked for; whoever does so sets it to None. One that runs is off."""
        self.gaps = 0
        """How often something was lost that no replay has brought."""
        self.restarts = 0

    @property
    def replaying(self) -> bool:
        """True while a replay is wanted or running."""
        return self._asked is not None

    def on_connected(self) -> None:
        """Handles a connection to the publisher, the first or a later one.

        It may have published before, or be another process.
        """
        if self._replays:
            self._ask(self._tracker.last)

    def restart(self) -> None:
        """Starts over, after the consumer has lost its state."""
        self._tracker = SequenceTracker()
        self._held.clear()
        self._held_weight = 0
        self._asked = self.replay_wanted_from = None
        self.on_connected()

    def on_live_batch(self, batch: EventBatch) -> None:
        """Handles a batch that was published now."""
        if self._asked is None:
            self._take(batch, self._replays)
            return
        self._hold(batch)
        if len(self._held) > _HELD or self._held_weight > _HELD_WEIGHT:
            self._end()

    def _hold(self, batch: EventBatch) -> None:
        self._held.append(batch)
        self._held_weight += batch_weight(batch)

    def on_replayed_batch(self, batch: EventBatch) -> None:
        """Handles a batch that was replayed."""
        asked = self._asked
        if asked is None or self.replay_wanted_from is not None:  # of a replay before the one that is wanted now
            return
        first, self._brought = not self._brought, True
        if first and batch.sequence != asked and self._tracker.next:  # what was taken last is not there any more
            self._give_up(batch.sequence or 0)
        self._take(batch, False)

    def on_replay_end(self) -> None:
        """Handles the end of a replay, or its time-out."""
        if self._asked is not None and self.replay_wanted_from is None:
            self._end()

    def _end(self) -> None:
        if not self._brought and self._tracker.next:  # not even what was taken last: another publisher, perhaps
            self._give_up(0)
        held, self._held, self._held_weight = self._held, [], 0
        self._asked = self.replay_wanted_from = None
        for batch in held:
            self._take(batch, False)

    def _take(self, batch: EventBatch, may_ask: bool) -> None:
        number = batch.sequence or 0
        order = self._tracker.observe(number, batch.mark)
        if order.finding == "restart":
            self.restarts += 1
            self._tell(None)
            may_ask = self._replays
            order = self._tracker.observe(number, batch.mark)
        if order.finding == "gap":
            if may_ask:
                self._hold(batch)
                self._ask(order.replay_from)
                return
            self._give_up(number)
            order = self._tracker.observe(number, batch.mark)
        if order.finding == "in_order":
            self._tell(batch)

    def _ask(self, first: int) -> None:
        self._asked = self.replay_wanted_from = first
        self._brought = False

    def _give_up(self, goes_on: int) -> None:
        """Skips lost events and invalidates the earlier ones."""
        if self._tracker.next or goes_on:
            self.gaps += 1
        self._tell(None)
        self._tracker.resume(goes_on)
