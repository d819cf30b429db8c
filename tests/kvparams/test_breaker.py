"""A breaker opens when it should, for ever longer, and lets one trial through at a time."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvparams.breaker import Breaker, BreakerLimits, BreakerState

LIMITS = BreakerLimits(consecutive=3, window=10, failures=5, open_s=1.0, longest_s=8.0)


def opened(limits: BreakerLimits = LIMITS, now: float = 0.0) -> Breaker:
    """One that has just opened."""
    breaker = Breaker(limits)
    while not breaker.failed(now):
        assert breaker.admits
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
    assert not breaker.failed(0.0)
    assert not breaker.failed(0.0)
    breaker.succeeded()
    assert not breaker.failed(0.0)
    assert not breaker.failed(0.0)
    assert breaker.failed(0.0)
    assert not breaker.admits


def test_half_of_what_is_done_failing_opens_it_and_a_fifth_does_not() -> None:
    breaker = Breaker(LIMITS)
    outcomes = [breaker.failed(0.0) or breaker.succeeded() for _ in range(5)]
    assert outcomes == [False] * 4 + [True]
    breaker = Breaker(LIMITS)
    for number in range(200):
        changed = breaker.succeeded() if number % 5 else breaker.failed(0.0)
        assert not changed


def test_it_waits_twice_as_long_each_time_up_to_a_bound_and_forgets_in_a_whole_window() -> None:
    breaker = opened()
    waits = [breaker.until]
    now = 0.0
    for _ in range(5):
        now = breaker.until
        assert breaker.poll(now)
        breaker.begin_trial()
        assert breaker.failed(now)
        waits.append(breaker.until - now)
    assert waits == [1, 2, 4, 8, 8, 8]
    assert breaker.poll(breaker.until)
    assert breaker.succeeded()
    for _ in range(LIMITS.window - 2):
        assert not breaker.spotless
        breaker.succeeded()
    breaker.succeeded()
    assert breaker.spotless
    assert breaker.opened == 0


def test_one_good_answer_does_not_make_a_bad_worker_new() -> None:
    """It is closed again, and opens for longer than before."""
    breaker = opened()
    assert breaker.poll(1.0)
    breaker.begin_trial()
    assert breaker.succeeded()
    while not breaker.failed(1.0):
        pass
    assert breaker.until - 1.0 == 2.0


def test_what_had_begun_before_it_opened_tells_nothing() -> None:
    breaker = opened()
    assert not breaker.succeeded()
    assert not breaker.failed(0.5)
    assert (breaker.state, breaker.until) == (BreakerState.OPEN, 1.0)


def test_good_probes_shorten_the_wait_and_never_close_it() -> None:
    breaker = opened(BreakerLimits(open_s=60.0, longest_s=60.0))
    waits: list[float] = []
    for now in (0, 5, 10):
        breaker.probed_well(now)
        waits.append(breaker.until - now)
        assert breaker.state is BreakerState.OPEN
    assert waits == [30, 12.5, 3.75]
    assert breaker.poll(20.0)


def test_another_process_is_tried_at_once_and_not_taken_for_good() -> None:
    breaker = opened()
    breaker.restarted(0.25)
    assert breaker.state is BreakerState.OPEN
    assert breaker.poll(0.25)
    breaker.begin_trial()
    breaker.failed(0.25)
    assert breaker.until == 2.25
    breaker.restarted(3.0)
    assert breaker.until == 2.25


def test_another_process_begins_with_a_clean_record() -> None:
    breaker = Breaker(LIMITS)
    breaker.failed(0.0)
    breaker.failed(0.0)
    breaker.restarted(1.0)
    assert not breaker.failed(1.0)
    assert not breaker.failed(1.0)
    assert breaker.failed(1.0)


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
            assert self.now >= self.breaker.until
            self.trials = 0
        elif was is BreakerState.OPEN:
            assert self.now < self.breaker.until

    @precondition(lambda self: self.breaker.admits and self.breaker.state is BreakerState.HALF_OPEN)
    @rule()
    def try_it(self) -> None:
        self.breaker.begin_trial()
        self.trials += 1
        assert self.trials == 1
        assert not self.breaker.admits

    @precondition(lambda self: self.breaker.trial)
    @rule()
    def give_up_the_trial(self) -> None:
        self.breaker.end_trial()
        self.trials -= 1
        assert self.breaker.admits

    @rule()
    def succeed(self) -> None:
        was = self.breaker.state
        changed = self.breaker.succeeded()
        assert changed is (was is BreakerState.HALF_OPEN)
        assert self.breaker.state is (BreakerState.OPEN if was is BreakerState.OPEN else BreakerState.CLOSED)
        if changed:
            self.outcomes = [False]
        if was is not BreakerState.OPEN:
            self.outcomes.append(True)

    @rule()
    def fail(self) -> None:
        was = self.breaker.state
        changed = self.breaker.failed(self.now)
        if was is BreakerState.OPEN:
            assert not changed
            return
        self.outcomes.append(False)
        window = self.outcomes[-LIMITS.window :]
        bad = window[-3:] == [False] * 3 or window.count(False) >= LIMITS.failures
        assert changed is (bad or was is BreakerState.HALF_OPEN)
        if changed:
            self.opened_at = self.now
            assert LIMITS.open_s <= self.breaker.until - self.now <= LIMITS.longest_s

    @rule()
    def probe(self) -> None:
        was, until = self.breaker.state, self.breaker.until
        self.breaker.probed_well(self.now)
        assert self.breaker.state is was
        assert min(until, self.now) <= self.breaker.until <= until

    @rule()
    def restart(self) -> None:
        was = self.breaker.state
        self.breaker.restarted(self.now)
        assert self.breaker.state is was
        assert self.breaker.until <= self.now or was is not BreakerState.OPEN
        if was is BreakerState.CLOSED:
            self.outcomes = [False, True] if self.breaker.opened else []

    @invariant()
    def never_waits_longer_than_it_may(self) -> None:
        assert self.breaker.until <= self.opened_at + LIMITS.longest_s
        assert self.breaker.admits is not (self.breaker.state is BreakerState.OPEN or self.breaker.trial)
        if self.breaker.spotless:
            assert all(self.outcomes[-LIMITS.window :])


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(stateful_step_count=40)
