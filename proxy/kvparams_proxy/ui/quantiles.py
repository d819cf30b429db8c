"""Estimates quantiles of the histograms of a snapshot, as Prometheus does."""

from collections.abc import Mapping
from math import inf
from typing import Final

__all__ = ["QUANTILE_FAMILIES", "quantile"]

QUANTILE_FAMILIES: Final = {
    "ttft": "kvparams_proxy_time_to_first_byte_seconds",
    "itl": "kvparams_proxy_time_per_output_token_seconds",
}


def quantile(
    family: str, share: float, counters: Mapping[str, float], before: Mapping[str, float] | None = None
) -> float | None:
    """Returns a quantile in seconds, or None without values.

    Args:
        family: the name of the histogram.
        share: from 0 to 1.
        counters: those of a snapshot.
        before: those of an earlier snapshot, whose values do not count.
    """
    start = f'{family}_bucket{{le="'
    bounds = sorted(
        (inf if key[len(start) : -2] == "+Inf" else float(key[len(start) : -2]), value - (before or {}).get(key, 0.0))
        for key, value in counters.items()
        if key.startswith(start)
    )
    total = bounds[-1][1] if bounds else 0.0
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound, up_to in bounds:
        if up_to >= share * total and up_to > below:
            return lower if bound == inf else lower + (bound - lower) * (share * total - below) / (up_to - below)
        lower, below = bound, up_to
    return lower
