"""Merges the metrics of several worker processes into those of one proxy.

Counters and histograms are summed. A gauge is summed where each worker counts its own share, such as its connections.
It is not summed where all workers describe the same engine: a sum would count the engine once for each worker.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

from prometheus_client.core import Exemplar

from kvparams_proxy.telemetry.metric_snapshots import Labels, MetricSample, MetricSnapshot

__all__ = [
    "GAUGE_RULES",
    "MergeRule",
    "is_cumulative",
    "label_value",
    "merge_snapshots",
    "overlay_snapshot",
    "retain_labels",
]


class MergeRule(StrEnum):
    """The way to merge the values of one gauge in several workers."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    MEAN = "mean"
    """Weighted by `MetricSample.weight`."""


_CUMULATIVE: Final = ("counter", "histogram")
_OURS: Final = "kvparams_proxy_"
_RULES: Final = {
    MergeRule.SUM: (
        *(f"{_OURS}requests_{state}" for state in ("pending", "encoding", "prefilling", "decoding")),
        *(f"{_OURS}{name}" for name in ("body_bytes", "body_bytes_limit", "waiting", "releases_running")),
        *(f"{_OURS}{name}" for name in ("in_flight", "tokens_in_flight", "leases", "engine_connections")),
        *(f"{_OURS}{name}" for name in ("client_connections", "client_connections_limit")),
        *("vllm:current_qps", "vllm:num_prefill_requests", "vllm:num_decoding_requests", "vllm:num_requests_running"),
        *("process_virtual_memory_bytes", "process_resident_memory_bytes", "process_open_fds"),
    ),
    MergeRule.MAX: (
        *(f"{_OURS}{name}" for name in ("instances", "pairs_apart", "ready", "draining", "breaker_state")),
        *(
            f"{_OURS}{name}"
            for name in ("prefix_cache_alarm", "prefix_cache_blocks", "kv_events_connected", "foreign_legs")
        ),
        *(f"{_OURS}exchange_siblings", f"{_OURS}exchange_in_flight", "vllm:healthy_pods_total", "process_max_fds"),
    ),
    MergeRule.MIN: (f"{_OURS}exchange_connected", "process_start_time_seconds"),
    MergeRule.MEAN: (
        *(f"{_OURS}prefix_cache_accuracy", "vllm:router_queueing_delay_seconds", "vllm:avg_prefill_length"),
        *("vllm:avg_decoding_length", "vllm:avg_latency", "vllm:avg_itl"),
    ),
}
GAUGE_RULES: Final[Mapping[str, MergeRule]] = {name: rule for rule, names in _RULES.items() for name in names}
"""The rule of each gauge by the name of its family. All others, and info metrics, are merged by `MergeRule.MAX`."""


def is_cumulative(snapshot: MetricSnapshot) -> bool:
    """Returns whether the values only grow, so that those of an exited worker still count."""
    return snapshot.type in _CUMULATIVE


def merge_snapshots(snapshots: Sequence[MetricSnapshot]) -> MetricSnapshot:
    """Merges the snapshots of one metric family. There must be at least one.

    Series keep the order of their first occurrence: OpenMetrics requires the buckets of a histogram to stay together.
    """
    first = snapshots[0]
    rule = MergeRule.SUM if is_cumulative(first) else GAUGE_RULES.get(first.name, MergeRule.MAX)
    found: dict[tuple[str, Labels], MetricSample] = {}
    for snapshot in snapshots:
        for sample in snapshot.samples:
            key = sample.name, sample.labels
            before = found.get(key)
            found[key] = sample if before is None else _merged(rule, before, sample)
    return first._replace(samples=list(found.values()))


def overlay_snapshot(before: MetricSnapshot, after: MetricSnapshot) -> MetricSnapshot:
    """Returns `after` plus the series that only `before` has.

    The last snapshot of a worker lacks the counts of its instances, which have left by then. The one before has them.
    """
    found = {(sample.name, sample.labels): sample for snapshot in (before, after) for sample in snapshot.samples}
    return after._replace(samples=list(found.values()))


def retain_labels(snapshot: MetricSnapshot, label: str, values: Iterable[str]) -> MetricSnapshot:
    """Returns the snapshot without the series whose `label` has another value than these."""
    known = {None, *values}
    return snapshot._replace(
        samples=[sample for sample in snapshot.samples if label_value(sample, label) in known],
    )


def label_value(sample: MetricSample, label: str) -> str | None:
    """Returns the value of a label; None where the sample does not have it."""
    labels = sample.labels
    return next((labels[at + 1] for at in range(0, len(labels), 2) if labels[at] == label), None)


def _merged(rule: MergeRule, one: MetricSample, other: MetricSample) -> MetricSample:
    match rule:
        case MergeRule.SUM:
            return one._replace(value=one.value + other.value, exemplar=_newer(one.exemplar, other.exemplar))
        case MergeRule.MAX:
            return one._replace(value=max(one.value, other.value))
        case MergeRule.MIN:
            return one._replace(value=min(one.value, other.value))
        case MergeRule.MEAN:
            weight = one.weight + other.weight
            return one._replace(value=(one.value * one.weight + other.value * other.weight) / weight, weight=weight)


def _newer(one: Exemplar | None, other: Exemplar | None) -> Exemplar | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda each: float(each.timestamp or 0.0))
