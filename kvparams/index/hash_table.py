"""A hash table from 64-bit hashes to node numbers, asked and changed for whole arrays at once.

The nodes whose hashes fall into one bucket form a chain. Hashes stay in the caller's array, by node number, so the
table itself takes 8 bytes for each node.

The table grows in place, by a bucket for each node (linear hashing): its arrays are as long as they may ever be, of
which the system commits only what has been touched. So nothing is ever copied, and no insertion waits.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvparams.index.block_hashes import BlockHashes
from kvparams.index.zero_arrays import lazy_zeros
from kvparams.native import NATIVE

__all__ = ["HashTable", "NodeNumbers"]

NodeNumbers = NDArray[np.uint32]

_FIRST_BUCKETS: Final = 64
_SPREAD: Final = 0x9E3779B97F4A7C15
"""Spreads hashes that differ in few bits over the buckets: engines choose names of blocks as they like."""
_ROW: Final = 16
"""Hashes that are sooner compared with a row of the array than looked up."""
_WORD: Final = (1 << 64) - 1


class HashTable:
    """Maps hashes to node numbers. Hash 0 and number 0 stand for none."""

    __slots__ = ("_base", "_buckets", "_heads", "_keys", "_limit", "_memory", "_next", "_used")

    def __init__(self, keys: BlockHashes) -> None:
        """Creates an empty table.

        Args:
            keys: by number, the hash of each node. It is written before the node is inserted; it is 0 for number 0, and
                for nodes that were removed.
        """
        self._limit = max(_FIRST_BUCKETS, len(keys) - 1)
        self._keys = keys
        self._heads = lazy_zeros(self._limit, np.uint32)
        """By bucket, the first node of its chain."""
        self._next = lazy_zeros(len(keys), np.uint32)
        """By node, the next one of its chain."""
        self._memory = (keys.data, self._heads.data, self._next.data)
        self._used = 0
        self._base = self._buckets = _FIRST_BUCKETS

    def __len__(self) -> int:
        return self._used

    def get(self, key: int) -> int:
        """Returns the number of one hash; 0 if it is absent."""
        keys, heads, following = self._memory
        home = (key * _SPREAD & _WORD) >> 32 & 2 * self._base - 1
        number = heads[home - self._base if home >= self._buckets else home]
        while number and keys[number] != key:
            number = following[number]
        return number

    def find(self, hashes: BlockHashes) -> NodeNumbers:
        """Returns the number of each hash; 0 where it is absent."""
        if NATIVE is None:
            return self._find(hashes)
        numbers = np.empty(len(hashes), np.uint32)
        NATIVE.find_nodes(self._memory, self._base, self._buckets, _in_one_piece(hashes), numbers)
        return numbers

    def find_runs(self, hashes: BlockHashes, values: NodeNumbers) -> list[tuple[int, int]]:
        """Returns the values of the nodes of these hashes, up to the first hash that is absent.

        Args:
            hashes: the blocks of one prompt, in order.
            values: by number.

        Returns:
            For each run of equal values, the position of its end and the value.
        """
        if NATIVE is not None:
            return NATIVE.find_runs(self._memory, self._base, self._buckets, _in_one_piece(hashes), values.data)
        pieces = self._rows(hashes)
        rest = hashes[sum(map(len, pieces)) :]
        if len(rest) and self.get(rest.item(0)):
            numbers = self._probe(rest)
            absent = (numbers == 0).nonzero()[0]
            pieces.append(numbers[: absent[0]] if len(absent) else numbers)
        found = values.take(np.concatenate(pieces)) if pieces else values[:0]
        ends = [*((found[1:] != found[:-1]).nonzero()[0] + 1).tolist(), len(found)]
        return [(end, found.item(end - 1)) for end in ends if end]

    def insert(self, numbers: NodeNumbers) -> None:
        """Inserts nodes, whose hashes are absent and differ."""
        self._used += len(numbers)
        while self._buckets < min(self._used, self._limit):
            self._split(min(self._used, self._limit, 2 * self._base))
        if NATIVE is not None:
            NATIVE.link_nodes(self._memory, self._base, self._buckets, numbers)
        else:
            self._link(numbers)

    def remove(self, numbers: NodeNumbers) -> None:
        """Removes nodes that are in the table, each of them given once."""
        self._used -= len(numbers)
        if NATIVE is not None:
            NATIVE.unlink_nodes(self._memory, self._base, self._buckets, numbers)
            return
        homes = self._homes(self._keys.take(numbers))
        chained = self._chained(np.sort(homes))
        self._heads[homes] = 0
        self._next[numbers] = numbers  # which is nobody's next
        self._link(chained[self._next.take(chained) != chained])

    def _split(self, end: int) -> None:
        """Splits buckets until there are `end`."""
        base, first = self._base, self._buckets
        if NATIVE is not None:
            NATIVE.split_buckets(self._memory, base, end, first)
            self._buckets = end
        else:
            moved = self._chained(np.arange(first - base, end - base))
            self._heads[first - base : end - base] = 0
            self._buckets = end
            self._link(moved)
        if end == 2 * base:
            self._base = end

    # without native code

    def _find(self, hashes: BlockHashes) -> NodeNumbers:
        pieces = self._rows(hashes)
        return np.concatenate((*pieces, self._probe(hashes[sum(map(len, pieces)) :])))

    def _rows(self, hashes: BlockHashes) -> list[NodeNumbers]:
        """Finds the first hashes, as long as they belong to chains that were stored at once.

        The numbers of such a chain follow one another. There may be more hashes that are present.
        """
        rows: list[NodeNumbers] = []
        while len(hashes) >= _ROW and (first := self.get(hashes.item(0))):
            keys = self._keys[first : first + len(hashes)]
            ends = ((keys != hashes[: len(keys)]) | (keys == 0)).nonzero()[0]
            length = ends.item(0) if len(ends) else len(keys)
            if length < _ROW:
                break
            rows.append(np.arange(first, first + length, dtype=np.uint32))
            hashes = hashes[length:]
        return rows

    def _probe(self, hashes: BlockHashes) -> NodeNumbers:
        """Finds hashes, each in its bucket."""
        numbers = self._heads.take(self._homes(hashes))
        rows = (self._keys.take(numbers) != hashes).nonzero()[0]
        while len(rows):
            further = self._next.take(numbers.take(rows))
            numbers[rows] = further
            rows = rows[(self._keys.take(further) != hashes.take(rows)) & (further != 0)]
        return numbers

    def _link(self, numbers: NodeNumbers) -> None:
        """Puts nodes in front of the chains of their buckets."""
        while len(numbers):
            homes = self._homes(self._keys.take(numbers))
            self._next[numbers] = self._heads.take(homes)
            self._heads[homes] = numbers
            numbers = numbers[self._heads.take(homes) != numbers]  # where another one of the same bucket is now

    def _chained(self, homes: NDArray[np.intp]) -> NodeNumbers:
        """Returns the nodes of these buckets, which are sorted."""
        numbers = self._heads.take(homes[np.append(homes[:1] >= 0, homes[1:] != homes[:-1])])
        found: list[NodeNumbers] = []
        while len(numbers := numbers[numbers != 0]):
            found.append(numbers)
            numbers = self._next.take(numbers)
        return np.concatenate(found) if found else numbers

    def _homes(self, hashes: BlockHashes) -> NDArray[np.intp]:
        """Returns the bucket of each hash."""
        homes = (hashes * np.uint64(_SPREAD) >> np.uint64(32) & np.uint64(2 * self._base - 1)).view(np.intp)
        return homes - self._base * (homes >= self._buckets)


def _in_one_piece(hashes: BlockHashes) -> BlockHashes:
    flags = hashes.flags
    return hashes if flags.c_contiguous and flags.aligned else hashes.copy()
