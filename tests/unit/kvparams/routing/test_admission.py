"""Tests that limits are checked where they are given, and that Retry-After follows from how fast a queue drains."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.routing.admission import DrainRate, QueueLimits, RoleLimits, retry_after_s


@pytest.mark.parametrize(
    "make",
    [
        lambda: RoleLimits(requests=0),
        lambda: RoleLimits(tokens=0),
        lambda: QueueLimits(waiting=-1),
        lambda: QueueLimits(per_tenant=0),
        lambda: QueueLimits(wait_s=0.0),
        lambda: QueueLimits(wait_s=float("inf")),
        lambda: QueueLimits(wait_s=float("nan")),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must"):
        make()


def test_limits_may_be_left_out_and_a_queue_may_be_none_at_all() -> None:
    assert RoleLimits() == RoleLimits(None, None)
    assert QueueLimits(waiting=0).waiting == 0


@given(per_s=st.floats(1, 50), lasting_s=st.floats(50, 70))
def test_the_rate_of_a_steady_stream_is_found(per_s: float, lasting_s: float) -> None:
    rate = DrainRate()
    for number in range(int(per_s * lasting_s)):
        rate.record_departure(1000 + number / per_s)
    measured = rate.per_s(1000 + lasting_s)
    assert per_s * 0.75 <= measured <= per_s * 1.25


def test_the_rate_fades_when_nothing_happens() -> None:
    rate = DrainRate()
    for number in range(1000):
        rate.record_departure(number / 10)
    assert rate.per_s(100.0) > 9
    assert rate.per_s(160.0) < 0.05


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_retry_after_is_bounded_and_long_enough(ahead: float, per_s: float) -> None:
    after = retry_after_s(ahead, per_s)
    assert 1 <= after <= 60
    assert after == 60 or after * per_s >= ahead * (1 - 1e-9)


def test_retry_after_of_what_drains_is_when_it_has_drained() -> None:
    assert retry_after_s(100, 10.0) == 10
    assert retry_after_s(101, 10.0) == 11
    assert retry_after_s(1, 0.0) == 60
    assert retry_after_s(0, 5.0) == 1
