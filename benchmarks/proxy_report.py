"""The proxy benchmark's rows, and what is made of them: a summary and a table.

Differences and ratios are taken within a round and then summed up by their median.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.ratios import Interval, median_interval

__all__ = ["ClosedRow", "OpenRow", "Results", "SummaryRow", "table"]


@dataclass(frozen=True, slots=True)
class ClosedRow:
    """A `ClosedRow` is one subject in one scenario and round of the closed loop."""

    scenario: str
    subject: str
    cpu_us: float | None
    """User and system time of its whole process tree per request, microseconds."""
    rss_mb: float | None
    right_per_s: float


@dataclass(frozen=True, slots=True)
class OpenRow:
    """An `OpenRow` is one subject in one scenario and round of the open loop."""

    scenario: str
    subject: str
    rate_per_s: float
    e2e_p50_ms: float
    e2e_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    lag_p99_ms: float
    """How late the generator sent: near `e2e_p99_ms`, the machine was too busy for this round to mean much."""


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A `SummaryRow` is one subject in one scenario.

    Values are medians over the rounds, `added` is over `direct` in the same round.
    """

    scenario: str
    subject: str
    cpu_us: float
    of_floor: Interval
    rss_mb: float
    capacity_per_s: float
    rate_per_s: float
    added_p50_ms: float
    added_p99_ms: float
    added_ttft_p50_ms: float
    added_ttft_p99_ms: float


@dataclass(slots=True)
class Results:
    """All rows of a run, in the order in which they were taken."""

    closed: list[ClosedRow] = field(default_factory=list[ClosedRow])
    open: list[OpenRow] = field(default_factory=list[OpenRow])

    def summary(self) -> list[SummaryRow]:
        """Returns one row per scenario for the floor and one for the proxy."""
        scenarios = list(dict.fromkeys(row.scenario for row in self.closed))
        return [self._sum_up(scenario, subject) for scenario in scenarios for subject in ("floor", "proxy")]

    def _sum_up(self, scenario: str, subject: str) -> SummaryRow:
        closed = [row for row in self.closed if (row.scenario, row.subject) == (scenario, subject)]
        floor = [row for row in self.closed if (row.scenario, row.subject) == (scenario, "floor")]
        opened = [row for row in self.open if (row.scenario, row.subject) == (scenario, subject)]
        direct = [row for row in self.open if (row.scenario, row.subject) == (scenario, "direct")]
        pairs = list(zip(opened, direct, strict=True))
        return SummaryRow(
            scenario=scenario,
            subject=subject,
            cpu_us=statistics.median(row.cpu_us or 0.0 for row in closed),
            of_floor=median_interval(
                [(row.cpu_us or 0.0) / (least.cpu_us or 1.0) for row, least in zip(closed, floor, strict=True)]
            ),
            rss_mb=max(row.rss_mb or 0.0 for row in closed),
            capacity_per_s=statistics.median(row.right_per_s for row in closed),
            rate_per_s=opened[0].rate_per_s,
            added_p50_ms=statistics.median(row.e2e_p50_ms - base.e2e_p50_ms for row, base in pairs),
            added_p99_ms=statistics.median(row.e2e_p99_ms - base.e2e_p99_ms for row, base in pairs),
            added_ttft_p50_ms=statistics.median(row.ttft_p50_ms - base.ttft_p50_ms for row, base in pairs),
            added_ttft_p99_ms=statistics.median(row.ttft_p99_ms - base.ttft_p99_ms for row, base in pairs),
        )


def table(rows: Sequence[SummaryRow]) -> str:
    """The summary as a Markdown table."""
    lines = [
        "| scenario | subject | CPU us/request | x floor [95 %] | requests/s at most | RSS MB | at requests/s | "
        "added p50 / p99 ms | added TTFT p50 / p99 ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.scenario} | {row.subject} | {row.cpu_us:.0f} | {row.of_floor} | {row.capacity_per_s:.0f} | "
        f"{row.rss_mb:.0f} | {row.rate_per_s:.0f} | {row.added_p50_ms:.2f} / {row.added_p99_ms:.2f} | "
        f"{row.added_ttft_p50_ms:.2f} / {row.added_ttft_p99_ms:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)
