"""Runs Dynamo's RadixTree under the same workload and prints one line of JSON.

An interpreter that has `ai-dynamo-runtime` runs it. The figures are of its Python binding; `match` has the hashing of a
Python list in it, `find` has not.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from itertools import chain, islice
from typing import Any

from benchmarks.index_workload import BLOCK, questions, sequences


def main() -> None:
    core: Any = import_module("dynamo._core")
    tree, hashed = core.RadixTree(), core.compute_block_hash_for_seq
    blocks, workers = int(sys.argv[1]), int(sys.argv[2])
    prompts = sequences(blocks, workers)
    first = next(prompts)  # what all prompts share exists now
    before, stored, spent, number = resident(), 0, 0, 0
    for tokens, holders in chain((first,), prompts):
        own = hashed(tokens.tolist(), BLOCK)
        names = [hash((number, one)) & (2**63 - 1) for one in own]
        listed = [{"block_hash": name, "tokens_hash": one} for name, one in zip(names, own, strict=True)]
        for worker in holders:
            number += 1
            event = {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": listed}}}
            text = json.dumps(event).encode()
            started = time.process_time_ns()
            tree.apply_event(worker, text)
            spent += time.process_time_ns() - started
            stored += len(own)
    grown = resident() - before
    asked = questions([tokens for tokens, _ in islice(sequences(blocks, workers), 200)])
    lists = [one.tolist() for one in asked]
    ready = [hashed(one, BLOCK) for one in lists]
    found = {
        "bytes": grown / blocks,
        "stored": stored / spent * 1e3,
        "match": median(lambda at: tree.find_matches(hashed(lists[at], BLOCK)).scores, len(lists)),
        "find": median(lambda at: tree.find_matches(ready[at]).scores, len(lists)),
    }
    print(json.dumps(found))


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def median(ask: Callable[[int], object], questions: int) -> float:
    """Microseconds of 3,000 calls, question after question."""
    took: list[int] = []
    for number in range(3000):
        started = time.perf_counter_ns()
        ask(number % questions)
        took.append(time.perf_counter_ns() - started)
    return statistics.median(took) / 1e3


if __name__ == "__main__":
    main()
