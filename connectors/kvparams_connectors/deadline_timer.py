"""Runs one thread that calls back at a time, so that deadlines are noticed even without other events.

The timer is set to the earliest deadline. When it rings, its owner names the next one. So an owner with a thousand
deadlines needs one timer.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["DeadlineTimer"]

_LOGGER: Final = logging.getLogger(__name__)


class DeadlineTimer:
    """Rings at a time on the clock of `time.monotonic`. Its thread starts with the first time that is set."""

    def __init__(self, name: str, ring: Callable[[float], float | None]) -> None:
        """Starts no thread; the first time that is set does.

        Args:
            name: the name of the thread.
            ring: called with the time in seconds. It must return soon. It returns when to ring next, or None.
        """
        self._ring = ring
        self._changed = threading.Condition(threading.Lock())
        self._when: float | None = None
        self._closed = False
        # A daemon: whoever forgets to close a store must be able to end.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._started = False

    def schedule(self, when: float) -> None:
        """Ring at `when`, if it would not ring before."""
        with self._changed:
            if self._closed or (self._when is not None and self._when <= when):
                return
            self._when = when
            if self._started:
                self._changed.notify()
            else:
                self._started = True
                self._thread.start()

    def close(self) -> None:
        """Ring no more; what rings now has ended when this returns, unless it is called from there."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            started = self._started
        if started and threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def _work(self) -> None:
        while self._wait():
            now = time.monotonic()
            try:
                following = self._ring(now)
            except Exception:
                _LOGGER.exception("what an alarm called has failed")
                following = now + 1.0
            if following is not None:
                self.schedule(following)

    def _wait(self) -> bool:
        """Sleep until it is time; False if it was closed."""
        with self._changed:
            while not self._closed:
                left = None if self._when is None else self._when - time.monotonic()
                if left is not None and left <= 0:
                    self._when = None
                    return True
                self._changed.wait(left)
        return False
