"""Prometheus gauges of clients' connections."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams_proxy.server.connections import ClientConnections

__all__ = ["ConnectionGauges"]


class ConnectionGauges(Collector):
    """Collects the gauges of connections at each scrape."""

    def __init__(self, connections: ClientConnections) -> None:
        self._connections = connections

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        connections = self._connections
        yield _gauge("client_connections", "Connections of clients.", len(connections))
        yield _gauge("client_connections_limit", "Connections that clients may have.", connections.limits.total)
        refused = CounterMetricFamily(
            "kvparams_proxy_client_connections_refused",
            "Connections that were not served: `limit`, there were too many; `address`, too many from one address.",
            labels=["reason"],
        )
        for reason in ("limit", "address"):
            refused.add_metric([reason], connections.refused_counts[reason])
        yield refused
        for name, text, value in (
            ("shed", "Connections without a request that were closed to make room.", connections.shed_count),
            ("expired", "Connections that were closed because their client was too slow.", connections.expired_count),
        ):
            yield CounterMetricFamily(f"kvparams_proxy_client_connections_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvparams_proxy_{name}", text, value=value)
