"""Estimates how long moving so many bytes takes, from what was measured: a latency and a bandwidth.

Old measurements fade; a store that became slow is seen as slow after a few dozen operations.
"""

from typing import Final

__all__ = ["TransferRate"]

_FADING: Final = 0.97
"""What remains of a measurement's weight after each later one: half after 23."""


class TransferRate:
    """A straight line through faded (bytes, seconds) points. It does not lock; whoever owns it does."""

    __slots__ = ("_bytes", "_bytes2", "_cross", "_seconds", "_weight")

    def __init__(self) -> None:
        self._weight = self._bytes = self._seconds = self._bytes2 = self._cross = 0.0

    def record(self, nbytes: int, seconds: float) -> None:
        """Records that an operation moved `nbytes` bytes in `seconds`."""
        self._weight = self._weight * _FADING + 1
        self._bytes = self._bytes * _FADING + nbytes
        self._seconds = self._seconds * _FADING + seconds
        self._bytes2 = self._bytes2 * _FADING + float(nbytes) ** 2
        self._cross = self._cross * _FADING + nbytes * seconds

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes moved for each second that operations took, latency included; None if nothing was seen."""
        return self._bytes / self._seconds if self._seconds > 0 and self._bytes > 0 else None

    def expected_s(self, nbytes: int) -> float | None:
        """Seconds for `nbytes` bytes; None if nothing was seen. Never less than 0, and more bytes never take less."""
        if not self._weight:
            return None
        mean_bytes, mean_seconds = self._bytes / self._weight, self._seconds / self._weight
        spread = self._bytes2 / self._weight - mean_bytes**2
        slope = 0.0
        if spread > (mean_bytes / 10) ** 2:  # sizes differ enough to tell latency from bandwidth
            slope = (self._cross / self._weight - mean_bytes * mean_seconds) / spread
        latency = mean_seconds - slope * mean_bytes
        if slope <= 0 or latency < 0:  # they do not, or noise outweighs them: in proportion
            slope, latency = (mean_seconds / mean_bytes, 0.0) if mean_bytes else (0.0, mean_seconds)
        return latency + slope * nbytes
