"""Log lines that strangers can cause, written seldom.

Clients decide how often something happens, never how much is logged.
"""

import threading
import time
from typing import Final

__all__ = ["LogRateLimiter"]

_EVERY_S: Final = 60.0


class LogRateLimiter:
    """A `LogRateLimiter` limits one kind of log line; any thread may use it."""

    def __init__(self, every_s: float = _EVERY_S) -> None:
        """Allows the first line at once.

        Args:
            every_s: the least time between two lines, in seconds.
        """
        self._every_s: Final = every_s
        self._lock: Final = threading.Lock()
        self._next = 0.0

    def is_due(self) -> bool:
        """Returns whether it may be written now; then not again for a while."""
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                return False
            self._next = now + self._every_s
        return True
