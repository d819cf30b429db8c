"""Engines' names of blocks, and what they are: the hash of our chain, the namespace, and how deep the block stands."""

import numpy as np

from kvparams.index.chain import Hashes
from kvparams.index.prefix import PrefixIndex
from kvparams.index.table import Numbers, Table

__all__ = ["Names"]

_WINDOW = 256


class Names:
    """At most `capacity` names, 60 bytes each. Those that came first make room, unless the index has the block."""

    __slots__ = ("_capacity", "_depths", "_hashes", "_index", "_keys", "_namespaces", "_next", "_table")

    def __init__(self, index: PrefixIndex, capacity: int) -> None:
        self._index = index
        self._capacity = capacity
        self._table = Table(capacity)
        self._keys = np.zeros(capacity + 1, np.uint64)
        self._hashes = np.zeros(capacity + 1, np.uint64)
        self._namespaces = np.zeros(capacity + 1, np.uint64)
        self._depths = np.zeros(capacity + 1, np.uint32)
        self._next = 0

    def __len__(self) -> int:
        return len(self._table)

    def hashes(self, keys: Hashes) -> Hashes:
        """What blocks of these names are; 0 where that is not known."""
        return self._hashes.take(self._table.find(keys))

    def front(self, key: int) -> tuple[int, int, int] | None:
        """Hash and namespace of the block of this name, and how many blocks there are up to and with it."""
        number = self._table.get(key)
        if not number:
            return None
        return int(self._hashes[number]), int(self._namespaces[number]), int(self._depths[number])

    def put(self, keys: Hashes, hashes: Hashes, namespace: int, depth: int) -> None:
        """Names of blocks that follow one another behind `depth` others. Where there is no room for half of them, the
        first ones are kept; of a name that stands there twice, the first one."""
        keys = keys[: max(1, self._capacity // 2)]
        first = np.unique(keys, return_index=True)[1]
        keys, hashes = keys[first], hashes[first]
        numbers = self._table.find(keys)
        fresh = numbers == 0
        made = self._take(int(np.count_nonzero(fresh)), numbers[~fresh])
        numbers[fresh] = made
        self._table.insert(keys[fresh], made)
        self._keys[numbers] = keys
        self._hashes[numbers] = hashes
        self._namespaces[numbers] = namespace
        self._depths[numbers] = depth + 1 + first

    def _take(self, count: int, held: Numbers) -> Numbers:
        """Numbers for so many names, none of these."""
        window = min(self._capacity, max(_WINDOW, 2 * (count + len(held))))
        numbers = ((self._next + np.arange(window)) % self._capacity + 1).astype(np.uint32)
        needed = (self._index.last_used(self._hashes.take(numbers)) != 0) + 2 * np.isin(numbers, held)
        order = np.argsort(needed, kind="stable")[:count]
        taken = numbers.take(order)
        if count:
            self._next = (self._next + int(order.max()) + 1) % self._capacity
        old = self._keys.take(taken)
        self._table.remove(old[old != 0])
        self._keys[taken] = 0
        return taken
