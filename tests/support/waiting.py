"""Waits for conditions within a bound. Tests poll here and nowhere else.

`until`, `stays_true_for` and `stops_changing` are for asyncio; `wait_until` and `wait_stays_true_for` block. A test
that waits for something calls one of them in place of a sleep: it goes on as soon as the condition holds, and fails
with a message if it never does. `tests/contract/test_sleeps.py` counts the sleeps that are left elsewhere.
"""

import asyncio
import time
from collections.abc import Callable
from inspect import isawaitable
from typing import Any, Final, TypeVar

__all__ = ["stays_true_for", "stops_changing", "until", "wait_stays_true_for", "wait_until"]

T = TypeVar("T")
Condition = Callable[[], Any]
"""Returns a value that is true or false; for asyncio, perhaps an awaitable of it."""

_POLL_S: Final = 0.005


async def until(
    condition: Condition, within_s: float = 10.0, *, pause_s: float = _POLL_S, seen: Condition | None = None
) -> float:
    """Waits until the condition holds, and returns how many seconds that took.

    Args:
        condition: evaluated every `pause_s` seconds. What it raises ends the wait.
        within_s: the bound, in seconds. It also ends an evaluation that hangs.
        pause_s: seconds between two evaluations.
        seen: returns what the error shows if the condition never holds.

    Raises:
        TimeoutError: the condition did not hold in time.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    bound = asyncio.timeout(within_s)
    try:
        async with bound:
            while not await _value(condition):  # noqa: ASYNC110  most of what tests wait for sets no event
                await asyncio.sleep(pause_s)
    except TimeoutError:
        if not bound.expired():
            raise  # of the condition itself
        raise TimeoutError(_message(within_s, await _value(seen) if seen else None)) from None
    return loop.time() - began


def wait_until(
    condition: Condition, within_s: float = 30.0, *, pause_s: float = _POLL_S, seen: Condition | None = None
) -> float:
    """Blocks until the condition holds, and returns how many seconds that took. See `until`.

    Raises:
        TimeoutError: the condition did not hold in time.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began >= within_s:
            raise TimeoutError(_message(within_s, seen() if seen else None))
        time.sleep(pause_s)
    return time.monotonic() - began


async def stays_true_for(seconds: float, condition: Condition, *, pause_s: float = _POLL_S) -> None:
    """Asserts that the condition holds now and for so many seconds from now.

    This is for what must not happen in code that takes no clock. It costs all the seconds: keep them few.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while True:
        is_last = loop.time() >= end
        assert await _value(condition), f"the condition holds no longer, {end - loop.time():.3f} s before the end"
        if is_last:
            return
        await asyncio.sleep(min(pause_s, max(0.0, end - loop.time())))


def wait_stays_true_for(seconds: float, condition: Condition, *, pause_s: float = _POLL_S) -> None:
    """Asserts that the condition holds now and for so many seconds from now, and blocks. See `stays_true_for`."""
    end = time.monotonic() + seconds
    while True:
        is_last = time.monotonic() >= end
        assert condition(), f"the condition holds no longer, {end - time.monotonic():.3f} s before the end"
        if is_last:
            return
        time.sleep(min(pause_s, max(0.0, end - time.monotonic())))


async def stops_changing(value: Callable[[], T], for_s: float, within_s: float = 20.0) -> T:
    """Waits until a value has been the same for `for_s` seconds, and returns it.

    Raises:
        TimeoutError: the value still changed after `within_s` seconds.
    """
    loop = asyncio.get_running_loop()
    last, since = value(), loop.time()

    def is_steady() -> bool:
        nonlocal last, since
        if (now := value()) != last:
            last, since = now, loop.time()
        return loop.time() - since >= for_s

    await until(is_steady, within_s, seen=lambda: last)
    return last


async def _value(condition: Condition) -> Any:
    found = condition()
    return await found if isawaitable(found) else found


def _message(within_s: float, seen: object) -> str:
    return f"the condition did not hold within {within_s} s" + ("" if seen is None else f"; last seen: {seen}")
