"""The nodes of the index, in flat arrays: which block a node is, what stands in front of it, when it was used last.

There are at most `capacity` nodes. To make room, the leaf that was used longest ago goes first; then what it has made
a leaf is one of them. A node is a leaf when nothing stands behind it, as far as was said when that was stored.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvparams.index.block_hashes import BlockHashes
from kvparams.index.eviction_buckets import EvictionBuckets
from kvparams.index.hash_table import HashTable, NodeNumbers
from kvparams.index.leaf_removal import EVERY, NodeLinks, remove_leaves
from kvparams.index.use_order import used_last_first
from kvparams.index.zero_arrays import lazy_zeros

__all__ = ["BlockTree"]

_EPOCHS: Final = 1024
"""How finely uses are told apart: one epoch in that many uses of as many blocks as there may be."""
_NO_NODES: Final[NodeNumbers] = np.empty(0, np.uint32)
_ONE: Final = np.uint32(1)
_FIRST_EPOCH: Final = 1 << 20
"""Those before it are for what others have used: see `add_forest`."""
_PIECE: Final = 2000
"""Blocks of `contents` at a time."""
_SLICE: Final = 1 << 15
"""Nodes that `contents` looks at in one step."""


class BlockTree:
    """Nodes have numbers from 1 on. Node 0 is none: what the first block of a prompt stands behind."""

    __slots__ = (
        *("_ages", "_began", "_capacity", "_children", "_epochs", "_free", "_freed", "_hashes", "_is_queued"),
        *("_let_go", "_links", "_parents", "_table", "_ttl", "_uses"),
        *("end", "epoch", "sets"),
    )

    def __init__(self, capacity: int, ttl: float | None, let_go: Callable[[NodeNumbers], None]) -> None:
        """`let_go` is told of nodes that go, and makes their sets 0."""
        self._capacity = capacity
        self._ttl = ttl
        self._let_go = let_go
        self._ages = EvictionBuckets()
        self._hashes = lazy_zeros(capacity + 1, np.uint64)  # 0 where there is no node
        self._table = HashTable(self._hashes)
        self._parents = lazy_zeros(capacity + 1, np.uint32)
        self._children = lazy_zeros(capacity + 1, np.uint32)
        self._epochs = lazy_zeros(capacity + 1, np.uint32)
        self._is_queued = lazy_zeros(capacity + 1, np.uint8)  # whether it is in `_ages`
        self._free = lazy_zeros(capacity + 1, np.uint32)
        self.sets = lazy_zeros(capacity + 1, np.uint32)
        """By node: who holds it, for whoever has the tree to say; 0 for nobody, and where there is no node."""
        arrays = (self._parents, self._children, self.sets, self._epochs, self._is_queued)
        self._links = NodeLinks(*(each.data for each in arrays))
        self._freed = 0  # how many stand in `_free`
        self.end = 1
        """This number and those behind it have never been a node's."""
        self.epoch = _FIRST_EPOCH
        """Of what is used now."""
        self._uses = 0  # in this epoch
        self._began = deque([(1, float("-inf"))])  # epochs and when they began, not all of them

    def __len__(self) -> int:
        return self.end - 1 - self._freed

    def find(self, hashes: BlockHashes) -> NodeNumbers:
        """Returns the node of each block, or 0."""
        return self._table.find(hashes)

    def leading_runs(self, hashes: BlockHashes) -> list[tuple[int, int]]:
        """Returns the sets of the nodes of these blocks, up to the first that is absent.

        Each is the position behind the last block of a run, and the set of all nodes in it.
        """
        return self._table.find_runs(hashes, self.sets)

    def last_used(self, hashes: BlockHashes) -> NodeNumbers:
        """The epoch in which each block was used last; 0 where there is no node."""
        numbers = self.find(hashes)
        return self._epochs.take(numbers) * (numbers != 0)

    def chain_to(self, hash: int, blocks: int) -> BlockHashes:
        """Returns the hashes of at most so many nodes, each in front of the next, up to the node of this block."""
        pieces: list[BlockHashes] = []
        number, left = self._table.get(hash), blocks
        while number and left > 0:
            first = max(1, number + 1 - left)
            # Chains that were stored at once have numbers that follow one another.
            breaks = (self._parents[first + 1 : number + 1] != np.arange(first, number)).nonzero()[0]
            if len(breaks):
                first += int(breaks[-1]) + 1
            pieces.append(self._hashes[first : number + 1])
            left -= number + 1 - first
            number = self._parents.item(first)
        pieces.reverse()
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint64)

    def make_room(self, wanted: int, front: int, held: NodeNumbers) -> BlockHashes:
        """Evicts `wanted` nodes or a few more, but none of the nodes in `held` and not `front`.

        These are treated as if a node followed each of them.
        """
        self._children[held] += 1
        self._children[front] += 1
        gone = self.evict(wanted, self.epoch)
        self._children[front] -= 1
        self._children[held] -= 1
        held = np.append(held, np.uint32(front))
        self._queue_leaves(held[held != 0])
        return gone

    def add(self, hashes: BlockHashes, numbers: NodeNumbers, front: int) -> None:
        """Make nodes for the blocks of a chain whose number is 0, and write their numbers there. There is room.

        Args:
            hashes: the chain.
            numbers: their nodes.
            front: the node in front of the first one.
        """
        fresh = numbers == 0
        made = self._take(int(np.count_nonzero(fresh)))
        numbers[fresh] = made
        self._hashes[made] = hashes[fresh]
        self._table.insert(made)
        fronts = np.empty_like(numbers)
        fronts[:1] = front
        fronts[1:] = numbers[:-1]
        fronts = fronts[fresh]
        self._parents[made] = fronts
        self._children[made] = 0
        self._children[fronts] += 1
        self._epochs[made] = self.epoch
        self._queue_leaves(made)

    def add_forest(self, hashes: BlockHashes, parents: BlockHashes, epochs: NodeNumbers | None = None) -> NodeNumbers:
        """Make nodes for blocks of any prompts, as many of the first ones as there is room for.

        Args:
            hashes: the blocks, each once.
            parents: for each the hash of the block in front of it; 0 where there is none. One that is not known counts
                as none, and so do all where following them leads to no beginning.
            epochs: for each when it was used last, above 0; now, if not said.

        Returns:
            Their nodes, those that were there before included; fewer than hashes where there is no room.
        """
        numbers = self.find(hashes)
        missing = (numbers == 0).nonzero()[0]
        room = self._capacity - len(self)
        if len(missing) > room:
            end = int(missing[room])
            hashes, parents, numbers, missing = hashes[:end], parents[:end], numbers[:end], missing[:room]
        if not len(missing):
            return numbers
        made = self._take(len(missing))
        numbers[missing] = made
        self._hashes[made] = hashes[missing]
        self._table.insert(made)
        fronts = self._table.find(parents[missing])
        fronts[_is_endless(made, fronts)] = 0
        self._parents[made] = fronts
        self._children[made] = 0
        np.add.at(self._children, fronts, _ONE)
        self._epochs[made] = self.epoch if epochs is None else epochs[missing]
        self._queue_leaves(made)
        return numbers

    def contents(
        self, is_wanted: Callable[[], NDArray[np.bool_]] | None = None
    ) -> Iterator[tuple[BlockHashes, BlockHashes]]:
        """Yields blocks and the blocks in front of them, used last first: parents not behind their children.

        The tree may change meanwhile: each piece is as it is when it is yielded, and what is new may be left out. Empty
        pieces come while blocks are sorted.

        Args:
            is_wanted: returns by the number of a set whether its blocks are wanted now; all are, if not said.
        """
        for numbers in used_last_first(self._slices(is_wanted), self.epoch, _PIECE):
            numbers = self._wanted(numbers, is_wanted)
            yield self._hashes.take(numbers), self._hashes.take(self._parents.take(numbers))

    def _slices(self, is_wanted: Callable[[], NDArray[np.bool_]] | None) -> Iterator[tuple[NodeNumbers, NodeNumbers]]:
        """Yields the nodes of wanted blocks, some at a time, and when they were used last."""
        for first in range(1, self.end, _SLICE):
            numbers = self._wanted(np.arange(first, min(first + _SLICE, self.end), dtype=np.uint32), is_wanted)
            yield numbers, self._epochs.take(numbers)

    def _wanted(self, numbers: NodeNumbers, is_wanted: Callable[[], NDArray[np.bool_]] | None) -> NodeNumbers:
        kept = self._hashes.take(numbers) != 0
        if is_wanted is not None:
            kept &= is_wanted().take(self.sets.take(numbers))
        return numbers[kept]

    def use(self, numbers: NodeNumbers, now: float) -> None:
        """They go later."""
        self._uses += len(numbers)
        if self._uses * _EPOCHS >= self._capacity:
            self.epoch += 1
            self._uses = 0
        if self._ttl is not None and now - self._began[-1][1] >= self._ttl / 16:
            self.epoch += 1
            self._began.append((self.epoch, now))
        self._epochs[numbers] = self.epoch

    def outdated(self, now: float) -> int:
        """The last epoch in which nothing was used within the time to live; 0 where there is none."""
        if self._ttl is None:
            return 0
        while len(self._began) > 1 and self._began[1][1] <= now - self._ttl:
            self._began.popleft()
        return self._began[0][0] - 1

    def prune(self, numbers: NodeNumbers) -> None:
        """Removes those of these unheld nodes that have no children, and then the ancestors that become such nodes."""
        removed = remove_leaves(self._links, numbers, 0, EVERY)
        self._queue(removed.queued)
        self._release(removed.removed)

    def evict(self, count: int, until: int) -> BlockHashes:
        """Evicts `count` nodes or a few more, leaves first, that were used last in the epoch `until` or before."""
        gone = [_NO_NODES]
        while count > 0 and (epoch := self._ages.oldest(until)) is not None:
            removed = remove_leaves(self._links, self._ages.bucket(epoch), epoch, count)
            self._ages.keep(epoch, removed.left)
            self._queue(removed.queued)
            gone.append(removed.removed)
            count -= len(removed.removed)
        return self._release(np.concatenate(gone))

    def _queue_leaves(self, numbers: NodeNumbers) -> None:
        leaves = numbers[(self._children.take(numbers) == 0) & (self._is_queued.take(numbers) == 0)]
        self._is_queued[leaves] = 1
        self._queue(leaves)

    def _queue(self, leaves: NodeNumbers) -> None:
        self._ages.put(leaves, self._epochs.take(leaves))

    def _take(self, count: int) -> NodeNumbers:
        """Numbers for new nodes: those that went last first, in the order in which their chain had them."""
        again = min(count, self._freed)
        first = self._freed - again
        taken = self._free[first : self._freed][::-1]
        self._freed = first
        begin = self.end
        self.end = begin + count - again
        return np.concatenate((taken, np.arange(begin, self.end, dtype=np.uint32)))

    def _release(self, numbers: NodeNumbers) -> BlockHashes:
        """Makes nodes that were removed free; returns their blocks."""
        hashes = self._hashes.take(numbers)
        if len(numbers):
            self._let_go(numbers)
            self._table.remove(numbers)
            self._free[self._freed : self._freed + len(numbers)] = numbers
            self._freed += len(numbers)
            self._hashes[numbers] = 0
        return hashes


def _is_endless(made: NodeNumbers, fronts: NodeNumbers) -> NDArray[np.bool_]:
    """Returns for which of some new nodes following the nodes in front of them never leads to one that is not new."""
    order = np.argsort(made)
    places = np.searchsorted(made, fronts, sorter=order)
    ups = np.append(order.take(places, mode="clip"), len(made))  # the last place stands for all other nodes
    ups[:-1][made.take(ups[:-1]) != fronts] = len(made)
    for _ in range(len(made).bit_length()):  # each time twice as far
        ups = ups.take(ups)
    return ups[:-1] != len(made)
