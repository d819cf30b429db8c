"""Tests that histograms name a trace for each bucket, and that merging keeps the newest."""

import asyncio

from prometheus_client.core import HistogramMetricFamily, Metric

from kvparams_proxy.telemetry.exposition import metrics_text
from kvparams_proxy.telemetry.histogram import Histogram
from kvparams_proxy.telemetry.metric_merge import merge_snapshots
from kvparams_proxy.telemetry.metric_snapshots import decode_metric, encode_metric

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def family(*observed: tuple[float, int, float]) -> HistogramMetricFamily:
    """A histogram with the bounds 1 and 2, of values with a trace and a time; trace 0 is none."""
    histogram = Histogram((1.0, 2.0))
    for value, trace_id, at_s in observed:
        histogram.observe(value)
        if trace_id:
            histogram.add_exemplar(value, trace_id, at_s)
    made = HistogramMetricFamily("h", "text", labels=())
    histogram.add_to(made)
    return made


def text(metric: Metric, accept: str = OPENMETRICS) -> list[str]:
    written, _ = asyncio.run(metrics_text([metric], accept))
    return [line for line in written.decode().splitlines() if line.startswith("h_bucket")]


def test_the_last_trace_of_a_bucket_is_named() -> None:
    found = text(family((0.5, 1, 10.0), (0.75, 2, 11.0), (1.0, 0, 12.0), (1.5, 0, 13.0), (7.0, 3, 14.0)))
    assert found == [
        f'h_bucket{{le="1.0"}} 3.0 # {{trace_id="{2:032x}"}} 0.75 11.0',
        'h_bucket{le="2.0"} 4.0',
        f'h_bucket{{le="+Inf"}} 5.0 # {{trace_id="{3:032x}"}} 7.0 14.0',
    ]


def test_a_value_at_a_bound_is_an_example_of_the_bucket_that_counts_it() -> None:
    assert text(family((1.0, 5, 1.0)))[0].endswith(f'# {{trace_id="{5:032x}"}} 1.0 1.0')


def test_the_plain_format_has_none() -> None:
    assert text(family((0.5, 1, 10.0)), "text/plain") == [
        'h_bucket{le="1.0"} 1.0',
        'h_bucket{le="2.0"} 1.0',
        'h_bucket{le="+Inf"} 1.0',
    ]


def test_without_traces_there_is_none() -> None:
    assert not any("#" in line for line in text(family((0.5, 0, 0.0))))


def test_merging_keeps_the_newest_of_each_bucket() -> None:
    workers = (family((0.5, 1, 10.0), (1.5, 2, 30.0)), family((0.6, 3, 20.0)), family((0.7, 0, 0.0)))
    merged = merge_snapshots([decode_metric(encode_metric(worker)) for worker in workers]).metric()
    assert text(merged) == [
        f'h_bucket{{le="1.0"}} 3.0 # {{trace_id="{3:032x}"}} 0.6 20.0',
        f'h_bucket{{le="2.0"}} 4.0 # {{trace_id="{2:032x}"}} 1.5 30.0',
        'h_bucket{le="+Inf"} 4.0',
    ]
