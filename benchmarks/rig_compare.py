"""This proxy beside its peers, on an external bench rig if there is one.

Without a rig this file is of no use, and no other part of the project needs it.

    python benchmarks/rig_compare.py --rig DIR --rig-home DIR [--rounds 9] [--peers vr-pd-rr,...] [--only closed|open]
        [--plain] [--options OPTIONS] [--other OPTIONS]

Closed loop: CPU per request as the median of per-round ratios with its bootstrap interval, and the engines' counters.
Open loop: added p50 and p99 beside the first peer at half the slower one's capacity. Exit status 1 if a counter does
not add up. With `--plain` all engines are aggregated ones, one leg for each request, and only the closed loop is taken.
Tables on stdout, JSON in the results folder.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.load_process import LoadError
from benchmarks.rig import OTHER, SCENARIOS, Rig, name_of
from benchmarks.rig_closed import closed_table, compare_closed, problems, run_closed
from benchmarks.rig_open import compare_open, open_table, run_open
from tests.support.processes import Processes, StartError

__all__ = ["main"]

_CLOSED_SCENARIOS = "ns-s-64,ns-l-64,stb-s-64,st-s-64"
_OPEN_SCENARIOS = "ns-s-64,ns-l-64,stb-s-64"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="This proxy beside its peers, on an external bench rig.")
    parser.add_argument("--rig", type=Path, required=True, help="the folder with bench.py")
    parser.add_argument("--rig-home", type=Path, required=True, help="where its setup put mock, load and venvs")
    parser.add_argument("--peers", default="vr-pd-rr", help="routers of the rig, or ''; the open loop takes the first")
    parser.add_argument("--only", choices=("closed", "open"), help="one of the two comparisons")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scenarios", default=_CLOSED_SCENARIOS, help="closed loop")
    parser.add_argument("--scale", type=float, default=0.5, help="closed loop: of the rig's requests a round")
    parser.add_argument("--limit", type=float, default=20.0, help="closed loop: seconds after which a run is cut off")
    parser.add_argument("--open-scenarios", default=_OPEN_SCENARIOS, help="open loop")
    parser.add_argument("--open-seconds", type=float, default=3.0, help="open loop: seconds a run takes")
    parser.add_argument("--options", default="", help="further options of this proxy, as one word: '--continuation'")
    parser.add_argument("--other", help="closed loop: options of one more proxy of ours, started as a peer")
    parser.add_argument("--plain", action="store_true", help="closed loop: one leg, engines that do all themselves")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the tables, write JSON."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    peers: list[str] = [name for name in arguments.peers.split(",") if name]
    other: list[str] | None = None if arguments.other is None else shlex.split(arguments.other)
    plain: bool = arguments.plain
    scenarios: list[str] = arguments.scenarios.split(",")
    open_scenarios: list[str] = arguments.open_scenarios.split(",")
    unknown = [name for name in scenarios + open_scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f"unknown scenarios {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    if (plain or other is not None or not peers) and arguments.only != "closed":
        parser.error("--plain, --other and no peers are for --only closed")
    document: dict[str, object] = {
        "taken": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "plain": plain,
        "options": arguments.options,
        "other": arguments.other,
    }
    wrong: list[str] = []
    try:
        rig = Rig(arguments.rig, arguments.rig_home)
        with rig.with_ours(shlex.split(arguments.options), other, plain=plain):
            if arguments.only != "open":
                peers += [OTHER] if other is not None else []
                rows = run_closed(
                    rig,
                    peers=peers,
                    scenarios=scenarios,
                    rounds=arguments.rounds,
                    scale=arguments.scale,
                    limit_s=arguments.limit,
                )
                compared = compare_closed(rows, peers)
                print(closed_table(compared))
                document["closed"] = {"summary": [asdict(each) for each in compared], "rows": rows}
                wrong += problems(rows, arguments.limit, plain=plain)
            if arguments.only != "closed":
                with tempfile.TemporaryDirectory() as logs, Processes(Path(logs)) as processes:
                    figures = run_open(
                        rig,
                        processes,
                        peer=peers[0],
                        scenarios=open_scenarios,
                        rounds=arguments.rounds,
                        duration_s=arguments.open_seconds,
                    )
                results = compare_open(figures, peers[0])
                print(f"\npeer: {name_of(peers[0])}\n\n{open_table(results)}")
                document["open"] = {
                    "summary": [asdict(each) for each in results],
                    "rows": [asdict(each) for each in figures],
                }
                wrong += [
                    f"open loop, round {each.round} {each.scenario} {name_of(each.router)}: {each.problem}"
                    for each in figures
                    if each.problem
                ]
    except (StartError, LoadError) as error:
        print(f"rig_compare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rig_compare: interrupted; every process it started is gone", file=sys.stderr)
        return 130
    document["problems"] = wrong
    results_directory: Path = arguments.results
    results_directory.mkdir(parents=True, exist_ok=True)
    (results_directory / "rig.json").write_text(json.dumps(document, indent=1) + "\n")
    right = "every request counted, " + ("one leg without KV params" if plain else "both legs carried KV params")
    print("\ncounters: " + ("; ".join(wrong) or right))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
