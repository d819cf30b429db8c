"""Locks between processes that end with the process, however it ends.

`FileLock` excludes everybody else for a moment; `ProcessSeat` says who of the processes that use a file is still alive.
Both are locks of the kernel on the open file, so kill -9 gives them back; no process number is trusted, which would
mean something else in another container.
"""

import fcntl
import os
import struct
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

__all__ = ["FileLock", "ProcessSeat"]

_FIRST_BYTE: Final = 1 << 40
"""Members lock single bytes from here on, far behind any file's end."""
_LOCK: Final = struct.Struct("hhqqi4x")  # struct flock of Linux on 64 bits: type, whence, start, length, pid
_LONGEST_PAUSE_S: Final = 0.001


class FileLock:
    """A `FileLock` is an exclusive lock on an open file, for the threads of all processes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._threads = threading.Lock()

    @contextmanager
    def held(self, deadline: float) -> Generator[None]:
        """Hold the lock.

        Args:
            deadline: on the clock of `time.monotonic`.

        Raises:
            TimeoutError: somebody else held it until the deadline, perhaps a stopped process.
        """
        if not self._threads.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError("another thread holds the lock")
        try:
            pause_s = 0.00005
            # The kernel offers no waiting with a bound for this lock, so ask again and again.
            while not self._try():
                if time.monotonic() >= deadline:
                    raise TimeoutError("another process holds the lock")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def _try(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class ProcessSeat:
    """A numbered seat at an open file, held as long as the process lives and has it open."""

    def __init__(self, fd: int, seats: int) -> None:
        """Takes the first free seat.

        Args:
            fd: the file descriptor of the file.
            seats: the number of seats.

        Raises:
            OSError: all seats are taken.
        """
        self._fd = fd
        self.seat: Final = self._take(seats)

    def _take(self, seats: int) -> int:
        for seat in range(seats):
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, seat))
            except (BlockingIOError, PermissionError):
                continue
            return seat
        raise OSError(f"all {seats} seats are taken")

    def is_taken(self, seat: int) -> bool:
        """Returns whether somebody else holds `seat`."""
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, seat))
        return _LOCK.unpack(answer)[0] != fcntl.F_UNLCK

    def leave(self) -> None:
        """Give the seat back."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, self.seat))


def _lock(kind: int, seat: int) -> bytes:
    return _LOCK.pack(kind, os.SEEK_SET, _FIRST_BYTE + seat, 1, 0)
