"""Provides a clock that advances only when a test says so."""

from collections.abc import Callable
from heapq import heappop, heappush


class Timer:
    """What `Clock.call_later` gives."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Clock:
    """`now` and `call_later` of an event loop, without one."""

    def __init__(self) -> None:
        self.time = 1000.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._number = 0

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        assert delay_s >= 0
        self._number += 1
        timer = Timer(callback)
        heappush(self._timers, (self.time + delay_s, self._number, timer))
        return timer

    def pass_time(self, seconds: float) -> None:
        """Call whatever is due until then, in order."""
        until = self.time + seconds
        while self._timers and self._timers[0][0] <= until:
            at, _, timer = heappop(self._timers)
            self.time = max(self.time, at)
            if timer.callback is not None:
                timer.callback()
        self.time = until

    @property
    def pending(self) -> int:
        """Timers that will be called."""
        return sum(timer.callback is not None for _, _, timer in self._timers)
