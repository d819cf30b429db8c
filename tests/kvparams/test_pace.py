"""An instance's backlog and speed: what was given is counted once, and how fast it is is learnt."""

from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.pace import Pace
from kvparams.speed import SpeedCurve, features


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def taught(seconds_per_token: float, per_pair: float, noise: float = 0.0) -> SpeedCurve:
    """A curve after two hundred legs of an engine like that."""
    die, curve = Random(2), SpeedCurve()
    for _ in range(200):
        context = die.randrange(100, 40_000)
        new = max(1, int(context * die.choice((1.0, 1.0, 0.5, 0.1))))
        seconds = 0.02 + seconds_per_token * new + per_pair * new * (context - new / 2)
        curve.learn(features(new, context), seconds * exp(die.gauss(-noise * noise / 2, noise)))
    return curve


@pytest.mark.parametrize("per_pair", [0.0, 6e-9])
@pytest.mark.parametrize("seconds_per_token", [2e-5, 1.25e-4, 2e-3])
def test_a_curve_is_learnt_whatever_the_engine_quadratic_attention_or_not(
    seconds_per_token: float, per_pair: float
) -> None:
    curve = taught(seconds_per_token, per_pair)
    for new, context in ((500, 500), (30_000, 30_000), (1000, 30_000), (120_000, 120_000)):
        true = 0.02 + seconds_per_token * new + per_pair * new * (context - new / 2)
        assert curve.seconds(new, context) == pytest.approx(true, rel=0.1)


def test_noise_averages_out_and_one_stall_changes_little() -> None:
    curve = taught(1.25e-4, 0.0, noise=0.3)
    before = curve.seconds(10_000, 10_000)
    assert before == pytest.approx(1.27, rel=0.2)
    for _ in range(8):
        curve.learn(features(1000, 1000), 0.145)
    curve.learn(features(1000, 1000), 30.0)
    for _ in range(7):
        curve.learn(features(1000, 1000), 0.145)
    assert curve.seconds(10_000, 10_000) < 1.6 * before


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6), st.floats(0, 1e4)), max_size=60))
def test_a_curve_never_promises_less_than_nothing_nor_less_for_more(legs: list[tuple[int, int, float]]) -> None:
    curve = SpeedCurve()
    for new, cached, seconds in legs:
        curve.learn(features(new, new + cached), seconds)
        assert 0 <= curve.seconds(10, 100) <= curve.seconds(20, 100) <= curve.seconds(20, 200) < float("inf")


def test_the_wait_is_what_was_given_less_what_the_first_has_run() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begin("a", 2.0)
    pace.begin("b", 3.0)
    assert pace.wait_s == 5.0
    clock.now = 1.5
    assert pace.wait_s == 3.5
    clock.now = 9.0
    assert pace.wait_s == 3.0  # "a" overruns: it is about to end
    pace.end("a", 1000, 1000)
    assert pace.wait_s == 3.0
    pace.end("b")
    assert pace.wait_s == 0.0
    assert pace.speed.seen == 1
    pace.begin("c", 1.0)
    with pytest.raises(ValueError, match="already"):
        pace.begin("c", 1.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.floats(0, 10)), max_size=60))
def test_nothing_is_counted_twice_or_leaks(steps: list[tuple[bool, int, float]]) -> None:
    clock = Clock()
    pace = Pace(clock)
    given_to: dict[int, float] = {}
    for begins, leg, seconds in steps:
        clock.now += seconds / 10
        if begins and leg not in given_to:
            given_to[leg] = seconds
            pace.begin(leg, seconds)
        elif not begins:
            given_to.pop(leg, None)
            pace.end(leg)
        assert -1e-9 <= pace.wait_s <= sum(given_to.values()) + 1e-9
    for leg in range(6):
        pace.end(leg)
    assert pace.wait_s == 0.0


def test_fetching_runs_beside_the_work_and_one_fetch_after_the_other() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begin("a", 5.0)
    alone = pace.fetch_s(10_000)
    pace.begin("b", 1.0, fetch_s=alone)
    assert pace.wait_s == 6.0
    assert pace.fetch_s(10_000) == pytest.approx(2 * alone)
    clock.now = alone
    assert pace.fetch_s(10_000) == pytest.approx(alone)
