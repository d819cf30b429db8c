"""The embedded store between the processes of one machine: a mapped file, no server.

Any number of processes open the same path. Put it on tmpfs (`/dev/shm`) for speed; a file on disk outlives its users
but not a restart of the machine, after which it starts empty.

Invariant: the store is the file that has the path now. If that file is removed or replaced, all its users move to the
new one. Otherwise running engines and engines that start later would share nothing, without any error.
"""

import logging
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvparams_connectors.advice import Advice
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
    are_valid_keys,
)
from kvparams_connectors.store_url import StoreURL
from kvparams_connectors.stores.file.placement_advice import file_advice
from kvparams_connectors.stores.file.settings import FileSettings
from kvparams_connectors.stores.file.values import FileValues

__all__ = ["FileStore", "open_url"]

_LOGGER: Final = logging.getLogger(__name__)

_SMALLEST_UNIT: Final = 4 << 10
_AGAIN_S: Final = 1.0
"""After which a path at which no file could be opened is tried again."""


class FileStore(BlockingStore):
    """Values in a mapped file. A forked child cannot use its parent's; it opens the file anew."""

    calls_before_read = True

    def __init__(
        self,
        path: Path,
        size_bytes: int | None = None,
        *,
        unit_bytes: int | None = None,
        threads: int = 1,
        timeout_s: float = 120.0,
    ) -> None:
        """Opens the file, or creates it and allocates all of it.

        Args:
            path: the file; its directory exists.
            size_bytes: the size of the whole file, in bytes. None: that of the existing file, or 1 GiB for a new one.
            unit_bytes: a value takes whole units of so many bytes. None: that of the existing file, or 64 KiB for a new
                one.
            threads: the number of batches that this process works on at a time.
            timeout_s: how long to wait for another process that is creating the file, in seconds.

        Raises:
            StoreError: the file is no store, has another version or size, or the disk is full.
        """
        if unit_bytes is not None and (unit_bytes < _SMALLEST_UNIT or unit_bytes % _SMALLEST_UNIT):
            raise StoreError(f"file store: unit {unit_bytes} is not a multiple of {_SMALLEST_UNIT} bytes")
        self._path = path
        self._sizes = size_bytes, unit_bytes
        self._values: FileValues | None = FileValues(path, size_bytes, unit_bytes, timeout_s)
        self._shape = self._values.shape
        self._changing = threading.Lock()
        """Held by whoever opens the path anew, or counts who uses what is open."""
        self._again_at = 0.0
        super().__init__("file", threads=threads)

    @property
    def capabilities(self) -> Capabilities:
        """Returns what this store can do."""
        largest = self._shape.units * self._shape.unit_bytes
        return Capabilities(persistent=True, shared=True, max_value_bytes=largest)

    @property
    def repairs(self) -> int:
        """Returns how often the index was made anew because a process had died while it changed it."""
        return self._values.repairs if self._values is not None else 0

    def advice(self) -> list[Advice]:
        """For `kvparams doctor`: whether the file lies in a good place."""
        return file_advice(self._path)

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        """Stores values; see `BlockingStore`."""
        with self._using(deadline) as values:
            return values.put(ops, deadline) if values is not None else [Result(ResultCode.UNAVAILABLE)] * len(ops)

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        """Reads values; see `BlockingStore`."""
        with self._using(deadline) as values:
            return values.get(ops, deadline) if values is not None else [Result(ResultCode.UNAVAILABLE)] * len(ops)

    def exists_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Looks keys up; see `BlockingStore`."""
        with self._using(deadline) as values:
            return values.exists(keys) if values is not None else [Result(ResultCode.UNAVAILABLE)] * len(keys)

    def exists_nowait(self, keys: Sequence[str]) -> Results | None:
        """Looks keys up without waiting, or returns None; see `KVStore.exists_nowait`."""
        with self._closing:  # held for a moment only, by whoever closes
            if self._released or not self._changing.acquire(blocking=False):
                return None
            try:
                values = self._values
                if values is None or not values.path_was_current() or not all(are_valid_keys(keys)):
                    return None
                return values.exists(keys)
            finally:
                self._changing.release()

    def delete_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Deletes keys; see `BlockingStore`."""
        with self._using(deadline) as values:
            return values.delete(keys, deadline) if values is not None else [Result(ResultCode.UNAVAILABLE)] * len(keys)

    def release(self) -> None:
        """Lets go of everything; no worker runs any more."""
        if self._values is not None:
            self._values.close()

    @contextmanager
    def _using(self, deadline: float) -> Generator[FileValues | None]:
        """Yields the store that the path names now, for one batch; None if no store could be opened."""
        with self._changing:
            if self._values is None or not self._values.path_is_current():
                self._open_anew(deadline)
            values = self._values
            if values is not None:
                values.users += 1
        try:
            yield values
        finally:
            if values is not None:
                with self._changing:
                    values.users -= 1
                    last = not values.users and values is not self._values
                if last:
                    values.close()

    def _open_anew(self, deadline: float) -> None:
        """The file that was open has been removed or replaced. It is let go of first: the new one may need its room."""
        old, self._values = self._values, None
        if old is not None:
            _LOGGER.warning("the file store's file %s was removed or replaced; its values are gone", self._path)
            if not old.users:
                old.close()
            del old
        now = time.monotonic()
        if now < self._again_at:
            return
        size_bytes, unit_bytes = self._sizes
        if not self._path.exists():  # whoever creates it, it is as before
            size_bytes, unit_bytes = self._shape.size_bytes, self._shape.unit_bytes
        try:
            self._values = FileValues(self._path, size_bytes, unit_bytes, max(0.0, deadline - now))
        except StoreError as error:
            self._again_at = now + _AGAIN_S
            _LOGGER.warning("%s; the store tries again", error)
            return
        self._shape = self._values.shape


def open_url(url: StoreURL) -> KVStore:
    """`file:///dev/shm/kv?size=4GiB`; see `FileSettings`."""
    settings = FileSettings.read(url)
    if url.location or not url.path.startswith("/"):
        raise StoreError(f"file store: {url.redacted!r} has no absolute path; write file:///dev/shm/kv?size=1GiB")
    return FileStore(Path(url.path), settings.size)
