"""Provides a picker and an Envoy as processes, in front of engines that keep what they get."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from tests.support.gateway import Gateway, Picker, start_envoy, start_picker
from tests.support.processes import Processes
from tests.support.recording_engine import RecordingEngine
from tests.support.waiting import until

AGGREGATED = ("--mode", "aggregated", "--policy", "cache_aware", "--tokenizer", "bytes", "--probe", "0.2")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the proxy runs on in production."""
    return {"uvloop": uvloop.new_event_loop}


@dataclass(frozen=True, slots=True)
class Site:
    """Two engines, a picker, Envoy, and a client of it."""

    engines: tuple[RecordingEngine, ...]
    picker: Picker
    gateway: Gateway
    client: httpx.AsyncClient

    async def complete(self, prompt: str = "hello", **more: Any) -> httpx.Response:
        """Sends a completion request."""
        headers = more.pop("headers", {})
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, **more}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def metric(self, name: str) -> float:
        """Returns the value of a sample of the picker, whose name may have labels."""
        text = (await self.client.get(f"{self.picker.url}/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(lines[0].rpartition(" ")[2])

    async def in_flight(self) -> float:
        """Returns the load that the picker counts."""
        text = (await self.client.get(f"{self.picker.url}/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("kvparams_proxy_in_flight{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


StartSite = Callable[..., Awaitable[Site]]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes; ends them after the test."""
    with Processes(tmp_path) as running:
        yield running


@pytest.fixture
async def engines() -> AsyncIterator[tuple[RecordingEngine, ...]]:
    """Two engines."""
    async with RecordingEngine() as one, RecordingEngine() as two:
        yield one, two


@pytest.fixture
async def start_site(
    processes: Processes, tmp_path: Path, engines: tuple[RecordingEngine, ...]
) -> AsyncIterator[StartSite]:
    """Starts a picker with these flags and an Envoy with a changed configuration."""
    clients: list[httpx.AsyncClient] = []

    async def start(*flags: str, change: Callable[[dict[str, Any]], None] = lambda config: None) -> Site:
        named = [part for each in engines for part in ("--aggregated", each.url)]
        picker = await asyncio.to_thread(start_picker, processes, "picker", *AGGREGATED, *named, *flags)
        ports = [each.port for each in engines]
        gateway = await asyncio.to_thread(start_envoy, processes, tmp_path, "envoy", picker.grpc_port, ports, change)
        client = httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=20.0)
        clients.append(client)
        site = Site(engines, picker, gateway, client)

        async def all_are_ready() -> bool:
            return await site.metric('kvparams_proxy_instances{role="aggregated",state="ready"}') == len(engines)

        await until(all_are_ready)
        return site

    yield start
    for client in clients:
        await client.aclose()


@pytest.fixture
async def site(start_site: StartSite) -> Site:
    """The documented site."""
    return await start_site()
