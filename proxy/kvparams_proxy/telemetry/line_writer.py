"""Writes lines to stdout, stderr or a file from a thread of its own.

Writers never wait and never fail. Lines that a slow, full or closed destination does not take within the bounded buffer
are dropped and counted.

Several processes may write to one destination. A single write to a file is atomic (`O_APPEND`), but one to a pipe only
up to 4096 bytes (pipe(7), PIPE_BUF). So these processes share a lock. The kernel releases the lock of a killed process.
"""

import fcntl
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

__all__ = ["STDOUT", "LineWriter"]

STDOUT: Final = "-"
_ROOM_BYTES: Final = 4 << 20
"""Given, and not written yet."""
_MODE: Final = 0o640


class _LineBatch(NamedTuple):
    data: bytes
    lines: int


class LineWriter:
    """Writes lines to one destination. Lines stay whole and in order."""

    def __init__(self, place: str | int, lock: Path | None = None) -> None:
        """Starts the thread that writes.

        Args:
            place: a path, to which is added, or `STDOUT`, or the number of an open descriptor. A file that is moved
                away is begun anew (log rotation).
            lock: a lock file for all processes that write to this place.

        Raises:
            OSError: the file cannot be written.
        """
        place = 1 if place == STDOUT else place
        self._path = place if isinstance(place, str) else None
        self._fd = -1
        if isinstance(place, str):
            self._fd = _open(place)
        else:
            with suppress(OSError):  # it is closed: everything is dropped
                self._fd = os.dup(place)  # a number of our own: 1 could be closed, and be a client's socket next
        self._lock_fd = -1 if lock is None else os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._torn = False
        self._batches: SimpleQueue[_LineBatch | None] = SimpleQueue()
        self._given_bytes = 0
        self._taken_bytes = 0
        self._refused = 0
        self._lost = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """The number of lines that were dropped."""
        return self._refused + self._lost

    def put(self, data: bytes, lines: int) -> None:
        """Writes the data when there is time. `data` are `lines` whole lines."""
        if self._closed or self._given_bytes - self._taken_bytes + len(data) > _ROOM_BYTES:
            self._refused += lines
            return
        self._given_bytes += len(data)
        self._batches.put(_LineBatch(data, lines))

    def close(self, timeout_s: float) -> None:
        """Writes the remaining lines, for at most that long."""
        if not self._closed:
            self._closed = True
            self._batches.put(None)
        self._thread.join(timeout_s)

    # the thread: only it changes `_fd`, `_torn`, `_taken_bytes` and `_lost`

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._reopen()
                self._write(batch.data)
            except OSError:
                self._lost += batch.lines
            self._taken_bytes += len(batch.data)
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)

    def _write(self, data: bytes) -> None:
        view = memoryview(b"\n" + data if self._torn else data)
        with self._locked():
            self._torn = True  # until all of it is there
            while view:
                view = view[os.write(self._fd, view) :]
            self._torn = False

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Holds the lock, if there is one. Only the writer's thread waits for it."""
        if self._lock_fd < 0:
            yield
            return
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _reopen(self) -> None:
        """Opens a new file if the old one has been moved away."""
        if self._path is None:
            return
        try:
            there, here = os.stat(self._path), os.fstat(self._fd)
            moved = (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)
        except OSError:
            moved = True
        if moved:
            fd = _open(self._path)
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._torn = fd, False


def _open(path: str) -> int:
    """Opens the file for appending. A pipe without a reader is an error, not a reason to wait."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, _MODE)
    os.set_blocking(fd, True)
    return fd
