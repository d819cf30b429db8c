"""Tests the helpers that wait: they go on when the condition holds, and fail when it does not."""

import asyncio
import time
from collections.abc import Iterator
from itertools import count

import pytest

from tests.support.virtual_loop import VirtualLoop
from tests.support.waiting import stays_true_for, stops_changing, until, wait_stays_true_for, wait_until


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()


class Changing:
    """A value that becomes true at a time, and false again at another one."""

    def __init__(self, loop: VirtualLoop, from_s: float, to_s: float = 1e9) -> None:
        self._loop = loop
        self._from, self._to = loop.time() + from_s, loop.time() + to_s

    def __call__(self) -> bool:
        return self._from <= self._loop.time() < self._to

    async def later(self) -> bool:
        await asyncio.sleep(0)
        return self()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_wait_ends_when_its_condition_holds_and_says_how_long_that_took(loop: VirtualLoop, is_async: bool) -> None:
    changing = Changing(loop, 3.0)
    took = loop.run(until(changing.later if is_async else changing))
    assert took == pytest.approx(3.0, abs=0.01)


def test_a_wait_for_what_never_comes_ends_with_what_was_seen(loop: VirtualLoop) -> None:
    with pytest.raises(TimeoutError, match=r"did not hold within 7 s; last seen: seven"):
        loop.run(until(lambda: False, 7, seen=lambda: "seven"))
    assert loop.time() == pytest.approx(1007.0, abs=0.01)


def test_a_condition_that_hangs_is_bounded_too(loop: VirtualLoop) -> None:
    with pytest.raises(TimeoutError, match="did not hold within 2 s"):
        loop.run(until(loop.create_future, 2))


@pytest.mark.parametrize("error", [AssertionError("a fault"), TimeoutError("of its own")], ids=lambda error: str(error))
def test_what_a_condition_raises_ends_the_wait(loop: VirtualLoop, error: Exception) -> None:
    def fails() -> bool:
        raise error

    with pytest.raises(type(error), match=str(error)):
        loop.run(until(fails))
    with pytest.raises(type(error), match=str(error)):
        wait_until(fails)


def test_what_stays_true_costs_its_time_and_what_does_not_fails(loop: VirtualLoop) -> None:
    began = loop.time()
    loop.run(stays_true_for(2.0, Changing(loop, 0.0)))
    assert loop.time() - began == pytest.approx(2.0, abs=0.01)
    for wrong in (Changing(loop, 0.1), Changing(loop, 0.0, 1.0), Changing(loop, 0.0, 1.999)):
        with pytest.raises(AssertionError, match="holds no longer"):
            loop.run(stays_true_for(2.0, wrong))


def test_a_value_stops_changing_or_the_wait_ends(loop: VirtualLoop) -> None:
    began = loop.time()
    assert loop.run(stops_changing(lambda: min(5, int(loop.time() - began)), 1.5)) == 5
    assert loop.time() - began == pytest.approx(6.5, abs=0.02)
    numbers: Iterator[int] = count()
    with pytest.raises(TimeoutError, match="last seen"):
        loop.run(stops_changing(lambda: next(numbers), 1.5, 5.0))


def test_a_wait_that_blocks_does_the_same() -> None:
    numbers = count()
    assert wait_until(lambda: next(numbers) == 3, pause_s=0.001) < 5
    with pytest.raises(TimeoutError, match=r"did not hold within 0.01 s; last seen: 7"):
        wait_until(lambda: False, 0.01, seen=lambda: 7)
    began = time.monotonic()
    wait_stays_true_for(0.02, lambda: True)
    assert time.monotonic() - began >= 0.02
    with pytest.raises(AssertionError, match="holds no longer"):
        wait_stays_true_for(0.02, lambda: time.monotonic() - began < 0.03)
