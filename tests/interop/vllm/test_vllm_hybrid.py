"""Tests a model with full attention and sliding windows, in real engines that share KV through a store.

Damaged KV of any group of layers is computed again or reported as an error. The expected answers are vLLM's own,
without a connector.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from demo.client import NO_CERTIFICATES
from demo.processes import Processes, Server
from kvparams.pages import HEADER_BYTES
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, open_store
from tests.interop.vllm.engines import READY_S, complete, counters, start_engine, transfer_config, until
from tests.interop.vllm.legs import decode, prefill, tokens_of
from tests.interop.vllm.version import is_earlier
from tests.support.connectors.valkey_server import ValkeyServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(is_earlier(), reason="refused in words there"),
]

_PAGE: Final = 64
_WINDOW: Final = 128
_HITS: Final = "vllm:external_prefix_cache_hits_total"
_USED: Final = "vllm:kv_cache_usage_perc"
_LENGTHS: Final = (30, 64, 65, 127, 128, 129, 130, 160, 191, 192, 193, 256, 257, 300, 449, 640, 1000)
"""Before, at and behind the ends of blocks, pages and windows."""
_DAMAGED: Final = 480
"""Tokens: eight pages of the layers with full attention, three of each of the others."""
_KEYS: Final = 8 + 3 + 3


@dataclass
class _World:
    store: KVStore
    bare: Server
    both: Server
    """Computes in chunks and stores; what it cannot load it computes."""
    reader: Server
    """Only loads; ends a request whose KV it cannot load."""
    small: Server
    """Keeps prefixes itself, in a cache for few requests."""
    blind: Server
    """Believes what it loads."""
    chance: random.Random

    def prompt(self, tokens: int) -> list[int]:
        return [self.chance.randrange(300, 2000) for _ in range(tokens)]

    def right(self, prompt: list[int], max_tokens: int = 12) -> list[int]:
        return _tokens(complete(self.bare.url, prompt, max_tokens, return_token_ids=True))


@pytest.fixture(scope="module")
def world(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_World]:
    folder = hybrid
    logs = tmp_path_factory.mktemp("logs")
    with ValkeyServer(tmp_path_factory.mktemp("valkey"), max_memory="512mb") as server, Processes(logs) as processes:
        pages: dict[str, object] = {"page_tokens": _PAGE}
        bare = start_engine(processes, "bare", folder, "--no-enable-prefix-caching")
        both = start_engine(
            processes,
            "both",
            folder,
            *("--no-enable-prefix-caching", "--max-num-batched-tokens", "256"),
            transfer=transfer_config(server.url, engine_id="both", extra=pages),
        )
        reader = start_engine(
            processes,
            "reader",
            folder,
            "--no-enable-prefix-caching",
            transfer=transfer_config(server.url, role="kv_consumer", policy="fail", engine_id="reader", extra=pages),
            core=1,
        )
        small = start_engine(
            processes,
            "small",
            folder,
            transfer=transfer_config(server.url, engine_id="small", extra=pages),
            core=1,
            cache_bytes=24 << 20,
        )
        blind = start_engine(
            processes,
            "blind",
            folder,
            "--no-enable-prefix-caching",
            transfer=transfer_config(server.url, role="kv_consumer", engine_id="blind", extra=pages, verifies=False),
        )
        processes.wait_ready(bare, both, reader, small, blind, within_s=READY_S)
        store = open_store(server.url)
        yield _World(store, bare, both, reader, small, blind, random.Random(1))
        store.close()


def _tokens(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def _seen(server: Server, before: dict[str, float]) -> dict[str, float]:
    after = counters(server)
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}


def _value(store: KVStore, key: str) -> bytearray:
    until(lambda: store.exists([key]).result()[0].code is ResultCode.OK)
    buffer = bytearray(1 << 20)
    (result,) = store.get([GetOp(key, (memoryview(buffer),))]).result()
    assert result.code is ResultCode.OK
    return buffer[: result.nbytes]


def _replace(store: KVStore, key: str, value: bytearray) -> None:
    store.delete([key]).result()
    (result,) = store.put([PutOp(key, (memoryview(value),))]).result()
    assert result.code is ResultCode.OK


@pytest.mark.parametrize("length", _LENGTHS)
def test_what_one_engine_computes_another_loads(world: _World, length: int) -> None:
    prompt = world.prompt(length)
    found = prefill(world.both.url, prompt)
    before = counters(world.reader)
    assert tokens_of(decode(world.reader.url, prompt, found)) == world.right(prompt)
    seen = _seen(world.reader, before)
    assert seen[_HITS] == length - 1
    assert seen["vllm:kvparams_tokens_loaded_total"] == length - 1
    windows = range(max(0, length - _WINDOW) // _PAGE, -(-length // _PAGE))
    full = -(-length // _PAGE)
    assert len(found["load_keys"]) == full + 2 * len(windows)


def test_a_conversation_goes_on_behind_its_windows(world: _World) -> None:
    """Pages of an answer are stored as it comes, while the windows go on."""
    prompt = world.prompt(100)
    answer = _tokens(complete(world.both.url, prompt, 250, return_token_ids=True))
    assert answer == world.right(prompt, 250)
    more = [*prompt, *answer, *world.prompt(20)]
    expected = world.right(more)

    def hits() -> float:
        before = counters(world.reader)
        assert _tokens(complete(world.reader.url, more, 12, return_token_ids=True)) == expected
        complete(world.both.url, [300] * 5, 1)  # a step, in which saves go on
        return _seen(world.reader, before).get(_HITS, 0)

    until(lambda: hits() == 320)  # pages of 64 in 349 computed tokens


def test_prompts_share_what_they_begin_with(world: _World) -> None:
    """A prefix that ends where windows of the longer prompt are behind it: its pages are of use all the same."""
    long = world.prompt(512)
    keys = prefill(world.both.url, long)["load_keys"]
    for key in keys:
        _value(world.store, key)
    for length, hit in ((512, 511), (500, 448), (321, 320), (130, 128), (70, 64), (60, 0)):
        prompt = [*long[:length], *([] if length == 512 else world.prompt(7))]
        expected = world.right(prompt)
        before = counters(world.reader)
        assert _tokens(complete(world.reader.url, prompt, 12, return_token_ids=True)) == expected
        assert _seen(world.reader, before).get(_HITS, 0) == hit


def test_an_engines_own_prefixes_and_stored_ones_go_together(world: _World) -> None:
    """Its cache has room for two long requests or so: blocks are taken from others, and come from the store again."""
    bases = [world.prompt(900) for _ in range(4)]
    prompts: list[list[int]] = []
    for turn in range(48):
        cut = world.chance.choice((64, 128, 129, 192, 200, 256, 320, 333, 511, 640, 900))
        prompts.append([*bases[turn % 4][:cut], *world.prompt(world.chance.choice((1, 3, 40)))])
    for base in bases:
        prefill(world.both.url, base)
    expected = [world.right(prompt) for prompt in prompts]
    before = counters(world.small)

    def ask(prompt: list[int]) -> list[int]:
        return _tokens(complete(world.small.url, prompt, 12, return_token_ids=True))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, prompts)) == expected
    seen = _seen(world.small, before)
    assert seen[_HITS] > 0
    assert seen["vllm:prefix_cache_hits_total"] > 0
    assert "vllm:kvparams_loads_short_total" not in seen


def test_answers_depend_on_the_pages_of_all_groups(world: _World) -> None:
    """Else what is flipped below would show nothing: who does not verify answers something else."""
    prompt = world.prompt(_DAMAGED)
    expected = world.right(prompt)
    found = prefill(world.both.url, prompt)
    assert tokens_of(decode(world.blind.url, prompt, found)) == expected
    changed: list[bool] = []
    for key in found["load_keys"]:
        good = _value(world.store, key)
        numbers = [good[at : at + 4] for at in range(HEADER_BYTES, len(good), 4)]
        _replace(world.store, key, good[:HEADER_BYTES] + b"".join(reversed(numbers)))
        changed.append(tokens_of(decode(world.blind.url, prompt, found)) != expected)
        _replace(world.store, key, good)
    assert changed == [True] * _KEYS


def _enormous(value: bytearray) -> bytearray:
    """A page with one number that is: a bit of its exponent is flipped."""
    bad = bytearray(value)
    place = next(place for place in range(HEADER_BYTES + 259, len(bad), 4) if not bad[place] & 0x40)
    bad[place] ^= 0x40
    return bad


@pytest.mark.parametrize("at", range(_KEYS))
def test_a_flipped_byte(world: _World, at: int) -> None:
    prompt = world.prompt(_DAMAGED)
    expected = world.right(prompt)
    found = prefill(world.both.url, prompt)
    assert len(found["load_keys"]) == _KEYS
    key = found["load_keys"][at]
    bad = _enormous(_value(world.store, key))
    for engine in (world.reader, world.both):
        _replace(world.store, key, bad)
        before = counters(engine)
        response = decode(engine.url, prompt, found)
        seen = _seen(engine, before)
        assert seen["vllm:kvparams_pages_refused_total{reason=flipped_payload}"] == 1
        assert seen["vllm:kvparams_loads_short_total"] == 1
        if engine is world.reader:
            assert response.status_code == 500
        else:
            assert tokens_of(response) == expected
    assert counters(world.reader)[_USED] == 0
    assert counters(world.both)[_USED] == 0


@pytest.mark.parametrize("at", range(_KEYS))
def test_a_page_that_is_gone(world: _World, at: int) -> None:
    prompt = world.prompt(_DAMAGED)
    expected = world.right(prompt)
    found = prefill(world.both.url, prompt)
    for key in found["load_keys"]:
        _value(world.store, key)
    world.store.delete([found["load_keys"][at]]).result()
    assert decode(world.reader.url, prompt, found).status_code == 500
    before = counters(world.both)
    assert tokens_of(decode(world.both.url, prompt, found)) == expected
    assert _seen(world.both, before)["vllm:kvparams_promises_broken_total"] == 1
    until(lambda: counters(world.reader)[_USED] == 0)


def test_clients_that_leave_keep_no_blocks(world: _World) -> None:
    stored = [(prompt, prefill(world.both.url, prompt)) for prompt in (world.prompt(600) for _ in range(8))]

    def leave(turn: int) -> None:
        prompt, _ = stored[turn % len(stored)]
        engine = (world.both, world.reader)[turn % 2]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        with suppress(httpx.TimeoutException):
            httpx.post(
                f"{engine.url}/v1/completions", json=body, timeout=0.01 * (turn % 13 + 1), verify=NO_CERTIFICATES
            )

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(leave, range(60)))
    for engine in (world.both, world.reader):

        def unused(engine: Server = engine) -> bool:
            complete(engine.url, [300] * 5, 1)
            seen = counters(engine)
            return seen[_USED] == seen["vllm:num_requests_running"] == seen["vllm:num_requests_waiting"] == 0

        until(unused)
    for prompt, found in stored[:3]:
        assert tokens_of(decode(world.reader.url, prompt, found)) == world.right(prompt)
