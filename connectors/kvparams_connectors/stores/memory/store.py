"""The store inside one process: a bounded piece of memory. A scan does not drive out what is used again and again.

The lock guards the table, never a copy. A value is pinned while it is copied, so it stays in its place.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvparams_connectors.hashed_copy import CopyPairs
from kvparams_connectors.store import (
    BlockingStore,
    Capabilities,
    GetOp,
    KVStore,
    PutOp,
    Result,
    ResultCode,
    Results,
    StoreError,
)
from kvparams_connectors.store_url import StoreURL
from kvparams_connectors.stores.extents import (
    SKEW,
    ByteArray,
    copy_pairs,
    units_for,
)
from kvparams_connectors.stores.memory.in_place import ValuesInPlace
from kvparams_connectors.stores.memory.settings import MemorySettings
from kvparams_connectors.stores.memory.value_table import StoredValue, ValueTable
from kvparams_connectors.stores.value_copy import group_by_size, read_values, report_arrival, write_values
from kvparams_connectors.value_memory import PinnedValue, ValueMemory

__all__ = ["MemoryStore", "open_url"]

_DEFAULT_SIZE: Final = 1 << 30
_DEFAULT_UNIT: Final = 64 << 10
_URL_THREADS: Final = 2
"""One copies while the other looks at what has come."""
_MEMORY_PAGE: Final = 4096
_MISS: Final = Result(ResultCode.MISS)


class MemoryStore(BlockingStore):
    """Values in this process's memory."""

    calls_before_read = True

    def __init__(
        self,
        size_bytes: int = _DEFAULT_SIZE,
        *,
        unit_bytes: int = _DEFAULT_UNIT,
        threads: int = 1,
        lease_s: float = 0.0,
        name: str = "memory",
    ) -> None:
        """Allocates the memory and touches every page of it.

        Args:
            size_bytes: the size of all values together, in bytes; rounded down to whole units.
            unit_bytes: a value takes whole units of so many bytes.
            threads: the number of batches that are worked on at a time.
            lease_s: a value is not evicted for so many seconds after it was put or found; a put that needs its room is
                FULL.
            name: the prefix of the threads' names.
        """
        units = size_bytes // unit_bytes
        if units < 1:
            raise StoreError(f"memory store: size {size_bytes} is less than one unit of {unit_bytes} bytes")
        self._unit_bytes = unit_bytes
        memory = np.empty(units * unit_bytes + _MEMORY_PAGE, dtype=np.uint8)
        memory.fill(0)  # touch every page now, not during a transfer
        start = (SKEW - memory.ctypes.data) % _MEMORY_PAGE
        self._memory = memory[start : start + units * unit_bytes]
        self._values = ValueTable(units, lease_s)
        self._lease_s = lease_s
        self._changed = threading.Condition(threading.Lock())
        self._in_place = ValuesInPlace(self._values, self._changed, self._memory, unit_bytes)
        self._capabilities = Capabilities(persistent=False, shared=False, max_value_bytes=units * unit_bytes)
        super().__init__(name, threads=threads)

    @property
    def capabilities(self) -> Capabilities:
        """Returns what this store can do."""
        return self._capabilities

    @property
    def memory(self) -> ValueMemory:
        """Returns access in place to the values."""
        return self._in_place

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        """Stores values; see `BlockingStore`."""
        results = [Result(ResultCode.TIMEOUT)] * len(ops)
        left = list(range(len(ops)))
        while left:  # once, and again for a key whose other writer gave up
            left = self._put_round(ops, left, results, deadline)
        with self._changed:
            self._values.use([op.key for op in ops])
        return results

    def _put_round(self, ops: Sequence[PutOp], left: list[int], results: Results, deadline: float) -> list[int]:
        """Try the operations `left`; those that have to be tried again."""
        sizes = {index: sum(buffer.nbytes for buffer in ops[index].buffers) for index in left}
        ours: dict[int, StoredValue] = {}
        others: dict[int, StoredValue] = {}
        held: list[StoredValue] = []
        victims: deque[tuple[str, StoredValue]] = deque()
        with self._changed:
            for index in left:
                op = ops[index]
                value = self._values.get(op.key)
                if value is not None:
                    others[index] = value
                    self._values.pin(value)  # what this batch says exists is not evicted for the rest of the batch
                    held.append(value)
                    continue
                nbytes = sizes[index]
                if nbytes > self._capabilities.max_value_bytes:
                    results[index] = Result(ResultCode.TOO_LARGE)
                    continue
                units = units_for(nbytes, self._unit_bytes)
                value = self._values.add_unready(op.key, nbytes, units, batch=len(left), victims=victims)
                if value is None:
                    results[index] = Result(ResultCode.FULL)
                else:
                    ours[index] = value
        self._fill(ops, ours, results, deadline)
        again: list[int] = []
        with self._changed:
            for value in held:
                self._values.unpin(value)
            for index, value in others.items():
                self._changed.wait_for(lambda value=value: value.ready or value.removed, deadline - time.monotonic())
                if value.removed:
                    again.append(index)
                elif value.ready:
                    results[index] = Result(ResultCode.EXISTS)
        return again if time.monotonic() < deadline else []

    def _fill(self, ops: Sequence[PutOp], ours: dict[int, StoredValue], results: Results, deadline: float) -> None:
        """Copy new values in and make them visible, some together, or take them out of the table again."""
        for some in group_by_size((index, value.nbytes) for index, value in ours.items()):
            codes = self._copy_in([(ops[index], ours[index]) for index in some], deadline)
            leased_until = time.monotonic() + self._lease_s
            with self._changed:
                for index, code in zip(some, codes, strict=True):
                    value = ours[index]
                    value.ready = code is ResultCode.OK
                    value.leased_until = leased_until
                    if not value.ready:
                        self._values.drop(ops[index].key, value)
                    self._values.unpin(value)
                    results[index] = Result(code, value.nbytes if value.ready else 0)
                self._changed.notify_all()

    def _copy_in(self, values: Sequence[tuple[PutOp, StoredValue]], deadline: float) -> list[ResultCode]:
        """Copies values in; returns what became of each."""
        if time.monotonic() >= deadline:
            return [ResultCode.TIMEOUT] * len(values)
        places = [self._place(value, op.buffers) for op, value in values]
        good = [(op, place) for (op, _), place in zip(values, places, strict=True) if place is not None]
        written = iter(write_values([op for op, _ in good], [place for _, place in good]))
        return [ResultCode.OK if place is not None and next(written) else ResultCode.INVALID for place in places]

    def _place(self, value: StoredValue, buffers: Sequence[memoryview]) -> CopyPairs | None:
        """Returns the positions of the value's bytes, inside and outside; None if a leased buffer was released."""
        try:
            return copy_pairs(self._memory, self._unit_bytes, value.runs, buffers, value.nbytes)
        except ValueError:
            return None

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        """Reads values; see `BlockingStore`."""
        keys = [op.key for op in ops]
        with self._changed:
            found = [self._values.get(key) for key in keys]
            found = [value if value is not None and value.ready else None for value in found]
            for value in found:
                if value is not None:
                    self._values.pin(value)
            self._values.use(keys)
        results: Results = []
        for some in group_by_size((index, value.nbytes if value else 0) for index, value in enumerate(found)):
            results += self._read([(ops[index], found[index]) for index in some], deadline)
        return results

    def _read(self, some: Sequence[tuple[GetOp, StoredValue | None]], deadline: float) -> Results:
        """Copy values out that are pinned, and let them go."""
        late = time.monotonic() >= deadline
        sources = [_MISS if value is None else self._source(op, value, late=late) for op, value in some]
        ready = [(op, source) for (op, _), source in zip(some, sources, strict=True) if not isinstance(source, Result)]
        checksums = iter(read_values([op for op, _ in ready], [place for _, place in ready]))
        with self._changed:
            for _, value in some:
                if value is not None:
                    self._values.unpin(value)
        results: Results = []
        for (op, value), source in zip(some, sources, strict=True):
            if isinstance(source, Result) or value is None:
                results.append(source if isinstance(source, Result) else _MISS)
            elif (checksum := next(checksums)) is None:
                results.append(Result(ResultCode.INVALID))
            else:
                report_arrival(op, value.nbytes, checksum)
                results.append(Result(ResultCode.OK, value.nbytes))
        return results

    def _source(self, op: GetOp, value: StoredValue, *, late: bool) -> CopyPairs | Result:
        """Returns what is copied to read a value, or why it cannot be read."""
        if sum([buffer.nbytes for buffer in op.buffers]) < value.nbytes:
            return Result(ResultCode.TOO_LARGE, value.nbytes)
        if late:
            return Result(ResultCode.TIMEOUT)
        place = self._place(value, op.buffers)
        if place is None:
            return Result(ResultCode.INVALID)
        return [(outside, inside) for inside, outside in place]

    def exists_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Looks keys up; see `BlockingStore`."""
        with self._changed:
            values = [self._values.get(key) for key in keys]
            self._values.use(keys)
            return [
                Result(ResultCode.OK, value.nbytes) if value is not None and value.ready else _MISS for value in values
            ]

    def delete_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Deletes keys; see `BlockingStore`."""
        results: Results = []
        with self._changed:
            for key in keys:
                value = self._values.get(key)
                if value is None or not value.ready:
                    results.append(Result(ResultCode.MISS))
                else:
                    self._values.drop(key, value)
                    results.append(Result(ResultCode.OK))
        return results

    # ---- for others that read this memory: they use a value, and renew no lease

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Returns the sizes of stored values, and None for missing ones."""
        with self._changed:
            self._values.touch(keys)
            values = [self._values.get(key) for key in keys]
            return [value.nbytes if value is not None and value.ready else None for value in values]

    def pin_values(self, keys: Sequence[str]) -> list[PinnedValue | None]:
        """Pins the values that are there, whole; each is to be unpinned once."""
        return self._in_place.pin_values(keys)

    def unpin_values(self, held: Iterable[PinnedValue]) -> None:
        """Says that these may be overwritten once they are evicted or deleted."""
        self._in_place.unpin_values(held)

    @property
    def pinned_count(self) -> int:
        """Returns how many values are being copied or held at the moment, deleted ones among them."""
        return self._values.pinned

    @property
    def buffer(self) -> ByteArray:
        """Returns all of the memory."""
        return self._memory

    def release(self) -> None:
        """Lets go of everything; no worker runs any more."""
        self._values.clear()
        self._in_place.close()
        self._memory = np.empty(0, dtype=np.uint8)


def open_url(url: StoreURL) -> KVStore:
    """`memory:?size=1GiB`; see `MemorySettings`."""
    settings = MemorySettings.read(url)
    if url.location or url.path:
        raise StoreError(f"memory store: {url.redacted!r} has a host or path; write memory:?size=1GiB")
    return MemoryStore(settings.size, threads=_URL_THREADS)
