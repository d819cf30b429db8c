"""Time-outs of legs, checked by one sweep over all of them in place of a timer for each.

Starting or renewing a time-out costs a dictionary entry; it fires at most 0.15 seconds late: a tick of the sweep and
one of the coarse clock.
"""

import asyncio
import logging
from typing import Final, Protocol

from kvparams_proxy.event_loop.clock import Clock, MonotonicClock

__all__ = ["Deadlines", "Expirable"]

TICK_S: Final = 0.05
_log: Final = logging.getLogger(__name__)


class Expirable(Protocol):
    """An object that has a time-out."""

    def expire(self) -> None:
        """Called when the time is over."""
        ...


class Deadlines:
    """Knows until when everything that is watched has time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock | None = None) -> None:
        """`clock`: what time-outs are measured by, if not the loop's own."""
        self._loop = loop
        self._clock = clock or MonotonicClock(loop.time)
        self._deadlines: dict[Expirable, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self, what: Expirable, limit_s: float) -> None:
        """Starts or renews the time-out of `what`: it ends `limit_s` seconds from now."""
        self._deadlines[what] = self._clock.coarse_time_s + limit_s
        if self._timer is None:
            self._timer = self._loop.call_later(TICK_S, self._sweep)

    def stop(self, what: Expirable) -> None:
        """Cancels the time-out."""
        self._deadlines.pop(what, None)

    def _sweep(self) -> None:
        now = self._clock.time()
        try:
            for what in [what for what, deadline in self._deadlines.items() if deadline <= now]:
                self.stop(what)
                try:
                    what.expire()
                except Exception:  # noqa: BLE001  a fault of the proxy: the others' time is over too
                    _log.exception("a time-out could not be acted on")
        finally:
            self._timer = self._loop.call_later(TICK_S, self._sweep) if self._deadlines else None
