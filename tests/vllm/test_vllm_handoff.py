"""Prefill on one real vLLM, decode on another, our proxy in front and a store between: the tokens of one vLLM alone.

On a budget some stores are tested two at a time, each with one engine without a cache of its own that is both: it
computes for a prefill leg, and loads what it has stored for the decode leg.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from demo.processes import Processes, Server
from tests.vllm.engines import counters, start_engine, transfer_config
from tests.vllm.real_stores import KINDS, running_store
from tests.vllm.traffic import Ask, answers, mixed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_ON_A_BUDGET: Final = (("file",), ("peer",), ("valkey", "mooncake"), ("lmcache", "tiered"))


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


@dataclass(frozen=True, slots=True)
class _Expected:
    asks: list[Ask]
    answers: list[str]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fleets" in metafunc.fixturenames:
        stores = [(kind,) for kind in KINDS] if metafunc.config.getoption("--soak") else _ON_A_BUDGET
        metafunc.parametrize("fleets", stores, indirect=True, ids=["+".join(kinds) for kinds in stores], scope="module")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> _Expected:
    """Requests, and what one engine without a connector answers."""
    asks = mixed(200 if request.config.getoption("--soak") else 60)
    with Processes(tmp_path_factory.mktemp("single")) as processes:
        single = start_engine(processes, "single", model)
        processes.wait_ready(single, within_s=240)
        return _Expected(asks, answers(single.url, asks))


@pytest.fixture(scope="module")
def fleets(
    request: pytest.FixtureRequest, model: Path, expected: _Expected, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[_Fleet]]:
    """With one store a prefill and a decode engine, with two stores an engine each."""
    kinds: tuple[str, ...] = request.param
    found: list[_Fleet] = []
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(tmp_path_factory.mktemp("logs")))

        def engine(name: str, url: str, role: str, core: int, *more: str) -> Server:
            return start_engine(
                processes, name, model, *more, transfer=transfer_config(url, role=role, engine_id=name), core=core
            )

        for core, kind in enumerate(kinds):
            urls = stack.enter_context(running_store(kind, tmp_path_factory.mktemp(kind)))
            if len(kinds) == 1:
                prefill = engine("P", urls.writing, "kv_producer", 0)
                decode = engine("D", urls.reading, "kv_consumer", 1)
            else:
                prefill = engine(f"{kind}-P", urls.writing, "kv_both", core, "--no-enable-prefix-caching")
                decode = replace(prefill, name=f"{kind}-D")
            found.append(_Fleet(kind, prefill, decode, prefill))
        processes.wait_ready(*(fleet.prefill for fleet in found), *(fleet.decode for fleet in found), within_s=400)
        found = [replace(fleet, proxy=processes.proxy([fleet.prefill], [fleet.decode])) for fleet in found]
        processes.wait_ready(*(fleet.proxy for fleet in found), within_s=60)
        yield found


def test_tokens_are_those_of_one_engine(
    fleets: list[_Fleet], expected: _Expected, record: Callable[[dict[str, object]], None]
) -> None:
    for fleet in fleets:
        assert answers(fleet.proxy.url, expected.asks) == expected.answers, fleet.store
        record({"store": fleet.store, "prompts": len(expected.asks), "different": 0})


def test_the_prompt_came_from_outside(fleets: list[_Fleet], expected: _Expected) -> None:
    for fleet in fleets:
        assert answers(fleet.proxy.url, expected.asks[-3:]) == expected.answers[-3:]
        seen = counters(fleet.decode)
        assert seen["vllm:external_prefix_cache_hits_total"] > 0
        loaded = seen["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"]
        assert seen["vllm:kvparams_tokens_loaded_total"] == seen["vllm:kvparams_tokens_claimed_total"] == loaded
        assert seen["vllm:kvparams_promises_broken_total"] == 0
        assert counters(fleet.prefill)["vllm:kvparams_pages_saved_total"] > 0
        assert loaded > 0
        if not fleet.one_engine:
            assert loaded > seen["vllm:prompt_tokens_by_source_total{source=local_compute}"]
            assert seen["vllm:kvparams_pages_saved_total"] == 0  # it is a consumer
