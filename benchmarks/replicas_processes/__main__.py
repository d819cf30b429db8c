"""Measures several real proxies that share a fleet through a real Valkey server, beside one proxy.

Engines are stubs that model prefill: each computes one prompt after the other at the simulation's speed and has a
finite prefix cache, so hits and times to first token follow from routing. Requests of the trace arrive in an open loop,
dealt to the proxies in turn. Time is compressed. First so many proxies side by side, then one run in which three
proxies become six, one is killed, and Valkey is stopped and comes back empty.

    python -m benchmarks.replicas_processes TRACE               about 8 minutes
    python -m benchmarks.replicas_processes TRACE --seconds 15 --outage 10      to try it

Each result is a line of JSON on stdout; a table follows. The exit status is 1 if a bar is missed.
"""

import argparse
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import uvloop

from benchmarks.replay.__main__ import SAMPLE
from benchmarks.replay.parts import speed_for
from benchmarks.replay.trace import BLOCK, load, spread
from benchmarks.replay.world import World
from benchmarks.replicas_processes.fault_figures import fault_figures
from benchmarks.replicas_processes.figures import Figure, Run, engine_load_cov, hit_ratio, table, ttft_s
from benchmarks.replicas_processes.scenarios import Settings, disturb, faults_s, side_by_side
from benchmarks.sides import processor
from tests.support.processes import StartError

__all__ = ["main"]


class _Report:
    """Prints figures as they come, and keeps them for the table."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def add(self, figure: Figure) -> None:
        value = round(figure.value, 4) if math.isfinite(figure.value) else None
        print(json.dumps({**asdict(figure), "value": value, "meets": figure.meets}), flush=True)
        self.figures.append(figure)


def _beside_one(
    report: _Report, name: str, run: Run, one: Run | None, *, has_bars: bool = False, is_most: bool = False
) -> None:
    """Reports one run side by side with the run of one replica."""
    (mean_s, p99_s), hits, (cov, cov_requests) = ttft_s(run), hit_ratio(run.log), engine_load_cov(run)
    report.add(Figure(name, "failed requests", len(run.failed), "<= 0"))
    report.add(Figure(name, "hit ratio", hits))
    report.add(Figure(name, "mean time to first token, s", mean_s))
    report.add(Figure(name, "p99 time to first token, s", p99_s))
    report.add(Figure(name, "variation of engines' busy time", cov, "<= 0.06" if is_most else None))
    report.add(Figure(name, "variation of engines' requests", cov_requests))
    report.add(Figure(name, "generator late by, p99, s", run.lag_p99_s))
    if one is None:
        return
    one_mean_s, one_p99_s = ttft_s(one)
    bars = (">= 0.98", "<= 1.05", "<= 1.05") if has_bars else (None,) * 3
    report.add(Figure(name, "hit ratio / one", hits / hit_ratio(one.log), bars[0]))
    report.add(Figure(name, "mean time to first token / one", mean_s / one_mean_s, bars[1]))
    report.add(Figure(name, "p99 time to first token / one", p99_s / one_p99_s, bars[2]))
    report.add(
        Figure(
            name, "variation of engines' busy time / one", cov / engine_load_cov(one)[0], "<= 1.2" if is_most else None
        )
    )


async def _measure(settings: Settings, given: argparse.Namespace, report: _Report) -> None:
    seconds, outage_s = float(given.seconds), float(given.outage)
    has_faults = not given.no_faults
    longest = max(seconds, faults_s(outage_s)) if has_faults else seconds
    _say("1 replica", longest)
    reference = await side_by_side(settings, 1, longest, is_sharing=True)
    one = reference.until(seconds)
    _beside_one(report, "1 replica", one, None)
    most = max(given.replicas, default=0)
    for count in given.replicas:
        _say(f"{count} replicas", seconds)
        run = await side_by_side(settings, count, seconds, is_sharing=True)
        _beside_one(report, f"{count} replicas", run, one, has_bars=True, is_most=count == most)
    if most:
        _say(f"{most} replicas that share nothing", seconds)
        run = await side_by_side(settings, most, seconds, is_sharing=False)
        _beside_one(report, f"{most} replicas that share nothing", run, one)
    if has_faults:
        _say("replicas that come and go, Valkey that stops", longest)
        disturbed, times = await disturb(settings, outage_s)
        for figure in fault_figures(disturbed, times, reference):
            report.add(figure)


def _say(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.0f} s", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas_processes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, nargs="?", default=SAMPLE, help="JSON lines; default: the sample of replay")
    parser.add_argument("--replicas", type=int, nargs="*", default=[2, 4, 8], help="besides one (default: 2 4 8)")
    parser.add_argument("--seconds", type=float, default=50.0, help="of each run side by side (default: 50)")
    parser.add_argument("--outage", type=float, default=60.0, help="seconds that Valkey is away (default: 60)")
    parser.add_argument("--no-faults", action="store_true", help="only the runs side by side")
    parser.add_argument("--engines", type=int, default=8, help="for prefill (default: 8)")
    parser.add_argument("--blocks", type=int, default=4000, help="of 512 tokens in each engine's cache (default: 4000)")
    parser.add_argument("--load", type=float, default=0.95, help="how busy round robin would keep engines (0.95)")
    parser.add_argument("--faster", type=float, default=6.0, help="how much time is compressed (default: 6)")
    parser.add_argument("--answer-tokens", type=int, default=16, help="of each answer, 20 ms apart (default: 16)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    given = _parser().parse_args(argv)
    world = World(given.blocks, workers=given.engines)
    try:
        trace = [each._replace(tokens=len(each.blocks) * BLOCK) for each in spread(load(given.trace))]
    except (OSError, ValueError) as error:
        print(f"replicas_processes: {error}", file=sys.stderr)
        return 2
    speed = speed_for(trace[:4000], world, given.load)
    report = _Report()
    print(f"machine: {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}", file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory(prefix="kvparams-bench-") as folder:
            settings = Settings(trace, world, speed, given.faster, given.answer_tokens, Path(folder))
            uvloop.run(_measure(settings, given, report))
    except KeyboardInterrupt:
        print("\nreplicas_processes: interrupted; everything that it started has ended", file=sys.stderr)
        return 130
    except StartError as error:
        print(f"replicas_processes: {error}", file=sys.stderr)
        return 1
    print("\n" + table(report.figures))
    return 1 if any(each.meets is False for each in report.figures) else 0


if __name__ == "__main__":
    sys.exit(main())
