"""Tests the proxy with an external picker for decode engines: it is followed, and the proxy does without it."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio

from kvparams_proxy.ext_proc import messages as ext_proc
from kvparams_proxy.ext_proc.message_types import ProcessingResponse
from tests.support.gateway import start_picker
from tests.support.processes import Processes, free_ports
from tests.support.stub_engine import StubEngines

_grpc: Any = grpc
_aio: Any = aio


@dataclass
class FakePicker:
    """Answers as told."""

    named: str = ""
    hangs: bool = False
    status: int = 0
    subsets: list[frozenset[str]] = field(default_factory=list[frozenset[str]])
    bodies: list[bytes] = field(default_factory=list[bytes])

    async def process(self, requests: AsyncIterator[Any], _call: Any) -> AsyncIterator[Any]:
        """Serves one stream."""
        body = b""
        async for request in requests:
            if ext_proc.kind_of(request) == "request_headers":
                self.subsets.append(ext_proc.subset_hint(request) or frozenset())
                continue
            body += ext_proc.chunk(request)
            if not ext_proc.is_last(request):
                continue
            self.bodies.append(body)
            if self.hangs:
                await asyncio.Event().wait()
            if self.status:
                refused = ProcessingResponse()
                refused.immediate_response.status.code = self.status
                yield refused
            else:
                yield ext_proc.destination_answer([self.named] if self.named else [], {}, [])


@dataclass(frozen=True)
class PickedSite:
    """A proxy in front of a prefill engine and three decode engines."""

    stub: StubEngines
    picker: FakePicker
    url: str
    client: httpx.AsyncClient

    @property
    def decodes(self) -> list[str]:
        """Returns the decode engines as pickers name them."""
        return [f"127.0.0.1:{each.port}" for each in self.stub.engines if each.role == "decode"]

    @property
    def decoded(self) -> list[int]:
        """Returns the requests of each decode engine."""
        return [each.counters.decode_with_kv for each in self.stub.engines if each.role == "decode"]

    async def ask(self, prompt: str = "hello") -> int:
        """Sends a request. Returns the status."""
        body = {"model": "stub", "prompt": prompt, "max_tokens": 2}
        return (await self.client.post(f"{self.url}/v1/completions", json=body)).status_code

    async def result(self, name: str) -> float:
        """Returns how many choices had this result."""
        text = (await self.client.get(f"{self.url}/metrics")).text
        sample = f'kvparams_proxy_decode_picks_total{{result="{name}"}} '
        return float(next(line for line in text.splitlines() if line.startswith(sample)).rpartition(" ")[2])


StartProxy = Callable[..., Awaitable[PickedSite]]


@pytest.fixture
async def start_proxy(processes: Processes) -> AsyncIterator[StartProxy]:
    """Starts a proxy that asks a fake picker, or the one at this port."""
    stub = await StubEngines.start(prefill=[0], decode=[0, 0, 0])
    fake = FakePicker()
    server = _aio.server()
    codec = (ext_proc.parse, ext_proc.encode)
    method = {"Process": _grpc.stream_stream_rpc_method_handler(fake.process, *codec)}
    server.add_generic_rpc_handlers((_grpc.method_handlers_generic_handler(ext_proc.SERVICE, method),))
    own_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = httpx.AsyncClient(trust_env=False, timeout=20.0)

    async def start(picker_port: int | None = None) -> PickedSite:
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        command = [
            str(Path(sys.executable).with_name("kvparams")),
            "proxy",
            "--port",
            str(port),
            "--log-requests",
            "off",
            *("--startup-check", "off"),
        ]
        command += ["--decode-picker", f"grpc://127.0.0.1:{picker_port or own_port}?timeout=0.4"]
        command += [part for each in stub.engines for part in (f"--{each.role}", each.url)]
        await asyncio.to_thread(processes.start, "proxy", command, ready=[f"{url}/health"])
        return PickedSite(stub, fake, url, client)

    yield start
    await client.aclose()
    await server.stop(None)
    await stub.close()


async def test_decode_runs_where_the_picker_says(start_proxy: StartProxy) -> None:
    site = await start_proxy()
    for chosen in (2, 0):
        site.picker.named = site.decodes[chosen]
        before = site.decoded
        assert [await site.ask() for _ in range(4)] == [200] * 4
        assert site.decoded == [count + 4 * (number == chosen) for number, count in enumerate(before)]
    assert await site.result("followed") == 8
    assert set(site.picker.subsets) == {frozenset(site.decodes)}
    assert b'"hello"' in site.picker.bodies[0]


async def test_a_picker_that_names_an_engine_outside_the_subset_is_not_followed(start_proxy: StartProxy) -> None:
    site = await start_proxy()
    site.picker.named = "127.0.0.1:1"
    assert [await site.ask() for _ in range(6)] == [200] * 6
    assert site.decoded == [2, 2, 2]  # the proxy's own choice, in turn
    assert await site.result("unlisted") == 6


@pytest.mark.parametrize(("status", "result"), [(503, "refused"), (429, "refused"), (0, "format")])
async def test_a_picker_that_names_nobody_is_done_without(status: int, result: str, start_proxy: StartProxy) -> None:
    site = await start_proxy()
    site.picker.status = status
    assert [await site.ask() for _ in range(3)] == [200] * 3
    assert site.decoded == [1, 1, 1]
    assert await site.result(result) + await site.result("timeout") == 3


async def test_a_slow_picker_costs_its_time_limit_and_no_more(start_proxy: StartProxy) -> None:
    site = await start_proxy()
    site.picker.named, site.picker.hangs = site.decodes[0], True
    began_s = time.monotonic()
    assert await asyncio.gather(*(site.ask() for _ in range(6))) == [200] * 6
    assert 0.3 < time.monotonic() - began_s < 3.0
    assert await site.result("timeout") == 6
    assert site.decoded == [2, 2, 2]


async def test_nobody_at_the_pickers_address(start_proxy: StartProxy) -> None:
    (port,) = free_ports(1)
    site = await start_proxy(port)
    assert [await site.ask() for _ in range(3)] == [200] * 3
    assert await site.result("unreachable") + await site.result("timeout") == 3
    assert site.decoded == [1, 1, 1]


async def test_our_own_picker_can_be_asked(start_proxy: StartProxy, processes: Processes) -> None:
    (port,) = free_ports(1)
    site = await start_proxy(port)
    named = [part for each in site.decodes for part in ("--aggregated", f"http://{each}")]
    flags = ("--mode", "aggregated", "--policy", "cache_aware", "--tokenizer", "bytes", *named)
    await asyncio.to_thread(start_picker, processes, "picker", *flags, port=port)
    prompt = "The quick brown fox jumps over the lazy dog. " * 100
    await site.ask()  # the connection may have to be made once more
    before = sum(site.decoded)
    assert [await site.ask(prompt) for _ in range(4)] == [200] * 4
    assert sum(site.decoded) == before + 4
    assert await site.result("followed") >= 3
