"""A histogram that costs a search in a few numbers and two additions.

Labels, running totals and text are computed only when they are read.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import HistogramMetricFamily

__all__ = ["FINE_SECONDS_BUCKETS", "SECONDS_BUCKETS", "TOKENS_BUCKETS", "Histogram"]

SECONDS_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""For what takes as long as a request or a part of one."""
FINE_SECONDS_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
"""For what should take no time: one token, one turn of the event loop."""
TOKENS_BUCKETS: Final = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
"""For lengths of prompts and answers."""


class Histogram:
    """Counts and sums observed values by bucket."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float] = SECONDS_BUCKETS) -> None:
        """`bounds` are the upper ends of the buckets, ascending; what is above the last one is counted too."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self._counts)

    def add(self, other: "Histogram") -> None:
        """Adds the observations of another histogram with the same bounds."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def add_zeros(self, number: int) -> None:
        """Counts `number` observations of zero."""
        self._counts[0] += number

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """Adds the samples to a Prometheus metric."""
        bounds = (*(str(bound) for bound in self._bounds), "+Inf")
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
