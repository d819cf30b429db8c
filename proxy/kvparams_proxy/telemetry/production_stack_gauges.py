"""The gauges of production-stack's router under its own names, for dashboards that were made for it.

Source of names and label: production-stack 0c740a25, src/vllm_router/services/metrics_service/__init__.py and
routers/metrics_router.py; `avg_prefill_length` and `router_queueing_delay_seconds` are in its dashboard only
(observability/vllm-dashboard.json, version 18). A value that is not known is left out, instead of reported as 0 or -1.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams.instances import Role
from kvparams.routing.breaker import BreakerState
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.telemetry.instance_stats import InstanceTotals, SlidingWindow
from kvparams_proxy.telemetry.metric_snapshots import MeanGaugeFamily
from kvparams_proxy.telemetry.metrics import Metrics

__all__ = ["ProductionStackGauges"]

_LABELS: Final = ("server",)
"""There it is an engine's address, here an instance's id: addresses are nobody's business."""


_MEANS: Final[tuple[tuple[str, str, Callable[[InstanceTotals], tuple[float, int]]], ...]] = (
    (
        "router_queueing_delay_seconds",
        "How long its legs have waited in the proxy, those that did not wait included: mean of the last minute.",
        lambda added: (added.waits_s, added.waits),
    ),
    (
        "avg_prefill_length",
        "Tokens of the prompts that it has computed: mean of the last minute.",
        lambda added: (added.prompt_tokens, added.prompts),
    ),
    (
        "avg_decoding_length",
        "Tokens of its answers, events where it does not say how many tokens: mean of the last minute.",
        lambda added: (added.answer_tokens, added.answers),
    ),
    (
        "avg_latency",
        "Seconds from sending a leg's request to the end of its answer: mean of the last minute.",
        lambda added: (added.legs_s, added.legs),
    ),
    (
        "avg_itl",
        "Seconds between two tokens of a stream, events where it does not say how many: mean of the last minute.",
        lambda added: (added.gaps_s, added.gaps),
    ),
)


class ProductionStackGauges(Collector):
    """Collects the gauges from the totals of all instances at each scrape."""

    def __init__(self, metrics: Metrics, fleet: Fleet, now: Callable[[], float]) -> None:
        """`now` is a clock, in seconds: nothing was counted before it is made."""
        self._metrics = metrics
        self._fleet = fleet
        self._now = now
        self._window = SlidingWindow(now())

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        members = list(self._fleet.members)
        seconds, added = self._window.observe(
            self._now(),
            {each.instance.id: self._metrics.instance_totals(each.instance.id, each.own_in_flight) for each in members},
        )
        yield _family(
            "current_qps",
            "Legs that it was given, per second of the last minute.",
            {id: max(0, sums.begun) / seconds if seconds > 0 else 0.0 for id, sums in added.items()},
        )
        yield _family("num_prefill_requests", "Legs that run on a prefill instance.", _running(members, Role.PREFILL))
        yield _family("num_decoding_requests", "Legs that run on a decode instance.", _running(members, Role.DECODE))
        yield _family("num_requests_running", "Legs that run on it.", _running(members, *Role))
        yield _family(
            "healthy_pods_total",
            "1: it answers probes, and its legs do not fail; 0 otherwise.",
            {each.instance.id: float(_healthy(each)) for each in members},
        )
        for name, text, of in _MEANS:
            means = MeanGaugeFamily(f"vllm:{name}", text, labels=_LABELS)
            for id, sums in added.items():
                means.add_mean([id], *of(sums))
            yield means


def _running(members: Iterable[Member], *roles: Role) -> dict[str, float]:
    return {each.instance.id: each.own_in_flight for each in members if each.instance.role in roles}


def _healthy(member: Member) -> bool:
    return member.ready and member.breaker.state is BreakerState.CLOSED


def _family(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
    for id, value in values.items():
        family.add_metric([id], value)
    return family
