"""Waiting for something to become true, within a bound."""

import asyncio
from collections.abc import Callable

__all__ = ["until"]


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Waits until it is so.

    Raises:
        TimeoutError: it was not in time.
    """
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
