"""The embedded store between the processes of one machine: a mapped file, no server.

Any number of processes open the same path. Put it on tmpfs (`/dev/shm`) for speed; a file on disk outlives its users
but not a restart of the machine, after which it starts empty. The one rule: no lock is held while bytes are copied; a
value becomes visible in one step when it is whole, and a reader that was overtaken by eviction reports a miss.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvparams_connectors.advice import Advice
from kvparams_connectors.settings import StoreURL
from kvparams_connectors.store import (
    Capabilities,
    Code,
    GetOp,
    KVStore,
    LaneStore,
    PutOp,
    Result,
    Results,
    StoreError,
    valid_key,
)
from kvparams_connectors.stores.extents import copy_in, copy_out, units_for
from kvparams_connectors.stores.file.index import Entry, FileIndex
from kvparams_connectors.stores.file.map import open_map
from kvparams_connectors.tools.file_advice import file_advice

__all__ = ["FileStore", "open_url"]

_LOGGER: Final = logging.getLogger(__name__)

_SMALLEST_UNIT: Final = 4 << 10
_BATCH: Final = 64
"""So many values find their room under one lock: others wait no longer than that takes."""
_PAUSE_S: Final = 0.0001
_ABANDON_S: Final = 5.0


class FileStore(LaneStore):
    """Values in a mapped file. A forked child cannot use its parent's; it opens the file anew."""

    calls_going = True

    def __init__(
        self,
        path: Path,
        size_bytes: int | None = None,
        *,
        unit_bytes: int | None = None,
        threads: int = 1,
        timeout_s: float = 120.0,
    ) -> None:
        """Open the file, or create it and allocate all of it.

        Args:
            path: the file; its directory exists.
            size_bytes: of the whole file. None: as the file is, or 1 GiB for a new one.
            unit_bytes: a value takes whole units. None: as the file is, or 64 KiB for a new one.
            threads: how many batches this process works on at a time.
            timeout_s: how long to wait for another process that is creating it.

        Raises:
            StoreError: the file is something else, of another version or size, or the disk is full.
        """
        if unit_bytes is not None and (unit_bytes < _SMALLEST_UNIT or unit_bytes % _SMALLEST_UNIT):
            raise StoreError(f"file store: unit {unit_bytes} is not a multiple of {_SMALLEST_UNIT} bytes")
        self._path = path
        self._map = open_map(path, size_bytes, unit_bytes, timeout_s=timeout_s)
        try:
            self._index = FileIndex(self._map, time.monotonic() + timeout_s)
        except (OSError, TimeoutError) as error:
            self._map.close()
            raise StoreError(f"file store: cannot join the users of {path}: {error}") from error
        self._capabilities = Capabilities(persistent=True, shared=True, max_value_bytes=self._map.data.size)
        super().__init__("file", threads=threads)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def repairs(self) -> int:
        """How often the index was made anew because a process had died while it changed it."""
        return self._index.repairs

    def advice(self) -> list[Advice]:
        """For `kvparams doctor`: whether the file lies in a good place."""
        return file_advice(self._path)

    def put_now(self, ops: Sequence[PutOp], deadline: float) -> Results:
        results = [Result(Code.TIMEOUT)] * len(ops)
        entries: list[Entry | None] = [None] * len(ops)
        for start in range(0, len(ops), _BATCH):
            left = list(range(start, min(start + _BATCH, len(ops))))
            while left:  # once, and again for a key whose other writer gave up
                left = self._put_round(ops, left, results, entries, deadline)
        self._index.touch(entries)
        return results

    def _put_round(
        self, ops: Sequence[PutOp], left: list[int], results: Results, entries: list[Entry | None], deadline: float
    ) -> list[int]:
        """Try the operations `left`; those that have to be tried again."""
        ours: dict[int, Entry] = {}
        others: dict[int, Entry] = {}
        try:
            with self._index.changing(deadline):
                for index in left:
                    entry = self._index.find_any(ops[index].key)
                    if entry is None:
                        results[index] = self._reserve(ops[index], index, ours, entries)
                    elif entry.ready:
                        entries[index] = entry
                        results[index] = Result(Code.EXISTS)
                    else:
                        others[index] = entry
        except TimeoutError:
            return []
        unwritten: list[Entry] = []
        for index, entry in ours.items():
            results[index], entries[index] = self._fill(ops[index], entry, deadline)
            if entries[index] is None:
                unwritten.append(entry)
        self._abandon(unwritten)
        return [index for index, entry in others.items() if self._outcome(entry, index, results, deadline)]

    def _reserve(self, op: PutOp, index: int, ours: dict[int, Entry], entries: Sequence[Entry | None]) -> Result:
        """Room for a new value, without evicting what this batch has put or found."""
        nbytes = sum(buffer.nbytes for buffer in op.buffers)
        if nbytes > self._capabilities.max_value_bytes:
            return Result(Code.TOO_LARGE)
        keep = {entry.slot for entry in entries if entry is not None}
        added = self._index.add(op.key, nbytes, units_for(nbytes, self._map.shape.unit_bytes), keep)
        if added is None:
            return Result(Code.FULL)
        ours[index] = added
        return Result(Code.TIMEOUT)

    def _fill(self, op: PutOp, entry: Entry, deadline: float) -> tuple[Result, Entry | None]:
        """Copy the value in and publish it; no entry if that was not done."""
        if time.monotonic() >= deadline:
            return Result(Code.TIMEOUT), None
        try:
            copy_in(self._map.data, self._map.shape.unit_bytes, entry.runs, op.gone().buffers, entry.nbytes)
        except ValueError:  # the caller released a buffer that it had leased to us
            return Result(Code.INVALID), None
        published = self._index.publish(entry)
        return (Result(Code.OK, entry.nbytes) if published else Result(Code.UNAVAILABLE)), published

    def _abandon(self, unwritten: Sequence[Entry]) -> None:
        """Free the room of values of ours that were not written."""
        if not unwritten:
            return
        try:
            with self._index.changing(time.monotonic() + _ABANDON_S):
                for entry in unwritten:
                    if self._index.unchanged(entry):
                        self._index.remove(entry)
        except TimeoutError:
            _LOGGER.warning("the room of %d values is lost until this process ends", len(unwritten))

    def _outcome(self, entry: Entry, index: int, results: Results, deadline: float) -> bool:
        """Wait for somebody else's writing of the same value; whether we have to write it after all."""
        while self._index.awaited(entry):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        if self._index.published(entry):
            results[index] = Result(Code.EXISTS)
            return False
        return time.monotonic() < deadline

    def get_now(self, ops: Sequence[GetOp], deadline: float) -> Results:
        entries: list[Entry | None] = []
        results: Results = []
        for op in ops:
            entry = self._index.find(op.key) if time.monotonic() < deadline else None
            entries.append(entry)
            if entry is not None:
                results.append(self._read(op, entry))
            else:
                results.append(Result(Code.MISS if time.monotonic() < deadline else Code.TIMEOUT))
        self._index.touch(entries)
        return results

    def _read(self, op: GetOp, entry: Entry) -> Result:
        if sum(buffer.nbytes for buffer in op.buffers) < entry.nbytes:
            return Result(Code.TOO_LARGE, entry.nbytes)
        copy_out(self._map.data, self._map.shape.unit_bytes, entry.runs, op.buffers, entry.nbytes, op.coming)
        if not self._index.unchanged(entry):  # evicted meanwhile: the bytes may be another value's
            return Result(Code.MISS)
        if op.arrived is not None:
            op.arrived(entry.nbytes)
        return Result(Code.OK, entry.nbytes)

    def exists_now(self, keys: Sequence[str], deadline: float) -> Results:
        entries = [self._index.find(key) for key in keys]
        self._index.touch(entries)
        return [Result(Code.MISS) if entry is None else Result(Code.OK, entry.nbytes) for entry in entries]

    def exists_at_once(self, keys: Sequence[str]) -> Results | None:
        with self._closing:  # held for a moment only, by whoever closes
            if self._released or not all(valid_key(key) for key in keys):
                return None
            return self.exists_now(keys, 0.0)

    def delete_now(self, keys: Sequence[str], deadline: float) -> Results:
        results = [Result(Code.TIMEOUT)] * len(keys)
        with suppress(TimeoutError), self._index.changing(deadline):
            for index, key in enumerate(keys):
                entry = self._index.find(key)
                if entry is not None:
                    self._index.remove(entry)
                results[index] = Result(Code.MISS if entry is None else Code.OK)
        return results

    def release(self) -> None:
        self._index.leave()
        self._map.close()


def open_url(url: StoreURL) -> KVStore:
    """`file:///dev/shm/kv?size=4GiB&unit=64KiB&threads=1`; `size` and `unit` may be left away for an existing file."""
    url.only("size", "unit", "threads")
    if url.place or not url.path.startswith("/"):
        raise StoreError(f"file store: {url.text!r} names no absolute path; write file:///dev/shm/kv?size=1GiB")
    return FileStore(
        Path(url.path),
        url.size("size"),
        unit_bytes=url.size("unit"),
        threads=url.number("threads", 1, low=1, high=64),
    )
