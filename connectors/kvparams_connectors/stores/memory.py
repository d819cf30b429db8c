"""The store inside one process: a bounded piece of memory. A scan does not drive out what is used again and again.

The one rule: the lock guards the table, never a copy. A value is pinned while it is copied, so nothing moves under it.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvparams_connectors.settings import StoreURL
from kvparams_connectors.store import Capabilities, Code, GetOp, KVStore, LaneStore, PutOp, Result, Results, StoreError
from kvparams_connectors.stores.eviction import Entry, ScanResistant
from kvparams_connectors.stores.extents import (
    SKEW,
    Bytes,
    Extents,
    Pairs,
    Run,
    drain,
    fill,
    pairs,
    stretches,
    units_for,
)

__all__ = ["Held", "MemoryStore", "open_url"]

_DEFAULT_SIZE: Final = 1 << 30
_DEFAULT_UNIT: Final = 64 << 10
_DEFAULT_THREADS: Final = 2
"""One copies while the other looks at what has come."""
_MEMORY_PAGE: Final = 4096
_MISS: Final = Result(Code.MISS)
_TOGETHER: Final = 4 << 20
"""Values of so many bytes become visible, and are let go, together: after each copy the processor's caches hold that,
and what is done then for one value costs about as much as for several."""
_AT_ONCE: Final = 64
"""So many values to evict are looked for at a time: whoever looks holds the lock, and may have to pass many leases."""


class _Value(Entry):
    """A value in the table. Not `ready`: its writer is still copying."""

    __slots__ = ("generation", "leased_until", "nbytes", "pins", "ready", "removed", "runs")

    def __init__(self, runs: list[Run], nbytes: int, units: int, generation: int) -> None:
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


@dataclass(frozen=True, slots=True)
class Held:
    """A value that stays where it is, whatever is put or deleted, until it is let go."""

    nbytes: int
    views: tuple[memoryview, ...]
    """Its bytes, in order. Not to be written."""
    addresses: tuple[tuple[int, int], ...]
    """Where they are: addresses and lengths."""
    generation: int
    """Another value that was put later, under the same key or not, has another one."""
    value: _Value = field(repr=False)


class MemoryStore(LaneStore):
    """Values in this process's memory."""

    calls_going = True

    def __init__(
        self,
        size_bytes: int = _DEFAULT_SIZE,
        *,
        unit_bytes: int = _DEFAULT_UNIT,
        threads: int = 1,
        lease_s: float = 0.0,
        name: str = "memory",
    ) -> None:
        """Allocate and touch the memory.

        Args:
            size_bytes: for all values together; rounded down to whole units.
            unit_bytes: a value takes whole units.
            threads: how many batches are worked on at a time.
            lease_s: so long after it was put or found a value is not evicted; what would need its room is FULL.
            name: of the threads.
        """
        units = size_bytes // unit_bytes
        if units < 1:
            raise StoreError(f"memory store: size {size_bytes} is less than one unit of {unit_bytes} bytes")
        self._unit_bytes = unit_bytes
        memory = np.empty(units * unit_bytes + _MEMORY_PAGE, dtype=np.uint8)
        memory.fill(0)  # touch every page now, not during a transfer
        start = (SKEW - memory.ctypes.data) % _MEMORY_PAGE
        self._memory = memory[start : start + units * unit_bytes]
        self._address = int(self._memory.ctypes.data)
        self._extents = Extents(np.ones(units, dtype=np.bool_))
        self._values: ScanResistant[_Value] = ScanResistant(units)
        self._lease_s = lease_s
        self._generation = 0
        self._pinned = 0
        self._full_until = 0.0
        """Before this time nothing can be evicted, unless a pin goes."""
        self._changed = threading.Condition(threading.Lock())
        self._capabilities = Capabilities(persistent=False, shared=False, max_value_bytes=units * unit_bytes)
        super().__init__(name, threads=threads)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def put_now(self, ops: Sequence[PutOp], deadline: float) -> Results:
        results = [Result(Code.TIMEOUT)] * len(ops)
        left = list(range(len(ops)))
        while left:  # once, and again for a key whose other writer gave up
            left = self._put_round(ops, left, results, deadline)
        with self._changed:
            self._use([op.key for op in ops])
        return results

    def _put_round(self, ops: Sequence[PutOp], left: list[int], results: Results, deadline: float) -> list[int]:
        """Try the operations `left`; those that have to be tried again."""
        sizes = {index: sum(buffer.nbytes for buffer in ops[index].buffers) for index in left}
        ours: dict[int, _Value] = {}
        others: dict[int, _Value] = {}
        held: list[_Value] = []
        victims: deque[tuple[str, _Value]] = deque()
        with self._changed:
            for index in left:
                op = ops[index]
                value = self._values.get(op.key)
                if value is not None:
                    others[index] = value
                    self._pin(value)  # what this batch says exists is not evicted for the rest of the batch
                    held.append(value)
                    continue
                nbytes = sizes[index]
                if nbytes > self._capabilities.max_value_bytes:
                    results[index] = Result(Code.TOO_LARGE)
                    continue
                units = units_for(nbytes, self._unit_bytes)
                runs = self._make_room(units, victims, len(left))
                if runs is None:
                    results[index] = Result(Code.FULL)
                    continue
                self._generation += 1
                ours[index] = _Value(runs, nbytes, units, self._generation)
                self._pin(ours[index])
                self._values.add(op.key, ours[index])
        self._fill(ops, ours, results, deadline)
        again: list[int] = []
        with self._changed:
            for value in held:
                self._unpin(value)
            for index, value in others.items():
                self._changed.wait_for(lambda value=value: value.ready or value.removed, deadline - time.monotonic())
                if value.removed:
                    again.append(index)
                elif value.ready:
                    results[index] = Result(Code.EXISTS)
        return again if time.monotonic() < deadline else []

    def _fill(self, ops: Sequence[PutOp], ours: dict[int, _Value], results: Results, deadline: float) -> None:
        """Copy new values in and make them visible, some together, or take them out of the table again."""
        for some in _together([(index, ours[index].nbytes) for index in ours]):
            places = {index: self._place(ours[index], ops[index].buffers) for index in some}
            codes = {index: self._copy_in(ops[index], places[index], deadline) for index in some}
            leased_until = time.monotonic() + self._lease_s
            with self._changed:
                for index, code in codes.items():
                    value = ours[index]
                    value.ready = code is Code.OK
                    value.leased_until = leased_until
                    if not value.ready:
                        self._remove(ops[index].key, value)
                    self._unpin(value)
                    results[index] = Result(code, value.nbytes if value.ready else 0)
                self._changed.notify_all()

    @staticmethod
    def _copy_in(op: PutOp, place: Pairs | None, deadline: float) -> Code:
        if place is None:
            return Code.INVALID
        if time.monotonic() >= deadline:
            return Code.TIMEOUT
        try:
            op.gone()
        except ValueError:  # the caller released what it looks at then
            return Code.INVALID
        fill(place)
        return Code.OK

    def _place(self, value: _Value, buffers: Sequence[memoryview]) -> Pairs | None:
        """Where its bytes are, inside and outside; None: the caller released a buffer that it had leased to us."""
        try:
            return pairs(self._memory, self._unit_bytes, value.runs, buffers, value.nbytes)
        except ValueError:
            return None

    def get_now(self, ops: Sequence[GetOp], deadline: float) -> Results:
        keys = [op.key for op in ops]
        with self._changed:
            found = [self._values.get(key) for key in keys]
            found = [value if value is not None and value.ready else None for value in found]
            for value in found:
                if value is not None:
                    self._pin(value)
            self._use(keys)
        results: Results = []
        for some in _together([(index, value.nbytes if value else 0) for index, value in enumerate(found)]):
            results += self._read([(ops[index], found[index]) for index in some], deadline)
        return results

    def _read(self, some: Sequence[tuple[GetOp, _Value | None]], deadline: float) -> Results:
        """Copy values out that are pinned, and let them go."""
        results = [_MISS if value is None else self._copy_out(op, value, deadline) for op, value in some]
        with self._changed:
            for _, value in some:
                if value is not None:
                    self._unpin(value)
        for (op, _), result in zip(some, results, strict=True):
            if op.arrived is not None and op.coming is not None and result.code is Code.OK:
                op.arrived(result.nbytes)  # who was told of its pieces has looked at them
        return results

    def _copy_out(self, op: GetOp, value: _Value, deadline: float) -> Result:
        nbytes = value.nbytes
        if sum([buffer.nbytes for buffer in op.buffers]) < nbytes:
            return Result(Code.TOO_LARGE, nbytes)
        if time.monotonic() >= deadline:
            return Result(Code.TIMEOUT)
        place = self._place(value, op.buffers)
        if place is None:
            return Result(Code.INVALID)
        try:
            drain(place, nbytes, op.coming)
        except ValueError:  # the caller released what it looks at meanwhile
            return Result(Code.INVALID)
        if op.arrived is not None and op.coming is None:
            op.arrived(nbytes)
        return Result(Code.OK, nbytes)

    def exists_now(self, keys: Sequence[str], deadline: float) -> Results:
        with self._changed:
            values = [self._values.get(key) for key in keys]
            self._use(keys)
            return [Result(Code.OK, value.nbytes) if value is not None and value.ready else _MISS for value in values]

    def delete_now(self, keys: Sequence[str], deadline: float) -> Results:
        results: Results = []
        with self._changed:
            for key in keys:
                value = self._values.get(key)
                if value is None or not value.ready:
                    results.append(Result(Code.MISS))
                else:
                    self._remove(key, value)
                    results.append(Result(Code.OK))
        return results

    # ---- for others that read this memory: they use a value, and renew no lease

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Of values that are there; None where there is none."""
        with self._changed:
            self._values.use(keys)
            values = [self._values.get(key) for key in keys]
            return [value.nbytes if value is not None and value.ready else None for value in values]

    def hold(self, keys: Sequence[str]) -> list[Held | None]:
        """The values of those that are there, whole; each is to be let go once."""
        held: list[Held | None] = []
        with self._changed:
            self._values.use(keys)
            for key in keys:
                value = self._values.get(key)
                if value is None or not value.ready:
                    held.append(None)
                    continue
                self._pin(value)
                views = stretches(self._memory, self._unit_bytes, value.runs, value.nbytes)
                places = zip(value.runs, views, strict=False)  # a value of no bytes has a unit, and no view
                addresses = tuple((self._address + run.first * self._unit_bytes, view.size) for run, view in places)
                held.append(Held(value.nbytes, tuple(v.data for v in views), addresses, value.generation, value))
        return held

    def let_go(self, held: Iterable[Held]) -> None:
        """These may be overwritten once they are evicted or deleted."""
        with self._changed:
            for one in held:
                self._unpin(one.value)

    @property
    def pinned(self) -> int:
        """How many values are being copied or held at the moment, deleted ones among them."""
        return self._pinned

    @property
    def whole(self) -> Bytes:
        """All of the memory."""
        return self._memory

    def release(self) -> None:
        self._values.clear()
        self._memory = np.empty(0, dtype=np.uint8)

    # ---- the lock is held

    def _make_room(self, units: int, victims: deque[tuple[str, _Value]], batch: int) -> list[Run] | None:
        """Units for a new value, evicting as little as needed; None if everything else is leased or being copied.

        `victims` is what was found for the same batch of so many values before and was not needed yet.
        """
        first = not victims
        while (runs := self._extents.take(units)) is None:
            if not victims:
                victims += self._evictable(min(batch, _AT_ONCE) if first else _AT_ONCE)
                first = False
            if not victims:
                return None
            key, value = victims.popleft()
            if not value.pins and not value.removed:  # found by the same batch meanwhile
                self._remove(key, value)
        return runs

    def _evictable(self, most: int) -> list[tuple[str, _Value]]:
        """The next to go; none if that is so for certain until a lease ends or a pin goes."""
        now = time.monotonic()
        if now < self._full_until:
            return []
        found: list[tuple[str, _Value]] = []
        earliest = math.inf
        for key, value in self._values.order():
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

    def _use(self, keys: Sequence[str]) -> None:
        """This process has used these, and may tell others of them."""
        self._values.use(keys)
        if self._lease_s:
            until = time.monotonic() + self._lease_s
            for key in keys:
                value = self._values.get(key)
                if value is not None:
                    value.leased_until = until

    def _remove(self, key: str, value: _Value) -> None:
        self._values.remove(key)
        value.removed = True
        if not value.pins:
            self._extents.give_back(value.runs)

    def _pin(self, value: _Value) -> None:
        self._pinned += not value.pins
        value.pins += 1

    def _unpin(self, value: _Value) -> None:
        value.pins -= 1
        if value.pins:
            return
        self._pinned -= 1
        if value.removed:
            self._extents.give_back(value.runs)
        else:
            self._full_until = min(self._full_until, value.leased_until)


def _together(sizes: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Indexes, in order, in groups of a bounded size."""
    groups: list[list[int]] = []
    room = 0
    for index, nbytes in sizes:
        if room < nbytes or not groups:
            groups.append([])
            room = _TOGETHER
        groups[-1].append(index)
        room -= max(nbytes, _MEMORY_PAGE)
    return groups


def open_url(url: StoreURL) -> KVStore:
    """`memory:?size=1GiB&unit=64KiB&threads=2`."""
    url.only("size", "unit", "threads")
    if url.place or url.path:
        raise StoreError(f"memory store: {url.text!r} names a place; a memory store has none: memory:?size=1GiB")
    return MemoryStore(
        url.size("size") or _DEFAULT_SIZE,
        unit_bytes=url.size("unit") or _DEFAULT_UNIT,
        threads=url.number("threads", _DEFAULT_THREADS, low=1, high=64),
    )
