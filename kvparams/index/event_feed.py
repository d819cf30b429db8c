"""Feeds the index from engines' KV events (`kvparams.kv_events`).

An engine has names of its own for its blocks; an event has the tokens and the name of the block in front, from which
the hash of our chain follows. The names are kept, to know what is removed.

Events that cannot be placed are left out and counted. The worker is then believed to have less than it has, which costs
some recomputation. The same happens when an engine's blocks differ from those of the index and two of them end the same
index block: one eviction is taken for both.
"""

from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvparams.index.block_hashes import INITIAL_STATE, BlockHasher, BlockHashes, HashState
from kvparams.index.engine_block_map import EngineBlockMap
from kvparams.index.prefix_index import PrefixIndex
from kvparams.kv_events.model import AllBlocksCleared, BlockLocation, BlockRemoved, BlockStored, EventBatch, Medium

__all__ = ["EventFeed", "IndexChange"]

_LEVELS: Final[dict[Medium, int]] = {"device": 0, "host": 1, "disk": 2, "remote": 3}
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
