"""Tests our proxy before two stock vLLM engines that move KV with the real NixlConnector, over UCX on loopback."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from demo.processes import Processes, Server
from tests.interop.vllm.engines import ANSWER_S, CALM, PATIENCE_S, counters, until
from tests.interop.vllm.own_connectors import (
    NIXL_LEASE_S,
    Alone,
    Pair,
    check,
    external,
    installed,
    nixl,
    start_pair,
    usage,
)
from tests.interop.vllm.traffic import Ask, answers
from tests.support.waiting import wait_stays_true_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_SOON_S: Final = 25.0
_AT_ONCE: Final = 4
_SCENES: Final = 10


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    installed("nixl")
    with Processes(tmp_path_factory.mktemp("logs")) as processes:
        yield start_pair(
            processes,
            model,
            "nixl",
            nixl("P", "kv_producer"),
            nixl("D", "kv_consumer"),
            "--enable-prompt-tokens-details",
        )


def _prompt(size: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(300, 2000), k=size)


def _in_use(server: Server) -> float:
    """The share of an engine's blocks that are in use."""
    return counters(server)["vllm:kv_cache_usage_perc"]


def test_tokens_are_those_of_one_engine_and_decode_had_the_prompts_from_prefill(
    pair: Pair, alone: Alone, record: Callable[[dict[str, object]], None]
) -> None:
    before = external(pair.decode)
    assert answers(pair.proxy.url, alone.asks) == alone.answers
    seen = counters(pair.decode)
    loaded = external(pair.decode) - before
    assert loaded > 0
    assert seen["vllm:external_prefix_cache_hits_total"] > 0
    # What decode computes of a prompt itself is the last token, and what its own cache had.
    assert loaded > 10 * seen["vllm:prompt_tokens_by_source_total{source=local_compute}"]
    until(lambda: not _in_use(pair.prefill) and not _in_use(pair.decode), _SOON_S)
    record({"connector": "NixlConnector", "prompts": len(alone.asks), "different": 0, "tokens_loaded": loaded})


def test_usage_is_what_prefill_computed_and_found(pair: Pair) -> None:
    prompt = _prompt(300, 1)
    for cached in (0, 288):  # nine blocks of 32, the second time
        seen = usage(pair.proxy.url, prompt)
        details: dict[str, Any] = seen["prompt_tokens_details"] or {}
        assert (seen["prompt_tokens"], seen["completion_tokens"]) == (300, 5)
        assert (details.get("cached_tokens") or 0) == cached


def test_the_check_finds_the_pair_good_and_another_declaration_wrong(pair: Pair) -> None:
    engines = [pair.prefill], [pair.decode]
    good = check(*engines, "nixl")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "D loaded " in good.stdout
    wrong = check(*engines, "content")
    assert wrong.returncode == 1
    assert "D computed the whole prompt itself: it did not get the KV of P" in wrong.stdout
    wrong = check(*engines, "store")
    assert wrong.returncode == 1
    assert "does its connector speak kvparams" in wrong.stdout


def test_blocks_stay_until_somebody_comes(pair: Pair) -> None:
    """The negative control of the next test: what makes prefill free its blocks is a decode leg, not time."""
    body = {"model": "tiny", "prompt": _prompt(500, 2), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    prefilled = httpx.post(
        f"{pair.prefill.url}/v1/completions", json={**body, "kv_transfer_params": asked}, timeout=ANSWER_S
    )
    held = prefilled.json()["kv_transfer_params"]
    wait_stays_true_for(3.0, lambda: _in_use(pair.prefill) > 0, pause_s=0.1)
    fetched = httpx.post(
        f"{pair.decode.url}/v1/completions", json={**body, "kv_transfer_params": held}, timeout=ANSWER_S
    )
    assert fetched.status_code == 200
    until(lambda: not _in_use(pair.prefill), _SOON_S)


def test_a_client_that_leaves_between_the_legs_leaves_no_blocks(pair: Pair, tmp_path: Path) -> None:
    """Where decode's long answer ended before the other request was given up, there was nothing to see: once more."""
    for scene in range(_SCENES):
        folder = tmp_path / str(scene)
        folder.mkdir()
        with Processes(folder) as processes:
            narrow = processes.proxy([pair.prefill], [pair.decode], *CALM, "--decode-requests", "1", connector="nixl")
            processes.wait_ready(narrow, within_s=PATIENCE_S)
            took = asyncio.run(_leave_between_legs(pair, narrow.url, scene))
            metrics = httpx.get(f"{narrow.url}/metrics", timeout=ANSWER_S).text
        until(lambda: not _in_use(pair.prefill) and not _in_use(pair.decode))
        if took is not None:
            break
    else:
        pytest.fail(f"decode was never busy long enough, {_SCENES} times")
    assert took < _SOON_S < NIXL_LEASE_S
    assert "kvparams_proxy_transfers_released_total 1.0" in metrics
    assert "kvparams_proxy_transfers_orphaned_total 0.0" in metrics


async def _leave_between_legs(pair: Pair, url: str, scene: int) -> float | None:
    """Decode is busy with a long answer; another request is prefilled, waits for decode, and is given up. How long its
    blocks were held after that; None if decode was not busy all the time."""
    long = Ask(_prompt(64, 1000 + scene), max_tokens=1900, stream=True).body()
    short = Ask(_prompt(700, 2000 + scene)).body()
    path = f"{url}/v1/completions"
    async with httpx.AsyncClient(timeout=ANSWER_S) as client, client.stream("POST", path, json=long) as busy:
        lines = busy.aiter_lines()  # kept: a generator that is forgotten closes the stream
        await anext(lines)
        await asyncio.to_thread(until, lambda: not _in_use(pair.prefill))
        waiting = asyncio.create_task(client.post(path, json=short))
        await asyncio.to_thread(until, lambda: waiting.done() or _in_use(pair.prefill), pause_s=0.02)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        took = await asyncio.to_thread(until, lambda: not _in_use(pair.prefill))
        running = (await asyncio.to_thread(counters, pair.decode))["vllm:num_requests_running"]
        return took if running == 1 else None


def test_clients_that_leave_at_random_moments_leave_nothing(
    pair: Pair, effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    chance = random.Random(5)
    asks = [Ask(_prompt(chance.randrange(20, 700), 100 + number), max_tokens=12) for number in range(6)]
    expected = answers(pair.proxy.url, asks)
    answered, given_up, wrong = asyncio.run(_storm(pair.proxy.url, asks, expected, effort(40, 300), chance))
    assert not wrong, "\n".join([*wrong, pair.prefill.tail(), pair.decode.tail(), pair.proxy.tail()])
    assert answered
    assert given_up
    # A prefill that ends at the very moment at which its leg is given up has told nobody of its blocks: they stay until
    # the lease is over.
    took = until(lambda: not _in_use(pair.prefill) and not _in_use(pair.decode), NIXL_LEASE_S + 15)
    for server in (pair.prefill, pair.decode):
        seen = counters(server)
        assert not seen["vllm:num_requests_running"]
        assert not seen["vllm:num_requests_waiting"]
    assert answers(pair.proxy.url, asks[:4]) == expected[:4]
    record({"answered": answered, "given_up": given_up, "idle_after_s": took})


async def _storm(
    url: str, asks: list[Ask], expected: list[str], count: int, chance: random.Random
) -> tuple[int, int, list[str]]:
    """How many requests were answered, how many were given up, and what was told in answers that were wrong."""
    ended: list[bool] = []
    wrong: list[str] = []
    gate = asyncio.Semaphore(_AT_ONCE)
    async with httpx.AsyncClient(timeout=ANSWER_S) as client:

        async def one(which: int, patience_s: float | None) -> None:
            async with gate:
                try:
                    async with asyncio.timeout(patience_s):
                        response = await client.post(f"{url}/v1/completions", json=asks[which].body())
                except TimeoutError:
                    ended.append(False)
                    return
            if response.status_code != 200 or str(response.json()["choices"][0]["token_ids"]) != expected[which]:
                wrong.append(f"{time.ctime()}, prompt {which}: {response.text} instead of {expected[which]}")
            ended.append(True)

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                patience_s = chance.choice((None, chance.uniform(0.005, 0.6)))
                group.create_task(one(chance.randrange(len(asks)), patience_s))
    return sum(ended), len(ended) - sum(ended), wrong
