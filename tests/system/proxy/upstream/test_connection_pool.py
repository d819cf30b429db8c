"""Tests the connections to one engine: each count is given back, and an expired waiter is not tried."""

import asyncio
from typing import Any

import pytest

from kvparams.native import NATIVE, NativeCode
from kvparams_proxy.upstream import connection
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import MAX_BYTES_PER_TURN, ResponseHead, UpstreamError, UpstreamLimits
from tests.support.proxy.fixtures import Awaited
from tests.support.waiting import stays_true_for, until


async def well(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")


async def asked(pool: UpstreamConnectionPool) -> int:
    """The status of one whole exchange."""
    collect = Awaited()
    pool.exchange(pool.request(b"/", b"", b"{}"), collect)
    async with asyncio.timeout(5):
        return (await collect.answer)[0].status


async def test_an_exchange_given_up_before_its_connection_was_begun_holds_no_place(scripted: Any) -> None:
    """A client can leave in the very turn of the loop in which a connection for it was asked for."""
    engine = await scripted(well)
    pool = UpstreamConnectionPool(engine.url, UpstreamLimits(connections=2))
    for _ in range(5):
        collect = Awaited()
        pool.exchange(pool.request(b"/", b"", b"{}"), collect).abort(UpstreamError("the client has left"))
        assert isinstance(collect.answer.exception(), UpstreamError)
        await asyncio.sleep(0)
    assert await asked(pool) == 200
    pool.close()


async def test_a_connection_that_waited_too_long_is_closed_rather_than_tried(scripted: Any) -> None:
    engine = await scripted(well)
    loop = asyncio.get_running_loop()
    for idle_s, connections in ((60.0, 1), (0.0, 3)):  # the first is the control
        engine.connections = 0
        pool = UpstreamConnectionPool(engine.url, UpstreamLimits(idle_s=idle_s))
        for _ in range(3):
            assert await asked(pool) == 200
            returned = loop.time()
            await until(lambda returned=returned: loop.time() > returned)  # by then it is idle for longer than 0 s
        assert engine.connections == connections
        pool.close()


@pytest.mark.parametrize("framing", [b"transfer-encoding: chunked", b"content-length: 5", b"x: y"])
@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_ends_with_its_head(scripted: Any, status: int, framing: bytes) -> None:
    """Whatever its framing says (RFC 9112, 6.3): nothing is waited for, and the connection serves the next request."""
    answers = [b"HTTP/1.1 %d X\r\n%b\r\n\r\n" % (status, framing), b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"]

    async def answer(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))

    engine = await scripted(answer)
    pool = UpstreamConnectionPool(engine.url, UpstreamLimits(connections=1))
    assert [await asked(pool), await asked(pool)] == [status, 200]
    assert engine.connections == 1
    pool.close()


async def test_a_host_name_that_cannot_be_one_is_an_error_not_a_hang() -> None:
    pool = UpstreamConnectionPool("http://" + "a" * 64 + ".example:1", UpstreamLimits())
    collect = Awaited()
    pool.exchange(pool.request(b"/", b"", b"{}"), collect)
    async with asyncio.timeout(5):
        await asyncio.wait([collect.answer])
    error = collect.answer.exception()
    assert isinstance(error, UpstreamError)
    assert not error.connected


@pytest.mark.parametrize("waited", [True, False], ids=["sent on a connection that waited", "control-never sent"])
async def test_what_was_sent_once_may_have_been_seen_though_nobody_is_there_any_more(waited: bool) -> None:
    """The engine takes the request, closes, and is gone when it is to be sent again."""
    taken: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not taken:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/last" in head:
                taken.append(head)
                server.close()
                break
            await reader.readexactly(2)
            await well(b"", reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = UpstreamConnectionPool(url, UpstreamLimits())
    if waited:
        assert await asked(pool) == 200
    else:
        server.close()
    collect = Awaited()
    pool.exchange(pool.request(b"/last", b"", b"{}"), collect)
    async with asyncio.timeout(5):
        await asyncio.wait([collect.answer])
    error = collect.answer.exception()
    assert isinstance(error, UpstreamError)
    assert bool(taken) is waited
    assert (error.connected, error.sent) == (False, waited)
    pool.close()


@pytest.mark.parametrize("left", [True, False], ids=["nobody waits any more", "control-somebody does"])
async def test_a_request_for_which_nobody_waits_any_more_is_not_sent_again(left: bool) -> None:
    """A kept connection turns out to be closed after the client has left."""
    seen: list[int] = []
    leave, close = asyncio.Event(), asyncio.Event()
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        number = connections
        while number > 1 or number not in seen:
            try:
                await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            await reader.readexactly(2)
            seen.append(number)
            await well(b"", reader, writer)
        if number == 1:
            await reader.readuntil(b"\r\n\r\n")
            leave.set()
            await close.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = UpstreamConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", UpstreamLimits())
    assert await asked(pool) == 200
    collect = Awaited()
    exchange = pool.exchange(pool.request(b"/", b"", b"{}"), collect)
    async with asyncio.timeout(5):
        await leave.wait()
        if left:
            assert exchange.half_close()
        close.set()
        await asyncio.wait([collect.answer])
    assert isinstance(collect.answer.exception(), UpstreamError) is left
    assert seen == ([1] if left else [1, 2])
    pool.close()
    server.close()


async def test_a_pool_that_is_closed_begins_nothing(scripted: Any) -> None:
    engine = await scripted(well)
    pool = UpstreamConnectionPool(engine.url, UpstreamLimits())
    assert await asked(pool) == 200  # one connection is idle
    connecting = Awaited()
    other = UpstreamConnectionPool(engine.url, UpstreamLimits())
    other.exchange(other.request(b"/", b"", b"{}"), connecting)
    for closed in (pool, other):
        closed.close()
        collect = Awaited()
        closed.exchange(closed.request(b"/", b"", b"{}"), collect)
        assert not collect.answer.done()  # who asked has his handle first
        await asyncio.sleep(0)
        error = collect.answer.exception()
        assert isinstance(error, UpstreamError)
        assert not error.connected
    async with asyncio.timeout(5):
        await asyncio.wait([connecting.answer])
    await until(lambda: not pool.open_connections and not other.open_connections)
    assert isinstance(connecting.answer.exception(), UpstreamError)
    assert engine.connections <= 2


@pytest.mark.parametrize("native", [NATIVE, None], ids=["native", "python"])
@pytest.mark.parametrize("together", [True, False], ids=["one read", "two reads"])
async def test_what_comes_before_a_broken_chunk_is_delivered_however_it_falls_into_reads(
    monkeypatch: pytest.MonkeyPatch, scripted: Any, native: NativeCode | None, together: bool
) -> None:
    monkeypatch.setattr(connection, "NATIVE", native)
    head = b"HTTP/1.1 503 Busy\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n"
    sink = Counting()

    async def broken(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not together:
            writer.write(head)
            await until(lambda: sink.size == 2)
        writer.write((head if together else b"") + b"2\r\ncd, and more than it says\r\n")

    pool = UpstreamConnectionPool((await scripted(broken)).url, UpstreamLimits())
    pool.exchange(pool.request(b"/", b"", b"{}"), sink)
    async with asyncio.timeout(5):
        await asyncio.wait([sink.answer])
    assert isinstance(sink.answer.exception(), UpstreamError)
    assert (sink.status, sink.size) == (503, 4)
    assert pool.open_connections == 0
    pool.close()


class Counting(Awaited):
    """A sink that counts."""

    status = 0

    def on_head(self, head: ResponseHead) -> None:
        self.status = head.status
        super().on_head(head)

    size = 0

    def on_body(self, data: bytes) -> None:
        self.size += len(data)


@pytest.mark.parametrize("paused", [True, False])
async def test_an_exchange_paused_before_it_has_a_connection_reads_nothing(scripted: Any, paused: bool) -> None:
    sent = asyncio.Event()

    async def much(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000)
        sent.set()

    pool = UpstreamConnectionPool((await scripted(much)).url, UpstreamLimits())
    collect = Counting()
    exchange = pool.exchange(pool.request(b"/", b"", b"{}"), collect)
    if paused:
        exchange.pause()
    async with asyncio.timeout(5):
        await sent.wait()
        if paused:
            await stays_true_for(0.1, lambda: collect.size == 0)
            exchange.resume()
        await collect.answer
    assert collect.size == 100_000
    pool.close()


class InTurns(Awaited):
    """Notes how much came in each turn of the loop."""

    def __init__(self) -> None:
        super().__init__(64 << 20)
        self.pieces: list[int] = []
        self.paused_at: int | None = None
        self.handle: Any = None

    def on_body(self, data: bytes) -> None:
        self.pieces.append(len(data))
        super().on_body(data)
        if self.paused_at == len(self.pieces):
            self.handle.pause()


@pytest.mark.parametrize("end", ["kept", "closed", "reset", "garbage"])
async def test_a_long_answer_is_delivered_in_turns(scripted: Any, end: str) -> None:
    body = bytes(range(256)) * (12 << 10)  # 3 MiB
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def long(asked: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + body + (b"garbage" if end == "garbage" else b""))
        await writer.drain()
        if end != "kept":
            raise ConnectionResetError

    engine = await scripted(long)
    pool = UpstreamConnectionPool(engine.url, UpstreamLimits())
    for paused_at in (None, 1, 3):
        sink = InTurns()
        sink.paused_at = paused_at
        sink.handle = pool.exchange(pool.request(b"/", b"", b"{}"), sink)
        if paused_at is not None:
            await until(lambda sink=sink, paused_at=paused_at: len(sink.pieces) >= paused_at)
            # The control: nothing comes while it is paused.
            await stays_true_for(0.05, lambda sink=sink, paused_at=paused_at: len(sink.pieces) == paused_at)
            sink.handle.resume()
        async with asyncio.timeout(20):
            _, got = await sink.answer
        assert got == body
        assert max(sink.pieces) <= MAX_BYTES_PER_TURN
        assert len(sink.pieces) >= len(body) // MAX_BYTES_PER_TURN
    if end == "kept":
        assert engine.connections == 1
    pool.close()
