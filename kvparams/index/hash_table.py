"""A flat hash table from 64-bit hashes to node numbers, asked and changed for whole arrays of hashes at once.

Buckets of eight hashes, one cache line each, so that a lookup is one gather and one comparison, whether it finds
something or not. What does not fit into its bucket lies in a small dict, and the bucket counts how many do.

The table grows in place, a few buckets with every insertion (linear hashing): its arrays are as long as they may ever
be, of which the system commits only what has been touched. So nothing is ever copied, and no insertion waits.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvparams.index.block_hashes import BlockHashes
from kvparams.index.zero_arrays import lazy_zeros

__all__ = ["HashTable", "NodeNumbers"]

NodeNumbers = NDArray[np.uint32]

_WIDTH: Final = 8
_FULLEST: Final = 0.5
"""Of all places; then about one hash in a hundred finds its bucket full."""
_FIRST_BUCKETS: Final = 64
_FEW: Final = 8
"""Hashes that are sooner looked up and put in one by one: a new prompt has some blocks that are its own."""
_3, _7 = np.intp(3), np.intp(7)


class HashTable:
    """From hashes, of which none is 0, to numbers, of which none is 0."""

    __slots__ = (
        *("_base", "_buckets", "_keys", "_keys_at", "_limit", "_mask", "_rows", "_spill", "_spilled", "_used"),
        *("_values", "_values_at"),
    )

    def __init__(self, capacity: int) -> None:
        """Creates an empty table.

        Args:
            capacity: hashes that it may have to hold at once.
        """
        self._limit = max(_FIRST_BUCKETS, 1 << int(capacity / _FULLEST / _WIDTH).bit_length())
        self._keys = lazy_zeros(self._limit * _WIDTH, np.uint64)
        self._rows = self._keys.reshape(-1, _WIDTH)
        self._values = lazy_zeros(self._limit * _WIDTH, np.uint32)
        self._keys_at, self._values_at = self._keys.data, self._values.data
        self._spilled = lazy_zeros(self._limit, np.uint8)  # hashes of this bucket in the dict; never too few
        self._spill: dict[int, int] = {}
        self._used = 0
        self._base = self._buckets = _FIRST_BUCKETS
        self._mask = _FIRST_BUCKETS - 1

    def __len__(self) -> int:
        return self._used

    def find(self, hashes: BlockHashes) -> NodeNumbers:
        """The number of each hash; 0 where it is not there."""
        if len(hashes) <= _FEW:
            return np.array([self.get(key) for key in hashes.tolist()], np.uint32)
        homes, at = self._places(hashes)
        found = np.zeros(len(hashes), np.uint32)
        rows = at >> _3
        found[rows] = self._values.take((homes.take(rows) << _3) + (at & _7))
        if self._spill:
            for row in (self._spilled[homes].astype(bool) & (found == 0)).nonzero()[0].tolist():
                found[row] = self._spill.get(int(hashes[row]), 0)
        return found

    def get(self, key: int) -> int:
        """The number of one hash; 0 where it is not there."""
        first = self._home(key) * _WIDTH
        bucket = self._keys_at[first : first + _WIDTH].tolist()
        if key and key in bucket:
            return self._values_at[first + bucket.index(key)]
        return self._spill.get(key, 0)

    def insert(self, hashes: BlockHashes, numbers: NodeNumbers) -> None:
        """Inserts hashes that are absent and occur once."""
        self._used += len(hashes)
        self._grow(2 * len(hashes) + 16)
        if len(hashes) <= _FEW:
            for key, number in zip(hashes.tolist(), numbers.tolist(), strict=True):
                self._put(key, number)
            return
        while len(hashes):
            homes = self._homes(hashes)
            free = self._rows.take(homes, axis=0) == 0
            place = free.argmax(axis=1)
            slots = (homes << _3) + place
            fits = np.equal(self._keys.take(slots), 0)
            if not np.all(fits):
                self._put_aside(hashes[~fits], numbers[~fits], homes[~fits])
                hashes, numbers, slots = hashes[fits], numbers[fits], slots[fits]
            self._keys[slots] = hashes
            self._values[slots] = numbers
            lost = np.not_equal(self._keys.take(slots), hashes)  # to another one of the same bucket
            hashes, numbers = hashes[lost], numbers[lost]

    def _put(self, key: int, number: int) -> None:
        home = self._home(key)
        first = home * _WIDTH
        bucket = self._keys_at[first : first + _WIDTH].tolist()
        if 0 in bucket:
            slot = first + bucket.index(0)
            self._keys_at[slot] = key
            self._values_at[slot] = number
        else:
            self._spill[key] = number
            self._spilled[home] += 1

    def remove(self, hashes: BlockHashes) -> None:
        """Removes hashes that are present and occur once."""
        self._used -= len(hashes)
        homes, at = self._places(hashes)
        rows = at >> _3
        slots = (homes.take(rows) << _3) + (at & _7)
        self._keys[slots] = 0
        self._values[slots] = 0
        if len(at) < len(hashes):
            missing = np.ones(len(hashes), bool)
            missing[rows] = False
            for row in missing.nonzero()[0].tolist():
                del self._spill[int(hashes[row])]
                self._spilled[homes[row]] -= 1

    def _places(self, hashes: BlockHashes) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Their buckets, and, for each one that is in its bucket, eight times its position plus its place there."""
        homes = self._homes(hashes)
        return homes, (self._rows.take(homes, axis=0) == hashes[:, None]).ravel().nonzero()[0]

    def _home(self, key: int) -> int:
        home = key & self._mask
        return home - self._base if home >= self._buckets else home

    def _homes(self, hashes: BlockHashes) -> NDArray[np.intp]:
        homes = (hashes & np.uint64(self._mask)).view(np.intp)
        if self._buckets != self._base:
            homes -= self._base * (homes >= self._buckets)
        return homes

    def _put_aside(self, hashes: BlockHashes, numbers: NodeNumbers, homes: NDArray[np.intp]) -> None:
        for key, number, home in zip(hashes.tolist(), numbers.tolist(), homes.tolist(), strict=True):
            self._spill[key] = number
            self._spilled[home] += 1

    def _grow(self, steps: int) -> None:
        """Split buckets, in their order, while the table is too full or between two powers of two."""
        base, first = self._base, self._buckets
        if first == base:
            if base == self._limit or self._used < _FULLEST * _WIDTH * base:
                return
            self._mask = 2 * base - 1
        end = min(first + steps, 2 * base)
        old, new = slice(first - base, end - base), slice(first, end)
        moving = (self._rows[old] & np.uint64(base)) != 0
        values = self._values.reshape(-1, _WIDTH)
        self._rows[new] = self._rows[old] * moving
        self._rows[old] *= ~moving
        values[new] = values[old] * moving
        values[old] *= ~moving
        self._spilled[new] = self._spilled[old]
        self._buckets = end
        if end == 2 * base:
            self._base = end
