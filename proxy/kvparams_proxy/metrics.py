"""What the proxy counts, for Prometheus. One object per app, with a registry of its own."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams.scheduling import Role
from kvparams_proxy.fleet import Fleet

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class _FleetCollector(Collector):
    """Reads the fleet when it is scraped, so that a request pays nothing for its gauges."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        """Gauges by role and instance."""
        in_flight = GaugeMetricFamily("kvparams_proxy_in_flight", "Legs running now.", labels=["role", "instance"])
        ready = GaugeMetricFamily(
            "kvparams_proxy_ready", "1 if the instance may be chosen.", labels=["role", "instance"]
        )
        for member in self._fleet.members:
            labels = [member.instance.role, member.instance.id]
            in_flight.add_metric(labels, member.in_flight)
            ready.add_metric(labels, float(member.ready))
        return in_flight, ready


class Metrics:
    """The proxy's counters and histograms."""

    def __init__(self, fleet: Fleet) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_FleetCollector(fleet))
        requests = Counter(
            "kvparams_proxy_requests",
            "Requests by outcome: ok, refused (4xx), failed (5xx), midway (its stream broke), gone (its client left).",
            ["outcome"],
            registry=self._registry,
        )
        self.outcomes = {name: requests.labels(name) for name in ("ok", "refused", "failed", "midway", "gone")}
        legs = Histogram(
            "kvparams_proxy_leg_seconds",
            "From sending a leg's request to the end of its answer.",
            ["role"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.legs = {role: legs.labels(role.value) for role in Role}
        self.first_byte = Histogram(
            "kvparams_proxy_time_to_first_byte_seconds",
            "From the complete request to the first byte of its answer, prefill included.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
