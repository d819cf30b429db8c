"""Tests that an engine's load is read from metrics as engines write them, and that nothing else is believed."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from kvparams.routing.engine_metrics import MovedBytes, add_moved_bytes, parse_engine_metrics

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 5.0
"""
SGLANG = b"""sglang:num_running_reqs{engine_type="prefill",model_name="m",pp_rank="0",priority="",tp_rank="0"} 2.0
sglang:num_running_reqs{engine_type="prefill",model_name="m",pp_rank="0",priority="7",tp_rank="0"} 2.0
sglang:num_running_reqs{engine_type="prefill",model_name="m",pp_rank="0",priority="",tp_rank="1"} 2.0
sglang:num_queue_reqs{engine_type="prefill",model_name="m",pp_rank="0",priority="",tp_rank="0"} 4.0
sglang:num_prefill_bootstrap_queue_reqs{engine_type="prefill",model_name="m",pp_rank="0",tp_rank="0"} 1.0
sglang:num_running_reqs{dp_rank="1",engine_type="prefill",model_name="m",pp_rank="0",priority="",tp_rank="0"} 10.0
"""


def queue_depth(text: bytes) -> int | None:
    """Returns the depth of all ranks together. Raises ValueError if it cannot be believed."""
    said = parse_engine_metrics(text)
    if said.fault is not None:
        assert not said.queue_depths
        raise ValueError(said.fault)
    return sum(said.queue_depths.values()) if said.queue_depths else None


def cache_usage(text: bytes) -> float | None:
    """Returns the highest usage of all ranks."""
    return max(parse_engine_metrics(text).cache_usages.values(), default=None)


def moved_bytes(text: bytes) -> MovedBytes | None:
    """Returns what all ranks have moved together."""
    found = parse_engine_metrics(text).moved
    return add_moved_bytes(found.values()) if found else None


def test_each_rank_has_figures_of_its_own() -> None:
    assert parse_engine_metrics(SGLANG).queue_depths == {"": 7, "1": 10}
    ranks = b"".join(
        b'vllm:num_requests_%b{engine="%d",model_name="m"} %d.0\n' % (name, rank, 10 * rank + more)
        for name, more in ((b"running", 1), (b"waiting", 2))
        for rank in range(3)
    )
    assert parse_engine_metrics(ranks).queue_depths == {"0": 3, "1": 23, "2": 43}
    usages = b"".join(b'vllm:kv_cache_usage_perc{engine="%d",model_name="m"} 0.%d\n' % (r, r + 1) for r in range(3))
    assert parse_engine_metrics(usages).cache_usages == {"0": 0.1, "1": 0.2, "2": 0.3}
    assert parse_engine_metrics(b"sglang:token_usage 0.5\n").cache_usages == {"": 0.5}


def test_vllm_ranks_are_added_up() -> None:
    assert queue_depth(VLLM) == 9


def test_sglang_repeats_by_priority_and_tensor_rank_count_once() -> None:
    assert queue_depth(SGLANG) == 17


def test_a_text_without_the_names_has_no_depth() -> None:
    other = b'process_cpu_seconds_total 1.0\nvllm:num_requests_waiting_by_reason{reason="capacity"} 5.0\n'
    assert queue_depth(other) is None
    assert queue_depth(b"# vllm:num_requests_running 3\nmy_vllm:num_requests_running 3\n") is None
    assert queue_depth(b"") is None


def test_a_last_line_without_an_end_and_one_with_a_time_are_read() -> None:
    assert queue_depth(b"vllm:num_requests_running 2 1700000000000") == 2


def test_labels_may_hold_anything() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("vllm:num_requests_running", "text", ["engine", "model_name"], registry=registry)
    gauge.labels("0", 'a "b\\ } 7,engine="5"\n').set(4)
    assert queue_depth(generate_latest(registry)) == 4


@pytest.mark.parametrize("value", [b"", b"NaN", b"+Inf", b"-1", b"many", b"1e300", b"2000000"])
def test_an_implausible_value_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"no number|implausibly many"):
        queue_depth(b"vllm:num_requests_running{} " + value + b"\n")


def test_too_many_samples_and_too_long_ones_are_refused() -> None:
    line = b'vllm:num_requests_running{engine="%d"} 1\n'
    assert queue_depth(b"".join(line % number for number in range(1000))) == 1000
    with pytest.raises(ValueError, match="more than 2048 samples"):
        queue_depth(b"".join(line % number for number in range(3000)))
    with pytest.raises(ValueError, match="longer than 4096 bytes"):
        queue_depth(b'vllm:num_requests_running{a="' + b"x" * 5000 + b'"} 1\n')
    long = b'vllm:num_requests_running{a="' + b"x" * 3000 + b'",engine="%d"} 1\n'
    assert queue_depth(b"".join(long % number for number in range(80))) == 80
    with pytest.raises(ValueError, match="more than 262144 bytes"):
        queue_depth(b"".join(long % number for number in range(90)))


@given(st.binary(max_size=300), st.sampled_from((b"vllm:num_requests_running", b"sglang:num_queue_reqs")))
def test_any_bytes_have_a_depth_or_none_or_are_refused(text: bytes, name: bytes) -> None:
    try:
        depth = queue_depth(b"\n" + name + text)
    except ValueError:
        return
    assert depth is None or 0 <= depth <= 1_000_000


@pytest.mark.parametrize(
    "text",
    [
        b"x" * (1 << 20),
        b"vllm:num_requests_runnin" * (1 << 15),
        b"vllm:num_requests_running" * (1 << 15),
        b"\nvllm:num_requests_running{" + b"}" * 4000 + b'priority="' * 100_000,
        b"\n" * (1 << 20),
        (b"vllm:num_requests_running{" + b"," * 950 + b"} 1\n") * 1000,
        (b"vllm:num_requests_running{" + b",engin" * 600 + b"} 1\n") * 280,
    ],
)
def test_hostile_texts_take_no_longer_than_an_event_loop_can_bear(text: bytes) -> None:
    shortest = 1.0
    for _ in range(3):
        began = time.process_time()
        parse_engine_metrics(text)
        shortest = min(shortest, time.process_time() - began)
    assert shortest < 0.02


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n', 0.25),
        (b"# HELP vllm:kv_cache_usage_perc KV.\nvllm:kv_cache_usage_perc 1.0\n", 1.0),
        (b'x 1\nvllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:kv_cache_usage_perc{engine="1"} 0.7\n', 0.7),
        (b"vllm:gpu_cache_usage_perc 0.5\n", 0.5),
        (b'sglang:token_usage{model_name="m"} 0.03125 1700000000\n', 0.03125),
        (b"", None),
        (b"vllm:num_requests_running 3\n", None),
        (b"my_vllm:kv_cache_usage_perc 0.5\n", None),
        (b"vllm:kv_cache_usage_perc_total 0.5\n", None),
        (b"vllm:kv_cache_usage_perc 1.5\nvllm:kv_cache_usage_perc -1\nvllm:kv_cache_usage_perc nan\n", None),
        (b"vllm:kv_cache_usage_perc e-e-e\n", None),
        (b"vllm:kv_cache_usage_perc{" + b"x" * 5000 + b"} 0.5\n", None),
    ],
)
def test_the_share_of_the_kv_cache_that_is_used(text: bytes, share: float | None) -> None:
    assert cache_usage(text) == share


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        (b'vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 1024.0\n', (1024.0, None, None)),
        (b'\nvllm:nixl_bytes_transferred_sum{a="0"} 1\nvllm:nixl_bytes_transferred_sum{a="1"} 2', (3, None, None)),
        (b'sglang:kv_transfer_total_mb_sum{tp_rank="0"} 1.5 1700000000\n', (1.5 * (1 << 20), None, None)),
        (b"vllm:kvparams_bytes_loaded_total 7\nvllm:kvparams_bytes_saved_total 0\n", (None, 7, 0)),
        (b"reference_engine:kv_bytes_loaded_total 1e+06\n", (None, 1e6, None)),
        (b"", None),
        (b"# vllm:nixl_bytes_transferred_sum 3\nvllm:nixl_bytes_transferred_sum_x 3\n", None),
        (b"vllm:nixl_bytes_transferred_sum -1\nvllm:kvparams_bytes_loaded_total nan\n", None),
        (b"vllm:nixl_bytes_transferred_sum 1e300\nvllm:kvparams_bytes_loaded_total inf\n", None),
        (b"vllm:nixl_bytes_transferred_sum{" + b"x" * 5000 + b"} 0.5\n", None),
        (b"vllm:nixl_bytes_transferred_sum{} " + b"1" * 5000 + b"\n", None),
    ],
)
def test_the_kv_bytes_that_an_engine_has_moved(text: bytes, moved: tuple[float | None, ...] | None) -> None:
    assert moved_bytes(text) == moved


NAMES = (b"vllm:nixl_bytes_transferred_sum", b"reference_engine:kv_bytes_saved_total")


@given(st.binary(max_size=300), st.sampled_from(NAMES))
def test_any_bytes_have_moved_bytes_or_none(text: bytes, name: bytes) -> None:
    moved = moved_bytes(b"\n" + name + text)
    assert moved is None or all(each is None or 0 <= each <= 1e18 for each in moved)


@given(st.lists(st.integers(0, 1 << 40), max_size=20))
def test_the_samples_of_all_ranks_are_added_up(values: list[int]) -> None:
    lines = [b'vllm:kvparams_bytes_loaded_total{engine="%d"} %d\n' % pair for pair in enumerate(values)]
    assert moved_bytes(b"".join(lines)) == (MovedBytes(None, sum(values), None) if values else None)
    assert parse_engine_metrics(b"".join(lines)).moved == {
        str(rank): MovedBytes(None, value, None) for rank, value in enumerate(values)
    }


@pytest.mark.parametrize("name", [*NAMES, b"vllm:kv_cache_usage_perc"])
@pytest.mark.parametrize("rest", [b"", b" 1", b"{" + b"}" * 4000 + b" 1\n", b"{" + b"}" * 1000 + b"\n", b"\n\n"])
def test_hostile_samples_take_no_longer_than_an_event_loop_can_bear(name: bytes, rest: bytes) -> None:
    text = (name + rest) * ((1 << 20) // len(name + rest))
    shortest = 1.0
    for _ in range(3):
        began = time.process_time()
        parse_engine_metrics(text)
        shortest = min(shortest, time.process_time() - began)
    assert shortest < 0.02
