"""Waits for a condition within a bound, and does all steps of some work at once."""

import asyncio
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from kvparams_proxy.requests.intake import ParsedRequest, parse_request_in_steps

__all__ = ["drained", "read_all", "until"]

T = TypeVar("T")


def drained(steps: Generator[None, None, T]) -> T:
    """Returns what the work returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def read_all(*arguments: Any, **options: Any) -> ParsedRequest:
    """Reads the body of a request, however long."""
    return drained(parse_request_in_steps(*arguments, **options))


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Waits until it is so.

    Raises:
        TimeoutError: it was not in time.
    """
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
