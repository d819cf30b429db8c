"""Gives freed memory back to the system after large bodies: the C library keeps tens of megabytes of it otherwise."""

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

__all__ = ["MemoryTrimmer"]

_WORTH_BYTES: Final = 1 << 20
"""Freed since the last time."""
_DELAYS_S: Final = (1.0, 5.0, 30.0)
"""From one trim to the next. What a body's owner has released may still wait in a socket's buffer for an engine that
does not read, until a time-out; nobody tells when that is freed."""


class MemoryTrimmer:
    """Calls `malloc_trim` of the GNU C library from a thread: three times after the last large body.

    It is called at most once a second. With another library nothing happens.

    Source: glibc 2.36, malloc/malloc.c, mtrim: it walks the free chunks of all arenas.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._trim = _malloc_trim()
        self._freed_bytes = 0
        self._trims = 0
        """Since a large body was freed."""
        self._timer: asyncio.TimerHandle | None = None

    def freed(self, size: int) -> None:
        """Hears that `size` bytes are about to be freed."""
        self._freed_bytes += size
        if self._freed_bytes < _WORTH_BYTES or self._trim is None:
            return
        self._freed_bytes = 0
        if self._trims or self._timer is None:
            self._trims = 0
            self._start()

    def close(self) -> None:
        """Cancels the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._trim = None

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_DELAYS_S[self._trims], self._run)

    def _run(self) -> None:
        self._timer = None
        self._trims += 1
        if self._trims < len(_DELAYS_S):
            self._start()
        if self._trim is not None:
            self._loop.run_in_executor(None, self._trim, 0)


def _malloc_trim() -> Callable[[int], object] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
