"""Prefill on one real vLLM, decode on another, our proxy in front and a store between: the tokens of one vLLM alone."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.processes import Processes, Server, free_port
from tests.connectors.valkey_server import ValkeyServer
from tests.vllm.engines import counters, start_engine, transfer_config
from tests.vllm.traffic import Ask, answers, mixed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_ASKS = 200


@dataclass(frozen=True, slots=True)
class _Fleet:
    prefill: Server
    decode: Server
    proxy: Server
    asks: list[Ask]
    alone: list[str]


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Ask], list[str]]:
    """Requests, and what one engine without a connector answers."""
    asks = mixed(_ASKS)
    with Processes(tmp_path_factory.mktemp("single")) as processes:
        single = start_engine(processes, "single", model)
        processes.wait_ready(single, within_s=240)
        return asks, answers(single.url, asks)


@pytest.fixture(scope="module", params=["file", "valkey", "peer"])
def fleet(
    request: pytest.FixtureRequest,
    model: Path,
    alone: tuple[list[Ask], list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[_Fleet]:
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(logs))
        if request.param == "peer":  # decode reads the memory of the engine that computed
            store, reading = f"peer://127.0.0.1:{free_port()}?size=256MiB", "peer://127.0.0.1:0?size=1MiB"
        elif request.param == "valkey":
            store = reading = stack.enter_context(
                ValkeyServer(tmp_path_factory.mktemp("valkey"), max_memory="512mb")
            ).url
        else:
            store = reading = f"file://{tmp_path_factory.mktemp('store')}/kv?size=512MiB"
        prefill = start_engine(
            processes, "P", model, transfer=transfer_config(store, role="kv_producer", engine_id="P"), core=0
        )
        decode = start_engine(
            processes, "D", model, transfer=transfer_config(reading, role="kv_consumer", engine_id="D"), core=1
        )
        processes.wait_ready(prefill, decode, within_s=240)
        proxy = processes.proxy([prefill], [decode])
        processes.wait_ready(proxy, within_s=60)
        yield _Fleet(prefill, decode, proxy, *alone)


def test_tokens_are_those_of_one_engine(fleet: _Fleet) -> None:
    assert answers(fleet.proxy.url, fleet.asks) == fleet.alone


def test_the_prompt_came_from_outside(fleet: _Fleet) -> None:
    if answers(fleet.proxy.url, fleet.asks[-3:]) != fleet.alone[-3:]:
        pytest.fail("the answers differ")
    seen = counters(fleet.decode)
    assert seen["vllm:external_prefix_cache_hits_total"] > 0
    loaded = seen["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"]
    assert loaded > seen["vllm:prompt_tokens_by_source_total{source=local_compute}"]
    assert seen["vllm:kvparams_tokens_loaded_total"] == seen["vllm:kvparams_tokens_claimed_total"] == loaded
    assert seen["vllm:kvparams_promises_broken_total"] == 0
    assert seen["vllm:kvparams_pages_saved_total"] == 0  # it is a consumer
    assert counters(fleet.prefill)["vllm:kvparams_pages_saved_total"] > 0
