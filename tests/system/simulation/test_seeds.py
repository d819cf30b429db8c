"""Tests the proxy under seeded faults on a virtual clock.

`python -m tests.system.simulation replay SEED` replays one seed.
"""

import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.system.simulation.processes import CORES, simulate

Effort = Callable[[int, int], int]
Record = Callable[[dict[str, object]], None]


@pytest.mark.slow
@pytest.mark.alone
def test_whatever_goes_wrong_nothing_leaks_and_nobody_is_told_a_lie(effort: Effort, record: Record) -> None:
    count = effort(2_000, 100_000)
    began = time.perf_counter()
    parts = simulate(*(("seeds", first, count - first, CORES) for first in range(CORES)))
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part["counts"])
    record({**counts, "seconds": round(time.perf_counter() - began)})
    bad = sorted(seed for part in parts for seed in part["bad"])
    reports = [report for part in parts for report in part["reports"]]
    assert not bad, f"seeds {bad[:20]}, {len(bad)} of {count}; the first:\n{reports[0]}"
    assert counts["seeds"] == count
    # The law is not kept by doing nothing: most answers are whole, and every kind of ending comes.
    assert counts["whole"] > counts["an error"] > counts["an error midway"] > count / 200
    assert counts["faults"] > count / 2
    # Behind a broker work is done, handed out again, told to be lost, let go, and put aside.
    assert counts["work done"] > counts["queued"] > count / 20
    assert min(counts[what] for what in ("redelivered", "work lost", "work cancelled", "dead: expired")) > count / 1000


@pytest.mark.slow
@pytest.mark.alone
def test_a_seed_repeats_to_the_letter_in_another_process() -> None:
    first, second = simulate(("traces", 0, 60), ("traces", 0, 60))
    assert first == second
    assert len(set(first)) == 60
    (alone,) = simulate(("traces", 59, 1))
    assert alone == first[59:]
