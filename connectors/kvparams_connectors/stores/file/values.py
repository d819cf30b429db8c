"""The values in one mapped file: put, got, looked up and deleted by one process among several.

No lock is held while bytes are copied. A complete value becomes visible in one step, and a reader that was overtaken by
eviction reports a miss.
"""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvparams_connectors.hashed_copy import CopyPairs
from kvparams_connectors.store import GetOp, PutOp, Result, ResultCode, Results
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.extents import copy_pairs, units_for
from kvparams_connectors.stores.file.file_map import FileGeometry, open_map
from kvparams_connectors.stores.file.index import FileIndex, IndexEntry
from kvparams_connectors.stores.value_copy import group_by_size, read_values, report_arrival, write_values

__all__ = ["FileValues"]

_LOGGER: Final = logging.getLogger(__name__)
_BATCH: Final = 64
"""So many values find their room under one lock: others wait no longer than that takes."""
_PAUSE_S: Final = 0.0001
_ABANDON_S: Final = 5.0
_LATELY_S: Final = 1.0
_MISS: Final = Result(ResultCode.MISS)
_GONE: Final = Result(ResultCode.UNAVAILABLE)


class FileValues:
    """A `FileValues` is a file as this process has opened it; for its operations see `KVStore`."""

    def __init__(self, path: Path, size_bytes: int | None, unit_bytes: int | None, timeout_s: float) -> None:
        """Opens the file; for the arguments and errors see `FileStore`."""
        self.users = 0
        """Batches that work on it; `FileStore` counts them."""
        self._path = path
        self._map = open_map(path, size_bytes, unit_bytes, timeout_s=timeout_s)
        try:
            status = os.fstat(self._map.fd)
            self._index = FileIndex(self._map, time.monotonic() + timeout_s)
        except (OSError, TimeoutError) as error:
            self._map.close()
            raise StoreError(f"file store: cannot join the users of {path}: {error}") from error
        self._file = status.st_dev, status.st_ino
        self._seen_there = 0.0

    @property
    def shape(self) -> FileGeometry:
        """Returns the shape of the file."""
        return self._map.shape

    @property
    def repairs(self) -> int:
        """See `FileStore.repairs`."""
        return self._index.repairs

    def path_is_current(self) -> bool:
        """Returns whether its path still names this file."""
        try:
            status = os.lstat(self._path)
        except OSError:
            return False
        return self._file == (status.st_dev, status.st_ino)

    def path_was_current(self) -> bool:
        """Returns the most recent result of `path_is_current`, without a system call.

        A system call gives other threads their turn, and in a busy process takes milliseconds.
        """
        now = time.monotonic()
        if now - self._seen_there < _LATELY_S:
            return True
        if not self.path_is_current():
            return False
        self._seen_there = now
        return True

    def close(self) -> None:
        """Give the seat back and let go of the file."""
        self._index.leave()
        self._map.close()

    def put(self, ops: Sequence[PutOp], deadline: float) -> Results:
        """Store them."""
        results = [Result(ResultCode.TIMEOUT)] * len(ops)
        entries: list[IndexEntry | None] = [None] * len(ops)
        for start in range(0, len(ops), _BATCH):
            left = list(range(start, min(start + _BATCH, len(ops))))
            while left:  # once, and again for a key whose other writer gave up
                left = self._put_round(ops, left, results, entries, deadline)
        self._index.touch(entries)
        return results

    def _put_round(
        self, ops: Sequence[PutOp], left: list[int], results: Results, entries: list[IndexEntry | None], deadline: float
    ) -> list[int]:
        """Try the operations `left`; those that have to be tried again."""
        ours: dict[int, IndexEntry] = {}
        others: dict[int, IndexEntry] = {}
        try:
            with self._index.locked(deadline):
                for index in left:
                    entry = self._index.find_any(ops[index].key)
                    if entry is None:
                        results[index] = self._reserve(ops[index], index, ours, entries)
                    elif entry.is_ready:
                        entries[index] = entry
                        results[index] = Result(ResultCode.EXISTS)
                    else:
                        others[index] = entry
        except TimeoutError:
            return []
        unwritten: list[IndexEntry] = []
        for some in group_by_size((index, entry.nbytes) for index, entry in ours.items()):
            filled = self._fill([(ops[index], ours[index]) for index in some], deadline)
            for index, (result, published) in zip(some, filled, strict=True):
                results[index], entries[index] = result, published
                if published is None:
                    unwritten.append(ours[index])
        self._abandon(unwritten)
        return [index for index, entry in others.items() if self._outcome(entry, index, results, deadline)]

    def _reserve(
        self, op: PutOp, index: int, ours: dict[int, IndexEntry], entries: Sequence[IndexEntry | None]
    ) -> Result:
        """Room for a new value, without evicting what this batch has put or found."""
        nbytes = sum(buffer.nbytes for buffer in op.buffers)
        if nbytes > self._map.data.size:
            return Result(ResultCode.TOO_LARGE)
        keep = {entry.slot for entry in entries if entry is not None}
        added = self._index.add(op.key, nbytes, units_for(nbytes, self._map.shape.unit_bytes), keep)
        if added is None:
            return Result(ResultCode.FULL)
        ours[index] = added
        return Result(ResultCode.TIMEOUT)

    def _fill(
        self, values: Sequence[tuple[PutOp, IndexEntry]], deadline: float
    ) -> list[tuple[Result, IndexEntry | None]]:
        """Copy values in and publish them; no entry where that was not done."""
        if time.monotonic() >= deadline:
            return [(Result(ResultCode.TIMEOUT), None)] * len(values)
        places = [self._place(entry, op.buffers) for op, entry in values]
        good = [(op, place) for (op, _), place in zip(values, places, strict=True) if place is not None]
        written = iter(write_values([op for op, _ in good], [place for _, place in good]))
        filled: list[tuple[Result, IndexEntry | None]] = []
        for (_, entry), place in zip(values, places, strict=True):
            if place is None or not next(written):
                filled.append((Result(ResultCode.INVALID), None))
                continue
            published = self._index.publish(entry)
            filled.append((Result(ResultCode.OK, entry.nbytes) if published else _GONE, published))
        return filled

    def _place(self, entry: IndexEntry, buffers: Sequence[memoryview]) -> CopyPairs | None:
        """Returns the pieces of a value, in the file and outside; None if a leased buffer was released."""
        try:
            return copy_pairs(self._map.data, self._map.shape.unit_bytes, entry.runs, buffers, entry.nbytes)
        except ValueError:
            return None

    def _abandon(self, unwritten: Sequence[IndexEntry]) -> None:
        """Free the room of values of ours that were not written."""
        if not unwritten:
            return
        try:
            with self._index.locked(time.monotonic() + _ABANDON_S):
                for entry in unwritten:
                    if self._index.is_unchanged(entry):
                        self._index.remove(entry)
        except TimeoutError:
            _LOGGER.warning("the room of %d values is lost until this process ends", len(unwritten))

    def _outcome(self, entry: IndexEntry, index: int, results: Results, deadline: float) -> bool:
        """Wait for somebody else's writing of the same value; whether we have to write it after all."""
        while self._index.is_being_written(entry):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        if self._index.is_published(entry):
            results[index] = Result(ResultCode.EXISTS)
            return False
        return time.monotonic() < deadline

    def get(self, ops: Sequence[GetOp], deadline: float) -> Results:
        """Copy them out."""
        entries: list[IndexEntry | None] = []
        results: Results = []
        for some in group_by_size((at, sum(buffer.nbytes for buffer in op.buffers)) for at, op in enumerate(ops)):
            found = [self._index.find(ops[at].key) if time.monotonic() < deadline else None for at in some]
            results += self._read([(ops[at], entry) for at, entry in zip(some, found, strict=True)], deadline)
            entries += found
        self._index.touch(entries)
        return results

    def _read(self, values: Sequence[tuple[GetOp, IndexEntry | None]], deadline: float) -> Results:
        """Copies values out."""
        missing = Result(ResultCode.MISS if time.monotonic() < deadline else ResultCode.TIMEOUT)
        sources = [missing if entry is None else self._source(op, entry) for op, entry in values]
        ready = [
            (op, source) for (op, _), source in zip(values, sources, strict=True) if not isinstance(source, Result)
        ]
        checksums = iter(read_values([op for op, _ in ready], [place for _, place in ready]))
        results: Results = []
        for (op, entry), source in zip(values, sources, strict=True):
            if isinstance(source, Result) or entry is None:
                results.append(source if isinstance(source, Result) else missing)
            elif (checksum := next(checksums)) is None:
                results.append(Result(ResultCode.INVALID))
            elif not self._index.is_unchanged(entry):  # evicted meanwhile: the bytes may be another value's
                results.append(Result(ResultCode.MISS))
            else:
                report_arrival(op, entry.nbytes, checksum)
                results.append(Result(ResultCode.OK, entry.nbytes))
        return results

    def _source(self, op: GetOp, entry: IndexEntry) -> CopyPairs | Result:
        """Returns what is copied to read a value, or why it cannot be read."""
        if sum(buffer.nbytes for buffer in op.buffers) < entry.nbytes:
            return Result(ResultCode.TOO_LARGE, entry.nbytes)
        place = self._place(entry, op.buffers)
        return Result(ResultCode.INVALID) if place is None else [(outside, inside) for inside, outside in place]

    def exists(self, keys: Sequence[str]) -> Results:
        """Look them up."""
        found = self._index.find_sizes(keys)
        self._index.touch(found)
        return [_MISS if value is None else Result(ResultCode.OK, value[2]) for value in found]

    def delete(self, keys: Sequence[str], deadline: float) -> Results:
        """Free their room."""
        results = [Result(ResultCode.TIMEOUT)] * len(keys)
        with suppress(TimeoutError), self._index.locked(deadline):
            for index, key in enumerate(keys):
                entry = self._index.find(key)
                if entry is not None:
                    self._index.remove(entry)
                results[index] = Result(ResultCode.MISS if entry is None else ResultCode.OK)
        return results
