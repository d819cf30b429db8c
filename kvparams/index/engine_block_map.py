"""Engines' names of blocks, and what they are: where our chain stands behind each, and in which namespace.

Engines' blocks may be of any size, and a block of the index counts as cached exactly while the engine's block in which
it ends is cached. Engines evict the end of a sequence first.
"""

import numpy as np
from numpy.typing import NDArray

from kvparams.index.block_hashes import BlockHashes, HashState, HashStates
from kvparams.index.hash_table import HashTable, NodeNumbers
from kvparams.index.prefix_index import PrefixIndex
from kvparams.index.zero_arrays import lazy_zeros

__all__ = ["EngineBlockMap"]

_WINDOW = 256


class EngineBlockMap:
    """At most `capacity` names, 45 bytes each. Those that came first make room, unless the index has the block."""

    __slots__ = (
        *("_capacity", "_ends", "_hashes", "_index", "_keys", "_namespaces", "_next", "_parts", "_table"),
        "_tokens",
    )

    def __init__(self, index: PrefixIndex, capacity: int) -> None:
        self._index = index
        self._capacity = capacity
        self._keys = lazy_zeros(capacity + 1, np.uint64)
        self._table = HashTable(self._keys)
        self._hashes = lazy_zeros(capacity + 1, np.uint64)
        self._namespaces = lazy_zeros(capacity + 1, np.uint64)
        self._parts = lazy_zeros(capacity + 1, np.uint64)
        self._tokens = lazy_zeros(capacity + 1, np.uint32)
        self._ends = lazy_zeros(capacity + 1, np.bool_)
        self._next = 0

    def __len__(self) -> int:
        return len(self._table)

    def lookup_hashes(self, keys: BlockHashes) -> BlockHashes:
        """The last of our blocks that ends in each block of these names; 0 where none does, or it is not known."""
        numbers = self._table.find(keys)
        return self._hashes.take(numbers) * self._ends.take(numbers)

    def count_unknown(self, keys: BlockHashes) -> int:
        """Counts the block names that are not known."""
        return int(np.count_nonzero(self._table.find(keys) == 0))

    def lookup_state(self, key: int) -> tuple[HashState, int] | None:
        """Returns the state of the chain behind the block of this name, and its namespace."""
        number = self._table.get(key)
        if not number:
            return None
        front = HashState(int(self._hashes[number]), int(self._parts[number]), int(self._tokens[number]))
        return front, int(self._namespaces[number])

    def put(self, keys: BlockHashes, behind: HashStates, ends: NDArray[np.bool_], namespace: int) -> None:
        """Records the names of consecutive blocks and the chain's state behind each.

        `ends` tells whether an index block ends in it. If there is no room for half of them, the first ones are kept.
        Of a name that occurs twice, the first one is kept.
        """
        keys = keys[: max(1, self._capacity // 2)]
        order = keys.argsort(kind="stable")
        keys = keys.take(order)
        is_first = np.append(keys[:1] == keys[:1], keys[1:] != keys[:-1])
        first, keys = order[is_first], keys[is_first]
        numbers = self._table.find(keys)
        fresh = numbers == 0
        made = self._take(int(np.count_nonzero(fresh)), numbers[~fresh])
        numbers[fresh] = made
        self._keys[made] = keys[fresh]
        self._table.insert(made)
        self._hashes[numbers] = behind.hashes[first]
        self._parts[numbers] = behind.parts[first]
        self._tokens[numbers] = behind.tokens[first]
        self._ends[numbers] = ends[first]
        self._namespaces[numbers] = namespace

    def _take(self, count: int, held: NodeNumbers) -> NodeNumbers:
        """Numbers for so many names, none of these."""
        window = min(self._capacity, max(_WINDOW, 2 * (count + len(held))))
        numbers = ((self._next + np.arange(window)) % self._capacity + 1).astype(np.uint32)
        needed = (self._index.last_used(self._hashes.take(numbers)) != 0).astype(np.int8)
        pinned = (held.astype(np.int64) - 1 - self._next) % self._capacity
        pinned = pinned[pinned < window]
        needed[pinned] += 2
        order = np.argsort(needed, kind="stable")[:count]
        taken = numbers.take(order)
        if count:
            self._next = (self._next + int(order.max()) + 1) % self._capacity
        self._table.remove(taken[self._keys.take(taken) != 0])
        self._keys[taken] = 0
        return taken
