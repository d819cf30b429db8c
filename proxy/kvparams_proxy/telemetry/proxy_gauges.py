"""Prometheus gauges of the proxy's present state. Requests do not update them; a scrape computes them.

Label values are roles, instance ids and fixed words; none comes from a client.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams.routing.breaker import BreakerState
from kvparams.routing.plan import KVLease
from kvparams.version import __version__
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.requests.body import BodyBudget
from kvparams_proxy.telemetry.metrics import Metrics
from kvparams_proxy.telemetry.request_log import RequestLog

__all__ = ["InstanceGauges", "KVReleaseCounts", "ProxyGauges", "leases_by_instance"]

_BY: Final = ("role", "instance")
_BREAKERS: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class KVReleaseCounts(Protocol):
    """Counts of unfetched KV, as `kvparams_proxy.execution.kv_releaser.KVReleaser` keeps them."""

    released: int
    """Transfers whose KV an engine was told to free."""
    orphaned: int
    """Transfers whose KV stays until its lease ends."""

    def __len__(self) -> int:
        """Returns the number of engines that are being told."""
        ...

    def leases(self) -> Iterable[KVLease]:
        """The leases that they are told to free."""
        ...


def leases_by_instance(metrics: Metrics, releases: KVReleaseCounts) -> Counter[str]:
    """Returns the number of KV leases that each instance holds, by instance id: one for each unfetched transfer.

    KV that may stay, in a store, is not among it. An engine that is to be stopped can be once it has no leg and none of
    these.
    """
    return Counter(lease.producer.id for held in (metrics.held_leases(), releases.leases()) for lease in held)


class ProxyGauges(Collector):
    """Collects the counters of the proxy, and the gauges whose number does not depend on the number of instances."""

    def __init__(
        self,
        metrics: Metrics,
        fleet: Fleet,
        releases: KVReleaseCounts,
        journal: RequestLog | None,
        bodies: BodyBudget,
    ) -> None:
        self._metrics = metrics
        self._fleet = fleet
        self._releases = releases
        self._journal = journal
        self._bodies = bodies

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        yield InfoMetricFamily("kvparams_proxy", "Which proxy this is.", value={"version": __version__})
        yield from self._requests()
        yield from self._roles()
        yield from self._instances()
        yield from self._transfers()

    def _requests(self) -> Iterable[Metric]:
        now = self._metrics.count_in_states
        yield _gauge("requests_pending", "Requests that wait in the proxy for room on an instance.", now("queued"))
        yield _gauge("requests_encoding", "Requests whose encode leg runs.", now("encode"))
        yield _gauge("requests_prefilling", "Requests whose prefill leg runs.", now("prefill"))
        yield _gauge("requests_decoding", "Requests whose decode leg runs.", now("decode", "first_byte"))
        dropped = CounterMetricFamily(
            "kvparams_proxy_log_lines_dropped", "Lines of the request log that could not be written."
        )
        dropped.add_metric([], 0 if self._journal is None else self._journal.dropped)
        yield dropped
        bodies = self._bodies
        yield _gauge("body_bytes", "Bytes of request bodies that are held.", bodies.held_bytes)
        yield _gauge("body_bytes_limit", "Bytes of request bodies that may be held.", bodies.limit_bytes)
        refused = CounterMetricFamily(
            "kvparams_proxy_bodies_refused", "Requests refused because so many bytes of bodies were held."
        )
        refused.add_metric([], bodies.refused)
        yield refused

    def _roles(self) -> Iterable[Metric]:
        waiting = GaugeMetricFamily("kvparams_proxy_waiting", "Legs that wait for room.", labels=["role"])
        instances = GaugeMetricFamily(
            "kvparams_proxy_instances", "Instances: total, ready, draining, broken.", labels=["role", "state"]
        )
        panic = CounterMetricFamily(
            "kvparams_proxy_panic_legs", "Legs of suspected instances, where no other could be used.", labels=["role"]
        )
        adapters = CounterMetricFamily(
            "kvparams_proxy_adapter_legs",
            "Legs for LoRA adapters, by whether their instance should have had the adapter loaded.",
            labels=["role", "loaded"],
        )
        for role, health in self._fleet.health().items():
            for loaded, word in ((True, "yes"), (False, "no")):
                adapters.add_metric([role, word], self._fleet.adapter_legs(role, loaded=loaded))
            waiting.add_metric([role], health.waiting)
            panic.add_metric([role], self._fleet.panic_legs(role))
            for state in ("total", "ready", "draining", "broken"):
                instances.add_metric([role, state], getattr(health, state))
        pairs = _gauge("pairs_apart", "Prefill and decode instances that fail together.", self._fleet.separated_pairs)
        return waiting, panic, adapters, instances, pairs

    def _instances(self) -> Iterable[Metric]:
        members = list(self._fleet.members)
        self._metrics.retain_instances(member.instance.id for member in members)
        legs = CounterMetricFamily("kvparams_proxy_legs", "Legs that have ended.", labels=_BY)
        for member in members:
            legs.add_metric([member.instance.role, member.instance.id], self._metrics.leg_count(member.instance.id))
        yield legs

    def _transfers(self) -> Iterable[Metric]:
        releases = self._releases
        yield _gauge("releases_running", "Engines being told now to free KV that nobody fetched.", len(releases))
        for name, text, value in (
            ("released", "Transfers whose KV an engine was told to free, and did.", releases.released),
            ("orphaned", "Transfers whose KV stays until its lease ends: nobody could be told.", releases.orphaned),
        ):
            yield CounterMetricFamily(f"kvparams_proxy_transfers_{name}", text, value=value)


class InstanceGauges(Collector):
    """Collects the gauges of all instances at each scrape."""

    def __init__(self, metrics: Metrics, fleet: Fleet, pools: UpstreamPools, releases: KVReleaseCounts) -> None:
        self._metrics = metrics
        self._fleet = fleet
        self._pools = pools
        self._releases = releases

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        members = list(self._fleet.members)
        holding = leases_by_instance(self._metrics, self._releases)
        columns: tuple[tuple[str, str, Callable[[Member], float]], ...] = (
            ("in_flight", "Legs running now.", lambda member: member.own_in_flight),
            (
                "tokens_in_flight",
                "Prompt tokens of legs running now.",
                lambda member: member.own_tokens,
            ),
            (
                "leases",
                "Transfers whose KV it holds and nobody has fetched.",
                lambda member: holding[member.instance.id],
            ),
            ("ready", "1 if the instance may be chosen before others.", lambda member: float(member.available)),
            ("draining", "1 if it gets no new legs by wish.", lambda member: float(member.draining)),
            (
                "breaker_state",
                "0: closed, all is well. 1: half open, one leg at a time. 2: open, none while others can.",
                lambda member: _BREAKERS[member.breaker.state],
            ),
            ("engine_connections", "Connections to the instance, idle ones included.", self._connections),
        )
        for name, text, value in columns:  # one by one: between two, requests go on
            family = GaugeMetricFamily(f"kvparams_proxy_{name}", text, labels=_BY)
            for member in members:
                family.add_metric([member.instance.role, member.instance.id], value(member))
            yield family

    def _connections(self, member: Member) -> int:
        pool = self._pools.get(member.instance.id)
        return 0 if pool is None else pool.open_connections


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvparams_proxy_{name}", text, value=value)
