"""Measures event loop lag: a timer records its own delay.

It takes four calls a second, too little to be measured.
"""

import asyncio
from typing import Final

from kvparams_proxy.telemetry.histogram import Histogram

__all__ = ["LoopLag"]

_EVERY_S: Final = 0.25


class LoopLag:
    """Runs from when it is made until it is closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seen: Histogram) -> None:
        """`seen` gets seconds; below a millisecond a timer is not exact."""
        self._loop = loop
        self._seen = seen
        self._set()

    def close(self) -> None:
        """Cancels the timer."""
        self._timer.cancel()

    def _set(self) -> None:
        self._due_s = self._loop.time() + _EVERY_S
        self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        self._seen.observe(max(0.0, self._loop.time() - self._due_s))
        self._seen.fold()  # nobody else does while there are no requests
        self._set()
