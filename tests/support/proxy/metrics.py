"""Waits until a metric of a proxy has a value."""

from collections.abc import Callable
from typing import Protocol

from tests.support.waiting import until

__all__ = ["HasMetrics", "metric_becomes"]


class HasMetrics(Protocol):
    """A running proxy whose metrics can be read."""

    async def metric(self, name: str) -> float:
        """Returns the sum of the series whose line in /metrics begins so."""
        ...


async def metric_becomes(
    proxy: HasMetrics, name: str, value: float | Callable[[float], bool] = 0.0, within_s: float = 10.0
) -> None:
    """Scrapes until the metric has this value, or one of which `value` is true.

    Raises:
        TimeoutError: the metric did not have such a value in time; the message shows the last one.
    """
    last = 0.0

    async def holds() -> bool:
        nonlocal last
        last = await proxy.metric(name)
        return value(last) if callable(value) else last == value

    await until(holds, within_s, seen=lambda: f"{name} = {last}")
