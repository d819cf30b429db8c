"""Writes the text of all metrics for Prometheus, in the format that it asks for.

The event loop serves requests between two metrics, however many instances there are.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, cast

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

__all__ = ["MetricsExposition", "metrics_text"]

_END: Final = b"# EOF\n"
"""The last line of an OpenMetrics text."""


class MetricsExposition:
    """The metrics of one app."""

    def __init__(
        self, *collectors: Collector, gauges: Iterable[Collector] = (), flush: Callable[[], None] | None = None
    ) -> None:
        """Beside `collectors` it has what there is to know of the process: memory, descriptors, CPU time.

        Args:
            collectors: collectors with counters, and cheap gauges.
            gauges: collectors with gauges only, which are not needed between two scrapes.
            flush: called before each collection, to count what is pending.
        """
        self._counters = CollectorRegistry()
        self._gauges = CollectorRegistry()
        self._flush = flush
        for collector in collectors:
            self._counters.register(collector)
        for collector in gauges:
            self._gauges.register(collector)
        ProcessCollector(registry=self._counters)

    def add(self, collector: Collector) -> None:
        """Shows what `collector` reads, too."""
        self._counters.register(collector)

    def collect(self, *, complete: bool = True) -> Iterator[Metric]:
        """Collects one metric family after the other. Without `complete` it leaves out those of `gauges`."""
        if self._flush is not None:
            self._flush()
        yield from self._counters.collect()
        if complete:
            yield from self._gauges.collect()

    async def text(self, accept: str) -> tuple[bytes, str]:
        """Returns the text and its content type. `accept`: see `metrics_text`."""
        return await metrics_text(self.collect(), accept)


async def metrics_text(metrics: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """Returns the text of metrics and its content type. Other tasks run between two metrics.

    Args:
        metrics: the metric families, collected one at a time.
        accept: the header of that name; the plain format, unless it has OpenMetrics in it.
    """
    encode, content_type = _encoder(accept)
    parts: list[bytes] = []
    for metric in metrics:
        parts.append(encode(_SingleMetricCollector(metric)).removesuffix(_END))
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
