"""Tests the median of ratios and its confidence interval."""

import pytest

from benchmarks.ratios import median_interval


def test_the_interval_holds_the_median_and_stays_within_the_rounds() -> None:
    found = median_interval([0.8, 0.9, 1.0, 1.1, 5.0])
    assert found.median == 1.0
    assert 0.8 <= found.low <= found.median <= found.high <= 5.0
    assert found.low < found.high


def test_one_round_is_trusted_no_further_than_itself_and_equal_rounds_leave_no_doubt() -> None:
    assert str(median_interval([1.5])) == "1.50 [1.50, 1.50]"
    assert str(median_interval([1.0] * 9)) == "1.00 [1.00, 1.00]"


def test_more_rounds_of_the_same_noise_narrow_the_interval() -> None:
    few, many = ([0.9, 1.0, 1.1] * times for times in (2, 30))
    assert (
        median_interval(many).high - median_interval(many).low <= median_interval(few).high - median_interval(few).low
    )


def test_no_rounds_have_no_median() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        median_interval([])
