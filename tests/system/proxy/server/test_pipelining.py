"""Tests requests that a client sends behind another one, on the same connection, before its answer."""

import asyncio
import json
import socket
import struct
import time
from typing import Any

import pytest

from kvparams.native import NATIVE, NativeCode
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.body import BodyBudget
from kvparams_proxy.requests.downstream import Downstream
from kvparams_proxy.server import http_parser
from kvparams_proxy.server.admission import Admission
from kvparams_proxy.server.connections import ClientConnections, ConnectionLimits
from kvparams_proxy.server.http_protocol import HTTPProtocol, ServerContext
from tests.support.proxy.fixtures import Proxy
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
RESET = struct.pack("ii", 1, 0)


def post(document: object) -> bytes:
    body = json.dumps(document).encode()
    return HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def chunked(document: object) -> bytes:
    body = json.dumps(document).encode()
    return HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


SHORT = {"model": "stub", "prompt": "x", "max_tokens": 1}
LONG = {"model": "stub", "prompt": "x", "max_tokens": 2000, "stream": True}
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def live(stub: StubEngines) -> int:
    """How many legs run."""
    return sum(engine.counters.live for engine in stub.engines)


@pytest.mark.parametrize("request_", [post({}), GET, post({"model": "nobody", "prompt": "x"}), chunked({})])
async def test_requests_that_are_answered_at_once_hold_up_nobody(stubbed: Proxy, request_: bytes) -> None:
    """Thousands in one packet: other clients have their answers in between."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stubbed.port)
    writer.write(request_ * 20_000)
    took: list[float] = []
    for _ in range(20):
        began = time.monotonic()
        assert (await stubbed.client.get("/health")).status_code == 200
        took.append(time.monotonic() - began)
    assert max(took) < 0.5, took
    assert (await reader.read(9)).startswith(b"HTTP/1.1 ")
    writer.transport.abort()


@pytest.mark.parametrize("behind", [GET, post(SHORT), post(SHORT) * 3000])
@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_client_that_leaves_is_noticed_whatever_waits(
    stubbed: Proxy, stub: StubEngines, behind: bytes, how: str
) -> None:
    """Its request ends in the engines, and those behind it never begin. What waited is in no budget any more."""
    stub.delays.itl_ms = 60_000  # no write to the client tells that it has left
    before = await stubbed.metric("kvparams_proxy_body_bytes ")
    reader, writer = await asyncio.open_connection("127.0.0.1", stubbed.port)
    writer.write(post(LONG))
    assert b"data: " in await reader.readuntil(b"\n\n")
    asked = sum(engine.counters.requests for engine in stub.engines)
    writer.write(behind)
    await until(lambda: waits(stubbed, before + min(len(behind), 270_000)))
    raw = writer.get_extra_info("socket")
    if how == "reset":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
    await until(lambda: ended(stub))
    assert sum(engine.counters.requests for engine in stub.engines) == asked
    assert await stubbed.metric("kvparams_proxy_body_bytes ") == before


async def waits(proxy: Proxy, size: float) -> bool:
    return await proxy.metric("kvparams_proxy_body_bytes ") >= size


async def ended(stub: StubEngines) -> bool:
    return live(stub) == 0


@pytest.mark.parametrize(("first", "status"), [(chunked(SHORT), b"200"), (chunked({}), b"400")])
async def test_what_stands_behind_chunks_in_one_piece_is_not_served(
    stubbed: Proxy, first: bytes, status: bytes
) -> None:
    """Where it begins is not known for certain: the connection ends behind the first answer.

    That answer says so, unless it is written before the rest of the piece is read.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", stubbed.port)
    writer.write(first + post(SHORT))
    async with asyncio.timeout(10):
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 " + status) == 1
    assert status != b"200" or b"connection: close" in answers
    writer.close()


@pytest.mark.parametrize("piece", [1, 3, 64, 1 << 20])
async def test_requests_are_answered_in_their_order_however_they_come(stubbed: Proxy, piece: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stubbed.port)
    raw = b"\r\n".join(post({**SHORT, "max_tokens": count}) for count in range(1, 8))
    for at in range(0, len(raw), piece):
        writer.write(raw[at : at + piece])
        await writer.drain()
    counts: list[int] = []
    async with asyncio.timeout(20):
        for _ in range(7):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            counts.append(json.loads(await reader.readexactly(length))["usage"]["completion_tokens"])
    assert counts == list(range(1, 8))
    writer.close()


class Silent:
    """A direct endpoint that answers nobody."""

    max_bytes = 1000

    def __init__(self, budget: BodyBudget) -> None:
        self.bodies = budget

    def admit(self, headers: list[tuple[bytes, bytes]]) -> Admission:
        return Admission("r", "t", [], None, None, None)

    def handle(self, admission: Admission, body: bytes, downstream: Downstream) -> None:
        pass

    def refuse(self, admission: Admission, error: ProxyError, downstream: Downstream) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize("behind", [100, 2000])
async def test_what_does_not_fit_the_budget_is_not_kept(behind: int) -> None:
    """And whatever was counted is given back, once."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(scope)

    budget = BodyBudget(1000)
    loop = asyncio.get_running_loop()
    connections = ClientConnections(loop, ConnectionLimits(10))
    service = ServerContext(loop, app, {}, {b"/x": Silent(budget)}, connections, lambda error: None, budget)
    server = await loop.create_server(lambda: HTTPProtocol(service), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" + b"x" * behind)

    async def kept() -> bool:
        return budget.held_bytes == (2 + behind if behind < 1000 else 2) and len(connections) == 1

    await until(kept)
    assert budget.refused == (behind > 1000)
    writer.transport.abort()

    async def gone() -> bool:
        return not len(connections)

    await until(gone)
    assert budget.held_bytes == 0
    server.close()


class Faulty(Silent):
    """A direct endpoint with a fault."""

    def admit(self, headers: list[tuple[bytes, bytes]]) -> Admission:
        raise RuntimeError("a fault of the proxy")


@pytest.mark.parametrize("native", [NATIVE, None], ids=["native", "python"])
@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["first", "behind another one"])
async def test_a_fault_of_the_proxy_is_answered_whoever_reads_the_head(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, native: NativeCode | None, before: bytes
) -> None:
    monkeypatch.setattr(http_parser, "NATIVE", native)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    loop = asyncio.get_running_loop()
    connections = ClientConnections(loop, ConnectionLimits(10))
    service = ServerContext(loop, app, {}, {b"/x": Faulty(BodyBudget(1000))}, connections, lambda error: None)
    server = await loop.create_server(lambda: HTTPProtocol(service), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(before + b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
    try:
        async with asyncio.timeout(10):
            answers = await reader.read()
    finally:
        writer.close()
        connections.abort()
        server.close()
    assert answers.count(b"HTTP/1.1 ") == 1 + bool(before)
    assert b"HTTP/1.1 500 " in answers
    assert "a request could not be taken" in caplog.text
