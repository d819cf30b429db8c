"""Waits for the first of several things."""

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["first_of"]


async def first_of(longest_s: float | None, *events: Coroutine[Any, Any, object]) -> None:
    """Waits until one of `events` is over, or `longest_s` have passed if they are given. The others are cancelled."""
    tasks = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait(tasks, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
