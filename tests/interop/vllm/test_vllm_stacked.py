"""Tests vLLM's MultiConnector with NixlConnector and ours, in both orders, behind our proxy.

Prefill keeps its blocks for NIXL and saves them in a store. Decode takes what the first connector has that offers any.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest

from demo.processes import Processes, Server
from tests.interop.vllm.engines import (
    ANSWER_S,
    CALM,
    PATIENCE_S,
    READY_S,
    SAVED,
    by_its_name,
    child,
    counters,
    multi,
    start_engine,
    until,
)
from tests.interop.vllm.own_connectors import external, installed, nixl
from tests.interop.vllm.traffic import Ask, answers, mixed

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

_LOADED: Final = "vllm:kvparams_pages_loaded_total"
_PROMPT: Final = list(range(300, 1068))
"""Six pages of 128 tokens."""


class _Stack(NamedTuple):
    first: str
    prefill: Server
    decode: Server
    proxy: Server
    processes: Processes


@pytest.fixture(scope="module", params=["nixl first", "store first"])
def stack(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Stack]:
    """Both engines have both connectors in this order."""
    installed("nixl")
    folder = tmp_path_factory.mktemp("stacked")
    store = f"file://{folder}/kv?size=256MiB"
    with Processes(folder) as processes:

        def engine(name: str, role: str, core: int) -> Server:
            own = nixl(name, role)
            told: dict[str, Any] = json.loads(own.transfer)
            told.pop("engine_id")  # vLLM refuses it of a child
            children = [told, child(store)]
            if request.param == "store first":
                children.reverse()
            environment = {**own.environment, **by_its_name(folder / name)}
            transfer = multi(*children)
            return start_engine(processes, name, model, transfer=transfer, environment=environment, core=core)

        prefill, decode = engine("P", "kv_producer", 0), engine("D", "kv_consumer", 1)
        processes.wait_ready(prefill, decode, within_s=READY_S)
        proxy = processes.proxy([prefill], [decode], *CALM, connector="nixl")
        processes.wait_ready(proxy, within_s=PATIENCE_S)
        yield _Stack(request.param, prefill, decode, proxy, processes)


def test_tokens_are_those_of_one_engine_by_the_path_that_is_first(
    stack: _Stack, bare: Server, effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    asks = mixed(effort(30, 200), seed=3)
    expected = answers(bare.url, asks)
    pages, tokens = counters(stack.decode)[_LOADED], external(stack.decode)
    assert answers(stack.proxy.url, asks) == expected
    by_store = counters(stack.decode)[_LOADED] - pages
    loaded = external(stack.decode) - tokens
    record({"order": stack.first, "prompts": len(asks), "different": 0, "tokens": loaded, "pages_of_store": by_store})
    assert loaded > 0
    assert counters(stack.prefill)[SAVED] > 0
    assert (by_store > 0) is (stack.first == "store first")
    until(lambda: not counters(stack.prefill)["vllm:kv_cache_usage_perc"], PATIENCE_S)


def test_tokens_are_right_when_the_peer_of_nixl_has_died(stack: _Stack, bare: Server) -> None:
    """The last test of the stack: its prefill engine is killed between the legs.

    The store serves where it is first. Otherwise NIXL's transfer fails, and decode computes the prompt.
    """
    body: dict[str, Any] = {**Ask(_PROMPT).body(), "max_tokens": 1}
    expected = answers(bare.url, [Ask(_PROMPT)])
    before = counters(stack.prefill)[SAVED]
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    told = httpx.post(
        f"{stack.prefill.url}/v1/completions", json={**body, "kv_transfer_params": asked}, timeout=ANSWER_S
    ).json()["kv_transfer_params"]
    assert told["remote_host"]
    until(lambda: counters(stack.prefill)[SAVED] >= before + 6, PATIENCE_S)
    stack.prefill.process.kill()
    stack.prefill.process.wait(PATIENCE_S)
    loaded = counters(stack.decode)[_LOADED]
    answer = httpx.post(
        f"{stack.decode.url}/v1/completions",
        json={**Ask(_PROMPT).body(), "kv_transfer_params": told},
        timeout=ANSWER_S,
    )
    assert answer.status_code == 200, answer.text + stack.decode.tail()
    assert [json.dumps(answer.json()["choices"][0]["token_ids"])] == expected
    assert (counters(stack.decode)[_LOADED] > loaded) is (stack.first == "store first")
