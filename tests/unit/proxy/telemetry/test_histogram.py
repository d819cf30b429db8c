"""Tests that histograms keep few values: they are counted by bucket before they are many."""

import time
from collections.abc import Iterator

from kvparams.instances import RequestFacts
from kvparams.routing.request_lifecycle import RequestLifecycle
from kvparams_proxy.telemetry.histogram import Histogram
from kvparams_proxy.telemetry.loop_lag import LoopLag
from kvparams_proxy.telemetry.metrics import Metrics
from kvparams_proxy.telemetry.request_record import RequestRecord
from tests.support.virtual_loop import VirtualLoop

FACTS = RequestFacts("r", "t", None, 1, 1, None, None)


def ended_requests(metrics: Metrics, number: int) -> Iterator[RequestRecord]:
    for _ in range(number):
        life = RequestLifecycle(time.perf_counter)
        metrics.request_began(life)
        life.enter("prefill", "p")
        life.enter("result", "p")
        life.enter("decode", "d")
        life.enter("first_byte")
        life.finish("ok")
        record = RequestRecord(FACTS, "/v1/completions", False, life, [], None)
        record.prompt_tokens = 7
        yield record


def kept(metrics: Metrics) -> int:
    return sum(len(found._values) for found in _histograms(metrics))  # pyright: ignore[reportPrivateUsage]


def _histograms(metrics: Metrics) -> Iterator[Histogram]:
    for value in vars(metrics).values():
        if isinstance(value, Histogram):
            yield value
        elif isinstance(value, dict):
            yield from (each for each in value.values() if isinstance(each, Histogram))  # pyright: ignore[reportUnknownVariableType]


def test_what_is_not_counted_yet_is_bounded() -> None:
    metrics = Metrics()
    most = 0
    for record in ended_requests(metrics, 5000):
        metrics.first_byte.observe(0.1)
        metrics.ended(record)
        most = max(most, kept(metrics))
    assert 1000 < most <= 1024 * 8
    (seconds,) = (each for each in metrics.collect() if each.name == "kvparams_proxy_time_to_first_byte_seconds")
    assert next(s.value for s in seconds.samples if s.name.endswith("_count")) == 5000
    assert kept(metrics) == 0


def test_a_proxy_without_requests_keeps_no_values() -> None:
    """The lag of the event loop is looked at all the time."""
    metrics, loop = Metrics(), VirtualLoop()
    lag = LoopLag(loop, metrics.loop_lag)
    loop.run_until(loop.time() + 3600.0)
    lag.close()
    assert metrics.loop_lag.count > 10_000
    assert kept(metrics) < 100


def test_counting_the_values_changes_no_figure() -> None:
    often, once = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 0.25):
        often.observe(value)
        often.fold()
        once.observe(value)
    assert often.count == once.count == 6
    once.fold()
    assert (often._counts, often._sum) == (once._counts, once._sum) == ([3, 2, 1], 7.75)  # pyright: ignore[reportPrivateUsage]
