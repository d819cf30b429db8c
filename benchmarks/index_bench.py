"""Measures the cost of the prefix index: `make bench-index`.

Bars at 1,000,000 blocks of 16 tokens and 64 workers, eviction on: a question of 8,192 tokens, 73 % of it held, from a
Python list 2.5 x as fast as Dynamo's RadixTree, from an int32 array 45 us; 40 bytes a block; 1,500,000 blocks stored in
a second of CPU time; no call takes longer than 2 ms.

Dynamo has its turn in the same run where `$KVBENCH_HOME/venvs/dyn` (by default ~/.cache/kvbench) has it. Every row is
a process of its own, so that memory is its own; prompts are made again for the questions, so that none are kept. Times
of questions are medians. The longest step is the longest of all calls that change the index: what is stored while it
fills and evicts, and at the end what is removed or forgotten, 4,096 blocks at a time, and workers that leave. It is CPU
time, with Python's garbage collection on for what the index makes.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import chain as joined
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.index_dynamo import median, resident
from benchmarks.index_workload import BLOCK, questions, sequences
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
    prompts = sequences(blocks + more, workers)
    first = next(prompts)  # what all prompts share exists now
    gc.collect()
    gc.freeze()
    before = resident()
    index, longest = PrefixIndex(blocks), LongestStep()
    spent, stored, made = [0, 0], [0, 0], 0
    for tokens, holders in joined((first,), prompts):
        hashes = chain.hashes(tokens, namespace)
        for worker in holders:
            full = int(len(index) > blocks - len(hashes))
            spent[full] += longest.measure(partial(index.stored, worker, hashes, now=made))
            stored[full] += len(hashes)
        made += 1
    grown = resident() - before
    kept = min(200, blocks // 1024 + 1)
    last = [tokens for tokens, _ in islice(sequences(blocks + more, workers), made - kept, None)]
    asked = questions(last)
    lists = [one.tolist() for one in asked]
    ready = [chain.hashes(one, namespace) for one in asked]
    held = [max(index.match(one).held[0].values()) for one in ready]
    assert min(held) == 6000 // BLOCK, "a question is not held as it should be"
    found = {
        "bytes": grown / len(index),
        "stored": stored[0] / spent[0] * 1e3,
        "evicting": stored[1] / spent[1] * 1e3,
        "array": median(lambda at: index.match(chain.hashes(asked[at], namespace)), len(asked)),
        "list": median(lambda at: index.match(chain.hashes(lists[at], namespace)), len(asked)),
        "hashes": median(lambda at: index.match(ready[at]), len(asked)),
    }
    gc.freeze()
    everything = np.concatenate([chain.hashes(one, namespace) for one in last])
    for worker in range(min(workers, 8)):
        for first_block in range(0, len(everything), 4096):
            longest.measure(partial(index.removed, worker, everything[first_block : first_block + 4096]))
        longest.measure(partial(index.cleared, worker))
    for _ in range(100):
        longest.measure(partial(index.forget, 4096))
    return found | {"longest": longest.cpu / 1e6, "wall": longest.wall / 1e6}


class LongestStep:
    """The longest of some calls, in nanoseconds."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0

    def measure(self, call: Callable[[], object]) -> int:
        """Calls; returns the CPU time."""
        started, clock = time.thread_time_ns(), time.perf_counter_ns()
        call()
        clock = time.perf_counter_ns() - clock
        took = time.thread_time_ns() - started
        self.cpu, self.wall = max(self.cpu, took), max(self.wall, clock)
        return took


if __name__ == "__main__":
    main()
