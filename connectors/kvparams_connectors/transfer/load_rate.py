"""Determines whether a load is worth its time: the measured rate of loads against the rate of recomputing.

Pure. Where nothing has been measured, a load goes ahead; and of those that look too slow one in 16 does, for what was
measured once need not be true for ever.
"""

import threading
from typing import Final

__all__ = ["LoadRate"]

_WEIGHT: Final = 0.2
"""Of the newest load in the average."""
_PROBE_EVERY: Final = 16
_LEAST_BYTES: Final = 64 << 10
"""Less says more about latency than about the rate."""


class LoadRate:
    """A moving average of how fast loads are, and what follows from it. Any thread may use it."""

    def __init__(self, recompute_tokens_per_s: float | None, store_bytes_per_s: float | None = None) -> None:
        """Begins without a measurement.

        Args:
            recompute_tokens_per_s: the engine's prefill speed, in tokens per second; None: every load is worthwhile.
            store_bytes_per_s: the assumed speed of loads until one was measured, in bytes per second; None: unknown.
        """
        self._recompute = recompute_tokens_per_s
        self._rate = store_bytes_per_s
        self._skipped = 0
        self._lock = threading.Lock()

    @property
    def bytes_per_s(self) -> float:
        """0 while nothing is known."""
        with self._lock:
            return self._rate or 0.0

    def observe(self, nbytes: int, seconds: float) -> None:
        """A load of `nbytes` took so long, failures included; 0 bytes after a time-out count as the least."""
        if seconds <= 0 or (0 < nbytes < _LEAST_BYTES):
            return
        rate = max(nbytes, 1) / seconds
        with self._lock:
            self._rate = rate if self._rate is None else (1 - _WEIGHT) * self._rate + _WEIGHT * rate

    def is_worth_loading(self, nbytes: int, tokens: int) -> bool:
        """Returns whether to load `nbytes` bytes rather than to compute `tokens` tokens."""
        with self._lock:
            if self._recompute is None or self._rate is None or nbytes * self._recompute <= tokens * self._rate:
                self._skipped = 0
                return True
            self._skipped += 1
            return self._skipped % _PROBE_EVERY == 0
