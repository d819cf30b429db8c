"""Wakes an event loop at absolute times, to some tens of microseconds.

Times are not rounded. The timers of asyncio and uvloop count whole milliseconds, more than what is to be measured, so
this one is Linux's timerfd(2), which Python itself offers only from 3.13.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable

__all__ = ["ArrivalClock"]

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class ArrivalClock:
    """Calls `on_time` whenever the time last given to `wake_at` has come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_time: Callable[[], None]) -> None:
        self._loop = loop
        self._on_time = on_time
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        self._check(self._fd)
        loop.add_reader(self._fd, self._wake)

    def wake_at(self, monotonic_s: float) -> None:
        """Wake once `time.monotonic()` is this; at once if it is already past."""
        nanoseconds = max(1, round(monotonic_s * 1e9))
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(*divmod(nanoseconds, 1_000_000_000)))
        self._check(self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None))

    def close(self) -> None:
        """Never wake again."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _wake(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set anew between the wake-up and this read
            return
        self._on_time()

    @staticmethod
    def _check(result: int) -> None:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timerfd: {os.strerror(number)}")
