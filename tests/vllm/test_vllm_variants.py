"""Engines that differ share pages as long as the KV is the same, and only then."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.processes import Processes, Server
from tests.vllm.engines import complete, counters, start_engine, transfer_config
from tests.vllm.traffic import Ask, answers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _loaded(server: Server) -> float:
    return counters(server)["vllm:kvparams_tokens_loaded_total"]


def _prompts(seed: int, *sizes: int) -> list[Ask]:
    chance = random.Random(seed)
    return [Ask([chance.randrange(300, 2000) for _ in range(size)]) for size in sizes]


def _ids(found: dict[str, Any]) -> list[int]:
    return found["choices"][0]["token_ids"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_of_other_block_sizes_share(model: Path, shared_memory: Path, tmp_path: Path, dtype: str) -> None:
    """One has blocks of 32, the other of 128 (64 in bfloat16), no cache of its own, and computes in small chunks."""
    store = f"file://{shared_memory}/kv?size=256MiB"
    # In bfloat16 rounding depends on where a computation is cut, so both are asked where their caches end alike.
    exact = dtype == "float32"
    sizes = (129, 257, 200, 300, 700, 513) if exact else (129, 257, 513)
    first, second = _prompts(2, *sizes), _prompts(3, *sizes)
    with Processes(tmp_path) as processes:
        small = start_engine(processes, "small", model, transfer=transfer_config(store), dtype=dtype)
        large = start_engine(
            processes,
            "large",
            model,
            *("--no-enable-prefix-caching", "--max-num-batched-tokens", "160", "--enable-chunked-prefill"),
            transfer=transfer_config(store),
            block_size=128 if exact else 64,
            core=1,
            dtype=dtype,
        )
        processes.wait_ready(small, large, within_s=240)
        expected = answers(small.url, first)
        if not exact:
            expected = answers(small.url, first)  # from its own cache
            assert counters(small)["vllm:prefix_cache_hits_total"] > 0
        assert _loaded(small) == 0
        assert answers(large.url, first) == expected
        assert _loaded(large) > sum(sizes) * 0.7
        if exact:
            expected = answers(large.url, second)
            assert answers(small.url, second) == expected
            assert _loaded(small) > sum(sizes) * 0.7
            _salted(small, large)
            _answers_are_shared(small, large)
            _what_cannot_be_read_is_left_alone(small)


def _salted(one: Server, other: Server) -> None:
    """Two requests of equal ids and other salts share nothing."""
    prompt = _prompts(4, 300)[0].prompt
    told = {"return_token_ids": True}
    first = complete(one.url, prompt, cache_salt="a", **told)
    before = _loaded(other)
    assert _ids(complete(other.url, prompt, cache_salt="b", **told)) == _ids(first)
    assert _ids(complete(other.url, prompt, **told)) == _ids(first)
    assert _loaded(other) == before
    assert _ids(complete(other.url, prompt, cache_salt="a", **told)) == _ids(first)
    assert _loaded(other) == before + 256


def _answers_are_shared(one: Server, other: Server) -> None:
    """The pages that decode fills are found by whoever goes on with the conversation elsewhere."""
    (ask,) = _prompts(5, 100)
    assert isinstance(ask.prompt, list)
    answer = _ids(complete(one.url, ask.prompt, max_tokens=200, return_token_ids=True))
    before = _loaded(other)
    complete(other.url, [*ask.prompt, *answer])
    assert _loaded(other) == before + 256


def _what_cannot_be_read_is_left_alone(server: Server) -> None:
    """A document that is none, or not of this request: it is answered, and shares nothing."""
    prompt = _prompts(6, 300)[0].prompt
    before = counters(server)
    for document in ({"version": "1.0"}, {"version": "9.0"}, "x", _of_another_adapter()):
        complete(server.url, prompt, kv_transfer_params={"kvparams": document})
    complete(server.url, prompt, kv_transfer_params={"do_remote_prefill": True})
    after = counters(server)
    assert after["vllm:kvparams_requests_off_total"] == before["vllm:kvparams_requests_off_total"] + 4
    assert after["vllm:kvparams_pages_saved_total"] == before["vllm:kvparams_pages_saved_total"] + 2  # of the last


def _of_another_adapter() -> dict[str, object]:
    transfer = {"id": "t", "attempt": 1}
    document = {"version": "1.0", "request_id": "r", "transfer": transfer, "phase": "decode", "mode": "store"}
    return {**document, "isolation": {"lora": "another"}}


def test_as_a_plugin_and_as_a_child_of_multi_connector(model: Path, shared_memory: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin" / "kvparams_vllm_test-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: kvparams-vllm-test\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkvparams_test = kvparams_connectors.engines.vllm.plugin:register\n"
    )
    store = f"file://{shared_memory}/kv?size=64MiB"
    ours = json.loads(transfer_config(store))
    del ours["kv_connector_module_path"], ours["engine_id"], ours["kv_load_failure_policy"]
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(shared_memory / "example")},
    }
    children = {"connectors": [ours, example]}
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": children}
    environment = {"PYTHONPATH": str(plugin.parent)}
    ask = _prompts(7, 300)
    with Processes(tmp_path) as processes:
        writer = start_engine(
            processes, "multi", model, transfer=json.dumps(multi), environment=environment, cache_bytes=32 << 20
        )
        reader = start_engine(processes, "plain", model, transfer=transfer_config(store), core=1)
        processes.wait_ready(writer, reader, within_s=240)
        expected = answers(writer.url, ask)
        assert answers(reader.url, ask) == expected
        assert _loaded(reader) == 256
        assert answers(writer.url, ask) == expected
        counters(writer)  # its statistics can be read


def test_adapters_share_nothing_with_each_other(
    model: Path, make_tiny: Callable[..., Path], shared_memory: Path, tmp_path: Path
) -> None:
    first, second = make_tiny(1, "adapter"), make_tiny(2, "adapter")
    transfer = transfer_config(f"file://{shared_memory}/kv?size=64MiB")
    told = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules")
    prompt = _prompts(11, 300)[0].prompt
    with Processes(tmp_path) as processes:
        one = start_engine(processes, "one", model, *told, f"a={first}", f"b={second}", transfer=transfer)
        other = start_engine(  # here the names are the other way round
            processes, "other", model, *told, f"a={second}", f"b={first}", transfer=transfer, core=1
        )
        processes.wait_ready(one, other, within_s=400)
        answered = [_ids(complete(one.url, prompt, model=name, return_token_ids=True)) for name in ("tiny", "a", "b")]
        assert len({tuple(ids) for ids in answered}) == 3
        assert _loaded(one) == 0
        swapped = [_ids(complete(other.url, prompt, model=name, return_token_ids=True)) for name in ("tiny", "b", "a")]
        assert swapped == answered
        assert _loaded(other) == 256  # of the bare model; an adapter's pages are those of its name and weights


def test_two_ranks_store_what_one_reads(model: Path, shared_memory: Path, tmp_path: Path) -> None:
    store = f"file://{shared_memory}/kv?size=256MiB"
    sizes = {"tensor_parallel_sizes": [1, 2]}
    asks = _prompts(8, 129, 300, 700)
    more = _prompts(9, 129, 300, 700)
    with Processes(tmp_path) as processes:
        one = start_engine(processes, "one", model, transfer=transfer_config(store, extra=sizes))
        processes.wait_ready(one, within_s=240)
        expected = answers(one.url, asks)
        processes.stop(one)
        two = start_engine(
            processes,
            "two",
            model,
            *("--tensor-parallel-size", "2"),
            transfer=transfer_config(store, extra=sizes),
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        )
        processes.wait_ready(two, within_s=400)
        assert answers(two.url, asks) == expected
        assert _loaded(two) == 2 * (128 + 256 + 640)  # each rank its half
        expected = answers(two.url, more)
        processes.stop(two)
        one = start_engine(processes, "again", model, transfer=transfer_config(store, extra=sizes))
        processes.wait_ready(one, within_s=240)
        assert answers(one.url, more) == expected
        assert _loaded(one) == 128 + 256 + 640


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"store": "memory:?size=1MiB"}, "vLLM's scheduler and workers are several"),
        ({"stroe": "x"}, "unknown setting stroe; known: store"),
        ({"tensor_parallel_sizes": [3]}, "cannot be divided over 3 ranks"),
    ],
)
def test_what_cannot_work_is_refused_in_words(
    model: Path, tmp_path: Path, extra: dict[str, object], words: str
) -> None:
    store = str(extra.pop("store", f"file://{tmp_path}/kv?size=16MiB"))
    with Processes(tmp_path) as processes:
        engine = start_engine(processes, "E", model, transfer=transfer_config(store, extra=extra))
        engine.process.wait(200)
        assert words in engine.log.read_text()
