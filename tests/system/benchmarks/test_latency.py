"""Tests percentiles of latencies and the plans of arrivals."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.latency import Spread, arrival_offsets, percentile


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.001, 1))
def test_a_percentile_is_the_smallest_measured_value_that_covers_its_share(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, share)
    covered = sum(value <= found for value in ordered)
    below = sum(value < found for value in ordered)
    assert found in values
    assert covered >= share * len(ordered) - 1e-9
    assert below < share * len(ordered) + 1e-9


def test_a_spread_is_in_milliseconds_and_finds_the_tail() -> None:
    spread = Spread.of_seconds([index / 1000 for index in range(1000, 0, -1)])
    assert spread is not None
    assert (spread.count, spread.p50, spread.p99, spread.p999, spread.max) == (1000, 500, 990, 999, 1000)
    assert spread.mean == pytest.approx(500.5)


def test_no_values_have_no_spread_and_no_percentile() -> None:
    assert Spread.of_seconds([]) is None
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_fixed_arrivals_are_evenly_spaced_and_end_with_the_plan() -> None:
    assert list(arrival_offsets("fixed", rate_per_s=4, duration_s=1, seed=1)) == [0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_the_rate_asked_for_and_exponential_gaps() -> None:
    offsets = arrival_offsets("poisson", rate_per_s=1000, duration_s=50, seed=7)
    gaps = [after - before for before, after in itertools.pairwise(offsets)]
    assert len(offsets) == pytest.approx(50_000, rel=0.02)
    assert min(gaps) >= 0
    # A share 1/e of exponential gaps is above the mean; of even gaps it would be none or all.
    assert sum(gap > 1e-3 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.01)


def test_one_seed_gives_one_sequence_so_that_two_servers_can_be_asked_the_same() -> None:
    def draw(seed: int) -> list[float]:
        return list(arrival_offsets("poisson", rate_per_s=100, duration_s=1, seed=seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize(("rate_per_s", "duration_s"), [(0, 1), (1, 0), (-1, 1), (1e6, 10)])
def test_a_plan_without_sense_or_end_is_refused(rate_per_s: float, duration_s: float) -> None:
    with pytest.raises(ValueError, match="/s"):
        arrival_offsets("fixed", rate_per_s=rate_per_s, duration_s=duration_s, seed=1)
