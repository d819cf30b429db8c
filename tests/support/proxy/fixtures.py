"""Provides real engines on loopback and the proxy itself, for the proxy's tests.

The engines are the benchmarks' stub and scripted ones that misbehave. The proxy runs once with its direct writer and
once as plain ASGI.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx
import pytest
import uvloop

from demo.client import NO_CERTIFICATES
from kvparams.instances import DataParallelRank, Instance, Role
from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.server.app import create_app
from kvparams_proxy.server.http_server import ProxyServer, ServerSettings
from kvparams_proxy.upstream.types import ResponseCollector, ResponseHead, UpstreamError
from tests.support.proxy.acting import Actor
from tests.support.proxy.stage import Stage, StartStage
from tests.support.stub_engine import StubEngines

JSON = {"content-type": "application/json"}
MODELS = b'{"object":"list","data":[{"id":"stub"}]}'


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the proxy runs on in production."""
    return {"uvloop": uvloop.new_event_loop}


def answer(body: bytes, *, status: bytes = b"200 OK", extra: bytes = b"") -> bytes:
    """A whole HTTP answer with JSON in it."""
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
    return head % (status, extra, len(body)) + body


def instance(role: Role, url: str, dialect: str, number: int = 0, addresses: tuple[str, ...] = ()) -> Instance:
    return Instance(f"{role}-{number}", "boot-1", role, url, dialect, addresses=addresses)


Script = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Scripted:
    """An engine that answers probes well and requests as its script says. It keeps what it was sent."""

    script: Script
    port: int = 0
    bodies: list[bytes] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0
    models: bytes = MODELS
    """What it answers to probes."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(answer(self.models))
                    continue
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                self.heads.append(head)
                self.bodies.append(body)
                await self.script(body, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class Awaited(ResponseCollector):
    """A sink whose answer can be waited for: `await sink.answer` gives (head, body) or raises `UpstreamError`."""

    def __init__(self, limit_bytes: int = 1000) -> None:
        self.answer: asyncio.Future[tuple[ResponseHead, bytes]] = asyncio.get_running_loop().create_future()
        super().__init__(limit_bytes, self._ended)

    def _ended(self, head: ResponseHead, body: bytes, error: UpstreamError | None) -> None:
        if error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result((head, body))


@dataclass
class Proxy:
    """A running proxy and how to reach it."""

    port: int
    client: httpx.AsyncClient
    app: object

    async def metric(self, name: str) -> float:
        """The sum over the labels that `name` leaves open; `name` is the start of a line of /metrics."""
        text = (await self.client.get("/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def scripted(stack: AsyncExitStack) -> Callable[[Script], Awaitable[Scripted]]:
    """Start an engine that follows a script."""

    async def start(script: Script) -> Scripted:
        engine = Scripted(script)
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        engine.port = server.sockets[0].getsockname()[1]
        stack.callback(server.close)
        return engine

    return start


@pytest.fixture
async def stub(stack: AsyncExitStack) -> StubEngines:
    """Two prefill and two decode engines that report 7 cached tokens."""
    return await stack.enter_async_context(await StubEngines.start(prefill=[0, 0], decode=[0, 0], cached_tokens=7))


@asynccontextmanager
async def running(settings: Settings, direct: bool, port: int = 0) -> AsyncGenerator[Proxy]:
    listener = socket.create_server(("127.0.0.1", port))
    app = create_app(settings)
    server = ProxyServer(app, ServerSettings(direct=direct))
    task = asyncio.create_task(server.run(listener))
    started = asyncio.create_task(server.started.wait())
    await asyncio.wait((task, started), timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert server.started.is_set()
    port = listener.getsockname()[1]
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=20, verify=NO_CERTIFICATES, headers=JSON) as client:
            yield Proxy(port, client, app)
    finally:
        server.stop()
        async with asyncio.timeout(10):
            await task


@pytest.fixture(params=["direct", pytest.param("plain", marks=[pytest.mark.slow, pytest.mark.soak])])
def direct(request: pytest.FixtureRequest) -> bool:
    """Both ways to write an answer. `make soak` sees the plain one in all files, `make test` in two of them."""
    return request.param == "direct"


StartProxy = Callable[..., Awaitable[Proxy]]


@pytest.fixture
def proxy(stack: AsyncExitStack, direct: bool) -> StartProxy:
    """Start a proxy in front of engines: `await proxy(prefill=[url, ...], decode=[url, ...], dialect="nixl")`.

    `encode` are further engines, of this rank; `addresses` those that prefill and encode engines may name.
    """

    async def start(
        prefill: Sequence[str],
        decode: Sequence[str],
        dialect: str = "nixl",
        addresses: tuple[str, ...] = (),
        encode: Sequence[str] = (),
        encode_rank: DataParallelRank | None = None,
        **changes: object,
    ) -> Proxy:
        instances = (
            *(instance(Role.PREFILL, url, dialect, number, addresses) for number, url in enumerate(prefill)),
            *(instance(Role.DECODE, url, dialect, number) for number, url in enumerate(decode)),
            *(
                replace(instance(Role.ENCODE, url, "ec", number, addresses), rank=encode_rank)
                for number, url in enumerate(encode)
            ),
        )
        settings = replace(Settings(instances, expose_route=True), **changes)  # pyright: ignore[reportArgumentType]
        return await stack.enter_async_context(running(settings, direct))

    return start


@pytest.fixture
async def stubbed(stub: StubEngines, proxy: StartProxy) -> Proxy:
    """The proxy in front of the stub engines."""
    urls = {role: [engine.url for engine in stub.engines if engine.role == role] for role in ("prefill", "decode")}
    return await proxy(urls["prefill"], urls["decode"])


@pytest.fixture
def stage(stack: AsyncExitStack, proxy: StartProxy) -> StartStage:
    """Start a proxy before actors, two of each role. Its breakers never open: the same one fails again and again."""
    never = BreakerLimits(consecutive=1_000_000, window=1_000_000, failures=1_000_000)

    async def start(dialect: str = "store", engines: int = 2, **changes: object) -> Stage:
        actors = {role: [Actor(role) for _ in range(engines)] for role in ("prefill", "decode")}
        for actor in (*actors["prefill"], *actors["decode"]):
            await actor.begin()
            stack.callback(actor.end)
        urls = [[actor.url for actor in actors[role]] for role in ("prefill", "decode")]
        running = await proxy(*urls, dialect, **{"breaker": never, **changes})
        return Stage(running, actors["prefill"], actors["decode"])

    return start
