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

from kvparams_connectors.store import GetOp, PutOp, Result, ResultCode, Results
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.extents import copy_in, copy_out, units_for
from kvparams_connectors.stores.file.file_map import FileGeometry, open_map
from kvparams_connectors.stores.file.index import FileIndex, IndexEntry

__all__ = ["FileValues"]

_LOGGER: Final = logging.getLogger(__name__)
_BATCH: Final = 64
"""So many values find their room under one lock: others wait no longer than that takes."""
_PAUSE_S: Final = 0.0001
_ABANDON_S: Final = 5.0
_LATELY_S: Final = 1.0


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
        for index, entry in ours.items():
            results[index], entries[index] = self._fill(ops[index], entry, deadline)
            if entries[index] is None:
                unwritten.append(entry)
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

    def _fill(self, op: PutOp, entry: IndexEntry, deadline: float) -> tuple[Result, IndexEntry | None]:
        """Copy the value in and publish it; no entry if that was not done."""
        if time.monotonic() >= deadline:
            return Result(ResultCode.TIMEOUT), None
        try:
            copy_in(
                self._map.data, self._map.shape.unit_bytes, entry.runs, op.resolve_before_read().buffers, entry.nbytes
            )
        except ValueError:  # the caller released a buffer that it had leased to us
            return Result(ResultCode.INVALID), None
        published = self._index.publish(entry)
        return (Result(ResultCode.OK, entry.nbytes) if published else Result(ResultCode.UNAVAILABLE)), published

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
        for op in ops:
            entry = self._index.find(op.key) if time.monotonic() < deadline else None
            entries.append(entry)
            if entry is not None:
                results.append(self._read(op, entry))
            else:
                results.append(Result(ResultCode.MISS if time.monotonic() < deadline else ResultCode.TIMEOUT))
        self._index.touch(entries)
        return results

    def _read(self, op: GetOp, entry: IndexEntry) -> Result:
        if sum(buffer.nbytes for buffer in op.buffers) < entry.nbytes:
            return Result(ResultCode.TOO_LARGE, entry.nbytes)
        copy_out(self._map.data, self._map.shape.unit_bytes, entry.runs, op.buffers, entry.nbytes, op.on_progress)
        if not self._index.is_unchanged(entry):  # evicted meanwhile: the bytes may be another value's
            return Result(ResultCode.MISS)
        if op.on_complete is not None:
            op.on_complete(entry.nbytes)
        return Result(ResultCode.OK, entry.nbytes)

    def exists(self, keys: Sequence[str]) -> Results:
        """Look them up."""
        entries = [self._index.find(key) for key in keys]
        self._index.touch(entries)
        return [Result(ResultCode.MISS) if entry is None else Result(ResultCode.OK, entry.nbytes) for entry in entries]

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
