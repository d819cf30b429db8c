"""The open-loop comparison on the rig: latency added by this proxy and by a peer at the same rate.

All sides get the same requests at the same moments. Within a round, ours, the peer and an engine without any router get
one and the same sequence of arrivals, at half of what the slower of the two can carry; who goes first changes from
round to round.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load_process import LoadError, open_at
from benchmarks.ratios import Interval, median_interval
from benchmarks.rig import DECODE_PORTS, ENGINE_PORTS, OURS, Rig, name_of
from tests.support.processes import Processes, require_free, tree_usage

__all__ = ["OpenFigures", "OpenResult", "compare_open", "open_table", "run_open"]

_CONCURRENCY = 64
_WARM_UP_S = 0.5
_CAPACITY_S = 2.0
_CAPACITY_TRIES = 2


@dataclass(frozen=True, slots=True)
class OpenFigures:
    """An `OpenFigures` holds the figures of one router in one round."""

    scenario: str
    router: str
    round: int
    rate_per_s: float
    e2e_p50_ms: float
    e2e_p99_ms: float
    lag_p99_ms: float
    rss_mb: float
    problem: str | None
    """What is wrong with the engines' counters, if anything."""


@dataclass(frozen=True, slots=True)
class OpenResult:
    """This proxy beside the peer in one scenario; `added` is over no router in the same round."""

    scenario: str
    peer: str
    rate_per_s: float
    ours_added_p50_ms: Interval
    peer_added_p50_ms: Interval
    ours_added_p99_ms: Interval
    peer_added_p99_ms: Interval
    p99_difference_ms: Interval
    """Ours less the peer's, round by round: below zero, ours is better."""
    p99_ratio: float
    """Of the medians of what is added: a single round's may well be near zero or below."""
    ours_rss_mb: float
    peer_rss_mb: float


def run_open(
    rig: Rig, processes: Processes, *, peer: str, scenarios: Sequence[str], rounds: int, duration_s: float
) -> list[OpenFigures]:
    """Start the engines and both routers, find the rates, take the rounds. Raises StartError or LoadError."""
    routers = [rig.router(name) for name in (OURS, peer)]
    require_free([*ENGINE_PORTS, *(router.port for router in routers)])
    processes.start("mock", rig.mock, ready=[rig.mock_ready])
    pids: dict[str, int] = {}
    ports = {"direct": DECODE_PORTS[0]}
    for router in routers:
        ports[router.name] = router.port
        pids[router.name] = processes.start(router.name, router.command, ready=router.ready, directory=rig.home)
    figures: list[OpenFigures] = []
    for scenario in scenarios:
        rig.prepare(scenario)
        capacity = {
            name: max(
                rig.capacity_per_s(ports[name], scenario, concurrency=_CONCURRENCY, limit_s=_CAPACITY_S)
                for _ in range(_CAPACITY_TRIES)
            )
            for name in (OURS, peer)
        }
        rate_per_s = min(capacity.values()) / 2
        carried = ", ".join(f"{name_of(name)} {per_s:.0f}/s" for name, per_s in capacity.items())
        print(f"{scenario}: {carried}; asking for {rate_per_s:.0f}/s", file=sys.stderr, flush=True)
        for number in range(rounds):
            order = [OURS, peer, "direct"]
            turn = number % len(order)
            for name in order[turn:] + order[:turn]:
                taken = _take(rig, scenario, name, ports[name], pids.get(name), number, rate_per_s, duration_s)
                figures.append(taken)
                times = f"p50 {taken.e2e_p50_ms:.2f} ms, p99 {taken.e2e_p99_ms:.2f} ms"
                print(f"{number} {scenario} {name_of(name)}: {times}", file=sys.stderr, flush=True)
    return figures


def _take(
    rig: Rig, scenario: str, name: str, port: int, pid: int | None, number: int, rate_per_s: float, duration_s: float
) -> OpenFigures:
    rig.prepare(scenario)
    report = open_at(
        port,
        rig.ask(scenario),
        rate_per_s=rate_per_s,
        duration_s=duration_s,
        warm_up_s=_WARM_UP_S,
        seed=number,
    )
    if report.e2e is None or report.lag is None:
        raise LoadError(f"{scenario}, {name_of(name)}: nothing was timed")
    return OpenFigures(
        scenario=scenario,
        router=name,
        round=number,
        rate_per_s=rate_per_s,
        e2e_p50_ms=report.e2e.p50,
        e2e_p99_ms=report.e2e.p99,
        lag_p99_ms=report.lag.p99,
        rss_mb=tree_usage(pid).rss_mb if pid else 0.0,
        problem=rig.counted().problem(report.requests, 0) if pid else None,
    )


def compare_open(figures: Sequence[OpenFigures], peer: str) -> list[OpenResult]:
    """Sum up the rounds, scenario by scenario."""
    results: list[OpenResult] = []
    for scenario in dict.fromkeys(each.scenario for each in figures):
        taken = {(each.router, each.round): each for each in figures if each.scenario == scenario}
        rounds = sorted({number for _, number in taken})
        direct = [taken["direct", number] for number in rounds]
        ours = [taken[OURS, number] for number in rounds]
        theirs = [taken[peer, number] for number in rounds]
        ours_p99 = [one.e2e_p99_ms - base.e2e_p99_ms for one, base in zip(ours, direct, strict=True)]
        peer_p99 = [one.e2e_p99_ms - base.e2e_p99_ms for one, base in zip(theirs, direct, strict=True)]
        results.append(
            OpenResult(
                scenario=scenario,
                peer=peer,
                rate_per_s=ours[0].rate_per_s,
                ours_added_p50_ms=_added_p50(ours, direct),
                peer_added_p50_ms=_added_p50(theirs, direct),
                ours_added_p99_ms=median_interval(ours_p99),
                peer_added_p99_ms=median_interval(peer_p99),
                p99_difference_ms=median_interval([mine - its for mine, its in zip(ours_p99, peer_p99, strict=True)]),
                p99_ratio=statistics.median(ours_p99) / statistics.median(peer_p99),
                ours_rss_mb=max(each.rss_mb for each in ours),
                peer_rss_mb=max(each.rss_mb for each in theirs),
            )
        )
    return results


def _added_p50(taken: Sequence[OpenFigures], direct: Sequence[OpenFigures]) -> Interval:
    return median_interval([one.e2e_p50_ms - base.e2e_p50_ms for one, base in zip(taken, direct, strict=True)])


def open_table(results: Sequence[OpenResult]) -> str:
    """The comparison as a Markdown table."""
    lines = [
        "| scenario | at requests/s | added p50 ms: ours | peer | added p99 ms: ours | peer | ours - peer, p99 | "
        "ours / peer, p99 | RSS MB ours / peer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.scenario} | {each.rate_per_s:.0f} | {each.ours_added_p50_ms} | {each.peer_added_p50_ms} | "
        f"{each.ours_added_p99_ms} | {each.peer_added_p99_ms} | {each.p99_difference_ms} | {each.p99_ratio:.2f} | "
        f"{each.ours_rss_mb:.0f} / {each.peer_rss_mb:.0f} |"
        for each in results
    ]
    return "\n".join(lines)
