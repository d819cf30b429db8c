"""Tests that a breaker opens when it should, for ever longer, and lets one trial through at a time."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvparams.routing.breaker import Breaker, BreakerLimits, BreakerState

LIMITS = BreakerLimits(consecutive=3, window=10, failures=5, open_s=1.0, longest_s=8.0)


def opened(limits: BreakerLimits = LIMITS, now: float = 0.0) -> Breaker:
    """One that has just opened."""
    breaker = Breaker(limits)
    while not breaker.record_failure(now):
        assert breaker.allows_requests
    return breaker


@pytest.mark.parametrize(
    "make",
    [
        lambda: BreakerLimits(consecutive=0),
        lambda: BreakerLimits(consecutive=51),
        lambda: BreakerLimits(failures=0),
        lambda: BreakerLimits(failures=51),
        lambda: BreakerLimits(open_s=0.0),
        lambda: BreakerLimits(open_s=16.0),
        lambda: BreakerLimits(longest_s=float("inf")),
        lambda: BreakerLimits(open_s=float("nan")),
    ],
)
def test_limits_that_make_no_sense_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(LIMITS)
    assert not breaker.record_failure(0.0)
    assert not breaker.record_failure(0.0)
    breaker.record_success()
    assert not breaker.record_failure(0.0)
    assert not breaker.record_failure(0.0)
    assert breaker.record_failure(0.0)
    assert not breaker.allows_requests


def test_half_of_what_is_done_failing_opens_it_and_a_fifth_does_not() -> None:
    breaker = Breaker(LIMITS)
    outcomes = [breaker.record_failure(0.0) or breaker.record_success() for _ in range(5)]
    assert outcomes == [False] * 4 + [True]
    breaker = Breaker(LIMITS)
    for number in range(200):
        changed = breaker.record_success() if number % 5 else breaker.record_failure(0.0)
        assert not changed


def test_it_waits_twice_as_long_each_time_up_to_a_bound_and_forgets_in_a_whole_window() -> None:
    breaker = opened()
    waits = [breaker.half_open_at]
    now = 0.0
    for _ in range(5):
        now = breaker.half_open_at
        assert breaker.poll(now)
        breaker.begin_trial()
        assert breaker.record_failure(now)
        waits.append(breaker.half_open_at - now)
    assert waits == [1, 2, 4, 8, 8, 8]
    assert breaker.poll(breaker.half_open_at)
    assert breaker.record_success()
    for _ in range(LIMITS.window - 2):
        assert not breaker.is_pristine
        breaker.record_success()
    breaker.record_success()
    assert breaker.is_pristine
    assert breaker.opened == 0


def test_one_good_answer_does_not_make_a_bad_worker_new() -> None:
    """It is closed again, and opens for longer than before."""
    breaker = opened()
    assert breaker.poll(1.0)
    breaker.begin_trial()
    assert breaker.record_success()
    while not breaker.record_failure(1.0):
        pass
    assert breaker.half_open_at - 1.0 == 2.0


def test_what_had_begun_before_it_opened_tells_nothing() -> None:
    breaker = opened()
    assert not breaker.record_success()
    assert not breaker.record_failure(0.5)
    assert (breaker.state, breaker.half_open_at) == (BreakerState.OPEN, 1.0)


def test_good_probes_shorten_the_wait_and_never_close_it() -> None:
    breaker = opened(BreakerLimits(open_s=60.0, longest_s=60.0))
    waits: list[float] = []
    for now in (0, 5, 10):
        breaker.record_probe_success(now)
        waits.append(breaker.half_open_at - now)
        assert breaker.state is BreakerState.OPEN
    assert waits == [30, 12.5, 3.75]
    assert breaker.poll(20.0)


def test_another_process_is_tried_at_once_and_not_taken_for_good() -> None:
    breaker = opened()
    breaker.record_restart(0.25)
    assert breaker.state is BreakerState.OPEN
    assert breaker.poll(0.25)
    breaker.begin_trial()
    breaker.record_failure(0.25)
    assert breaker.half_open_at == 2.25
    breaker.record_restart(3.0)
    assert breaker.half_open_at == 2.25


def test_another_process_begins_with_a_clean_record() -> None:
    breaker = Breaker(LIMITS)
    breaker.record_failure(0.0)
    breaker.record_failure(0.0)
    breaker.record_restart(1.0)
    assert not breaker.record_failure(1.0)
    assert not breaker.record_failure(1.0)
    assert breaker.record_failure(1.0)


class BreakerMachine(RuleBasedStateMachine):
    """Whatever happens to it in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(LIMITS)
        self.now = 0.0
        self.opened_at = 0.0
        self.streak = 0
        self.outcomes: list[bool] = []
        self.trials = 0

    @rule(quarters=st.integers(0, 40))
    def wait(self, quarters: int) -> None:
        self.now += quarters / 4
        was = self.breaker.state
        if self.breaker.poll(self.now):
            assert was is BreakerState.OPEN
            assert self.now >= self.breaker.half_open_at
            self.trials = 0
        elif was is BreakerState.OPEN:
            assert self.now < self.breaker.half_open_at

    @precondition(lambda self: self.breaker.allows_requests and self.breaker.state is BreakerState.HALF_OPEN)
    @rule()
    def try_it(self) -> None:
        self.breaker.begin_trial()
        self.trials += 1
        assert self.trials == 1
        assert not self.breaker.allows_requests

    @precondition(lambda self: self.breaker.trial)
    @rule()
    def give_up_the_trial(self) -> None:
        self.breaker.end_trial()
        self.trials -= 1
        assert self.breaker.allows_requests

    @rule()
    def succeed(self) -> None:
        was = self.breaker.state
        changed = self.breaker.record_success()
        assert changed is (was is BreakerState.HALF_OPEN)
        assert self.breaker.state is (BreakerState.OPEN if was is BreakerState.OPEN else BreakerState.CLOSED)
        if changed:
            self.outcomes = [False]
        if was is not BreakerState.OPEN:
            self.outcomes.append(True)

    @rule()
    def fail(self) -> None:
        was = self.breaker.state
        changed = self.breaker.record_failure(self.now)
        if was is BreakerState.OPEN:
            assert not changed
            return
        self.outcomes.append(False)
        window = self.outcomes[-LIMITS.window :]
        bad = window[-3:] == [False] * 3 or window.count(False) >= LIMITS.failures
        assert changed is (bad or was is BreakerState.HALF_OPEN)
        if changed:
            self.opened_at = self.now
            assert LIMITS.open_s <= self.breaker.half_open_at - self.now <= LIMITS.longest_s

    @rule()
    def probe(self) -> None:
        was, until = self.breaker.state, self.breaker.half_open_at
        self.breaker.record_probe_success(self.now)
        assert self.breaker.state is was
        assert min(until, self.now) <= self.breaker.half_open_at <= until

    @rule()
    def restart(self) -> None:
        was = self.breaker.state
        self.breaker.record_restart(self.now)
        assert self.breaker.state is was
        assert self.breaker.half_open_at <= self.now or was is not BreakerState.OPEN
        if was is BreakerState.CLOSED:
            self.outcomes = [False, True] if self.breaker.opened else []

    @invariant()
    def never_waits_longer_than_it_may(self) -> None:
        assert self.breaker.half_open_at <= self.opened_at + LIMITS.longest_s
        assert self.breaker.allows_requests is not (self.breaker.state is BreakerState.OPEN or self.breaker.trial)
        if self.breaker.is_pristine:
            assert all(self.outcomes[-LIMITS.window :])


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(stateful_step_count=40)
