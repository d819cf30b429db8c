"""Counts what a tiered store has done, in values.

Counted where it happens, in whatever thread, and read as a copy.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvparams_connectors.store import Result, ResultCode, Results

__all__ = ["TieredCounters", "TieredStatistics"]


@dataclass(frozen=True, slots=True)
class TieredStatistics:
    """Values since the store was opened."""

    found: tuple[int, ...]
    """get: by each tier."""
    missed: int = 0
    """get: by none, and every tier said so."""
    promoted: int = 0
    """Put into a faster tier; once for each such tier."""
    not_promoted: int = 0
    """There was no room to stage them, or the tier did not take them."""
    written_back: int = 0
    """write=back: a slower tier has them by now; once for each such tier."""
    not_written_back: int = 0
    """write=back: a slower tier did not take them."""


class TieredCounters:
    """`TieredStatistics` as it grows."""

    def __init__(self, tiers: int) -> None:
        self._lock = threading.Lock()
        self._seen = TieredStatistics((0,) * tiers)

    def statistics(self) -> TieredStatistics:
        """As things stand."""
        with self._lock:
            return self._seen

    def record_get(self, sources: Sequence[int | None], results: Sequence[Result]) -> None:
        """A get ended: which tier each value came from."""
        with self._lock:
            seen = self._seen
            found = tuple(count + sources.count(tier) for tier, count in enumerate(seen.found))
            missed = sum(result.code is ResultCode.MISS for result in results)
            self._seen = replace(seen, found=found, missed=seen.missed + missed)

    def record_not_staged(self, count: int) -> None:
        """Counts values that could not be promoted for want of room."""
        with self._lock:
            self._seen = replace(self._seen, not_promoted=self._seen.not_promoted + count)

    def record_promoted(self, said: Results) -> None:
        """Counts a faster tier's results for values that came from a slower one."""
        done = sum(result.code is ResultCode.OK for result in said)
        there = sum(result.code is ResultCode.EXISTS for result in said)
        with self._lock:
            seen = self._seen
            self._seen = replace(
                seen, promoted=seen.promoted + done, not_promoted=seen.not_promoted + len(said) - done - there
            )

    def record_written_back(self, said: Results) -> None:
        """Counts a slower tier's results for values that the first tier has."""
        there = sum(result.code in (ResultCode.OK, ResultCode.EXISTS) for result in said)
        with self._lock:
            seen = self._seen
            self._seen = replace(
                seen,
                written_back=seen.written_back + there,
                not_written_back=seen.not_written_back + len(said) - there,
            )
