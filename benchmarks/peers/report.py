"""Summarizes the rows of a run: medians with intervals, and ratios of neighbors in a round. Pure.

Ratios and differences are taken within a round, where both sides met the same noise, and summed up by their median.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.peers.measure import DIRECT, Row
from benchmarks.peers.routers import OURS, OURS_ALONE, OURS_SGLANG, PEERS
from benchmarks.ratios import Interval, median_interval

__all__ = ["Comparison", "best_peer", "compare", "report"]

_ABSENT: Final = "-"
"""Stands for a router that does not take such requests."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One router in one scenario of a part, beside ours."""

    scenario: str
    router: str
    value: Interval
    """Of the router."""
    ours: Interval
    """Ours over the router's; for latencies, ours less the router's."""

    @property
    def is_ours(self) -> bool:
        """Returns whether this is our proxy, with whatever options."""
        return self.router.startswith(OURS)


def compare(
    rows: Sequence[Row],
    value: Callable[[Row], float],
    *,
    own: str = OURS,
    difference: bool = False,
    over_direct: bool = False,
) -> list[Comparison]:
    """Compares all routers of a part with ours, scenario by scenario.

    Args:
        rows: of one part and one kind of loop.
        value: what is compared.
        own: which of our proxies is compared.
        difference: whether to subtract instead of dividing.
        over_direct: whether to subtract the bare engine's value of the same round first.
    """
    found: list[Comparison] = []
    for scenario in dict.fromkeys(row.scenario for row in rows):
        taken = {(row.router, row.round): value(row) for row in rows if row.scenario == scenario}
        names = list(dict.fromkeys(name for name, _ in taken))
        rounds = sorted({number for _, number in taken})
        for name in names:
            if name == DIRECT:
                continue
            values = [taken[name, each] - (taken[DIRECT, each] if over_direct else 0.0) for each in rounds]
            pairs = [(taken[own, each], taken[name, each]) for each in rounds]
            beside = [one - other if difference else one / max(other, 1e-9) for one, other in pairs]
            found.append(Comparison(scenario, name, median_interval(values), median_interval(beside)))
    return found


def best_peer(comparisons: Sequence[Comparison], scenario: str) -> Comparison | None:
    """Returns the peer with the lowest value in a scenario."""
    peers = [each for each in comparisons if each.scenario == scenario and each.router in PEERS]
    return min(peers, key=lambda each: each.value.median, default=None)


def report(rows: Sequence[Row]) -> str:
    """Returns everything that was measured, as Markdown."""
    sections = [
        _cpu_section("defaults", "CPU per request, default settings", rows),
        _cpu_section("everything", "CPU per request, everything on beside `cache_aware` of the others", rows),
        _throughput_section(rows),
        _latency_section(rows),
        _memory_section(rows),
        _limits_section(rows),
    ]
    return "\n\n".join(section for section in sections if section)


def _of(rows: Sequence[Row], part: str, loop: str = "closed") -> list[Row]:
    return [row for row in rows if (row.part, row.loop) == (part, loop)]


def _cpu_section(part: str, title: str, rows: Sequence[Row]) -> str:
    taken = _of(rows, part)
    if not taken:
        return ""
    compared = compare(taken, lambda row: row.cpu_us)
    names = list(dict.fromkeys(each.router for each in compared))
    pairs = [(OURS, name) for name in names if not name.startswith(OURS)]
    both = {OURS: compared}
    if OURS_SGLANG in names:
        both[OURS_SGLANG] = compare(taken, lambda row: row.cpu_us, own=OURS_SGLANG)
        pairs += [(OURS_SGLANG, name) for name in PEERS if name in names and name != "vllm-router"]
    figures: list[list[str]] = []
    ratios: list[list[str]] = []
    for scenario in dict.fromkeys(each.scenario for each in compared):
        found = {(own, each.router): each for own in both for each in both[own] if each.scenario == scenario}
        costs = [found.get((OURS, name)) for name in names]
        figures.append([scenario, *(_microseconds(each.value) if each else _ABSENT for each in costs)])
        best = best_peer(compared, scenario)
        told = f"{best.ours} ({best.router})" if best else _ABSENT
        beside = [found.get(pair) for pair in pairs]
        ratios.append([scenario, *(str(each.ours) if each else _ABSENT for each in beside), told])
    heads = [f"{own} / {name}" for own, name in pairs]
    return "\n\n".join(
        [
            f"### {title}",
            "Microseconds of user and system time of the router's processes; median of the rounds [95 %].",
            _table(["scenario", *names], figures),
            "Ours over the other's, paired by round; below 1, ours costs less.",
            _table(["scenario", *heads, f"{OURS} / best peer"], ratios),
        ]
    )


def _throughput_section(rows: Sequence[Row]) -> str:
    taken = _of(rows, "throughput")
    if not taken:
        return ""
    lines: list[list[str]] = []
    for each in compare(taken, lambda row: row.per_s):
        same = [row for row in taken if (row.scenario, row.router) == (each.scenario, each.router)]
        cost, others = (
            _median(same, lambda row: row.cpu_us),
            _median(same, lambda row: row.engine_us + row.generator_us),
        )
        rate = f"{each.value.median:.0f} [{each.value.low:.0f}, {each.value.high:.0f}]"
        lines.append([each.scenario, each.router, rate, str(each.ours), f"{cost:.0f}", f"{others:.0f}"])
    for scenario in dict.fromkeys(row.scenario for row in taken):
        same = [row for row in taken if (row.scenario, row.router) == (scenario, DIRECT)]
        others = _median(same, lambda row: row.engine_us + row.generator_us)
        lines.append(
            [scenario, "(engine alone)", f"{_median(same, lambda row: row.per_s):.0f}", "", "", f"{others:.0f}"]
        )
    heads = ["scenario", "router", "requests/s", "ours / its", "CPU us/request", "engines and generator us/request"]
    sections = ["### Throughput, two workers or threads on the same two cores", _table(heads, lines)]
    return "\n\n".join([*sections, *_scaling_lines(taken)])


def _scaling_lines(taken: Sequence[Row]) -> list[str]:
    """Returns for each scenario how much more two workers carry than one, and how much more they could.

    Engines and the generator use the same two cores: what they need is not there for a second worker.
    """
    lines: list[str] = []
    for each in compare(taken, lambda row: row.per_s):
        if each.router == OURS_ALONE:
            both = [row for row in taken if (row.scenario, row.router) == (each.scenario, OURS)]
            whole_us = _median(both, lambda row: row.cpu_us + row.engine_us + row.generator_us)
            most = 2e6 / whole_us / each.value.median
            lines.append(
                f"{each.scenario}: two workers carry {each.ours} times what one does. With the two cores always busy, "
                f"{most:.2f} is the most: a request takes {whole_us:.0f} us of them, engines and generator included."
            )
    return lines


def _latency_section(rows: Sequence[Row]) -> str:
    taken = _of(rows, "defaults", "open")
    if not taken:
        return ""
    p50 = compare(taken, lambda row: row.p50_ms, difference=True, over_direct=True)
    p99 = compare(taken, lambda row: row.p99_ms, difference=True, over_direct=True)
    lines: list[list[str]] = []
    for middle, tail in zip(p50, p99, strict=True):
        rate = next(row.per_s for row in taken if row.scenario == middle.scenario)
        beside = ["", ""] if middle.is_ours else [str(middle.ours), str(tail.ours)]
        lines.append([middle.scenario, f"{rate:.0f}", middle.router, str(middle.value), str(tail.value), *beside])
    heads = ["scenario", "requests/s", "router", "added p50 ms", "added p99 ms", "ours less its: p50", "p99"]
    return "\n\n".join(
        [
            "### Added latency, open loop at half of what the slowest carries",
            "Over the bare engine in the same round, which has one leg where a router has two.",
            _table(heads, lines),
        ]
    )


def _memory_section(rows: Sequence[Row]) -> str:
    routers = dict.fromkeys((row.part, row.router) for row in rows if row.router != DIRECT)
    lines: list[list[str]] = []
    for part, name in routers:
        most = max(row.rss_mb for row in rows if (row.part, row.router) == (part, name))
        lines.append([part, name, f"{most:.0f}"])
    return f"### Resident memory\n\n{_table(['part', 'router', 'MiB at most'], lines)}"


def _limits_section(rows: Sequence[Row]) -> str:
    """Tells what engines and generator can do, to show that they are not what limits a router."""
    taken = [row for row in rows if row.router == DIRECT and row.loop == "closed" and row.part == "defaults"]
    lines: list[list[str]] = []
    for scenario in dict.fromkeys(row.scenario for row in taken):
        same = [row for row in taken if row.scenario == scenario]
        per_s, engine_us = _median(same, lambda row: row.per_s), _median(same, lambda row: row.engine_us)
        generator_us = _median(same, lambda row: row.generator_us)
        lines.append([scenario, f"{per_s:.0f}", f"{engine_us:.0f}", f"{generator_us:.0f}"])
    heads = ["scenario", "requests/s", "engine us/request", "generator us/request"]
    return f"### The stub engines asked without a router\n\n{_table(heads, lines)}" if lines else ""


def _median(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
    return statistics.median(value(row) for row in rows)


def _microseconds(interval: Interval) -> str:
    return f"{interval.median:.0f} [{interval.low:.0f}, {interval.high:.0f}]"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)
