"""A clock that stands still while something holds up the event loop.

What an engine has sent in such a time lies unread, and what it was to be sent may not have left: it is not late. So
time-outs of engines are measured by this clock, and end no later than the loop lets them.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

__all__ = ["Clock", "ClockTimer", "MonotonicClock", "StallAwareClock"]

_TICK_S: Final = 0.1
_LATE_S: Final = 0.05
"""By which a tick may be late: in a loop that is merely busy, timers are."""


class Clock(Protocol):
    """A clock that measures time-outs."""

    def time(self) -> float:
        """Seconds; only differences mean something."""
        ...

    @property
    def coarse_time_s(self) -> float:
        """Returns the time, or up to a tenth of a second later, for events as frequent as those of a stream."""
        ...


class MonotonicClock:
    """The loop's own clock: for loops that nothing holds up."""

    __slots__ = ("_time",)

    def __init__(self, time: Callable[[], float]) -> None:
        """`time`: of the loop."""
        self._time = time

    def time(self) -> float:
        """See `Clock.time`."""
        return self._time()

    @property
    def coarse_time_s(self) -> float:
        """See `Clock.coarse_time_s`."""
        return self._time()


class StallAwareClock:
    """Runs from when it is made until it is closed."""

    __slots__ = ("_due_s", "_held_s", "_loop", "_timer", "coarse_time_s")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._held_s = 0.0
        self.coarse_time_s = 0.0
        """See `Clock.coarse_time_s`."""
        self._set()

    def time(self) -> float:
        """See `Clock.time`."""
        now = self._loop.time()
        late_s = now - self._due_s
        return now - self._held_s - (late_s if late_s > _LATE_S else 0.0)

    def close(self) -> None:
        """Closes the clock and cancels its timer."""
        self._timer.cancel()

    def _set(self) -> None:
        self._due_s = self._loop.time() + _TICK_S
        self.coarse_time_s = self._due_s - self._held_s
        self._timer = self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        late_s = self._loop.time() - self._due_s
        if late_s > _LATE_S:
            self._held_s += late_s
        self._set()


class ClockTimer:
    """Calls back once, when so much time has passed by a clock."""

    __slots__ = ("_callback", "_clock", "_loop", "_timer", "_until_s")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Clock, delay_s: float, callback: Callable[[], object]
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._callback = callback
        self._until_s = clock.time() + delay_s
        self._timer = loop.call_later(delay_s, self._look)

    def cancel(self) -> None:
        """Cancels the callback."""
        self._timer.cancel()

    def _look(self) -> None:
        left_s = self._until_s - self._clock.time()
        if left_s > _LATE_S:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._callback()
