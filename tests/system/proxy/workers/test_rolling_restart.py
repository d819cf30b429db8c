"""Tests a rolling restart as a whole: replicas with workers behind a load balancer that asks `/health`."""

import asyncio
import json
import signal
from contextlib import AsyncExitStack, closing, suppress

import pytest

from tests.support.proxy.served import Served, serving
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

STREAMS = 200
FLAGS = (
    *("--workers", "2", "--drain-delay", "1.5", "--grace", "60"),
    *("--log-requests", "off", "--startup-check", "off"),
)
_BODY = json.dumps({"model": "stub", "prompt": "x", "max_tokens": 30, "stream": True}).encode()
_STREAM = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
_HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
_EVERY_S = 0.1


class Balancer:
    """A load balancer for TCP connections. It asks every replica's `/health` again and again."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.port = 0
        self.healthy: set[int] = set()
        self.statuses: dict[int, int] = {}
        self.unannounced: list[int] = []
        """Replicas that refused a connection while their last `/health` was 200."""
        self.pipes: set[asyncio.StreamWriter] = set()
        """The clients that are served now."""
        self._turn = 0

    async def watch(self, port: int) -> None:
        while True:
            status = 0
            with suppress(OSError, asyncio.IncompleteReadError, ValueError, TimeoutError):
                async with asyncio.timeout(5.0):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    with closing(writer):
                        writer.write(_HEALTH)
                        status = int((await reader.readuntil(b"\r\n")).split()[1])
            self.statuses[port] = status
            (self.healthy.add if status == 200 else self.healthy.discard)(port)
            await asyncio.sleep(_EVERY_S)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Brings one client to a replica."""
        upstream: asyncio.StreamWriter | None = None
        self.pipes.add(writer)
        try:
            await until(lambda: bool(self.healthy), 30.0)
            self._turn += 1
            port = sorted(self.healthy)[self._turn % len(self.healthy)]
            try:
                answers, upstream = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                self.unannounced.append(port)
                return
            upstream.write(await reader.readuntil(b"}"))
            while data := await answers.read(1 << 16):
                writer.write(data)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.pipes.discard(writer)
            writer.close()
            if upstream is not None:
                upstream.close()


class Clients:
    """Clients with a stream each, one after the other."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.whole = 0
        self.lost: list[str] = []
        self.running = 0
        self.is_over = False

    async def run(self) -> None:
        while not self.is_over:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            text = b""
            with closing(writer), suppress(ConnectionError, asyncio.IncompleteReadError):
                writer.write(_STREAM)
                text = await reader.readuntil(b"\r\n\r\n")
                self.running += 1
                try:
                    text += await reader.read()
                finally:
                    self.running -= 1
            if text.startswith(b"HTTP/1.1 200") and text.count(b"data: [DONE]") == 1 and b'"error"' not in text:
                self.whole += 1
            else:
                self.lost.append(text[:300].decode(errors="replace"))


async def begin(
    stub: StubEngines, stack: AsyncExitStack
) -> tuple[list[Served], Balancer, Clients, list[asyncio.Task[None]]]:
    """Starts two replicas, the balancer and the clients, and waits until all streams are under way."""
    stub.delays.itl_ms = 100
    replicas = [await stack.enter_async_context(serving(stub, *FLAGS)) for _ in range(2)]
    balancer = Balancer([one.port for one in replicas])
    server = await asyncio.start_server(balancer.connect, "127.0.0.1", 0, backlog=1024)
    stack.callback(server.close)
    balancer.port = server.sockets[0].getsockname()[1]
    for port in balancer.ports:
        stack.callback(asyncio.create_task(balancer.watch(port)).cancel)
    await until(lambda: len(balancer.healthy) == 2, 20.0)
    clients = Clients(balancer.port)
    tasks = [asyncio.create_task(clients.run()) for _ in range(STREAMS)]
    stack.callback(lambda: [task.cancel() for task in tasks])
    await until(lambda: clients.running > 0.9 * STREAMS, 40.0)
    return replicas, balancer, clients, tasks


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_both_replicas_are_restarted_and_no_stream_is_lost(stub: StubEngines) -> None:
    async with AsyncExitStack() as stack:
        replicas, balancer, clients, tasks = await begin(stub, stack)
        for replica in replicas:
            replica.process.send_signal(signal.SIGTERM)
            await until(lambda port=replica.port: balancer.statuses[port] == 503, 20.0)
            await replica.output()
            assert balancer.statuses[replica.port] in (0, 503)
            await stack.enter_async_context(serving(stub, *FLAGS, "--port", str(replica.port)))
            await until(lambda: len(balancer.healthy) == 2, 30.0)
            whole = clients.whole
            await until(lambda seen=whole: clients.whole > seen + STREAMS // 2, 60.0)
        clients.is_over = True
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
        await until(lambda: not balancer.pipes, 10.0)
        assert (clients.lost, balancer.unannounced) == ([], [])
        assert clients.whole > 2 * STREAMS


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_replica_that_is_killed_loses_its_streams(stub: StubEngines) -> None:
    """The control."""
    async with AsyncExitStack() as stack:
        replicas, balancer, clients, tasks = await begin(stub, stack)
        replicas[0].process.kill()
        clients.is_over = True
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
        await until(lambda: not balancer.pipes, 10.0)
        assert len(clients.lost) > STREAMS // 10
        assert clients.whole > STREAMS // 10
