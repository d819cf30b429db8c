"""The values of a memory store: where they lie, who is copying them, and which go when room is needed.

Nothing here locks or copies: the store calls it with its lock held.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvparams_connectors.stores.extents import Extent, ExtentAllocator
from kvparams_connectors.stores.memory.eviction import EvictionEntry, ScanResistantTable

__all__ = ["StoredValue", "ValueTable"]

_AT_ONCE: Final = 64
"""So many values to evict are looked for at a time: whoever looks holds the lock, and may have to pass many leases."""


class StoredValue(EvictionEntry):
    """A value in the table. Not `ready`: its writer is still copying."""

    __slots__ = ("generation", "leased_until", "nbytes", "pins", "ready", "removed", "runs")

    def __init__(self, runs: list[Extent], nbytes: int, units: int, generation: int) -> None:
        super().__init__(units)
        self.generation = generation
        self.leased_until = 0.0
        self.runs = runs
        self.nbytes = nbytes
        self.ready = False
        self.pins = 0
        """Copies in progress: its writer's and its readers'."""
        self.removed = False
        """No longer in the table; its room is given back with the last pin."""


class ValueTable(ScanResistantTable[StoredValue]):
    """Values under keys in a bounded number of units."""

    def __init__(self, units: int, lease_s: float) -> None:
        """Begins empty, with all units free.

        Args:
            units: the room for all values, in units.
            lease_s: a value is not evicted for so many seconds after it was put or found.
        """
        super().__init__(units)
        self._extents = ExtentAllocator(np.ones(units, dtype=np.bool_))
        self.lease_s: Final = lease_s
        self._generation = 0
        self._full_until = 0.0
        """Before this time nothing can be evicted, unless a pin goes."""
        self.pinned = 0
        """Values that are being copied or held at the moment, deleted ones among them."""

    def add_unready(
        self, key: str, nbytes: int, units: int, *, batch: int, victims: deque[tuple[str, StoredValue]] | None = None
    ) -> StoredValue | None:
        """Adds a pinned value whose writer has yet to copy it; None if there is no room.

        Args:
            key: not in the table.
            nbytes: the size of the value.
            units: the room that it takes.
            batch: as for `make_room`.
            victims: as for `make_room`.
        """
        runs = self.make_room(units, deque() if victims is None else victims, batch)
        if runs is None:
            return None
        self._generation += 1
        value = StoredValue(runs, nbytes, units, self._generation)
        self.pin(value)
        self.add(key, value)
        return value

    def make_room(self, units: int, victims: deque[tuple[str, StoredValue]], batch: int) -> list[Extent] | None:
        """Units for a new value, evicting as little as needed; None if everything else is leased or being copied.

        `victims` is what was found for the same batch of so many values before and was not needed yet.
        """
        first = not victims
        while (runs := self._extents.allocate(units)) is None:
            if not victims:
                victims += self._evictable(min(batch, _AT_ONCE) if first else _AT_ONCE)
                first = False
            if not victims:
                return None
            key, value = victims.popleft()
            if not value.pins and not value.removed:  # found by the same batch meanwhile
                self.drop(key, value)
        return runs

    def _evictable(self, most: int) -> list[tuple[str, StoredValue]]:
        """The next to go; none if that is so for certain until a lease ends or a pin goes."""
        now = time.monotonic()
        if now < self._full_until:
            return []
        found: list[tuple[str, StoredValue]] = []
        earliest = math.inf
        for key, value in self.eviction_order():
            if value.pins:
                continue
            if value.leased_until <= now:
                found.append((key, value))
                if len(found) == most:
                    break
            elif value.leased_until < earliest:
                earliest = value.leased_until
        if not found:
            self._full_until = earliest
        return found

    def use(self, keys: Sequence[str]) -> None:
        """This process has used these, and may tell others of them."""
        self.touch(keys)
        if self.lease_s:
            until = time.monotonic() + self.lease_s
            for key in keys:
                value = self.get(key)
                if value is not None:
                    value.leased_until = until

    def drop(self, key: str, value: StoredValue) -> None:
        """Takes a value out of the table; its room is free once no copy uses it. `remove` alone would free nothing."""
        self.remove(key)
        value.removed = True
        if not value.pins:
            self._extents.free(value.runs)

    def pin(self, value: StoredValue) -> None:
        """Keeps a value where it is until `unpin`."""
        self.pinned += not value.pins
        value.pins += 1

    def unpin(self, value: StoredValue) -> None:
        """A copy that `pin` was called for has ended."""
        value.pins -= 1
        if value.pins:
            return
        self.pinned -= 1
        if value.removed:
            self._extents.free(value.runs)
        else:
            self._full_until = min(self._full_until, value.leased_until)
