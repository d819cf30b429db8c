"""Tests that requests find as much in engines' caches through Envoy and the picker as through the proxy."""

import asyncio
import random
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.caching_engine import CachingEngine
from tests.support.gateway import filters, start_envoy, start_picker
from tests.support.processes import Processes, free_ports

ENGINES, SESSIONS, TURNS = 4, 48, 8
CAPACITY_BLOCKS = 1500
"""All sessions together need about twice as much as the engines have."""
FLAGS = ("--mode", "aggregated", "--tokenizer", "bytes", "--log-requests", "off")


def trace() -> list[str]:
    """Returns prompts, which are sent one after the other: conversations that grow with each turn."""
    dice = random.Random(7)
    words = [f"{dice.randrange(1 << 30):x} " for _ in range(4000)]

    def text(size: int) -> str:
        return "".join(dice.choice(words) for _ in range(size))

    systems = [text(200) for _ in range(6)]
    sessions = [dice.choice(systems) for _ in range(SESSIONS)]
    left = [session for session in range(SESSIONS) for _ in range(TURNS)]
    dice.shuffle(left)
    prompts: list[str] = []
    for session in left:
        sessions[session] += text(60)
        prompts.append(sessions[session])
    return prompts


async def replay(url: str, engines: list[CachingEngine]) -> float:
    """Sends the trace. Returns the share of prompt tokens that were found in caches."""
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
        for prompt in trace():
            body = {"model": "m", "prompt": prompt, "max_tokens": 1}
            assert (await client.post(f"{url}/v1/completions", json=body)).status_code == 200
    return sum(each.found_tokens for each in engines) / sum(each.seen_tokens for each in engines)


async def through_proxy(processes: Processes, policy: str) -> float:
    """Replays the trace through the proxy."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(CachingEngine(capacity_blocks=CAPACITY_BLOCKS)) for _ in range(ENGINES)
        ]
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        named = [part for each in engines for part in ("--aggregated", each.url)]
        command = [str(Path(sys.executable).with_name("kvparams")), "proxy", "--port", str(port), *FLAGS, *named]
        await asyncio.to_thread(
            processes.start, f"proxy-{policy}", [*command, "--policy", policy], ready=[f"{url}/health"]
        )
        return await replay(url, engines)


async def through_picker(processes: Processes, folder: Path, change: Callable[[dict[str, Any]], None]) -> float:
    """Replays the trace through Envoy and the picker."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(CachingEngine(capacity_blocks=CAPACITY_BLOCKS)) for _ in range(ENGINES)
        ]
        named = [part for each in engines for part in ("--aggregated", each.url)]
        flags = (*FLAGS[:-2], *named, "--policy", "cache_aware")
        picker = await asyncio.to_thread(start_picker, processes, "picker", *flags)
        ports = [each.port for each in engines]
        gateway = await asyncio.to_thread(start_envoy, processes, folder, "envoy", picker.grpc_port, ports, change)
        return await replay(gateway.url, engines)


def shown(config: dict[str, Any]) -> None:
    """Has Envoy show bodies of responses to the picker."""
    filters(config)[0]["typed_config"]["processing_mode"]["response_body_mode"] = "FULL_DUPLEX_STREAMED"


def hidden(config: dict[str, Any]) -> None:
    """Leaves the configuration as it is documented."""


@pytest.mark.slow
@pytest.mark.parametrize("change", [shown, hidden])
async def test_the_hit_ratio_is_the_proxys(
    change: Callable[[dict[str, Any]], None], processes: Processes, tmp_path: Path
) -> None:
    proxy = await through_proxy(processes, "cache_aware")
    picker = await through_picker(processes, tmp_path, change)
    spread = await through_proxy(processes, "round_robin")
    assert abs(proxy - picker) <= 0.01
    assert spread < proxy - 0.1  # control: routing matters in this trace
