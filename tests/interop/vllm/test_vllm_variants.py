"""Tests that engines that differ share pages if their KV is the same, and only then."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.client import NO_CERTIFICATES
from demo.processes import Processes, Server
from kvparams_connectors.store import GetOp, ResultCode, open_store
from tests.interop.vllm.damage import flip
from tests.interop.vllm.engines import (
    ENVIRONMENT,
    READY_S,
    SAVED,
    by_its_name,
    child,
    complete,
    counters,
    multi,
    one_and_two,
    start_engine,
    transfer_config,
    until,
    wait_saved,
)
from tests.interop.vllm.legs import decode, prefill, tokens_of
from tests.interop.vllm.traffic import Ask, answers

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

_ROOT = Path(__file__).parents[3]


def _loaded(server: Server) -> float:
    return counters(server)["vllm:kvparams_tokens_loaded_total"]


def _saved(server: Server) -> float:
    return counters(server)[SAVED]


def _prompts(seed: int, *sizes: int) -> list[Ask]:
    chance = random.Random(seed)
    return [Ask([chance.randrange(300, 2000) for _ in range(size)]) for size in sizes]


def _ids(found: dict[str, Any]) -> list[int]:
    return found["choices"][0]["token_ids"]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two engines that share a store."""

    small: Server
    """With blocks of 32, and a cache of its own."""
    large: Server
    """With blocks of 128, none of its own, and a prompt computed in small chunks."""


@pytest.fixture(scope="module")
def pair(
    model: Path, make_tiny: Callable[..., Path], modules_memory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Pair]:
    """Their adapters have the same names and weights, but the other way round."""
    first, second = make_tiny(1, "adapter"), make_tiny(2, "adapter")
    transfer = transfer_config(f"file://{modules_memory}/kv?size=256MiB")
    told = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules")
    with Processes(tmp_path_factory.mktemp("logs")) as processes:
        small = start_engine(processes, "small", model, *told, f"a={first}", f"b={second}", transfer=transfer)
        large = start_engine(
            processes,
            "large",
            model,
            *(*told, f"a={second}", f"b={first}"),
            *("--no-enable-prefix-caching", "--max-num-batched-tokens", "160", "--enable-chunked-prefill"),
            transfer=transfer,
            block_size=128,
            core=1,
        )
        processes.wait_ready(small, large, within_s=READY_S)
        yield _Pair(small, large)


def test_engines_of_other_block_sizes_share(pair: _Pair) -> None:
    sizes = (129, 257, 200, 300, 700, 513)
    for seed, one, other in ((2, pair.small, pair.large), (3, pair.large, pair.small)):
        asks = _prompts(seed, *sizes)
        before, saved = (_loaded(one), _loaded(other)), _saved(one)
        expected = answers(one.url, asks)
        wait_saved(one, sum(size // 128 for size in sizes), saved)
        assert answers(other.url, asks) == expected
        assert _loaded(one) == before[0]
        assert _loaded(other) - before[1] > sum(sizes) * 0.7


def test_requests_of_equal_ids_and_other_salts_share_nothing(pair: _Pair) -> None:
    prompt = _prompts(4, 300)[0].prompt
    told = {"return_token_ids": True}
    before, saved = _loaded(pair.large), _saved(pair.small)
    first = complete(pair.small.url, prompt, cache_salt="a", **told)
    wait_saved(pair.small, 2, saved)
    assert _ids(complete(pair.large.url, prompt, cache_salt="b", **told)) == _ids(first)
    assert _ids(complete(pair.large.url, prompt, **told)) == _ids(first)
    assert _loaded(pair.large) == before
    assert _ids(complete(pair.large.url, prompt, cache_salt="a", **told)) == _ids(first)
    assert _loaded(pair.large) == before + 256


def test_answers_are_shared(pair: _Pair) -> None:
    """The pages that decode fills are found by whoever goes on with the conversation elsewhere."""
    (ask,) = _prompts(5, 100)
    assert isinstance(ask.prompt, list)
    before, saved = _loaded(pair.large), _saved(pair.small)
    answer = _ids(complete(pair.small.url, ask.prompt, max_tokens=200, return_token_ids=True))
    wait_saved(pair.small, 2, saved)
    complete(pair.large.url, [*ask.prompt, *answer])
    assert _loaded(pair.large) == before + 256


def test_what_cannot_be_read_is_left_alone(pair: _Pair) -> None:
    """A document that is none, or not of this request: it is answered, and shares nothing."""
    url = pair.small.url
    prompt = _prompts(6, 300)[0].prompt
    before = counters(pair.small)
    for document in ({"version": "1.0"}, {"version": "9.0"}, "x", _of_another_adapter()):
        complete(url, prompt, kv_transfer_params={"kvparams": document})
    complete(url, prompt, kv_transfer_params={"do_remote_prefill": True})
    wait_saved(pair.small, 2, before[SAVED])
    after = counters(pair.small)
    assert after["vllm:kvparams_requests_off_total"] == before["vllm:kvparams_requests_off_total"] + 4
    assert after[SAVED] == before[SAVED] + 2  # of the last


def test_adapters_share_nothing_with_each_other(pair: _Pair) -> None:
    prompt = _prompts(11, 300)[0].prompt

    def asked(server: Server, *names: str) -> list[list[int]]:
        return [_ids(complete(server.url, prompt, model=name, return_token_ids=True)) for name in names]

    before, saved = (_loaded(pair.small), _loaded(pair.large)), _saved(pair.small)
    answered = asked(pair.small, "tiny", "a", "b")
    assert len({tuple(ids) for ids in answered}) == 3
    wait_saved(pair.small, 6, saved)
    assert _loaded(pair.small) == before[0]
    assert asked(pair.large, "tiny", "b", "a") == answered
    assert _loaded(pair.large) == before[1] + 256  # of the bare model; an adapter's pages are of its name and weights


def _of_another_adapter() -> dict[str, object]:
    transfer = {"id": "t", "attempt": 1}
    document = {"version": "1.0", "request_id": "r", "transfer": transfer, "phase": "decode", "mode": "store"}
    return {**document, "isolation": {"lora": "another"}}


def test_as_a_plugin_and_as_children_of_multi_connector(model: Path, shared_memory: Path, tmp_path: Path) -> None:
    """In bfloat16. The second engine has two of ours: one loads, the other saves what the first has loaded, and both
    stores hold the same bytes then."""
    stores = [f"file://{shared_memory}/{name}?size=64MiB" for name in ("kv", "copy")]
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(shared_memory / "example")},
    }
    environment = by_its_name(tmp_path)
    asks = _prompts(7, 257, 513)
    with Processes(tmp_path) as processes:
        writer, reader = (
            start_engine(
                processes,
                name,
                model,
                transfer=multi(*children),
                environment=environment,
                core=core,
                block_size=32 if core else 64,
                dtype="bfloat16",
            )
            for core, (name, children) in enumerate(
                {"writer": (child(stores[0]), example), "reader": (child(stores[0]), child(stores[1]))}.items()
            )
        )
        processes.wait_ready(writer, reader, within_s=READY_S)
        answers(writer.url, asks)
        expected = answers(writer.url, asks)  # from its own cache
        wait_saved(writer, 6)
        assert counters(writer)["vllm:prefix_cache_hits_total"] == 256 + 512
        assert answers(reader.url, asks) == expected
        seen = counters(reader)  # its statistics can be read
        assert seen["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"] == 256 + 512
        prompts = [ask.prompt for ask in asks if not isinstance(ask.prompt, str)]
        keys = [key for prompt in prompts for key in prefill(writer.url, prompt)["load_keys"] if ".128." in key]
        assert len(keys) == 6  # of pages that are full
        pages, copies = (_values(store, keys) for store in stores)
        assert copies == pages


def _values(url: str, keys: Sequence[str]) -> list[bytes]:
    """What is stored, once it is."""
    store = open_store(url)
    try:
        found: list[bytes] = []
        for key in keys:
            until(lambda key=key: store.exists([key]).result()[0].code is ResultCode.OK)
            buffer = bytearray(1 << 20)
            (result,) = store.get([GetOp(key, (memoryview(buffer),))]).result()
            found.append(bytes(buffer[: result.nbytes]))
        return found
    finally:
        store.close()


def test_two_ranks_store_what_one_reads(model: Path, shared_memory: Path, tmp_path: Path) -> None:
    url = f"file://{shared_memory}/kv?size=256MiB"
    transfer = transfer_config(url, extra={"tensor_parallel_sizes": [1, 2]})
    asks, more = _prompts(8, 129, 300, 700), _prompts(9, 129, 300, 700)
    with Processes(tmp_path) as processes:
        one, two = one_and_two(processes, model, transfer)
        expected = answers(one.url, asks)
        wait_saved(one, 1 + 2 + 5)
        assert answers(two.url, asks) == expected
        assert _loaded(two) == 2 * (128 + 256 + 640)  # each rank its half
        expected = answers(two.url, more)
        wait_saved(two, 2 * (1 + 2 + 5))
        assert answers(one.url, more) == expected
        assert _loaded(one) == 128 + 256 + 640
        _half_a_page_is_damaged(one, two, url)
        _many_leave(two, expected, more)


def _half_a_page_is_damaged(one: Server, two: Server, url: str) -> None:
    """What one rank has to refuse, neither uses."""
    (ask,) = _prompts(14, 450)
    assert isinstance(ask.prompt, list)
    right = _ids(complete(one.url, ask.prompt, 12, cache_salt="apart", return_token_ids=True))
    found = prefill(one.url, ask.prompt)
    store, before = open_store(url), counters(two)
    try:
        halves = [key for key in found["load_keys"] if ".128." in key]
        assert len(halves) == 6, "three full pages, a half for each rank"
        flip(store, halves[3])
    finally:
        store.close()
    response = decode(two.url, ask.prompt, found)
    assert (response.status_code, tokens_of(response)) == (200, right)
    refused = "vllm:kvparams_pages_refused_total{reason=flipped_payload}"
    after = counters(two)
    assert after[refused] - before.get(refused, 0) == 1
    assert 0 < _loaded(two) - before["vllm:kvparams_tokens_loaded_total"] < 2 * 450


def _many_leave(two: Server, expected: list[str], asks: list[Ask]) -> None:
    """Clients that go at any moment leave no block behind in either rank."""
    chance = random.Random(15)

    def leave(patience_s: float) -> bool:
        try:
            body = Ask([chance.randrange(300, 2000) for _ in range(700)]).body()
            httpx.post(f"{two.url}/v1/completions", json=body, timeout=patience_s, verify=NO_CERTIFICATES)
        except httpx.TimeoutException:
            return True
        return False

    with ThreadPoolExecutor(6) as pool:
        left = sum(pool.map(leave, [chance.uniform(0.005, 0.4) for _ in range(40)]))
    assert left
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    until(lambda: not any(counters(two)[f"vllm:{name}"] for name in names))
    assert answers(two.url, asks) == expected


def test_layers_with_windows(model: Path, shared_memory: Path, tmp_path: Path) -> None:
    """Where vLLM keeps all layers alike; `test_vllm_hybrid.py` has the rest."""
    folder = _windows(model, tmp_path, ["sliding_attention", "full_attention"])
    asks = _prompts(13, 129, 300, 513)
    with Processes(tmp_path) as processes:
        alone = start_engine(processes, "alone", folder, "--no-enable-prefix-caching")
        ours = start_engine(
            processes,
            "ours",
            folder,
            *("--disable-hybrid-kv-cache-manager", "--no-enable-prefix-caching"),
            transfer=transfer_config(f"file://{shared_memory}/kv?size=64MiB"),
            core=1,
        )
        processes.wait_ready(alone, ours, within_s=READY_S)
        expected = answers(alone.url, asks)
        assert answers(ours.url, asks) == expected
        wait_saved(ours, 1 + 2 + 4)
        assert answers(ours.url, asks) == expected
        assert _loaded(ours) == 128 + 256 + 512


def _windows(model: Path, tmp_path: Path, kinds: Sequence[str]) -> Path:
    """A model whose layers are of these kinds."""
    folder = tmp_path / "-".join(kinds)
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "layer_types": kinds, "sliding_window": 64}))
    return folder


def test_what_cannot_work_is_refused_in_words(model: Path, tmp_path: Path) -> None:
    """A real engine does not start, with the sentence; every other such sentence is tested without one."""
    store = f"file://{tmp_path}/kv?size=16MiB"
    cases = (
        ("vLLM's scheduler and workers are several", model, transfer_config("memory:?size=1MiB")),
        ("cannot be divided over 3 ranks", model, transfer_config(store, extra={"tensor_parallel_sizes": [3]})),
        (
            "start vLLM with --disable-hybrid-kv-cache-manager",
            _windows(model, tmp_path, ["sliding_attention", "full_attention"]),
            transfer_config(store),
        ),
        (
            "turn the store off for this model",
            _windows(model, tmp_path, ["sliding_attention"] * 2),
            transfer_config(store),
        ),
    )
    told = [[str(folder), json.loads(transfer)] for _, folder, transfer in cases]
    command = [sys.executable, "-W", "ignore", "-m", "tests.interop.vllm.refusing", json.dumps(told)]
    environment = os.environ | ENVIRONMENT
    run = subprocess.run(command, capture_output=True, text=True, timeout=READY_S, env=environment, cwd=_ROOT)
    assert run.returncode == 0, run.stderr
    said: list[str] = json.loads(run.stdout.splitlines()[-1])
    for (words, _, _), one in zip(cases, said, strict=True):
        assert words in one
