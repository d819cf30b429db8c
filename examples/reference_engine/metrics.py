"""Defines the engine's Prometheus metrics in a registry of its own.

A counter counts work where it is done, so that it can be held against what an answer claims.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["Metrics", "StoreCounts"]


class StoreCounts(NamedTuple):
    """A `StoreCounts` counts the traffic with the store since the start."""

    loaded: int
    """Bytes."""
    saved: int
    """Bytes."""
    refused: Mapping[str, int]
    """Pages by reason."""


class Metrics:
    """The engine's counters and gauges; every name begins with `reference_engine:`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"reference_engine:{name}", text, labels, registry=self._registry)

        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens by source: computed, local_cache, external_kv", "source"
        )
        self.generated_tokens = counter("generation_tokens", "Tokens generated")
        self.requests = counter("requests", "Sequences that ended: stop, length, error, abort", "finish")
        self.transfers = counter("transfers", "Transfers that a proxy gave up: released, cancelled", "end")
        self.pages_released = counter("pages_released", "Stored pages that were dropped because nobody needs them")
        for end in ("released", "cancelled"):
            self.transfers.labels(end)
        for source in ("computed", "local_cache", "external_kv"):
            self.prompt_tokens.labels(source)

    def watch(
        self,
        *,
        in_flight: Callable[[], int],
        waiting: Callable[[], int],
        blocks_in_use: Callable[[], int],
        blocks_cached: Callable[[], int],
    ) -> None:
        """Read these whenever the metrics are asked for."""

        def gauge(name: str, text: str, read: Callable[[], int]) -> None:
            Gauge(f"reference_engine:{name}", text, registry=self._registry).set_function(read)

        gauge("requests_in_flight", "Sequences (choices of prompts) that have not ended", in_flight)
        gauge("requests_waiting", "Sequences that wait for blocks", waiting)
        gauge("kv_blocks_in_use", "Blocks that a sequence holds; cached ones do not count", blocks_in_use)
        gauge("kv_blocks_cached", "Blocks that only keep a prefix for later and may be taken", blocks_cached)

    def watch_store(self, counts: Callable[[], StoreCounts]) -> None:
        """Read these whenever the metrics are asked for."""
        self._registry.register(_StoreMetrics(counts))

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


class _StoreMetrics(Collector):
    def __init__(self, counts: Callable[[], StoreCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        prefix = "reference_engine:"
        yield CounterMetricFamily(f"{prefix}kv_bytes_loaded", "KV bytes read from the store and used", counts.loaded)
        yield CounterMetricFamily(f"{prefix}kv_bytes_saved", "KV bytes that the store took", counts.saved)
        text = "Stored pages that were not what was asked for, by reason"
        refused = CounterMetricFamily(f"{prefix}pages_refused", text, labels=["reason"])
        for reason, count in counts.refused.items():
            refused.add_metric([reason], count)
        yield refused
