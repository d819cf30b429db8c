"""Arrival times before a run and percentiles after it. Pure.

A percentile is a value that was really measured (nearest rank), never an interpolation between two.
"""

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Arrivals", "Spread", "arrival_offsets", "percentile"]

Arrivals = Literal["poisson", "fixed"]

_MAX_ARRIVALS = 5_000_000


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0..1) of the values in the ascending `ordered` do not exceed."""
    if not ordered:
        raise ValueError("no values, no percentile")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """A `Spread` is the distribution of one kind of measured time, in milliseconds."""

    count: int
    mean: float
    p50: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of_seconds(cls, seconds: Sequence[float]) -> "Spread | None":
        """The spread of these times, or None if there are none."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        return cls(
            count=len(ordered),
            mean=math.fsum(ordered) / len(ordered) * 1e3,
            p50=percentile(ordered, 0.5) * 1e3,
            p99=percentile(ordered, 0.99) * 1e3,
            p999=percentile(ordered, 0.999) * 1e3,
            max=ordered[-1] * 1e3,
        )


def arrival_offsets(arrivals: Arrivals, *, rate_per_s: float, duration_s: float, seed: int) -> "array[float]":
    """Returns the arrival times in seconds from the start: evenly spaced, or a Poisson process.

    One seed gives one sequence.

    Raises ValueError if the plan has no end in sight (over 5 million arrivals) or no sense.
    """
    if rate_per_s <= 0 or duration_s <= 0:
        raise ValueError(f"rate {rate_per_s}/s and duration {duration_s} s must both be above zero")
    if rate_per_s * duration_s > _MAX_ARRIVALS:
        raise ValueError(f"{rate_per_s}/s for {duration_s} s is over {_MAX_ARRIVALS} arrivals")
    if arrivals == "fixed":
        return array("d", (index / rate_per_s for index in range(int(rate_per_s * duration_s))))
    draw = random.Random(seed)
    offsets = array("d")
    at = draw.expovariate(rate_per_s)
    while at < duration_s:
        offsets.append(at)
        at += draw.expovariate(rate_per_s)
    return offsets
