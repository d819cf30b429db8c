"""Tests that a real vLLM computes KV whose stored copy is damaged, gone or foreign, or reports an error."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from demo.processes import Processes, Server
from kvparams.keys import KVShard, Namespace, chain_pages
from kvparams.pages import page_identity, seal
from kvparams_connectors.store import KVStore, open_store
from tests.interop.vllm.damage import flip, is_there, replace_value, value_of
from tests.interop.vllm.engines import ANSWER_S, READY_S, complete, counters, start_engine, transfer_config, until
from tests.interop.vllm.legs import decode, prefill, tokens_of
from tests.support.connectors.valkey_server import ValkeyServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_LENGTH = 450
"""Three full pages of 128 and a partial one."""


@dataclass
class _Case:
    """One prompt, what its KV is stored as, and what should be answered."""

    prompt: list[int]
    found: dict[str, Any]
    expected: list[int]


@dataclass
class _World:
    server: ValkeyServer
    store: KVStore
    engines: dict[str, Server]
    cases: dict[str, _Case] = field(default_factory=dict[str, _Case])


_NAMES = ("whole", "flipped", "zeros", "removed", "foreign", "short", "stopped", "going on", "killed", "unverified")
_BRISK_S = 2.0
"""The deadline of an engine that waits for nobody for long."""


@pytest.fixture(scope="module")
def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_World]:
    chance = random.Random(1)
    logs = tmp_path_factory.mktemp("logs")
    with ValkeyServer(tmp_path_factory.mktemp("valkey"), max_memory="512mb") as server, Processes(logs) as processes:
        store = open_store(server.url)
        world = _World(server, store, {})
        for policy, role, core in (("recompute", "kv_both", 0), ("fail", "kv_consumer", 1)):
            transfer = transfer_config(server.url, role=role, policy=policy, engine_id=policy)
            world.engines[policy] = start_engine(
                processes, policy, model, "--no-enable-prefix-caching", transfer=transfer, core=core
            )
        blind = transfer_config(server.url, role="kv_consumer", engine_id="blind", verifies=False)
        world.engines["blind"] = start_engine(processes, "blind", model, transfer=blind)
        brisk = transfer_config(server.url, engine_id="brisk", extra={"deadline_s": _BRISK_S})
        world.engines["brisk"] = start_engine(
            processes, "brisk", model, "--no-enable-prefix-caching", transfer=brisk, core=1
        )
        processes.wait_ready(*world.engines.values(), within_s=READY_S)
        producer = world.engines["recompute"]
        for name in _NAMES:
            prompt = [chance.randrange(300, 2000) for _ in range(_LENGTH)]
            expected = complete(producer.url, prompt, 12, cache_salt="apart", return_token_ids=True)
            found = prefill(producer.url, prompt)
            world.cases[name] = _Case(prompt, found, expected["choices"][0]["token_ids"])
        assert counters(producer)["vllm:kvparams_tokens_loaded_total"] == 0
        yield world
        store.close()


def _ask(world: _World, policy: str, name: str) -> tuple[int, list[int] | None, dict[str, float]]:
    """Status, tokens, and what was counted meanwhile."""
    case, engine = world.cases[name], world.engines[policy]
    before = counters(engine)
    response = decode(engine.url, case.prompt, case.found)
    after = counters(engine)
    seen = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    return response.status_code, tokens_of(response) if response.status_code == 200 else None, seen


def _refused(seen: dict[str, float]) -> dict[str, float]:
    """Pages by the reason for which they were not used."""
    name = "vllm:kvparams_pages_refused_total{reason="
    return {series.removeprefix(name)[:-1]: count for series, count in seen.items() if series.startswith(name)}


def test_whole_pages_are_loaded(world: _World) -> None:
    for policy in ("recompute", "fail"):
        status, tokens, seen = _ask(world, policy, "whole")
        assert (status, tokens) == (200, world.cases["whole"].expected)
        assert seen["vllm:kvparams_tokens_loaded_total"] == _LENGTH - 1
        assert seen["vllm:external_prefix_cache_hits_total"] == _LENGTH - 1


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_flipped_byte(world: _World, policy: str) -> None:
    case = world.cases["flipped"]
    at = 1 if policy == "recompute" else 0  # what was recomputed may be on its way to the store
    flip(world.store, case.found["load_keys"][at])
    status, tokens, seen = _ask(world, policy, "flipped")
    assert _refused(seen) == {"flipped_payload": 1}
    assert seen["vllm:kvparams_loads_short_total"] == 1
    if policy == "recompute":
        assert (status, tokens) == (200, case.expected)
        assert seen["vllm:kvparams_tokens_loaded_total"] == 128
    else:
        assert status == 500


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_page_that_is_gone(world: _World, policy: str) -> None:
    case = world.cases["removed"]
    is_there(world.store, case.found["load_keys"][2])
    world.store.delete([case.found["load_keys"][2]]).result()
    status, tokens, seen = _ask(world, policy, "removed")
    assert seen["vllm:kvparams_promises_broken_total"] == 1
    if policy == "recompute":
        assert (status, tokens) == (200, case.expected)
        assert seen["vllm:kvparams_tokens_loaded_total"] == 256
    else:
        assert status == 500
        assert seen["vllm:kvparams_loads_short_total"] == 1


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_page_of_another_model(world: _World, policy: str) -> None:
    case = world.cases["foreign"]
    key = case.found["load_keys"][1]
    first = case.found["load_keys"][0]
    other = Namespace("another", "model", "float32", _geometry(), 128)
    value = value_of(world.store, first)  # of the same size
    page = chain_pages(other, case.prompt)[1]
    seal(memoryview(value), page_identity(other, page, KVShard(0, 2, 0, 2)))
    replace_value(world.store, key, value)
    status, tokens, seen = _ask(world, policy, "foreign")
    assert _refused(seen) == {"namespace": 1}
    assert (status, tokens) == (200, case.expected) if policy == "recompute" else status == 500


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_page_of_zeros(world: _World, policy: str) -> None:
    case = world.cases["zeros"]
    at = 1 if policy == "recompute" else 0
    key = case.found["load_keys"][at]
    replace_value(world.store, key, bytearray(len(value_of(world.store, key))))
    status, tokens, seen = _ask(world, policy, "zeros")
    assert _refused(seen) == {"malformed": 1}
    assert (status, tokens) == (200, case.expected) if policy == "recompute" else status == 500


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_page_that_is_too_short(world: _World, policy: str) -> None:
    case = world.cases["short"]
    key = case.found["load_keys"][0]
    replace_value(world.store, key, value_of(world.store, key)[:1000])
    status, tokens, seen = _ask(world, policy, "short")
    if policy == "recompute":  # a lookup tells by its size: it is not read at all
        assert seen["vllm:kvparams_promises_broken_total"] == 1
    assert _refused(seen) == ({} if policy == "recompute" else {"torn": 1})
    assert "vllm:kvparams_tokens_loaded_total" not in seen
    assert (status, tokens) == (200, case.expected) if policy == "recompute" else status == 500


def test_without_verification_a_flipped_byte_is_believed(world: _World) -> None:
    case, blind = world.cases["unverified"], world.engines["blind"]
    flip(world.store, case.found["load_keys"][1])
    assert tokens_of(decode(blind.url, case.prompt, case.found)) != case.expected
    assert counters(blind)["vllm:kvparams_tokens_loaded_total"] == _LENGTH - 1
    status, tokens, _ = _ask(world, "recompute", "unverified")
    assert (status, tokens) == (200, case.expected)


def test_a_store_that_was_stopped_costs_its_deadline_and_no_step(world: _World) -> None:
    """SIGSTOP: it neither answers nor refuses. What runs already goes on, who asks for stored KV computes it then."""
    case, engine = world.cases["stopped"], world.engines["brisk"]
    again = world.cases["going on"]
    for key in (*case.found["load_keys"], *again.found["load_keys"]):
        is_there(world.store, key)

    def generated() -> float:
        return counters(engine)["vllm:generation_tokens_total"]

    with ThreadPoolExecutor(2) as pool:
        began = generated()
        running = pool.submit(complete, engine.url, case.prompt[:20], 2000, ignore_eos=True)
        until(lambda: generated() > began)
        world.server.stop()
        try:
            begun = time.monotonic()
            waiting = pool.submit(decode, engine.url, case.prompt, case.found)
            until(lambda: counters(engine)["vllm:num_requests_waiting"] > 0)
            before = generated()
            until(lambda: generated() > before + 20)
            assert not waiting.done(), "it has waited for nothing"
            assert not running.done(), "nothing ran beside it"
            response = waiting.result(ANSWER_S)
            took_s = time.monotonic() - begun
        finally:
            world.server.go_on()
        assert running.result(ANSWER_S)["usage"]["completion_tokens"] == 2000
    assert (response.status_code, tokens_of(response)) == (200, case.expected)
    assert took_s < 10 * _BRISK_S  # of which a busy machine computes most
    seen = counters(engine)
    assert seen["vllm:kvparams_lookups_failed_total"] >= 1
    assert seen["vllm:kvparams_tokens_loaded_total"] == 0

    def found_again() -> bool:
        assert tokens_of(decode(engine.url, again.prompt, again.found)) == again.expected
        return counters(engine)["vllm:kvparams_tokens_loaded_total"] > 0

    until(found_again)


def test_a_store_that_was_killed(world: _World) -> None:
    world.server.kill()
    status, tokens, seen = _ask(world, "recompute", "killed")
    assert (status, tokens) == (200, world.cases["killed"].expected)
    assert seen["vllm:kvparams_lookups_failed_total"] >= 1
    status, tokens, seen = _ask(world, "fail", "killed")
    assert status == 500


def _geometry() -> Any:
    from kvparams.keys import Geometry

    return Geometry(2, 2, 64, 64)
