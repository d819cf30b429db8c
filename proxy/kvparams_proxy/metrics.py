"""What the proxy counts, for Prometheus. One object per app, with a registry of its own.

The one rule: a request pays for an addition, not for a label look-up and a lock; the rest happens when it is scraped.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams.scheduling import Role
from kvparams_proxy.fleet import Fleet

__all__ = ["Metrics", "Seconds"]

_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Seconds:
    """A histogram of durations."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one."""
        self._counts[bisect_left(_BOUNDS, duration_s)] += 1
        self._sum_s += duration_s

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Say it to Prometheus."""
        bounds = (*(str(bound) for bound in _BOUNDS), "+Inf")
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum_s)


class Metrics(Collector):
    """The proxy's counters and histograms."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.outcomes: dict[str, int] = {"ok": 0, "refused": 0, "failed": 0, "midway": 0, "gone": 0}
        """Requests by how they ended; `kvparams_proxy_requests_total`."""
        self.legs = {role: Seconds() for role in Role}
        """From sending a leg's request to the end of its answer."""
        self.first_byte = Seconds()
        """From the complete request to the first byte of its answer, prefill included."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """For the registry: everything as it is now."""
        requests = CounterMetricFamily(
            "kvparams_proxy_requests",
            "Requests by outcome: ok, refused (4xx), failed (5xx), midway (its stream broke), gone (its client left).",
            labels=["outcome"],
        )
        for outcome, number in self.outcomes.items():
            requests.add_metric([outcome], number)
        legs = HistogramMetricFamily(
            "kvparams_proxy_leg_seconds", "From sending a leg's request to the end of its answer.", labels=["role"]
        )
        for role, seconds in self.legs.items():
            seconds.add_to(legs, [role])
        first = HistogramMetricFamily(
            "kvparams_proxy_time_to_first_byte_seconds",
            "From the complete request to the first byte of its answer, prefill included.",
            labels=[],
        )
        self.first_byte.add_to(first, [])
        by = ["role", "instance"]
        in_flight = GaugeMetricFamily("kvparams_proxy_in_flight", "Legs running now.", labels=by)
        ready = GaugeMetricFamily("kvparams_proxy_ready", "1 if the instance may be chosen.", labels=by)
        for member in self._fleet.members:
            in_flight.add_metric([member.instance.role, member.instance.id], member.in_flight)
            ready.add_metric([member.instance.role, member.instance.id], float(member.ready))
        return requests, legs, first, in_flight, ready
