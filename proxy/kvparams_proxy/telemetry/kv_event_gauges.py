"""Prometheus gauges of engines' KV events. They exist only where the policy looks at prefix caches."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kvparams_proxy.fleet.kv_events.consumer import KVEventConsumer

__all__ = ["KVEventGauges"]


class KVEventGauges(Collector):
    """Collects the gauges of KV events at each scrape."""

    def __init__(self, events: "KVEventConsumer") -> None:
        self._events = events

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        heard = self._events.stats()
        connected = GaugeMetricFamily(
            "kvparams_proxy_kv_events_connected",
            "Whether the publisher of an engine that declares KV events is connected.",
            labels=["instance"],
        )
        for instance, one in heard.items():
            connected.add_metric([instance], one.connected)
        yield connected
        for name, text, number in (
            ("batches", "Batches of KV events that were taken.", 1),
            ("refused", "Messages that were no KV events.", 2),
            ("gaps", "Times that batches were lost and no replay brought them.", 3),
            ("restarts", "Times that another publisher was found in its place.", 4),
        ):
            counter = CounterMetricFamily(f"kvparams_proxy_kv_events_{name}", text, labels=["instance"])
            for instance, one in heard.items():
                counter.add_metric([instance], one[number])
            yield counter
        text = "Blocks of engines that could not be placed: of a prompt whose beginning was never told, or of images."
        yield CounterMetricFamily("kvparams_proxy_kv_events_unplaced_blocks", text, value=self._events.unplaced_blocks)
