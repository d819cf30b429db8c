"""Tests an instance's backlog and speed: given work is counted once, and the speed is learned."""

from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.cost_model import CostModel, FleetCostPrior, leg_features
from kvparams.engine_backlog import EngineBacklog


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def taught(seconds_per_token: float, per_pair: float, noise: float = 0.0) -> CostModel:
    """A curve after two hundred legs of an engine like that."""
    die, curve = Random(2), CostModel()
    for _ in range(200):
        context = die.randrange(100, 40_000)
        new = max(1, int(context * die.choice((1.0, 1.0, 0.5, 0.1))))
        seconds = 0.02 + seconds_per_token * new + per_pair * new * (context - new / 2)
        curve.learn(leg_features(new, context), seconds * exp(die.gauss(-noise * noise / 2, noise)))
    return curve


@pytest.mark.parametrize("per_pair", [0.0, 6e-9])
@pytest.mark.parametrize("seconds_per_token", [2e-5, 1.25e-4, 2e-3])
def test_a_curve_is_learnt_whatever_the_engine_quadratic_attention_or_not(
    seconds_per_token: float, per_pair: float
) -> None:
    curve = taught(seconds_per_token, per_pair)
    for new, context in ((500, 500), (30_000, 30_000), (1000, 30_000), (120_000, 120_000)):
        true = 0.02 + seconds_per_token * new + per_pair * new * (context - new / 2)
        assert curve.predict_s(new, context) == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("tokens", [16, 64, 100])
def test_short_legs_do_not_make_long_ones_cheap(tokens: int) -> None:
    """Of one length they do not tell a leg from its tokens; the guess must do, whatever the noise."""
    die, curve = Random(5), CostModel()
    true = 0.02 + 8000 / 1280
    for _ in range(50):
        curve.learn(leg_features(tokens, tokens), (0.02 + tokens / 1280) * exp(die.gauss(-0.02, 0.2)))
        assert true / 3 < curve.predict_s(8000, 8000) < 3 * true


def test_lengths_that_hardly_differ_do_not_outdo_noise() -> None:
    """What looks like a slope, or like none, is noise."""
    said: list[float] = []
    for seed in range(40):
        die, curve = Random(seed), CostModel()
        for _ in range(60):
            tokens = die.randint(60, 68)
            curve.learn(leg_features(tokens, tokens), (0.02 + tokens / 1280) * exp(die.gauss(-0.02, 0.2)))
        said.append(curve.predict_s(8000, 8000) / (0.02 + 8000 / 1280))
    assert min(said) > 0.1
    assert sum(one > 0.3 for one in said) >= 36


def test_on_engines_that_are_known_a_short_first_leg_says_nothing_of_tokens() -> None:
    """An engine that was started anew is not left without long prompts because it got a short one first."""
    usual = FleetCostPrior()
    known, new, tiny = CostModel(usual), CostModel(usual), CostModel(usual)
    for tokens in (500, 8000, 2000, 100) * 5:
        known.learn(leg_features(tokens, tokens), 0.02 + tokens / 8000)
    new.learn(leg_features(64, 64), 0.028)
    assert new.predict_s(8000, 8000) == pytest.approx(1.02, rel=0.25)
    tiny.learn(leg_features(1, 1), 0.0201)
    assert tiny.predict_s(8000, 8000) == pytest.approx(1.02, rel=0.25)


def test_noise_averages_out_and_one_stall_changes_little() -> None:
    curve = taught(1.25e-4, 0.0, noise=0.3)
    before = curve.predict_s(10_000, 10_000)
    assert before == pytest.approx(1.27, rel=0.2)
    for _ in range(8):
        curve.learn(leg_features(1000, 1000), 0.145)
    curve.learn(leg_features(1000, 1000), 30.0)
    for _ in range(7):
        curve.learn(leg_features(1000, 1000), 0.145)
    assert curve.predict_s(10_000, 10_000) < 1.6 * before


@pytest.mark.parametrize(("lengths", "leg_s"), [((16, 16), 0.02), ((900, 1_100), 0.001)])
def test_one_leg_of_another_length_says_at_once_what_a_token_costs(lengths: tuple[int, int], leg_s: float) -> None:
    """Legs of one length do not tell a leg from its tokens: of the first long one something else may be expected, of no
    second one."""
    die, curve = Random(5), CostModel()
    for _ in range(101):  # so many that one leg changes little
        tokens = die.randint(*lengths)
        curve.learn(leg_features(tokens, tokens), (leg_s + 1.25e-4 * tokens) * die.uniform(0.9, 1.1))
    long = leg_s + 1.25e-4 * 8_000
    curve.learn(leg_features(8_000, 8_000), long)
    assert curve.predict_s(8_000, 8_000) == pytest.approx(long, rel=0.2)
    assert curve.predict_s(2_000, 2_000) == pytest.approx(leg_s + 1.25e-4 * 2_000, rel=0.5)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6), st.floats(0, 1e4)), max_size=60))
def test_a_curve_never_promises_less_than_nothing_nor_less_for_more(legs: list[tuple[int, int, float]]) -> None:
    curve = CostModel()
    for new, cached, seconds in legs:
        curve.learn(leg_features(new, new + cached), seconds)
        assert 0 <= curve.predict_s(10, 100) <= curve.predict_s(20, 100) <= curve.predict_s(20, 200) < float("inf")


def test_the_wait_is_what_was_given_less_what_the_first_has_run() -> None:
    clock = Clock()
    pace = EngineBacklog(clock)
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
    assert pace.cost_model.sample_count == 1
    pace.begin("c", 1.0)
    with pytest.raises(ValueError, match="already"):
        pace.begin("c", 1.0)


def ran(pace: EngineBacklog, clock: Clock, legs: int, tokens: int, seconds: float, *, batch: int = 1) -> None:
    """So many legs were waiting, and as many at a time as `batch` ended together, after the seconds of them all."""
    for leg in range(legs):
        pace.begin(leg, pace.cost_model.predict_s(tokens, tokens))
    for leg in range(legs):
        clock.now += 1e-4 if leg % batch else seconds * batch
        pace.end(leg, tokens, tokens)


@pytest.mark.parametrize("batch", [1, 2, 3, 6])
def test_what_legs_of_one_batch_took_is_told_by_all_of_them(batch: int) -> None:
    """Each by itself would be told to have taken as long as all, or nothing."""
    clock = Clock()
    pace = EngineBacklog(clock)
    for _ in range(40):
        ran(pace, clock, 6, 1000, 0.1, batch=batch)
        assert pace.wait_s == 0.0
    assert pace.cost_model.predict_s(1000, 1000) == pytest.approx(0.1, rel=0.02)
    assert pace.cost_model.relative_error < 0.02


@pytest.mark.parametrize("seconds", [1e-3, 0.1, 10.0])
def test_an_engine_without_a_break_is_learnt_all_the_same_however_wrong_the_guess(seconds: float) -> None:
    clock = Clock()
    pace = EngineBacklog(clock)
    ran(pace, clock, 50, 1000, seconds)
    assert pace.cost_model.sample_count == 50
    assert pace.cost_model.predict_s(1000, 1000) == pytest.approx(seconds, rel=0.02)


def test_a_leg_that_overruns_is_as_far_from_its_end_as_legs_are_usually_off() -> None:
    clock, die = Clock(), Random(4)
    pace = EngineBacklog(clock)
    for _ in range(300):
        ran(pace, clock, 1, 1000, 0.1 * exp(die.gauss(-0.125, 0.5)))
    assert pace.cost_model.relative_error == pytest.approx(0.5, abs=0.15)
    pace.begin("long", 2.0)
    pace.begin("next", 1.0)
    assert pace.wait_s == 3.0
    for later in (1.9, 2.0, 9.0):
        clock.now += later
        assert pace.wait_s == pytest.approx(1.0 + 2.0 * pace.cost_model.relative_error)


def fetched(pace: EngineBacklog, clock: Clock, tokens: int, seconds: float, *, waits: float = 0.0) -> None:
    """A leg that fetches so many tokens in these seconds and computes 1,000 in 0.1 s, behind one that takes `waits`."""
    rest = pace.cost_model.predict_s(1000, 1000 + tokens)
    if waits:
        pace.begin("before", waits)
    pace.begin("it", rest, pace.expected_fetch_s(tokens))
    if waits:
        clock.now += waits
        pace.end("before")
    clock.now += max(0.0, seconds - waits) + 0.1
    pace.end("it", 1000, 1000 + tokens, tokens)
    clock.now += 10.0


@pytest.mark.parametrize("waits", [0.0, 0.3])
def test_what_fetching_takes_is_learnt_apart_from_computing(waits: float) -> None:
    """Every other leg waits: it does not say when its fetch began, and says nothing against what the others say."""
    clock, die = Clock(), Random(6)
    pace = EngineBacklog(clock)
    for context in (1000, 2000, 9000, 30_000) * 10:  # 10,000 tokens/s, whatever is in front
        ran(pace, clock, 1, context, context / 10_000)
    before = pace.cost_model.predict_s(1000, 11_000)
    for number in range(60):
        tokens = die.randrange(5_000, 40_000)
        fetched(pace, clock, tokens, 0.2 + 1e-4 * tokens, waits=waits * (number % 2))
    assert pace.cost_model.predict_fetch_s(10_000) == pytest.approx(1.2, rel=0.1)
    assert pace.cost_model.predict_fetch_s(40_000) == pytest.approx(4.2, rel=0.1)
    assert pace.cost_model.predict_s(1000, 11_000) == pytest.approx(before, rel=0.02)


def test_where_every_leg_waits_a_fetch_is_taken_for_no_longer_than_it_is_and_no_shorter_than_what_was_seen() -> None:
    clock, die = Clock(), Random(6)
    pace = EngineBacklog(clock)
    ran(pace, clock, 40, 1000, 0.1)
    for _ in range(60):
        tokens = die.randrange(5_000, 40_000)
        fetched(pace, clock, tokens, 0.2 + 1e-4 * tokens, waits=0.3)
    assert 0.9 * 0.9 < pace.cost_model.predict_fetch_s(10_000) < 1.2 * 1.1
    assert 3.9 * 0.9 < pace.cost_model.predict_fetch_s(40_000) < 4.2 * 1.1


@pytest.mark.parametrize("queued", [1, 2, 6, 20])
@pytest.mark.parametrize("fetch_s", [0.01, 0.5])
def test_waiting_for_its_turn_is_not_charged_to_a_fetch(queued: int, fetch_s: float) -> None:
    """An engine that begins to fetch what a leg needs only when the leg's turn has come: so does one that is full."""
    clock = Clock()
    pace = EngineBacklog(clock)
    ran(pace, clock, 40, 1000, 0.1)
    for _ in range(40):
        for leg in range(queued):
            pace.begin(leg, pace.cost_model.predict_s(1000, 2000), pace.expected_fetch_s(1000))
        for leg in range(queued):
            clock.now += fetch_s + 0.1
            pace.end(leg, 1000, 2000, 1000)
        clock.now += 1.0
    assert pace.cost_model.predict_fetch_s(1000) == pytest.approx(fetch_s, rel=0.2, abs=0.03)
    assert pace.cost_model.predict_s(1000, 2000) == pytest.approx(0.1, rel=0.05)


def test_a_fetch_that_nobody_waited_for_took_no_longer_than_that() -> None:
    """So a store that was slow once is not believed to be slow for ever."""
    clock = Clock()
    pace = EngineBacklog(clock)
    ran(pace, clock, 40, 1000, 0.1)
    for _ in range(5):
        fetched(pace, clock, 10_000, 8.0)
    assert pace.cost_model.predict_fetch_s(10_000) > 4.0
    for _ in range(60):
        fetched(pace, clock, 10_000, 0.3, waits=0.5)
    assert pace.cost_model.predict_fetch_s(10_000) < 0.8


def test_of_a_new_engine_the_usual_is_expected_until_it_tells() -> None:
    clock, usual = Clock(), FleetCostPrior()
    old, new, stranger = EngineBacklog(clock, usual), EngineBacklog(clock, usual), EngineBacklog(clock)
    ran(old, clock, 50, 1000, 5.0)
    assert new.cost_model.predict_s(1000, 1000) == old.cost_model.predict_s(1000, 1000) == pytest.approx(5.0, rel=0.02)
    assert stranger.cost_model.predict_s(1000, 1000) < 1.0
    assert new.cost_model.sample_count == 0
    ran(new, clock, 1, 1000, 50.0)
    assert new.cost_model.predict_s(1000, 1000) == pytest.approx(50.0, rel=0.05)
    assert old.cost_model.predict_s(1000, 1000) == pytest.approx(5.0, rel=0.02)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.floats(0, 10)), max_size=60))
def test_nothing_is_counted_twice_or_leaks(steps: list[tuple[bool, int, float]]) -> None:
    clock = Clock()
    pace = EngineBacklog(clock)
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
    pace = EngineBacklog(clock)
    pace.begin("a", 5.0)
    alone = pace.expected_fetch_s(10_000)
    pace.begin("b", 1.0, fetch_s=alone)
    assert pace.wait_s == 6.0
    assert pace.expected_fetch_s(10_000) == pytest.approx(2 * alone)
    clock.now = alone
    assert pace.expected_fetch_s(10_000) == pytest.approx(alone)


def test_foreign_legs_are_waited_for_and_are_no_idle_time() -> None:
    clock = Clock()
    pace = EngineBacklog(clock)
    clock.now = 5.0
    assert pace.idle_s == 5.0
    pace.set_foreign(2, 3.0)
    assert (pace.wait_s, pace.idle_s) == (3.0, 0.0)
    pace.begin("a", 2.0)
    assert pace.wait_s == 5.0
    assert (pace.given_legs, pace.given_s) == (1, 2.0)
    pace.set_foreign(0, 0.0)
    assert pace.wait_s == 2.0
    pace.end("a")
    assert (pace.wait_s, pace.given_legs, pace.given_s) == (0.0, 0, 0.0)


@pytest.mark.parametrize("foreign", [True, False])
def test_what_foreign_legs_delay_does_not_make_an_engine_seem_slow(foreign: bool) -> None:
    clock, die = Clock(), Random(3)
    pace = EngineBacklog(clock)
    for leg in range(200):
        if foreign:
            pace.set_foreign(1, 0.1)
        pace.begin(leg, pace.cost_model.predict_s(1000, 1000))
        clock.now += 0.1 * (1 + die.choice((0, 0, 1, 3)))  # the delay
        pace.end(leg, 1000, 1000)
    learned = pace.cost_model.predict_s(1000, 1000)
    if foreign:
        assert learned == pytest.approx(0.1, rel=0.1)
    else:  # the control: without foreign legs it is the engine that is slow
        assert learned > 0.15


def test_an_engine_is_learned_anew_once_foreign_legs_have_stayed_away() -> None:
    clock = Clock()
    pace = EngineBacklog(clock)
    pace.set_foreign(1, 0.1)
    pace.set_foreign(0, 0.0)
    for leg in range(7):
        pace.begin(leg, 0.1)
        clock.now += 0.1
        pace.end(leg, 1000, 1000)
    assert pace.cost_model.sample_count == 0
    clock.now += 60.0
    pace.begin("late", 0.1)
    clock.now += 0.1
    pace.end("late", 1000, 1000)
    assert pace.cost_model.sample_count == 1


@pytest.mark.parametrize("load_first", [True, False])
def test_what_is_computed_beside_a_loaded_adapter_is_no_faster_for_it(load_first: bool) -> None:
    """Two prompts of one batch, one of which has to load its adapter first, for 1 s; a batch takes 0.2 s without."""
    clock = Clock()
    pace = EngineBacklog(clock)
    for number in range(40):
        pace.begin(number, 0.1)
        clock.now += 0.1
        pace.end(number, 1000, 1000)
    for _ in range(40):
        pace.begin("other", 0.1)
        pace.begin("load", 0.1, load_s=0.5)
        clock.now += 1.2
        for leg in ("load", "other") if load_first else ("other", "load"):
            pace.end(leg, 1000, 1000)
            clock.now += 1e-6
    assert pace.cost_model.predict_s(1000, 1000) == pytest.approx(0.1, rel=0.05)
    assert pace.cost_model.adapter_load_s == pytest.approx(1.1 if load_first else 1.0, rel=0.05)
    assert pace.wait_s == 0.0


def test_an_adapter_is_loaded_before_the_prompt_is_computed_and_is_waited_for() -> None:
    clock = Clock()
    pace = EngineBacklog(clock)
    pace.begin("one", 0.1, load_s=0.5)
    assert pace.wait_s == pytest.approx(0.6)
    pace.begin("two", 0.1)
    pace.add_load("two", 0.4)
    assert pace.wait_s == pytest.approx(1.1)
    pace.add_load("three", 9.0)  # it was never given
    assert pace.wait_s == pytest.approx(1.1)
    for leg in ("one", "two"):
        pace.end(leg)
    assert pace.wait_s == 0.0
