"""`python -m benchmarks.replay TRACE`: a trace through a model of a fleet, under every policy."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.replay.parts import PARTS, Row, run_part
from benchmarks.replay.report import table, write_plot
from benchmarks.replay.trace import load

SAMPLE = Path(__file__).with_name("sample.jsonl")


def main(arguments: list[str] | None = None) -> int:
    """Replay, print the tables, write rows and pictures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", default=SAMPLE, help="JSON lines; default: the sample here")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; may be given more than once")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder for rows and pictures")
    given = parser.parse_args(arguments)
    try:
        trace = load(given.trace)
    except (OSError, ValueError) as error:
        print(f"python -m benchmarks.replay: {error}", file=sys.stderr)
        return 2
    given.results.mkdir(parents=True, exist_ok=True)
    for part in given.part or PARTS:
        rows: list[Row] = []
        for row in run_part(part, trace):
            rows.append(row)
            print(f"{part}: {row.point}, {row.policy}: {row.mean_s:.3f} s", file=sys.stderr)
        print(f"\n## {part}\n\n{table(rows)}\n", flush=True)
        (given.results / f"replay-{part}.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        write_plot(rows, given.results / f"replay-{part}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
