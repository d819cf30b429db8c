"""Tests that further attempts are a fraction of the requests."""

from hypothesis import given
from hypothesis import strategies as st

from kvparams.routing.retries import RetryBudget


@given(st.lists(st.booleans(), max_size=500), st.floats(0, 1), st.integers(0, 20))
def test_attempts_never_exceed_the_reserve_and_their_share(events: list[bool], ratio: float, most: int) -> None:
    budget = RetryBudget(ratio, most)
    requests = taken = 0
    for is_request in events:
        if is_request:
            budget.record_request()
            requests += 1
        else:
            taken += budget.try_acquire()
        assert taken <= most + ratio * requests + 1e-6


def test_a_single_failure_is_always_tried_again_and_a_failing_fleet_is_not() -> None:
    budget = RetryBudget(ratio=0.1, most=3)
    assert budget.try_acquire()
    assert [budget.try_acquire() for _ in range(4)] == [True, True, False, False]
    for _ in range(11):
        budget.record_request()
    assert budget.try_acquire()
    assert not budget.try_acquire()
