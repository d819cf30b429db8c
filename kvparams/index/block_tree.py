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
from kvparams.index.zero_arrays import lazy_zeros

__all__ = ["BlockTree"]

_EPOCHS: Final = 1024
"""How finely uses are told apart: one epoch in that many uses of as many blocks as there may be."""
_FREED: Final = 0xFFFFFFFF
_EVERY: Final = 1 << 31
_AT_ONCE: Final = 1024
"""Blocks looked up together; what lies behind a gap is not looked up."""
_ROW: Final = 256
_SHORT: Final = 16
_FIRST_EPOCH: Final = 1 << 20
"""Those before it are for what others have used: see `add_forest`."""
_PIECE: Final = 4000
"""Blocks of `contents` at a time."""


class BlockTree:
    """Nodes have numbers from 1 on. Node 0 is none: what the first block of a prompt stands behind."""

    __slots__ = (
        *("_ages", "_began", "_capacity", "_epochs", "_epochs_at", "_free", "_freed", "_hashes", "_kids"),
        *(
            "_kids_at",
            "_let_go",
            "_parents",
            "_parents_at",
            "_queued",
            "_queued_at",
            "_sets_at",
            "_table",
            "_ttl",
            "_uses",
        ),
        *("end", "epoch", "sets"),
    )

    def __init__(self, capacity: int, ttl: float | None, let_go: Callable[[NodeNumbers], None]) -> None:
        """`let_go` is told of nodes that go, and makes their sets 0."""
        self._capacity = capacity
        self._ttl = ttl
        self._let_go = let_go
        self._table = HashTable(capacity)
        self._ages = EvictionBuckets()
        self._hashes = lazy_zeros(capacity + 1, np.uint64)  # 0 where there is no node
        self._parents = lazy_zeros(capacity + 1, np.uint32)
        self._kids = lazy_zeros(capacity + 1, np.uint32)
        self._epochs = lazy_zeros(capacity + 1, np.uint32)
        self._queued = lazy_zeros(capacity + 1, np.uint8)  # whether it is in `_ages`
        self._free = lazy_zeros(capacity + 1, np.uint32)
        self.sets = lazy_zeros(capacity + 1, np.uint32)
        """By node: who holds it, for whoever has the tree to say; 0 for nobody, and where there is no node."""
        # Single entries are read and written through memoryviews, which is four times faster.
        self._parents_at, self._kids_at = self._parents.data, self._kids.data
        self._epochs_at, self._queued_at = self._epochs.data, self._queued.data
        self._sets_at = self.sets.data
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
        """The node of each block, or 0.

        The blocks of a chain that was stored at once have numbers that follow one another: found by the first of them.
        """
        table = self._table
        if len(hashes) < _SHORT or np.count_nonzero(hashes) < len(hashes):
            return table.find(hashes)
        number = table.get(hashes.item(0))
        if not number:
            return table.find(hashes)
        piece = hashes[: self._capacity + 1 - number]
        differs = self._hashes[number : number + len(piece)] != piece
        length = int(differs.argmax()) or (0 if differs[0] else len(piece))
        if length < _SHORT:
            return table.find(hashes)
        row = np.arange(number, number + length, dtype=np.uint32)
        return row if length == len(hashes) else np.concatenate((row, table.find(hashes[length:])))

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
            number = int(self._parents_at[first])
        pieces.reverse()
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint64)

    def leading(self, hashes: BlockHashes) -> Iterator[NodeNumbers]:
        """The sets of the nodes of these blocks, up to the first that is not there, in pieces, none of them empty.

        The blocks of a chain that was stored at once have numbers that follow one another, so one lookup serves many;
        where that is not so, many are looked up together.
        """
        start = 0
        while start < len(hashes):
            number = self._table.get(int(hashes[start]))
            if not number:
                return
            piece = hashes[start : start + min(_AT_ONCE, self._capacity + 1 - number)]
            differs = self._hashes[number : number + len(piece)] != piece
            length = int(differs.argmax()) or (0 if differs[0] else len(piece))
            yield self.sets[number : number + length]
            start += length
            if length < _SHORT and start < len(hashes):
                numbers = self._table.find(hashes[start : start + _AT_ONCE])
                missing = (numbers == 0).nonzero()[0]
                if len(missing):
                    if missing[0]:
                        yield self.sets.take(numbers[: missing[0]])
                    return
                yield self.sets.take(numbers)
                start += len(numbers)

    def make_room(self, wanted: int, front: int, held: NodeNumbers) -> BlockHashes:
        """Evicts `wanted` nodes or a few more, but none of the nodes in `held` and not `front`.

        These are treated as if a node followed each of them.
        """
        self._kids[held] += 1
        self._kids[front] += 1
        gone = self.evict(wanted, self.epoch)
        self._kids[front] -= 1
        self._kids[held] -= 1
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
        self._table.insert(hashes[fresh], made)
        fronts = np.empty_like(numbers)
        fronts[:1] = front
        fronts[1:] = numbers[:-1]
        fronts = fronts[fresh]
        self._parents[made] = fronts
        self._kids[made] = 0
        self._kids[fronts] += 1
        self._epochs[made] = self.epoch
        self._queue_leaves(made)

    def add_forest(self, hashes: BlockHashes, parents: BlockHashes, epoch: int | None = None) -> NodeNumbers:
        """Make nodes for blocks of any prompts, as many of the first ones as there is room for.

        Args:
            hashes: the blocks, each once.
            parents: for each the hash of the block in front of it; 0 where there is none. One that is not known counts
                as none, and so do all where following them leads to no beginning.
            epoch: when they were used last, above 0; now, if not said.

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
        fresh = hashes[missing]
        self._hashes[made] = fresh
        self._table.insert(fresh, made)
        fronts = self._table.find(parents[missing])
        fronts[_is_endless(made, fronts)] = 0
        self._parents[made] = fronts
        self._kids[made] = 0
        np.add.at(self._kids, fronts, 1)
        self._epochs[made] = self.epoch if epoch is None else epoch
        self._queue_leaves(made)
        return numbers

    def contents(
        self, sets: Callable[[], NDArray[np.bool_]] | None = None
    ) -> Iterator[tuple[BlockHashes, BlockHashes]]:
        """Yields blocks and the blocks in front of them, used last first: parents not behind their children.

        The tree may change meanwhile: each piece is as it is when it is yielded, and what is new may be left out.

        Args:
            sets: returns by the number of a set whether its blocks are wanted now; all are, if not said.
        """
        numbers = self._wanted(np.arange(self.end, dtype=np.uint32), sets)
        numbers = numbers[np.argsort(-self._epochs[numbers].astype(np.int64), kind="stable")]
        for first in range(0, len(numbers), _PIECE):
            piece = self._wanted(numbers[first : first + _PIECE], sets)
            if len(piece):
                yield self._hashes.take(piece), self._hashes.take(self._parents.take(piece))

    def _wanted(self, numbers: NodeNumbers, sets: Callable[[], NDArray[np.bool_]] | None) -> NodeNumbers:
        """Returns those of these numbers that are nodes' whose blocks are wanted."""
        alive = self._hashes.take(numbers) != 0
        if sets is not None:
            alive &= sets().take(self.sets.take(numbers))
        return numbers[alive]

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

    def prune(self, numbers: NodeNumbers) -> BlockHashes:
        """Removes those of these unheld nodes that have no children, and then the ancestors that become such nodes."""
        gone: list[int] = []
        for number in numbers.tolist():
            if not self._kids_at[number]:
                self._climb(number, gone, 0, _EVERY)
        return self._release(gone)

    def evict(self, count: int, until: int) -> BlockHashes:
        """Evicts `count` nodes or a few more, leaves first, that were used last in the epoch `until` or before."""
        gone: list[int] = []
        while len(gone) < count:
            oldest = self._ages.take(until)
            if oldest is None:
                break
            number, bucket = oldest
            self._queued_at[number] = 0
            if not self._kids_at[number]:
                epoch = self._epochs_at[number]
                if epoch > bucket:
                    self._queue(number, epoch)
                else:
                    self._climb(number, gone, bucket, count)
        return self._release(gone)

    def _climb(self, number: int, gone: list[int], until: int, count: int) -> None:
        """Removes a leaf, and then the ancestors that become leaves by that.

        It removes an ancestor if nobody holds it, or while it is as old as `until` and fewer than `count` are gone.
        """
        kids, parents, sets, epochs = self._kids_at, self._parents_at, self._sets_at, self._epochs_at
        while True:
            if parents[number] == number - 1 and parents[number - 1] == number - 2 and kids[number - 1] == 1:
                number = self._climb_row(number, gone, until, count)
            gone.append(number)
            kids[number] = _FREED
            number = parents[number]
            if not number:
                return
            left = kids[number] - 1
            kids[number] = left
            if left:
                return
            if sets[number] and (epochs[number] > until or len(gone) >= count):
                if not self._queued_at[number]:
                    self._queue(number, epochs[number])
                return

    def _climb_row(self, number: int, gone: list[int], until: int, count: int) -> int:
        """Climbs as `_climb` does, at once for a run of nodes with consecutive numbers.

        Such a run is a chain that was stored at once. Returns the last node, which is about to be removed.
        """
        first = max(1, number - _ROW, number - max(count - len(gone) - 1, 0))
        above = slice(first, number)
        stays = self._parents[first + 1 : number + 1] != np.arange(first, number)
        stays |= self._kids[above] != 1
        stays |= (self._epochs[above] > until) & (self.sets[above] != 0)
        last = number - int(stays[::-1].argmax()) if stays.any() else first
        gone.extend(range(number, last, -1))
        self._kids[last + 1 : number + 1] = _FREED
        return last

    def _queue_leaves(self, numbers: NodeNumbers) -> None:
        for leaf in numbers[(self._kids.take(numbers) == 0) & (self._queued.take(numbers) == 0)].tolist():
            self._queue(int(leaf), self._epochs_at[int(leaf)])

    def _queue(self, number: int, epoch: int) -> None:
        self._queued_at[number] = 1
        self._ages.put(number, epoch)

    def _take(self, count: int) -> NodeNumbers:
        """Numbers for new nodes: those that went last first, in the order in which their chain had them."""
        again = min(count, self._freed)
        first = self._freed - again
        taken = self._free[first : self._freed][::-1]
        self._freed = first
        begin = self.end
        self.end = begin + count - again
        return np.concatenate((taken, np.arange(begin, self.end, dtype=np.uint32)))

    def _release(self, gone: list[int]) -> BlockHashes:
        numbers = np.array(gone, np.uint32)
        if gone:
            self._let_go(numbers)
            self._table.remove(self._hashes.take(numbers))
            self._free[self._freed : self._freed + len(gone)] = numbers
            self._freed += len(gone)
        hashes = self._hashes.take(numbers)
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
