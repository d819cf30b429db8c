"""Tests that the figures of the conversations benchmark on real engines add up."""

from pathlib import Path

import pytest

from benchmarks.conversations_bench import Held, hold, table

pytestmark = pytest.mark.slow


@pytest.mark.timeout(400)  # nine processes that import torch, one fleet after the other
def test_what_one_engine_computed_is_fetched_by_another_where_there_is_a_store_and_nowhere_else(tmp_path: Path) -> None:
    """Three conversations on two engines: by round robin none stays where it was."""
    alone, shared = hold(tmp_path, talks=3, turns=2, step_ms=0, policies=["round_robin"])
    assert (alone.fleet, shared.fleet) == ("no store", "one store")
    known = 1200 / (1200 + 1600)  # of the second turn, what the first one had
    assert alone.fetched == 0.0
    assert shared.local + shared.fetched == pytest.approx(known, abs=0.05)
    assert shared.ttft_ms > 0


def test_ratios_are_beside_round_robin_of_the_same_fleet_and_beside_no_store() -> None:
    rows = [Held("a", "round_robin", 200, 0.1, 0), Held("b", "round_robin", 100, 0, 0), Held("b", "c", 50, 1, 0)]
    assert table(rows).splitlines()[-1] == "| b | c | 50 | 0.50 | 0.25 | 100.0% | 0.0% |"
