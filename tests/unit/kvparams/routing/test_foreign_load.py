"""Tests that load that this proxy knows is never taken for foreign load, and that readings become stale."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.routing.foreign_load import ForeignLoad, MeanLeg

COUNTS = st.integers(0, 1000)


def test_what_the_engine_has_beyond_the_known_legs_is_foreign() -> None:
    load = ForeignLoad()
    load.record(7, 3, 2, 10.0)
    assert load.legs(10.0) == 4
    load.record(7, 3, 7, 10.5)
    assert load.legs(10.5) == 0


@given(COUNTS, COUNTS, COUNTS)
def test_known_legs_are_never_counted_twice(depth: int, before: int, after: int) -> None:
    load = ForeignLoad()
    load.record(depth, before, after, 1.0)
    assert load.legs(1.0) + max(before, after) == max(depth, before, after)


def test_a_reading_that_is_followed_by_none_fades() -> None:
    load = ForeignLoad()
    load.record(8, 0, 0, 10.0)
    assert [load.legs(10.0 + each) for each in (0.0, 2.0, 4.0, 6.0, 60.0)] == [8, 8, 4, 2, 0]


def test_a_figure_that_does_not_move_for_a_minute_fades_until_it_moves() -> None:
    load = ForeignLoad()
    for second in range(80):
        load.record(4, 0, 0, float(second))
        if second == 59:
            assert load.legs(59.0) == 4
    assert load.legs(79.0) == 0
    load.record(5, 0, 0, 80.0)
    assert load.legs(80.0) == 5


def test_known_legs_that_come_and_go_show_that_the_figure_is_alive() -> None:
    load = ForeignLoad()
    for second in range(80):
        load.record(4 + second % 2, second % 2, second % 2, float(second))
    assert load.legs(79.0) == 4


def test_a_mean_leg_is_that_of_this_proxys_legs() -> None:
    mean = MeanLeg()
    assert (mean.tokens, mean.seconds) == (0.0, 0.0)
    mean.record(0, 0, 0, 0.0)
    assert mean.tokens == 0.0
    mean.record(2, 3000, 1, 0.5)
    assert (mean.tokens, mean.seconds) == (1500.0, 0.5)
    for _ in range(500):
        mean.record(1, 100, 1, 0.1)
    assert mean.tokens == pytest.approx(100.0, rel=0.01)
    assert mean.seconds == pytest.approx(0.1, rel=0.01)
