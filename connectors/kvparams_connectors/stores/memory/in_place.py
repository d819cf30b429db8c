"""The values of a memory store as whoever reads and writes them in place sees them; see `ValueMemory`."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final, cast

from kvparams_connectors.store import ResultCode, are_valid_keys
from kvparams_connectors.stores.extents import ByteArray, extent_views, units_for
from kvparams_connectors.stores.memory.value_table import StoredValue, ValueTable
from kvparams_connectors.value_memory import CreatedValue, PinnedValue

__all__ = ["ValuesInPlace"]


class ValuesInPlace:
    """Creates and pins values of a memory store; nothing here copies."""

    def __init__(self, table: ValueTable, changed: threading.Condition, memory: ByteArray, unit_bytes: int) -> None:
        """Shares the table and the memory of the store.

        Args:
            table: the values.
            changed: guards the table; notified when a value becomes visible or is dropped.
            memory: in which the values lie.
            unit_bytes: a value takes whole units of so many bytes.
        """
        self._table = table
        self._changed = changed
        self._memory: ByteArray | None = memory
        self._address: Final = int(memory.ctypes.data)
        self._unit_bytes: Final = unit_bytes

    def create_values(self, wanted: Sequence[tuple[str, int]]) -> list[CreatedValue | ResultCode]:
        """Makes room for new values; see `ValueMemory.create_values`."""
        valid = are_valid_keys([key for key, _ in wanted])
        with self._changed:
            return [
                self._create(key, nbytes) if is_valid else ResultCode.INVALID
                for (key, nbytes), is_valid in zip(wanted, valid, strict=True)
            ]

    def _create(self, key: str, nbytes: int) -> CreatedValue | ResultCode:
        memory = self._memory
        if memory is None:
            return ResultCode.UNAVAILABLE
        found = self._table.get(key)
        if found is not None:
            return ResultCode.EXISTS if found.ready else ResultCode.UNAVAILABLE
        units = units_for(nbytes, self._unit_bytes)
        if units * self._unit_bytes > memory.size:
            return ResultCode.TOO_LARGE
        value = self._table.add_unready(key, nbytes, units, batch=1)
        if value is None:
            return ResultCode.FULL
        if len(value.runs) > 1:
            self._drop(key, value)
            return ResultCode.UNAVAILABLE
        start = value.runs[0].first * self._unit_bytes
        return CreatedValue(key, memory[start : start + nbytes].data, value)

    def publish_values(self, values: Sequence[CreatedValue]) -> None:
        """Makes values visible; see `ValueMemory.publish_values`."""
        leased_until = time.monotonic() + self._table.lease_s
        with self._changed:
            for created in values:
                value = cast("StoredValue", created.value)
                value.ready = True
                value.leased_until = leased_until
                self._table.unpin(value)
            self._table.use([created.key for created in values])
            self._changed.notify_all()

    def abandon_values(self, values: Sequence[CreatedValue]) -> None:
        """Gives room back; see `ValueMemory.abandon_values`."""
        with self._changed:
            for created in values:
                self._drop(created.key, cast("StoredValue", created.value))
            self._changed.notify_all()

    def _drop(self, key: str, value: StoredValue) -> None:
        self._table.drop(key, value)
        self._table.unpin(value)

    def use_values(self, keys: Sequence[str]) -> None:
        """Says that these were used together; see `ValueMemory.use_values`."""
        with self._changed:
            self._table.use(keys)

    def pin_values(self, keys: Sequence[str]) -> list[PinnedValue | None]:
        """Pins values; see `ValueMemory.pin_values`. It renews no lease."""
        with self._changed:
            self._table.touch(keys)
            return [self._pin(self._table.get(key)) for key in keys]

    def _pin(self, value: StoredValue | None) -> PinnedValue | None:
        if value is None or not value.ready or self._memory is None:
            return None
        self._table.pin(value)
        views = extent_views(self._memory, self._unit_bytes, value.runs, value.nbytes)
        places = zip(value.runs, views, strict=False)  # a value of no bytes has a unit, and no view
        addresses = tuple((self._address + run.first * self._unit_bytes, view.size) for run, view in places)
        return PinnedValue(value.nbytes, tuple(view.data for view in views), addresses, value.generation, value)

    def unpin_values(self, held: Iterable[PinnedValue]) -> None:
        """Unpins values; see `ValueMemory.unpin_values`."""
        with self._changed:
            for one in held:
                self._table.unpin(cast("StoredValue", one.value))

    def close(self) -> None:
        """From now on nothing is created or pinned; views that are held keep the memory."""
        with self._changed:
            self._memory = None
