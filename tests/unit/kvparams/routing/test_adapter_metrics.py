"""Tests that adapter slots are read from metrics as engines write them, and that nothing else is believed."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from kvparams.routing.adapter_metrics import parse_adapter_metrics

LABELS = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
SGLANG = b"""# HELP sglang:lora_pool_slots_total Total number of LoRA adapter slots available (max_loras_per_batch).
# TYPE sglang:lora_pool_slots_total gauge
sglang:lora_pool_slots_total{engine_type="unified",model_name="m",tp_rank="0"} 8.0
"""


def vllm(*samples: tuple[str, str, str, float]) -> bytes:
    """Returns metrics as vLLM 0.32.0 writes them: slots, waiting, running, time."""
    registry = CollectorRegistry()
    gauge = Gauge("vllm:lora_requests_info", "Running stats on lora requests.", LABELS, registry=registry)
    for slots, waiting, running, at in samples:
        gauge.labels(slots, waiting, running).set(at)
    return generate_latest(registry)


def test_the_newest_sample_counts() -> None:
    said = parse_adapter_metrics(vllm(("6", "", "a,b", 20.0), ("6", "", "", 10.0), ("6", "c", "a,c", 30.0)))
    assert said is not None
    assert (said.slots, said.active) == (6, {"a", "c"})
    said = parse_adapter_metrics(vllm(("6", "", "a,b", 20.0), ("6", "", "", 40.0), ("6", "c", "a,c", 30.0)))
    assert said is not None
    assert (said.slots, said.active) == (6, frozenset())


@pytest.mark.parametrize("samples", [4_096, 4_097, 10_000, 20_000])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_an_engine_that_has_had_many_combinations_is_read(samples: int, place: float) -> None:
    """vLLM removes no sample, and writes a combination that it has had before in its old place."""
    newest = round(place * (samples - 1))
    lines = [
        f'vllm:lora_requests_info{{max_lora="6",running_lora_adapters="a{at}",waiting_lora_adapters=""}} '
        f"{1e9 if at == newest else at}\n"
        for at in range(samples)
    ]
    text = "".join(lines).encode()
    said = parse_adapter_metrics(text)
    assert said is not None
    assert (said.slots, said.active) == (6, {f"a{newest}"})


@pytest.mark.parametrize(
    "text", [b"\nvllm:lora_requests_info{} 1", b"# vllm:lora_requests_info{\n", b"\nvllm:lora_requests_info{}"]
)
def test_the_number_of_samples_that_are_read_is_bounded(text: bytes) -> None:
    began = time.thread_time()
    parse_adapter_metrics(text * (2_000_000 // len(text)))
    assert time.thread_time() - began < 0.1  # some 15 ms without load


def test_sglang_says_how_many_slots_it_has() -> None:
    said = parse_adapter_metrics(SGLANG)
    assert said is not None
    assert (said.slots, said.active) == (8, frozenset())


@given(st.lists(st.text(st.characters(exclude_characters=",", exclude_categories=["Cs"]), min_size=1), max_size=4))
def test_names_are_what_they_are(names: list[str]) -> None:
    said = parse_adapter_metrics(vllm(("2", "", ",".join(names), 1.0)))
    assert said is not None
    assert said.active == set(names)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"vllm:num_requests_running 1\n",
        b'# vllm:lora_requests_info{max_lora="2"} 1\n',
        b'my_vllm:lora_requests_info{max_lora="2"} 1\n',
        b'vllm:lora_requests_info{running_lora_adapters="a"} 1\n',
        b'vllm:lora_requests_info{max_lora="many"} 1\n',
        b'vllm:lora_requests_info{max_lora="0"} 1\n',
        b'vllm:lora_requests_info{max_lora="-1"} 1\n',
        b'vllm:lora_requests_info{max_lora="nan"} 1\n',
        b'vllm:lora_requests_info{max_lora="1e300"} 1\n',
        b'vllm:lora_requests_info{max_lora="2"} NaN\n',
        b'vllm:lora_requests_info{max_lora="2"}\n',
        b'vllm:lora_requests_info{max_lora="2",running_lora_adapters="\xff"} 1\n',
        b"\nsglang:lora_pool_slots_total many\n",
        b"\nsglang:lora_pool_slots_total_x 3\n",
    ],
)
def test_what_says_nothing_plausible_is_no_news(text: bytes) -> None:
    assert parse_adapter_metrics(text) is None


@pytest.mark.parametrize(
    "piece",
    [
        b'vllm:lora_requests_info{max_lora="2",',
        b'vllm:lora_requests_info{max_lora="',
        b'\nvllm:lora_requests_info{max_lora="2"} 1',
        b"\nsglang:lora_pool_slots_total{",
        b'max_lora="\\',
    ],
)
@pytest.mark.parametrize("line", [60_000, 1_000_000])
def test_a_hostile_text_takes_linear_time(piece: bytes, line: int) -> None:
    text = (piece * (line // len(piece)) + b"} 1\n") * (1_000_000 // line)
    began = time.perf_counter()
    parse_adapter_metrics(text)
    assert time.perf_counter() - began < 0.5  # a quadratic search would take minutes


@given(st.binary(max_size=200))
def test_no_text_raises(noise: bytes) -> None:
    parse_adapter_metrics(b"vllm:lora_requests_info{" + noise)
    parse_adapter_metrics(b"\nsglang:lora_pool_slots_total" + noise)
