"""Feeds the index from engines' KV events, and from the requests that were routed to them.

`EventFeed` takes KV events (`kvparams.kv_events`). An engine has names of its own for its blocks; an event has the
tokens and the name of the block in front, from which the hash of our chain follows. The names are kept, to know what is
removed. `RoutingFeed` needs no events: what is sent somewhere will be cached there, for as long as it fits, and what
the engine reports as cached says how much fits.

Events that cannot be placed are left out and counted. The worker is then believed to have less than it has, which costs
some recomputation. The same happens when an engine's blocks differ from those of the index and two of them end the same
index block: one eviction is taken for both.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvparams.index.block_hashes import INITIAL_STATE, BlockHasher, BlockHashes, HashState
from kvparams.index.engine_block_map import EngineBlockMap
from kvparams.index.hash_table import NodeNumbers
from kvparams.index.prefix_index import PrefixIndex
from kvparams.kv_events.model import AllBlocksCleared, BlockLocation, BlockRemoved, BlockStored, EventBatch, Medium

__all__ = ["EventFeed", "IndexChange", "RoutedRequest", "RoutingFeed"]

_LEVELS: Final[dict[Medium, int]] = {"device": 0, "host": 1, "disk": 2, "remote": 3}
_TOLD_RUN: Final = 256
"""Blocks that another feed tells and that count as used at one time."""
_NO_HASHES: Final = np.empty(0, np.uint64)
_WHOLE: Final = (None, "full_attention", "mla_attention")
"""Kinds of layers whose blocks are kept for the whole prompt; a window's come and go and say nothing of the others."""


class IndexChange(NamedTuple):
    """An `IndexChange` is what an event has changed in the index."""

    kind: str
    """`stored`, `removed` or `cleared`."""
    worker: Hashable
    owner: str | None
    """Of the blocks, where that is not the worker."""
    hashes: BlockHashes
    parent: int
    level: int


class EventFeed:
    """An `EventFeed` applies events of any engines, whose blocks may be of any size.

    Blocks owned by somebody else than the engine are held by the pair of engine and owner.
    """

    def __init__(
        self,
        index: PrefixIndex,
        chain: BlockHasher,
        names: int,
        *,
        namespace: Callable[[str, str | None, str | None], int] | None = None,
        gone: Callable[[Hashable, BlockHashes | None], None] | None = None,
    ) -> None:
        """Creates a feed that knows no blocks.

        Args:
            index: what is fed.
            chain: how its hashes are made.
            names: how many names of blocks are remembered, of all engines together: as many as blocks that are cached,
                each one counted for each engine that has it.
            namespace: that of a model, an adapter and a salt; the chain's own, if not said.
            gone: hears which blocks a worker has given up on its device; None is everything.
        """
        self.changed: Callable[[IndexChange], None] | None = None
        """Hears each change, to tell other indexes (`apply_change`)."""
        self._index = index
        self._chain = chain
        self._names = EngineBlockMap(index, names)
        self._namespace = namespace or chain.namespace
        self._gone = gone
        self._owners: dict[Hashable, set[str]] = {}
        self.unplaced = 0
        """Blocks that were left out."""

    def apply(self, batch: EventBatch, worker: Hashable, model: str, now: float = 0.0) -> None:
        """Applies a batch of a worker, in the order in which the worker sent it (`sequence_tracker`).

        Args:
            batch: the events.
            worker: whose they are; of an engine with data parallel ranks, each rank is one.
            model: what requests call the model that it serves.
            now: the time.
        """
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._stored(event, worker, model, now)
            elif isinstance(event, BlockRemoved):
                self._removed(event, worker)
            else:
                if self.changed is not None:
                    self.changed(IndexChange("cleared", worker, event.owner, _NO_HASHES, 0, 0))
                self._cleared(event, worker)

    def clear(self, worker: Hashable) -> None:
        """Forgets all blocks of a worker, because events of it are lost."""
        if self.changed is not None:
            self.changed(IndexChange("cleared", worker, None, _NO_HASHES, 0, 0))
        self.forget_worker(worker)

    def forget_worker(self, worker: Hashable) -> None:
        """Forgets all blocks of a worker: after a gap that cannot be filled, a restart, or its departure."""
        self._index.cleared(worker)
        for owner in self._owners.pop(worker, ()):
            self._index.cleared((worker, owner))

    def _stored(self, event: BlockStored, worker: Hashable, model: str, now: float) -> None:
        level = _LEVELS.get(event.place.medium)
        if level is None or event.kind not in _WHOLE:
            self.unplaced += event.blocks
            return
        holder = self._holder(worker, event.place)
        keys = _keys(worker, event)
        if event.tokens is None:
            hashes = self._names.lookup_hashes(keys)
            hashes = hashes[self._index.last_used(hashes) != 0]
            front = INITIAL_STATE
            self.unplaced += self._names.count_unknown(keys)
        else:
            placed = self._placed(event, worker, model)
            size = event.block_size
            if placed is None or not size:
                self.unplaced += event.blocks
                return
            front, namespace, blocks = placed
            hashes, behind = self._chain.extend(event.tokens[: 4 * size * blocks], namespace, front, size)
            depths = behind.tokens // self._chain.block_size
            ends = depths != (behind.tokens - size) // self._chain.block_size
            self._names.put(keys[:blocks], behind, ends, namespace)
            self.unplaced += event.blocks - blocks
        self._index.stored(holder, hashes, front.hash, level, now)
        if self.changed is not None:
            self.changed(IndexChange("stored", worker, event.place.owner, hashes, front.hash, level))

    def apply_change(self, change: IndexChange, now: float = 0.0) -> None:
        """Applies what `changed` of another feed has told.

        Raises:
            ValueError: the change cannot be.
        """
        place = BlockLocation("device", owner=change.owner)
        if change.kind == "cleared":
            self._cleared(AllBlocksCleared(change.owner), change.worker)
        elif change.kind == "stored":
            self._index.stored(self._holder(change.worker, place), change.hashes, change.parent, change.level, now)
        else:
            self._index.removed(self._holder(change.worker, place), change.hashes, change.level)
            if not change.level and change.owner is None and self._gone is not None:
                self._gone(change.worker, change.hashes)

    def _placed(self, event: BlockStored, worker: Hashable, model: str) -> tuple[HashState, int, int] | None:
        """The front before them, the namespace, and how many of these blocks have hashes."""
        known = {None, event.lora, event.salt, event.lora_id}
        blocks = event.blocks
        for number, extras in enumerate(event.extras or ()):
            if extras is not None and not all(isinstance(one, str | int) and one in known for one in extras):
                blocks = number
                break
        if event.parent is None:
            if event.lora is None and event.lora_id:
                return None
            return INITIAL_STATE, self._namespace(model, event.lora, event.salt), blocks
        key = int(_keys(worker, BlockRemoved(event.place, event.parent, len(event.parent)))[0])
        front = self._names.lookup_state(key)
        return None if front is None else (*front, blocks)

    def _removed(self, event: BlockRemoved, worker: Hashable) -> None:
        level = _LEVELS.get(event.place.medium)
        if level is not None:
            hashes = self._names.lookup_hashes(_keys(worker, event))
            hashes = hashes[hashes != 0]
            self._index.removed(self._holder(worker, event.place), hashes, level)
            if self.changed is not None and len(hashes):
                self.changed(IndexChange("removed", worker, event.place.owner, hashes, 0, level))
            if not level and event.place.owner is None and self._gone is not None:
                self._gone(worker, hashes)

    def _cleared(self, event: AllBlocksCleared, worker: Hashable) -> None:
        owners = self._owners.get(worker, set())
        if event.owner is not None:
            self._index.cleared((worker, event.owner))
            owners.discard(event.owner)
            return
        self.forget_worker(worker)
        if self._gone is not None:
            self._gone(worker, None)

    def _holder(self, worker: Hashable, place: BlockLocation) -> Hashable:
        if place.owner is None:
            return worker
        self._owners.setdefault(worker, set()).add(place.owner)
        return worker, place.owner


def _keys(worker: Hashable, event: BlockStored | BlockRemoved) -> BlockHashes:
    """A worker's names of blocks as 64 bits, none of them 0, those of other workers and groups of layers apart."""
    salt = xxh3_64_intdigest(repr((worker, event.place.group, event.place.owner)).encode())
    if event.width == 8:
        keys = np.frombuffer(event.hashes, ">u8").astype(np.uint64) ^ np.uint64(salt)
    else:
        starts = range(0, len(event.hashes), event.width)
        named = [xxh3_64_intdigest(event.hashes[at : at + event.width], salt) for at in starts]
        keys = np.array(named, np.uint64)
    keys[keys == 0] = 1
    return keys


class RoutedRequest(NamedTuple):
    """A `RoutedRequest` records the expected cache state of a request that was sent.

    It is returned with the engine's report.
    """

    worker: Hashable
    used: NodeNumbers
    """Of the blocks that were believed to be there from the beginning: when they had been used last."""


class _WorkerCapacity:
    """A `_WorkerCapacity` tracks the blocks that one worker is believed to have, and its capacity."""

    __slots__ = ("capacity", "held", "told_epoch")

    def __init__(self, capacity: int, most: int) -> None:
        self.capacity = capacity
        self.held = PrefixIndex(most)
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

    def contents(self) -> Iterator[tuple[Hashable, int, BlockHashes, BlockHashes]]:
        """Yields what workers are believed to have, some thousand blocks at a time, used last first.

        Each is a worker, its capacity, blocks, and the hash of the block in front of each. The feed may change
        meanwhile.
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
        for first in range(0, stored, _TOLD_RUN):  # used last first: each run was used before the one in front of it
            ledger.told_epoch = max(1, ledger.told_epoch - 1)
            part = slice(first, min(first + _TOLD_RUN, stored))
            ledger.held.stored_forest(worker, hashes[part], parents[part], now, epoch=ledger.told_epoch)

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
        gone = [held.stored(worker, hashes, now=now), held.forget(len(held) - ledger.capacity)]
        self._index.stored(worker, hashes, now=now)
        self._drop(worker, gone)
        return routed

    def record_reported(self, routed: RoutedRequest, cached: int) -> None:
        """Corrects the estimate with the number of blocks that the engine reported as cached."""
        ledger = self._ledgers.get(routed.worker)
        if ledger is None:
            return
        held, believed = ledger.held, len(routed.used)
        if cached < believed:
            gone = held.forget(len(held), min(int(routed.used[cached]), held.epoch - 1))
            if len(gone):
                ledger.capacity = max(1, len(held))
                self._drop(routed.worker, [gone])
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

    def _ledger(self, worker: Hashable) -> _WorkerCapacity:
        ledger = self._ledgers.get(worker)
        if ledger is None:
            ledger = self._ledgers[worker] = _WorkerCapacity(self._capacity, self._most)
        return ledger

    def _drop(self, worker: Hashable, gone: list[BlockHashes]) -> None:
        hashes = np.concatenate(gone)
        if len(hashes):
            self._index.removed(worker, hashes)
