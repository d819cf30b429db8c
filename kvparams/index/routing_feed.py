"""Feeds the index from the requests that were routed to engines.

What is sent somewhere will be cached there, for as long as it fits, and what the engine reports as cached says how much
fits. No KV events are needed.
"""

from collections.abc import Hashable, Iterator
from typing import Final, NamedTuple

import numpy as np

from kvparams.index.block_hashes import BlockHashes
from kvparams.index.hash_table import NodeNumbers
from kvparams.index.prefix_index import PrefixIndex

__all__ = ["RoutedRequest", "RoutingFeed"]

_TOLD_RUN: Final = 256
"""Blocks that another feed tells and that count as used at one time."""
_FORGOTTEN_AT_ONCE: Final = 8192
"""Blocks that one call forgets, which takes a millisecond; the next calls for the same worker go on."""


class RoutedRequest(NamedTuple):
    """A `RoutedRequest` records the expected cache state of a request that was sent.

    It is returned with the engine's report.
    """

    worker: Hashable
    used: NodeNumbers
    """Of the blocks that were believed to be there from the beginning: when they had been used last."""


class _WorkerCapacity:
    """A `_WorkerCapacity` tracks the blocks that one worker is believed to have, and its capacity."""

    __slots__ = ("capacity", "doubted_epoch", "held", "told_epoch")

    def __init__(self, capacity: int, most: int) -> None:
        self.capacity = capacity
        self.held = PrefixIndex(most)
        self.doubted_epoch = 0
        """What was used last by this epoch has gone, as a report has shown; 0 where all of it is forgotten."""
        self.told_epoch = self.held.epoch
        """The epoch of what another feed told last; what it tells next was used before."""


class RoutingFeed:
    """A `RoutingFeed` predicts caches from routed requests, corrected by the engines' reports.

    A worker is believed to keep what it used last, in as much room as it seems to have. A block that was believed to
    be there and was not says more than itself: what was used longer ago has gone, too, and that is how much fits. One
    that was there against belief, while the room was believed to be full, says that more fits.
    """

    def __init__(self, index: PrefixIndex, capacity: int, most: int | None = None) -> None:
        """Creates a feed that has routed nothing.

        Args:
            index: what is fed.
            capacity: blocks that fit into one worker's cache, as far as is known; it need not be right.
            most: as many as one will ever be believed to keep; 16 times that, if not said.
        """
        self._index = index
        self._capacity = capacity
        self._most = most or 16 * capacity
        self._ledgers: dict[Hashable, _WorkerCapacity] = {}

    def capacity(self, worker: Hashable) -> int:
        """Returns the estimated capacity of a worker in blocks."""
        ledger = self._ledgers.get(worker)
        return self._capacity if ledger is None else ledger.capacity

    def held_blocks(self, worker: Hashable) -> int:
        """Returns the number of blocks that a worker is believed to have."""
        ledger = self._ledgers.get(worker)
        return 0 if ledger is None else len(ledger.held)

    def contents(self) -> Iterator[tuple[Hashable, int, BlockHashes, BlockHashes]]:
        """Yields what workers are believed to have, used last first, in steps of a millisecond or two.

        Each is a worker, its capacity, some of its blocks or none, and the hash of the block in front of each. The feed
        may change meanwhile.
        """
        for worker, ledger in list(self._ledgers.items()):
            for hashes, parents in ledger.held.tree.contents():
                if self._ledgers.get(worker) is not ledger:
                    break
                yield worker, ledger.capacity, hashes, parents

    def record_contents(
        self, worker: Hashable, capacity: int, hashes: BlockHashes, parents: BlockHashes, now: float = 0.0
    ) -> None:
        """Believes what `contents` of another feed says, as far as there is room.

        Raises:
            ValueError: a hash stands there twice, or is 0.
        """
        ledger = self._ledger(worker)
        is_measured = ledger.capacity != self._capacity
        ledger.capacity = min(self._most, max(ledger.capacity, capacity) if is_measured else capacity)
        room = max(0, ledger.capacity - len(ledger.held))
        stored = self._index.stored_forest(worker, hashes[:room], parents[:room], now)
        # Used last first: each run was used before the one in front of it.
        epochs = np.maximum(1, ledger.told_epoch - 1 - np.arange(stored) // _TOLD_RUN).astype(np.uint32)
        ledger.told_epoch = max(1, ledger.told_epoch - -(-stored // _TOLD_RUN))
        ledger.held.stored_forest(worker, hashes[:stored], parents[:stored], now, epochs=epochs)

    def distrust_capacities(self) -> None:
        """Believes again that every cache is as large as at first: what was learnt of it was learnt from too little."""
        for ledger in self._ledgers.values():
            ledger.capacity = max(ledger.capacity, self._capacity)

    def record_routed(self, worker: Hashable, hashes: BlockHashes, now: float = 0.0, parent: int = 0) -> RoutedRequest:
        """A request with these blocks is sent there. `parent`: the hash of the block in front of them, or 0."""
        ledger = self._ledger(worker)
        held = ledger.held
        used = held.last_used(hashes)
        missing = (used == 0).nonzero()[0]
        routed = RoutedRequest(worker, used[: missing[0]] if len(missing) else used)
        gone = [held.stored(worker, hashes, now=now)]
        gone.append(held.forget(min(len(held) - ledger.capacity, _FORGOTTEN_AT_ONCE)))
        self._index.stored(worker, hashes, now=now)
        self._drop(worker, gone)
        self._forget_doubted(worker, ledger)
        return routed

    def record_reported(self, routed: RoutedRequest, cached: int) -> None:
        """Corrects the estimate with the number of blocks that the engine reported as cached."""
        ledger = self._ledgers.get(routed.worker)
        if ledger is None:
            return
        held, believed = ledger.held, len(routed.used)
        if cached < believed:
            ledger.doubted_epoch = max(ledger.doubted_epoch, min(int(routed.used[cached]), held.epoch - 1))
            self._forget_doubted(routed.worker, ledger)
        elif cached > believed and len(held) >= ledger.capacity - ledger.capacity // 16:
            ledger.capacity = min(self._most, ledger.capacity + cached - believed + ledger.capacity // 16)

    def record_failed(self, routed: RoutedRequest, hashes: BlockHashes) -> None:
        """Removes the blocks that a failed request would have computed."""
        self.record_removed(routed.worker, hashes[len(routed.used) :])

    def record_removed(self, worker: Hashable, hashes: BlockHashes) -> None:
        """It has these blocks no longer."""
        ledger = self._ledgers.get(worker)
        if ledger is not None:
            ledger.held.removed(worker, hashes)
            self._drop(worker, [hashes])

    def forget_worker(self, worker: Hashable) -> None:
        """It has restarted, or is gone: it has nothing."""
        self._ledgers.pop(worker, None)
        self._index.cleared(worker)

    def _forget_doubted(self, worker: Hashable, ledger: _WorkerCapacity) -> None:
        """Forgets some of what has gone; what is left then is how much fits."""
        if not ledger.doubted_epoch:
            return
        gone = ledger.held.forget(_FORGOTTEN_AT_ONCE, ledger.doubted_epoch)
        if len(gone):
            ledger.capacity = max(1, len(ledger.held))
            self._drop(worker, [gone])
        if len(gone) < _FORGOTTEN_AT_ONCE:
            ledger.doubted_epoch = 0

    def _ledger(self, worker: Hashable) -> _WorkerCapacity:
        ledger = self._ledgers.get(worker)
        if ledger is None:
            ledger = self._ledgers[worker] = _WorkerCapacity(self._capacity, self._most)
        return ledger

    def _drop(self, worker: Hashable, gone: list[BlockHashes]) -> None:
        hashes = np.concatenate(gone)
        if len(hashes):
            self._index.removed(worker, hashes)
