"""A histogram that costs no more than an append to a list.

Values are counted by bucket many at once; labels, running totals and text are computed only when they are read.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final, cast

from prometheus_client.core import Exemplar, HistogramMetricFamily

__all__ = ["FINE_SECONDS_BUCKETS", "SECONDS_BUCKETS", "TOKENS_BUCKETS", "Histogram"]

SECONDS_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""For what takes as long as a request or a part of one."""
FINE_SECONDS_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
"""For what should take no time: one token, one turn of the event loop."""
TOKENS_BUCKETS: Final = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
"""For lengths of prompts and answers."""


class Histogram:
    """Counts and sums observed values by bucket."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum", "_values", "observe")

    def __init__(self, bounds: Sequence[float] = SECONDS_BUCKETS) -> None:
        """`bounds` are the upper ends of the buckets, ascending; what is above the last one is counted too."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: list[Exemplar | None] = []
        """For each bucket the last one; empty without any."""
        self._sum = 0.0
        self._values: list[float] = []
        """Those that are not counted yet."""
        self.observe: Callable[[float], None] = self._values.append
        """Keeps one value. Whoever calls it also calls `fold` from time to time."""

    def fold(self) -> None:
        """Counts the values that were kept."""
        values = self._values
        if not values:
            return
        values.sort()
        below = 0
        for index, bound in enumerate(self._bounds):
            up_to = bisect_right(values, bound, below)
            self._counts[index] += up_to - below
            below = up_to
        self._counts[-1] += len(values) - below
        self._sum += sum(values)
        values.clear()

    def add_exemplar(self, value: float, trace_id: int, at_s: float) -> None:
        """Names a trace in which a value was observed, as an example of its bucket.

        Args:
            value: the value, which `observe` counts.
            trace_id: the trace.
            at_s: the time, in seconds since 1970.
        """
        if not self._exemplars:
            self._exemplars = [None] * len(self._counts)
        exemplar = Exemplar({"trace_id": f"{trace_id:032x}"}, value, at_s)
        self._exemplars[bisect_left(self._bounds, value)] = exemplar

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self._counts) + len(self._values)

    def add(self, other: "Histogram") -> None:
        """Adds the observations of another histogram with the same bounds."""
        other.fold()
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def add_zeros(self, number: int) -> None:
        """Counts `number` observations of zero."""
        self._counts[0] += number

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """Adds the samples to a Prometheus metric."""
        self.fold()
        bounds = (*(str(bound) for bound in self._bounds), "+Inf")
        counts = accumulate(self._counts)
        exemplars = self._exemplars or [None] * len(bounds)
        buckets = [
            (bound, count) if exemplar is None else (bound, count, exemplar)
            for bound, count, exemplar in zip(bounds, counts, exemplars, strict=True)
        ]
        family.add_metric(labels, cast("Any", buckets), self._sum)
