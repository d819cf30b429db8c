"""Prometheus gauges of the exchange with other proxies. They exist only where a fleet is shared."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams_proxy.coordination.exchange import Exchange
from kvparams_proxy.fleet.fleet import Fleet

__all__ = ["ExchangeGauges"]


class ExchangeGauges(Collector):
    """Collects the gauges of the exchange at each scrape."""

    def __init__(self, exchange: Exchange, fleet: Fleet) -> None:
        self._exchange = exchange
        self._fleet = fleet

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
        in_flight = GaugeMetricFamily(
            "kvparams_proxy_exchange_in_flight", "Legs that other proxies run now.", labels=["role", "instance"]
        )
        for member in list(self._fleet.members):
            in_flight.add_metric([member.instance.role, member.instance.id], member.elsewhere)
        yield in_flight
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
