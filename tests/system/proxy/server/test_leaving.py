"""Tests clients that leave or are slow: engines hear of it at once, nothing is left, and memory does not grow."""

import asyncio
import json
import random
from contextlib import suppress
from typing import Any

import pytest

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.body import BodyBudget
from kvparams_proxy.requests.downstream import Downstream
from kvparams_proxy.server import http_protocol
from kvparams_proxy.server.admission import Admission
from kvparams_proxy.server.connections import ClientConnections, ConnectionLimits
from kvparams_proxy.server.http_protocol import HTTPProtocol, ServerContext
from tests.support.proxy.metrics import metric_becomes
from tests.support.stub_engine import StubEngines
from tests.support.waiting import stops_changing, until

BODY: dict[str, Any] = {"model": "stub", "prompt": "x", "max_tokens": 200}
GOOD = json.dumps(
    {
        "choices": [{"index": 0, "text": "x"}],
        "usage": {"prompt_tokens": 1},
        "kv_transfer_params": {
            "remote_engine_id": "e",
            "remote_block_ids": [[1]],
            "remote_host": "127.0.0.1",
            "remote_port": 1,
        },
    }
).encode()

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(GOOD), GOOD)


def request(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return (head % len(raw)).encode() + raw


def live(stub: StubEngines) -> int:
    return sum(engine.counters.live for engine in stub.engines)


async def test_whoever_sends_what_is_no_request_is_told_so_and_its_connection_closed(stubbed: Any) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stubbed.port)
    writer.write(b"no request\r\n\r\n")
    async with asyncio.timeout(3):  # an idle connection is closed after five seconds
        answer = await reader.read()  # to the end of the connection, which is not ours
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    writer.close()


@pytest.mark.parametrize("phase", ["prefill", "decode", "stream"])
async def test_a_client_that_leaves_ends_the_leg_that_runs_for_it(stub: StubEngines, stubbed: Any, phase: str) -> None:
    delays = {"prefill": ("prefill_ms", 60_000.0), "decode": ("ttft_ms", 60_000.0), "stream": ("itl_ms", 50.0)}
    setattr(stub.delays, *delays[phase])
    reader, writer = await asyncio.open_connection("127.0.0.1", stubbed.port)
    writer.write(request(BODY | {"stream": phase == "stream"}))
    role = "prefill" if phase == "prefill" else "decode"
    await until(lambda: any(engine.counters.live for engine in stub.engines if engine.role == role))
    if phase == "stream":
        await reader.readuntil(b"data: ")
    writer.transport.abort()
    await until(lambda: live(stub) == 0)
    assert sum(engine.counters.aborted for engine in stub.engines if engine.role == role) == 1
    assert await stubbed.metric("kvparams_proxy_in_flight") == 0
    assert await stubbed.metric('kvparams_proxy_requests_total{outcome="gone"}') == 1


@pytest.mark.parametrize("dialect", ["nixl", "store"])
async def test_kv_of_a_prefill_whose_answer_was_on_its_way_is_given_back(
    scripted: Any, proxy: Any, dialect: str
) -> None:
    """Only the answer names the blocks that NIXL keeps. Pages in a store are told by the transfer, so nothing is heard
    out there."""
    ends: list[bytes] = []
    prefilling = asyncio.Event()

    async def prefill(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prefilling.set()
        ends.append(await reader.read())
        writer.write(WHOLE)

    async def decode(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE)

    producer, consumer = await scripted(prefill), await scripted(decode)
    running = await proxy([producer.url], [consumer.url], dialect)
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(request(BODY))
    async with asyncio.timeout(5):
        await prefilling.wait()
    writer.transport.abort()
    await until(lambda: bool(ends))
    await metric_becomes(running, "kvparams_proxy_in_flight")
    if dialect == "nixl":
        await until(lambda: len(consumer.bodies) == 1)
        released = json.loads(consumer.bodies[0])
        assert released["kv_transfer_params"]["remote_engine_id"] == "e"
        assert released["max_tokens"] == 1
    else:
        assert consumer.bodies == []
    assert await running.metric("kvparams_proxy_orphaned_transfers_total") == 0
    assert ends == [b""]


async def test_kv_that_was_computed_anew_is_given_back_too(scripted: Any, proxy: Any) -> None:
    """Decode fails with the first KV, which it may have fetched; the client leaves before the second is used."""
    again = asyncio.Event()
    prefills = 0

    async def prefill(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal prefills
        prefills += 1
        if prefills == 2:
            again.set()
            await reader.read()
        writer.write(WHOLE)

    async def decode(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n" if prefills == 1 else WHOLE)

    producer, consumers = await scripted(prefill), [await scripted(decode) for _ in range(2)]
    running = await proxy([producer.url], [each.url for each in consumers], retries=1)
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(request(BODY))
    async with asyncio.timeout(5):
        await again.wait()
    assert sum(len(each.bodies) for each in consumers) == 1
    writer.transport.abort()
    await until(lambda: sum(len(each.bodies) for each in consumers) == 2)
    await metric_becomes(running, "kvparams_proxy_in_flight")


async def test_a_prefill_that_was_heard_out_and_is_no_json_is_not_tried_again(scripted: Any, proxy: Any) -> None:
    """Nobody waits for what another engine would say."""
    asked: list[asyncio.Event] = [asyncio.Event(), asyncio.Event()]

    async def prefill(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        next(event for event in asked if not event.is_set()).set()
        await reader.read()
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n{"id"')

    producers = [await scripted(prefill), await scripted(prefill)]
    running = await proxy([each.url for each in producers], [producers[0].url])
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(request(BODY))
    async with asyncio.timeout(5):
        await asked[0].wait()
        writer.transport.abort()
    await metric_becomes(running, 'kvparams_proxy_requests_total{outcome="gone"}', lambda value: value > 0)
    assert not asked[1].is_set()
    assert await running.metric("kvparams_proxy_in_flight") == 0


async def test_an_engine_that_does_not_mind_its_client_is_left_for_good(scripted: Any, proxy: Any) -> None:
    """It goes on after the end of what it was sent: then the connection is broken."""
    broken = asyncio.Event()

    async def prefill(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prefilling.set()
        with suppress(ConnectionError):
            async with asyncio.timeout(5):
                while True:
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.01)
        broken.set()

    prefilling = asyncio.Event()
    producer, consumer = await scripted(prefill), await scripted(prefill)
    running = await proxy([producer.url], [consumer.url])
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(request(BODY))
    async with asyncio.timeout(5):
        await prefilling.wait()
        writer.transport.abort()
        await broken.wait()
    assert await running.metric("kvparams_proxy_in_flight") == 0


async def test_streams_dropped_at_random_moments_leave_nothing_behind(stub: StubEngines, stubbed: Any) -> None:
    """A short form of `tests/system/chaos/test_aborts.py`."""
    stub.delays.prefill_ms, stub.delays.itl_ms = 5.0, 1.0
    draw = random.Random(7)

    async def one() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", stubbed.port)
        writer.write(request(BODY | {"stream": draw.random() < 0.8}))
        await asyncio.sleep(draw.random() * 0.08)
        writer.transport.abort()

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(10)))
    await until(lambda: live(stub) == 0)
    assert sum(engine.counters.requests for engine in stub.engines) > 50
    assert await stubbed.metric("kvparams_proxy_in_flight") == 0


async def test_a_request_given_up_from_outside_ends_its_leg(stub: StubEngines, stubbed: Any) -> None:
    """A server at its shutdown, or a middleware with a time-out, cancels the app's task: it ends, and so does the leg
    that ran for it, although its client is still there."""
    stub.delays.prefill_ms = 60_000.0  # longer than anything here waits
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not sent:
            sent.append({"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False})
            return sent[0]
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        raise AssertionError(message)

    app = stubbed.app
    async with app.router.lifespan_context(app) as state:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": TYPED, "state": state}
        task = asyncio.ensure_future(app(scope, receive, send))
        await until(lambda: live(stub) == 1)
        task.cancel()
        assert await asyncio.wait([task], timeout=5) == ({task}, set())
        await until(lambda: live(stub) == 0)


async def test_headers_without_an_end_are_refused(stub: StubEngines, stubbed: Any, direct: bool) -> None:
    """Plain ASGI leaves them to the server."""
    if not direct:
        return
    start = request(BODY)[:-1].partition(b"host")[0]
    for endless in (b"x: " + b"a" * 10_000_000, b"x: y\r\n" * 1_000_000):
        reader, writer = await asyncio.open_connection("127.0.0.1", stubbed.port)
        writer.write(start + endless)
        async with asyncio.timeout(10):
            with suppress(ConnectionResetError):  # it was still sending
                assert (await reader.read()).startswith(b"HTTP/1.1 431")
        writer.close()
    for _ in range(3):  # the control, on one connection: the count begins anew with each request
        got = await stubbed.client.post("/v1/completions", json=BODY, headers={"x": "a" * 60_000})
        assert got.status_code == 200


async def test_a_client_that_sends_on_without_reading_is_not_answered_into_memory(scripted: Any, proxy: Any) -> None:
    """Requests behind each other on one connection: the next waits until the answers before it were taken."""
    asked = 0
    big = GOOD[:-1] + b',"x":"' + b"x" * 1_000_000 + b'"}'

    async def good(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(GOOD) + GOOD)

    async def large(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(big) + big)

    prefill, decode = await scripted(good), await scripted(large)
    running = await proxy([prefill.url], [decode.url])
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1 << 16)
    writer.write(request(BODY) * 60)
    await reader.readuntil(b"x" * 100)
    assert await stops_changing(lambda: asked, 0.3) < 30
    received = 0  # The control: all are answered once the client reads.
    async with asyncio.timeout(30):
        while received < 60 * len(big) and (piece := await reader.read(1 << 20)):
            received += len(piece)
    assert asked == 60
    writer.close()


async def test_a_slow_client_throttles_its_engine_within_a_fixed_buffer(scripted: Any, proxy: Any) -> None:
    """The engine has 64 MiB to say; a client that reads nothing lets it say little more than the sockets hold."""
    said = 0
    total = 64 << 20

    async def chatter(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal said
        event = b'data: {"choices":[{"index":0,"text":"' + b"z" * 16_000 + b'"}]}\n\n'
        piece = b"%x\r\n%b\r\n" % (len(event), event)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        while said < total:
            writer.write(piece)
            await writer.drain()
            said += 16_000
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def good(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(GOOD) + GOOD)

    prefill, decode = await scripted(good), await scripted(chatter)
    running = await proxy([prefill.url], [decode.url])
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1 << 16)
    writer.write(request(BODY | {"stream": True}))
    await reader.readuntil(b"data: ")
    assert await stops_changing(lambda: said, 0.3) < total // 2  # the engine is stuck
    # The control: it was the client that held it up. It reads to the end of the stream, and all of it arrives.
    received, tail = 0, b""
    async with asyncio.timeout(60):
        while not tail.endswith(b"0\r\n\r\n") and (piece := await reader.read(1 << 20)):
            received += piece.count(b"z")
            tail = (tail + piece)[-8:]
    assert received == said
    writer.close()


TYPED = ((b"content-type", b"application/json"),)


class AtOnce:
    """A direct endpoint that answers each request within the call."""

    max_bytes = 1000
    asked = 0

    def __init__(self) -> None:
        self.bodies = BodyBudget(1 << 20)

    def admit(self, headers: list[tuple[bytes, bytes]]) -> Admission:
        return Admission("r", "t", [], None, None, None)

    def handle(self, admission: Admission, body: bytes, downstream: Downstream) -> None:
        self.asked += 1
        downstream.head(400, b"", 10_000)
        downstream.body(b"x" * 10_000)
        downstream.end()

    def refuse(self, admission: Admission, error: ProxyError, downstream: Downstream) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize("reads", [True, False])
async def test_answers_that_a_client_does_not_take_are_not_heaped_up(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests behind them wait in the client. One that never reads is sent away."""
    monkeypatch.setattr(http_protocol, "_REQUEST_S", 2.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(scope)

    number = 20_000
    endpoint = AtOnce()
    loop = asyncio.get_running_loop()
    connections = ClientConnections(loop, ConnectionLimits(10))
    service = ServerContext(loop, app, {}, {b"/x": endpoint}, connections, lambda error: None)
    server = await loop.create_server(lambda: HTTPProtocol(service), "127.0.0.1", 0)
    raw = b"POST /x HTTP/1.1\r\nhost: x\r\nx: %b\r\ncontent-length: 2\r\n\r\n{}" % (b"y" * 900)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1 << 14)
    writer.write(raw * number)
    assert 0 < await stops_changing(lambda: endpoint.asked, 0.1) < number / 2
    received = 0
    async with asyncio.timeout(30):
        if reads:
            while received < number * 10_000 and (piece := await reader.read(1 << 20)):
                received += piece.count(b"x")
            assert endpoint.asked == number
        else:
            with pytest.raises(ConnectionError):
                await writer.drain()
    writer.transport.abort()
    server.close()


async def test_what_is_not_http_is_counted(stubbed: Any) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stubbed.port)
    writer.write(b"hello\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()
    assert await stubbed.metric('kvparams_proxy_refusals_total{status="400"}') == 1
