"""Writes the text of all metrics for Prometheus, in the format that it asks for.

The event loop serves requests between two metrics, however many instances there are.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, cast

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

__all__ = ["MetricsExposition"]

_END: Final = b"# EOF\n"
"""The last line of an OpenMetrics text."""


class MetricsExposition:
    """The registry of one app."""

    def __init__(self, *collectors: Collector) -> None:
        """Beside `collectors` it has what there is to know of the process: memory, descriptors, CPU time."""
        self._registry = CollectorRegistry()
        for collector in collectors:
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def add(self, collector: Collector) -> None:
        """Shows what `collector` reads, too."""
        self._registry.register(collector)

    async def text(self, accept: str) -> tuple[bytes, str]:
        """Returns the text and its content type.

        Args:
            accept: the header of that name; the plain format, unless it has OpenMetrics in it.
        """
        encode, content_type = _encoder(accept)
        parts: list[bytes] = []
        for family in self._registry.collect():
            parts.append(encode(_SingleMetricCollector(family)).removesuffix(_END))
            await asyncio.sleep(0)
        if content_type.startswith("application/openmetrics-text"):
            parts.append(_END)
        return b"".join(parts), content_type


class _SingleMetricCollector(Collector):
    """Exposes a single metric as a registry."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        """Returns the single metric."""
        return (self._family,)


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    if "application/openmetrics-text" in accept:
        write = cast("Callable[..., bytes]", openmetrics.generate_latest)  # pyright: ignore[reportUnknownMemberType]
        # No name here needs escaping; with any other way prometheus_client 0.26.0 turns the colon of a sample into `_`.
        encode: Callable[[Collector], bytes] = partial(write, escaping=openmetrics.ALLOWUTF8)
        return encode, "application/openmetrics-text; version=1.0.0; charset=utf-8"
    return generate_latest, "text/plain; version=0.0.4; charset=utf-8"
