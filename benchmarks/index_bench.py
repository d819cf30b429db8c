"""Measures the cost of the prefix index: `make bench-index`.

Bars at 1,000,000 blocks of 16 tokens and 64 workers, eviction on: a question of 8,192 tokens, 73 % of it held, from an
int32 array 45 us; from a Python list 1.3 x as fast as Dynamo's RadixTree; 100 bytes a block; 1,500,000 blocks stored in
a second of CPU time; no call takes longer than 5 ms.

Dynamo has its turn in the same run where `$KVBENCH_HOME/venvs/dyn` (by default ~/.cache/kvbench) has it. Every row is
a process of its own, so that memory is its own. Times of questions are medians; the longest step is the longest of all
calls that change the index, by the CPU time of the process, with Python's garbage collection on.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.index_dynamo import median, resident
from benchmarks.index_workload import BLOCK, Tokens, questions, sequences
from kvparams.index.block_hashes import BlockHasher
from kvparams.index.prefix_index import PrefixIndex

__all__ = ["main"]

ROOT: Final = Path(__file__).parents[1]
ROWS: Final = (
    # blocks, workers, blocks stored over and above those there is room for
    (10_000, 64, 10_000),
    (100_000, 64, 100_000),
    (1_000_000, 64, 300_000),
    (1_000_000, 1_000, 300_000),
    (10_000_000, 64, 200_000),
    (10_000_000, 1_000, 200_000),
)
COLUMNS: Final = ("bytes", "stored", "evicting", "longest", "wall", "array", "list", "hashes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", nargs=3, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--largest", type=int, default=10_000_000, help="leave out rows with more blocks")
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measured(*arguments.row)))
        return
    print("| blocks | workers | bytes a block | stored M/s | evicting M/s | longest step ms CPU, wall "
          "| question us: array, list, hashes |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for row in ROWS:
        if row[0] <= arguments.largest:
            asked = [sys.executable, "-m", "benchmarks.index_bench", "--row", *map(str, row)]
            show(f"{row[0]:,} | {row[1]:,}", run(asked))
    python = Path(os.environ.get("KVBENCH_HOME", "~/.cache/kvbench")).expanduser() / "venvs" / "dyn" / "bin" / "python"
    if not python.exists():
        print(f"no Dynamo: there is no {python}")
        return
    found = run([str(python), "-m", "benchmarks.index_dynamo", "1000000", "64"])
    print(f"| Dynamo's RadixTree, 1,000,000 | 64 | {found['bytes']:.0f} | {found['stored']:.2f} | never | "
          f"| list {found['match']:.1f}, hashes {found['find']:.1f} |")  # fmt: skip


def run(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def show(name: str, found: dict[str, float]) -> None:
    times = f"{found['longest']:.2f}, {found['wall']:.2f}"
    asked = f"{found['array']:.1f}, {found['list']:.1f}, {found['hashes']:.1f}"
    print(f"| {name} | {found['bytes']:.1f} | {found['stored']:.2f} | {found['evicting']:.2f} | {times} | {asked} |")


def measured(blocks: int, workers: int, more: int) -> dict[str, float]:
    """Measures one row; `more` blocks are stored when the index is full, so as many are evicted."""
    chain = BlockHasher(5, BLOCK)
    namespace = chain.namespace("m")
    before = resident()
    index = PrefixIndex(blocks)
    spent, stored, longest, wall = [0, 0], [0, 0], 0, 0
    last: list[Tokens] = []
    for number, (tokens, holders) in enumerate(sequences(blocks + more, workers)):
        hashes = chain.hashes(tokens, namespace)
        for worker in holders:
            full = int(len(index) > blocks - len(hashes))
            started, clock = time.thread_time_ns(), time.perf_counter_ns()
            index.stored(worker, hashes, now=number)
            clock = time.perf_counter_ns() - clock
            took = time.thread_time_ns() - started
            spent[full] += took
            stored[full] += len(hashes)
            longest, wall = max(longest, took), max(wall, clock)
        last = [*last[-min(199, blocks // 1024) :], tokens]
    grown = resident() - before
    asked = questions(last)
    lists = [one.tolist() for one in asked]
    ready = [chain.hashes(one, namespace) for one in asked]
    held = [max(index.match(one).held[0].values()) for one in ready]
    assert min(held) == 6000 // BLOCK, "a question is not held as it should be"
    return {
        "bytes": grown / len(index),
        "stored": stored[0] / spent[0] * 1e3,
        "evicting": stored[1] / spent[1] * 1e3,
        "longest": longest / 1e6,
        "wall": wall / 1e6,
        "array": median(lambda at: index.match(chain.hashes(asked[at], namespace)), len(asked)),
        "list": median(lambda at: index.match(chain.hashes(lists[at], namespace)), len(asked)),
        "hashes": median(lambda at: index.match(ready[at]), len(asked)),
    }


if __name__ == "__main__":
    main()
