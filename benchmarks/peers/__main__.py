"""Compares the proxy with the Rust routers of the field, on one machine, in one run.

    python -m benchmarks.peers [--quick] [--peers vllm-router,smg | --peers none]      # make bench-peers

All routers stand in front of the same stub engines and take turns within each round, so that they meet the same noise.
The main figure is CPU time per request; every ratio is of neighbors in one round. The parts are:

    defaults     closed loop with 64 requests in flight, then an open loop for added latency
    everything   client keys, limits, log, continuation, signing and cache_aware, beside the others' cache_aware
    throughput   two workers or threads, on the same two cores

It prints tables, and writes peers.json, peers.md and peers.svg to the results folder. Ctrl-C ends all that it started.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.load_process import LoadError
from benchmarks.peers.measure import Bench, Row, closed_rounds, open_rounds, progress
from benchmarks.peers.plot import plot
from benchmarks.peers.report import compare, report
from benchmarks.peers.routers import (
    FLOORS,
    PEERS,
    Router,
    everything_on,
    floor,
    ours,
    ours_like_sglang,
    ours_with_one_worker,
    peer,
    peer_versions,
    pinned,
)
from benchmarks.scenarios import SCENARIOS
from benchmarks.sides import processor
from tests.support.processes import Processes, StartError

__all__ = ["main"]

_PARTS: Final = {
    "defaults": ("ns-s-64", "ns-l-64", "chat-s-64", "chat-l-64", "stb-s-64", "st-s-64"),
    "everything": ("ns-s-64", "ns-l-64", "ids-l-64", "stb-s-64", "st-s-64"),
    "throughput": ("ns-s-64", "ns-l-64"),
}
_LATENCY: Final = ("ns-s-64", "ns-l-64")
_THREADS: Final = 2
_PLOT: Final = "CPU per request: median, 95 % interval, 64 requests at once (in brackets: kvparams / that router)"


def _names(known: Sequence[str], what: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [] if text == "none" else text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown {what} {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Our proxy beside other routers.")
    parser.add_argument("--quick", action="store_true", help="two minutes instead of ten: fewer and shorter rounds")
    parser.add_argument("--peers", type=_names(PEERS, "peers"), default=list(PEERS), help="names, or none")
    parser.add_argument("--parts", type=_names(tuple(_PARTS), "parts"), default=list(_PARTS), help="of the measurement")
    parser.add_argument("--scenarios", type=_names(tuple(SCENARIOS), "scenarios"), help="of each part's, only these")
    parser.add_argument("--rounds", type=int, help="of each part (default: 5; with --quick 2)")
    parser.add_argument("--share", type=float, help="of each scenario's requests in a round (default: 0.6; 0.2)")
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")
    return parser


def _routers(part: str, bench: Bench, peers: Sequence[str], folder: Path, cores: Sequence[int]) -> list[Router]:
    engines = bench.engines
    if part == "everything":
        return [everything_on(engines, folder), *(peer(name, engines, policy="cache_aware") for name in peers)]
    if part == "throughput":
        several = [ours(engines, "--workers", str(_THREADS)), ours_with_one_worker(engines)]
        several += [peer(name, engines, threads=_THREADS) for name in peers]
        return [pinned(router, cores) for router in several]
    return [
        *(floor(name, engines) for name in FLOORS),
        ours(engines),
        ours_like_sglang(engines),
        *(peer(name, engines) for name in peers),
    ]


def _take(part: str, arguments: argparse.Namespace, rounds: int, share: float) -> list[Row]:
    """Starts what a part needs, takes its rounds, and ends it."""
    chosen: list[str] | None = arguments.scenarios
    scenarios = [SCENARIOS[name] for name in _PARTS[part] if chosen is None or name in chosen]
    rows: list[Row] = []
    if not scenarios:
        return rows
    usable = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as temporary, Processes(Path(temporary)) as processes:
        bench = Bench(processes, Path(temporary))
        bench.start(_routers(part, bench, arguments.peers, Path(temporary), usable[:_THREADS]))
        rows += closed_rounds(bench, part, scenarios, rounds=rounds, share=share)
        if part == "defaults":
            timed = [each for each in scenarios if each.name in _LATENCY[: 1 if arguments.quick else None]]
            rows += open_rounds(bench, part, timed, rounds=rounds, share=share)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the results."""
    arguments = _parser().parse_args(argv)
    rounds: int = arguments.rounds or (2 if arguments.quick else 5)
    share: float = arguments.share or (0.2 if arguments.quick else 0.6)
    results: Path = arguments.results
    rows: list[Row] = []
    start_s = time.monotonic()
    try:
        results.mkdir(parents=True, exist_ok=True)
        for part in arguments.parts:
            rows += _take(part, arguments, rounds, share)
    except (StartError, LoadError) as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmarks.peers: interrupted; every process it started is gone", file=sys.stderr)
        return 130
    versions = peer_versions(arguments.peers)
    told = ", ".join(f"{name} {version}" for name, version in versions.items()) or "no peers"
    head = f"{processor()}, {os.cpu_count()} cores; {rounds} rounds; {told}"
    text = f"{head}\n\n{report(rows)}\n"
    print(text)
    document = {"taken": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": head, "rows": [asdict(row) for row in rows]}
    (results / "peers.json").write_text(json.dumps(document, indent=1) + "\n")
    (results / "peers.md").write_text(text)
    plotted = [row for row in rows if (row.part, row.loop) == ("defaults", "closed")]
    if plotted:
        (results / "peers.svg").write_text(plot(compare(plotted, lambda row: row.cpu_us), _PLOT))
    progress(f"{time.monotonic() - start_s:.0f} s; results are in {results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
