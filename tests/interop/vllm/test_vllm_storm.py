"""Tests leaving clients, a cache too small for all, and a store that forgets: no leak, no hang, no wrong token.

Saves are copied 20 ms late, so that other requests want their blocks meanwhile.
"""

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from demo.processes import Processes, Server
from tests.interop.vllm.engines import ANSWER_S, READY_S, counters, start_engine, transfer_config, until
from tests.interop.vllm.traffic import Ask, answers

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

_AT_ONCE = 16
"""Twice what an engine runs: the others wait behind their lookups."""


def _asks(chance: random.Random, count: int) -> list[Ask]:
    shared = [chance.randrange(300, 2000) for _ in range(400)]
    asks: list[Ask] = []
    for _ in range(count):
        own = [chance.randrange(300, 2000) for _ in range(chance.randrange(10, 300))]
        asks.append(Ask(shared[: chance.choice((0, 128, 256, 300, 400))] + own, max_tokens=chance.randrange(20, 90)))
    return asks


async def _storm(
    url: str, asks: list[Ask], expected: list[str], count: int, leavers: int, chance: random.Random
) -> tuple[int, int]:
    """How many requests were answered, and how many were given up: `count` together, and more until `leavers` left."""
    answered = given_up = 0
    limits = httpx.Limits(max_connections=_AT_ONCE)
    async with httpx.AsyncClient(timeout=ANSWER_S, limits=limits) as client:

        async def one(which: int, patience_s: float | None) -> None:
            nonlocal answered, given_up
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    response = await client.post(f"{url}/v1/completions", json=asks[which].body())
                    assert response.status_code == 200, response.text
                    assert str(response.json()["choices"][0]["token_ids"]) == expected[which]
                    answered += 1
                    return
            given_up += 1

        async def some() -> None:
            while answered + given_up < count or given_up < leavers:
                patience_s = chance.choice((None, chance.uniform(0.005, 0.8)))
                await one(chance.randrange(len(asks)), patience_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(some())
    return answered, given_up


def _idle(server: Server) -> dict[str, float]:
    """What is counted once nothing runs any more."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    seen: dict[str, float] = {}

    def busy() -> list[float]:
        """How many run, how many wait, and the share of blocks in use."""
        seen.update(counters(server))
        return [seen[f"vllm:{name}"] for name in names]

    until(lambda: not any(busy()), seen=busy)
    return seen


def test_aborts_and_preemptions_leak_nothing(
    model: Path,
    shared_memory: Path,
    tmp_path: Path,
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    """With vLLM's own prefix cache and without, two engines at once."""
    asks = _asks(random.Random(5), 24)
    root = str(Path(__file__).parents[3])
    with Processes(tmp_path) as processes:
        engines = [
            start_engine(
                processes,
                f"E-{caching}",
                model,
                *("--max-model-len", "1024", f"--{caching}enable-prefix-caching"),
                # 32 pages: what is found is often gone
                transfer=_transfer(f"file://{shared_memory}/kv{core}?size=8MiB"),
                core=core,
                cache_bytes=3 << 20,  # 48 blocks of 32 tokens
                environment={"KVPARAMS_LATE_S": "0.02", "PYTHONPATH": root},
            )
            for core, caching in enumerate(("", "no-"))
        ]
        processes.wait_ready(*engines, within_s=READY_S)
        expected = answers(engines[0].url, asks)
        assert answers(engines[1].url, asks) == expected
        total, leavers = effort(100, 300), effort(1, 300)

        async def storms() -> list[tuple[int, int]]:
            storms = (
                _storm(engine.url, asks, expected, total, leavers, random.Random(7 + core))
                for core, engine in enumerate(engines)
            )
            return await asyncio.gather(*storms)

        for engine, (answered, given_up) in zip(engines, asyncio.run(storms()), strict=True):
            seen = _idle(engine)
            assert answers(engine.url, asks[:6]) == expected[:6]
            assert answered
            assert given_up >= leavers
            assert seen["vllm:num_preemptions_total"] > 0
            assert seen["vllm:kvparams_tokens_loaded_total"] > 0
            record(
                {
                    "engine": engine.name,
                    "answered": answered,
                    "given_up": given_up,
                    "preemptions": seen["vllm:num_preemptions_total"],
                    "loads": seen["vllm:kvparams_loads_total"],
                    "loads_short": seen["vllm:kvparams_loads_short_total"],
                }
            )


def _transfer(store: str) -> str:
    told = json.loads(transfer_config(store))
    return json.dumps(told | {"kv_connector": "LateConnector", "kv_connector_module_path": "tests.interop.vllm.late"})
