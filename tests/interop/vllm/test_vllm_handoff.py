"""Tests prefill on one real vLLM and decode on another: the tokens are those of one vLLM alone.

Our proxy is in front, and a store is between the engines. A budgeted run tests some stores two at a time, each with one
engine without a cache of its own that has both roles: it computes for a prefill leg, and loads what it has stored for
the decode leg. Over `file` both engines have both roles, and a conversation moves between them.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import httpx
import pytest

from demo.processes import Processes, Server
from tests.interop.vllm.engines import (
    ANSWER_S,
    CALM,
    PATIENCE_S,
    READY_S,
    complete,
    counters,
    start_engine,
    transfer_config,
)
from tests.interop.vllm.own_connectors import Alone, check, usage
from tests.interop.vllm.real_stores import KINDS, running_store
from tests.interop.vllm.traffic import answers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_PATIENT: Final = {"deadline_s": 150.0}
"""On a busy machine too all that is promised is loaded."""
_FILE: Final = ("file",)
_ON_A_BUDGET: Final = (_FILE, ("peer",), ("valkey", "mooncake"), ("lmcache", "tiered"))
_AT_LENGTH: Final = (_FILE, *((kind,) for kind in KINDS if kind != "file"))


@dataclass(frozen=True, slots=True)
class _Fleet:
    store: str
    prefill: Server
    decode: Server
    proxy: Server

    @property
    def one_engine(self) -> bool:
        """Whether prefill and decode are one engine."""
        return self.prefill.url == self.decode.url


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fleets" in metafunc.fixturenames:
        stores = _AT_LENGTH if metafunc.config.getoption("--soak") else _ON_A_BUDGET
        if "moves" in metafunc.function.__name__:
            stores = (_FILE,)
        metafunc.parametrize("fleets", stores, indirect=True, ids=["+".join(kinds) for kinds in stores], scope="module")


@pytest.fixture(scope="module")
def fleets(
    request: pytest.FixtureRequest, model: Path, alone: Alone, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[_Fleet]]:
    """With one store a prefill and a decode engine, with two stores an engine each."""
    kinds: tuple[str, ...] = request.param
    found: list[_Fleet] = []
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(tmp_path_factory.mktemp("logs")))

        def engine(name: str, url: str, role: str, core: int, *more: str) -> Server:
            transfer = transfer_config(url, role=role, engine_id=name, extra=_PATIENT)
            more = ("--enable-prompt-tokens-details", *more)
            forked = kinds != _FILE  # these two start as an operator's do
            return start_engine(processes, name, model, *more, transfer=transfer, core=core, forked=forked)

        for core, kind in enumerate(kinds):
            urls = stack.enter_context(running_store(kind, tmp_path_factory.mktemp(kind)))
            if kinds == _FILE:
                prefill, decode = (engine(name, urls.writing, "kv_both", at) for at, name in enumerate("PD"))
            elif len(kinds) == 1:
                prefill = engine("P", urls.writing, "kv_producer", 0)
                decode = engine("D", urls.reading, "kv_consumer", 1)
            else:
                prefill = engine(f"{kind}-P", urls.writing, "kv_both", core, "--no-enable-prefix-caching")
                decode = replace(prefill, name=f"{kind}-D")
            found.append(_Fleet(kind, prefill, decode, prefill))
        processes.wait_ready(*(fleet.prefill for fleet in found), *(fleet.decode for fleet in found), within_s=READY_S)
        found = [replace(fleet, proxy=processes.proxy([fleet.prefill], [fleet.decode], *CALM)) for fleet in found]
        processes.wait_ready(*(fleet.proxy for fleet in found), within_s=PATIENCE_S)
        yield found


def test_tokens_are_those_of_one_engine(
    fleets: list[_Fleet], alone: Alone, record: Callable[[dict[str, object]], None]
) -> None:
    for fleet in fleets:
        assert answers(fleet.proxy.url, alone.asks) == alone.answers, fleet.store
        record({"store": fleet.store, "prompts": len(alone.asks), "different": 0})


def test_the_prompt_came_from_outside(fleets: list[_Fleet], alone: Alone) -> None:
    for fleet in fleets:
        assert answers(fleet.proxy.url, alone.asks[-3:]) == alone.answers[-3:]
        seen = counters(fleet.decode)
        assert seen["vllm:external_prefix_cache_hits_total"] > 0
        loaded = seen["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"]
        assert seen["vllm:kvparams_tokens_loaded_total"] == seen["vllm:kvparams_tokens_claimed_total"] == loaded
        assert seen["vllm:kvparams_promises_broken_total"] == 0
        assert counters(fleet.prefill)["vllm:kvparams_pages_saved_total"] > 0
        assert loaded > 0
        if not fleet.one_engine:
            assert loaded > seen["vllm:prompt_tokens_by_source_total{source=local_compute}"]
            if fleet.store != "file":
                assert seen["vllm:kvparams_pages_saved_total"] == 0  # it is a consumer


def test_usage_is_what_prefill_computed_and_found(fleets: list[_Fleet]) -> None:
    for fleet in fleets:
        prompt = random.Random(fleet.store).choices(range(300, 2000), k=300)
        stored = 299 if fleet.one_engine else 288  # from the store all but the last token; else nine blocks of its own
        for cached in (0, stored):
            seen = usage(fleet.proxy.url, prompt)
            details: dict[str, int] = seen["prompt_tokens_details"] or {}
            assert (seen["prompt_tokens"], seen["completion_tokens"], seen["total_tokens"]) == (300, 5, 305)
            assert (details.get("cached_tokens") or 0) == cached, fleet.store


_CHANGED: Final[dict[str, dict[str, object]]] = {
    "cut": {"truncate_prompt_tokens": 200},
    "cut on the right": {"truncate_prompt_tokens": 200, "truncation_side": "right"},
    "cut to the model's length": {"truncate_prompt_tokens": -1},
    "not cut": {"truncate_prompt_tokens": 900},
    "searched with beams": {"use_beam_search": True},
    "with its prompt": {"echo": True},
}
"""Requests whose prompt an engine changes, or perhaps."""


@pytest.mark.parametrize("how", _CHANGED)
def test_a_prompt_that_the_engine_changes_is_answered_as_by_one_engine(
    fleets: list[_Fleet], bare: Server, how: str
) -> None:
    """What is said of its token ids is what the engine computes, or nothing."""
    chance = random.Random(how)
    for fleet in fleets:
        for size in (600, 2600) if _CHANGED[how].get("truncate_prompt_tokens") == -1 else (600,):
            prompt = chance.choices(range(300, 2000), k=size)
            asked = {"return_token_ids": True, **_CHANGED[how]}
            found, expected = (complete(url, prompt, 6, **asked) for url in (fleet.proxy.url, bare.url))
            assert [one["token_ids"] for one in found["choices"]] == [one["token_ids"] for one in expected["choices"]]
            assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]


def test_the_check_finds_the_engines_good_and_another_declaration_wrong(fleets: list[_Fleet]) -> None:
    for fleet in fleets:
        good = check([fleet.prefill], [fleet.decode], "store")
        assert good.returncode == 0, good.stdout + good.stderr
        wrong = check([fleet.prefill], [fleet.decode], "nixl")
        assert wrong.returncode == 1, wrong.stdout + wrong.stderr


@pytest.mark.parametrize("connector", ["store", "nixl"])
def test_the_doctor_asks_running_engines_what_they_are(fleets: list[_Fleet], connector: str, tmp_path: Path) -> None:
    fleet = fleets[0]
    roles = (("prefill", fleet.prefill), ("decode", fleet.decode))
    instances = [{"id": each.name, "url": each.url, "role": role, "connector": connector} for role, each in roles]
    path = tmp_path / "fleet.yaml"
    path.write_text(json.dumps({"instances": instances}))
    command = [sys.executable, "-m", "kvparams", "doctor", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    assert run.returncode == (0 if connector == "store" else 1), run.stdout + run.stderr


def test_a_conversation_moves_between_engines(fleets: list[_Fleet], bare: Server, tmp_path: Path) -> None:
    """Each turn is answered by another engine, which fetches the turns before it."""
    (fleet,) = fleets
    engines = [fleet.prefill, fleet.decode]
    with Processes(tmp_path) as processes:
        proxy = processes.proxy(engines, [replace(engine, name=f"{engine.name}-decode") for engine in engines], *CALM)
        processes.wait_ready(proxy, within_s=PATIENCE_S)
        chance = random.Random(21)
        history: list[int] = []
        routes: list[str] = []
        seen = {engine.name: 0 for engine in engines}
        for _ in range(4):
            stored = len(history) // 128 * 128
            history += [chance.randrange(300, 2000) for _ in range(150)]
            before = {engine.name: _external(engine) for engine in engines}
            body = {"model": "tiny", "prompt": history, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            response = httpx.post(
                f"{proxy.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=ANSWER_S
            )
            assert response.status_code == 200, response.text
            routes.append(response.headers["x-kvparams-prefill"])
            answer = response.json()["choices"][0]["token_ids"]
            assert answer == complete(bare.url, history, 20, return_token_ids=True)["choices"][0]["token_ids"]
            (engine,) = (engine for engine in engines if engine.name == routes[-1])
            fetched = _external(engine) - before[engine.name]
            assert fetched >= stored - seen[engine.name] // 32 * 32  # the full pages, but for blocks of its own
            assert fetched > 0 or not stored
            history += answer
            seen[engine.name] = len(history)
        assert routes in (["P", "D"] * 2, ["D", "P"] * 2)


def _external(engine: Server) -> float:
    return counters(engine)["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"]
