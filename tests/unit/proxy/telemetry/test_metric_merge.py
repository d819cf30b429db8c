"""Tests how the metrics of several workers are merged into one exposition."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvparams_proxy.telemetry.histogram import Histogram
from kvparams_proxy.telemetry.metric_merge import (
    GAUGE_RULES,
    MergeRule,
    is_cumulative,
    merge_snapshots,
    overlay_snapshot,
    retain_labels,
)
from kvparams_proxy.telemetry.metric_snapshots import MeanGaugeFamily, MetricSnapshot, decode_metric, encode_metric

PAGE = Path(__file__).parents[4] / "proxy" / "METRICS.md"


def snapshot(metric: Metric) -> MetricSnapshot:
    return decode_metric(encode_metric(metric))


def counter(values: dict[str, float]) -> MetricSnapshot:
    family = CounterMetricFamily("c", "text", labels=["instance"])
    for label, value in values.items():
        family.add_metric([label], value)
    return snapshot(family)


def gauge(name: str, *values: float) -> MetricSnapshot:
    family = GaugeMetricFamily(name, "text", labels=["number"])
    for number, value in enumerate(values):
        family.add_metric([str(number)], value)
    return snapshot(family)


def values(found: MetricSnapshot) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels): sample.value for sample in found.samples}


class Only(Collector):
    def __init__(self, metric: Metric) -> None:
        self.metric = metric

    def collect(self) -> list[Metric]:
        return [self.metric]


def text(metric: Metric) -> bytes:
    registry = CollectorRegistry()
    registry.register(Only(metric))
    return generate_latest(registry)


def histogram(*observed: float) -> Metric:
    found = Histogram((0.5, 1.0))
    for value in observed:
        found.observe(value)
    family = HistogramMetricFamily("h_seconds", "text", labels=["role"], unit="seconds")
    found.add_to(family, ["prefill"])
    return family


def test_a_snapshot_is_the_metric_again() -> None:
    for metric in (
        histogram(0.2, 0.7, 5),
        CounterMetricFamily("c", "with\nlines", value=3),
        GaugeMetricFamily("g", "text", value=float("nan")),
        InfoMetricFamily("i", "text", value={"version": '1"'}),
    ):
        again = snapshot(metric).metric()
        assert text(again) == text(metric)
        assert again.unit == metric.unit


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 1000)), min_size=1))
def test_counters_are_added_up_by_their_labels(workers: list[dict[str, int]]) -> None:
    merged = merge_snapshots([counter({**worker}) for worker in workers])
    ids = {id for worker in workers for id in worker}
    assert values(merged) == {("c_total", "instance", id): sum(worker.get(id, 0) for worker in workers) for id in ids}


def test_histograms_are_added_up_bucket_by_bucket() -> None:
    merged = merge_snapshots([snapshot(histogram(0.25, 0.75)), snapshot(histogram(0.875, 9.0))])
    assert merged == snapshot(histogram(0.25, 0.75, 0.875, 9.0))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kvparams_proxy_in_flight", [4.0, 3.0]),
        ("kvparams_proxy_ready", [3.0, 2.0]),
        ("process_start_time_seconds", [1.0, 1.0]),
        ("kvparams_proxy_prefix_cache_accuracy", [2.0, 1.5]),
    ],
)
def test_a_gauge_is_merged_by_its_rule(name: str, expected: list[float]) -> None:
    merged = merge_snapshots([gauge(name, 1.0, 2.0), gauge(name, 3.0, 1.0)])
    assert [sample.value for sample in merged.samples] == expected


def test_a_mean_is_weighted_by_what_it_is_the_mean_of() -> None:
    one, other = (MeanGaugeFamily("vllm:avg_latency", "text", labels=["server"]) for _ in range(2))
    one.add_mean(["a"], 10.0, 1)
    one.add_mean(["b"], 1.0, 0)  # of nothing
    other.add_mean(["a"], 8.0, 4)
    other.add_mean(["c"], 3.0, 3)
    merged = merge_snapshots([snapshot(one), snapshot(other)])
    assert {sample.labels[1]: sample.value for sample in merged.samples} == {"a": 18 / 5, "c": 1.0}


def test_every_gauge_of_the_page_has_a_rule() -> None:
    documented = set(re.findall(r"^\| `([\w:]+)` \| gauge \|", PAGE.read_text(), re.MULTILINE))
    assert len(documented) > 25
    ours = {name for name in GAUGE_RULES if not name.startswith("process_")}
    assert documented - {"kvparams_proxy_workers"} == ours  # the supervisor alone has that one
    assert set(GAUGE_RULES.values()) == set(MergeRule)


def test_only_what_grows_outlives_its_worker() -> None:
    assert is_cumulative(counter({}))
    assert is_cumulative(snapshot(histogram()))
    assert not is_cumulative(gauge("g"))
    assert not is_cumulative(snapshot(InfoMetricFamily("i", "text", value={"a": "b"})))


def test_the_last_snapshot_keeps_series_that_the_worker_no_longer_knows() -> None:
    assert values(overlay_snapshot(counter({"a": 1, "b": 2}), counter({"b": 5}))) == values(counter({"a": 1, "b": 5}))


def test_series_of_instances_that_have_left_are_dropped() -> None:
    assert values(retain_labels(counter({"a": 1, "b": 2}), "instance", ["b", "c"])) == values(counter({"b": 2}))
    unlabeled = snapshot(CounterMetricFamily("c", "text", value=1))
    assert retain_labels(unlabeled, "instance", []) == unlabeled
