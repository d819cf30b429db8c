"""Summing up rounds: a median, and how far it can be trusted. Pure.

Comparisons are made within a round, where both sides met the same noise; the rounds' results are then summed up, never
the raw figures of one side against those of the other.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Interval", "median_interval"]

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def median_interval(values: Sequence[float], *, seed: int = 1) -> Interval:
    """The median of the rounds and the percentile bootstrap interval of it. Raises ValueError on no values."""
    if not values:
        raise ValueError("no rounds, no median")
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    low, high = medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]
    return Interval(statistics.median(values), low, high)
