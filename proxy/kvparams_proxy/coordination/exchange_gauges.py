"""Prometheus gauges of the exchange with other proxies. They exist only where a fleet is shared."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams_proxy.coordination.exchange import Exchange

__all__ = ["ExchangeGauges"]


class ExchangeGauges(Collector):
    """Collects the gauges of the exchange at each scrape."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        exchange = self._exchange
        yield GaugeMetricFamily(
            "kvparams_proxy_exchange_connected",
            "Whether the other proxies of the site can be reached.",
            value=not exchange.is_degraded,
        )
        yield GaugeMetricFamily(
            "kvparams_proxy_exchange_siblings", "Other proxies that share the fleet.", value=len(exchange.siblings)
        )
        for name, text, value in (
            ("sent_messages", "Messages that were sent to other proxies.", exchange.sent_messages),
            ("sent_bytes", "Bytes of these.", exchange.sent_bytes),
            ("gaps", "Times that messages of another proxy were missing.", exchange.gaps),
        ):
            yield CounterMetricFamily(f"kvparams_proxy_exchange_{name}", text, value=value)
        refused = CounterMetricFamily(
            "kvparams_proxy_exchange_refused", "Messages that were not believed.", labels=["reason"]
        )
        for reason in ("authentication", "fault", "format", "unasked"):
            refused.add_metric([reason], exchange.refused[reason])
        yield refused
