"""Tests the limits on the number of client connections and on how long they may keep the proxy waiting."""

import asyncio
import json
import time
from typing import Any

import pytest

from kvparams_proxy.server import http_parser, http_protocol
from kvparams_proxy.server.connections import HEAD_S, ClientConnections, ConnectionLimits
from kvparams_proxy.server.file_descriptors import backlog_for, connections_for, descriptors_for, refusals_for
from tests.support.proxy.served import serving
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

BODY = {"model": "stub", "prompt": "x", "max_tokens": 2}


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.slow
async def test_idle_sockets_do_not_use_up_descriptors(stub: StubEngines) -> None:
    """200 of them where 100 files may be open: new clients are served and engines are reached."""
    async with serving(stub, "--log-requests", "off", files=100) as served:
        idle = [await connect(served.port) for _ in range(200)]

        async def has_room() -> bool:  # connections that have just come do not make room yet
            return (await served.client.get("/health", headers={"connection": "close"})).status_code != 503

        await until(has_room)
        for _ in range(20):
            got = await served.client.post("/v1/completions", json=BODY, headers={"connection": "close"})
            assert got.status_code == 200
        assert served.descriptors() < 100
        shed = await served.metric("kvparams_proxy_client_connections_shed_total")
        assert shed + await served.metric("kvparams_proxy_client_connections_refused_total") >= 150
        for _, writer in idle:
            writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"G", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", b""])
async def test_heads_that_do_not_end_do_not_use_up_descriptors(stub: StubEngines, sent: bytes) -> None:
    """200 clients that begin a request and do not go on, where 100 files may be open: what is asked is answered."""
    raw = json.dumps(BODY).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    request += b"content-length: %d\r\n\r\n%b" % (len(raw), raw)
    async with serving(stub, "--log-requests", "off", files=100) as served:
        held: list[asyncio.StreamWriter] = []
        for _ in range(200):
            _, writer = await connect(served.port)
            writer.write(sent)
            held.append(writer)
        said: list[bytes] = []
        async with asyncio.timeout(60):
            while said.count(b"HTTP/1.1 200") < 6:
                reader, writer = await connect(served.port)
                writer.write(request)
                answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 200") or b"retry-after: 1" in answer, answer
                said.append(answer[:12])
                writer.close()
        assert said[-6:] == [b"HTTP/1.1 200"] * 6
        assert served.descriptors() < 70, "there is room for the connections to engines"
        for writer in held:
            writer.close()


@pytest.mark.slow
async def test_each_of_too_many_requests_at_once_is_answered(stub: StubEngines) -> None:
    """120 where 100 files may be open: none is closed without an answer, although its connection is idle at first."""
    stub.delays.itl_ms = 80
    raw = json.dumps({**BODY, "stream": True, "max_tokens": 50}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    request += b"content-length: %d\r\n\r\n%b" % (len(raw), raw)
    async with serving(stub, "--log-requests", "off", files=100) as served:

        async def answer_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
            said = await reader.read()
            writer.close()
            return said[:12]

        answers: list[asyncio.Task[bytes]] = []
        async with asyncio.timeout(60):
            # No more at once than wait to be accepted: the kernel would let the others try again much later.
            for _ in range(20):
                for _ in range(backlog_for(100) - 2):
                    reader, writer = await connect(served.port)
                    writer.write(request)
                    answers.append(asyncio.create_task(answer_of(reader, writer)))
                reader, writer = await connect(served.port)
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                await answer_of(reader, writer)  # answered behind them: all of them have been accepted
            said = await asyncio.gather(*answers)
    assert set(said) == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
    assert said.count(b"HTTP/1.1 200") >= 20


@pytest.mark.slow
async def test_an_engine_is_not_gone_because_no_file_may_be_opened(stub: StubEngines) -> None:
    """More streams than there are descriptors for: some are refused in words, no engine is, and all is well after."""
    stub.delays.itl_ms = 20
    stream = {**BODY, "stream": True, "max_tokens": 50}
    raw = json.dumps(stream).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: %b\r\n"
    head += b"content-length: %d\r\n\r\n"
    async with serving(stub, "--log-requests", "off", "--max-connections", "100", files=80) as served:
        clients = [await connect(served.port) for _ in range(40)]
        await served.client.get("/health")  # answered behind them: all of them have been accepted
        for _, writer in clients:
            writer.write(head % (b"application/json", len(raw)) + raw)
        async with asyncio.timeout(30):
            said = await asyncio.gather(*(reader.read() for reader, _ in clients))
        for _, writer in clients:
            writer.close()
        assert {each[:12] for each in said} == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        assert await served.metric("kvparams_proxy_ready") == 4
        assert (await served.client.post("/v1/completions", json=BODY)).status_code == 200
        served.process.terminate()
        output = await served.output()
    assert "limit of open files" in output
    assert "is not ready" not in output


@pytest.mark.slow
async def test_connections_that_are_busy_are_not_given_up_for_others(stub: StubEngines) -> None:
    """All that there may be are streaming: another one is told to come again, and they go on."""
    stub.delays.itl_ms = 50
    stream = {**BODY, "stream": True, "max_tokens": 100}
    async with serving(stub, "--log-requests", "off", "--max-connections", "4") as served:

        async def asked() -> str:
            reader, writer = await connect(served.port)
            raw = json.dumps(stream).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw
            )
            text = (await reader.read()).decode()
            writer.close()
            return text

        await served.client.aclose()
        streams = [asyncio.create_task(asked()) for _ in range(4)]
        await until(lambda: sum(engine.counters.live for engine in stub.engines) == len(streams))
        for _ in range(5):
            reader, writer = await connect(served.port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(5):
                said = await reader.read()
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in said
            assert b"too_many_connections" in said
            writer.close()
        for each in streams:
            assert "data: [DONE]" in await each


@pytest.mark.slow
async def test_one_address_may_be_bounded(stub: StubEngines) -> None:
    async with serving(stub, "--log-requests", "off", "--max-connections-per-address", "3") as served:
        await served.client.aclose()
        kept = [await connect(served.port) for _ in range(3)]
        reader, writer = await connect(served.port)
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        writer.close()
        kept[0][1].close()

        async def is_served() -> bool:
            reader, writer = await connect(served.port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            said = await reader.read()
            writer.close()
            return said.startswith(b"HTTP/1.1 200")

        await until(is_served, 5.0)  # the proxy hears of the end a moment later
        for _, writer in kept:
            writer.close()


@pytest.mark.parametrize(
    ("sent", "every", "limit"),
    [
        (b"", b"", "_IDLE_S"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n", "HEAD_S"),
        (b"POST ", b"x", "HEAD_S"),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 99999\r\n\r\n",
            b"[",
            "_REQUEST_S",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n",
            b"1\r\n[\r\n",
            "_REQUEST_S",
        ),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"", "_IDLE_S"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET", b" ", "HEAD_S"),
    ],
)
async def test_deadlines_hold_however_slowly_a_client_goes_on(
    stubbed: Any, monkeypatch: pytest.MonkeyPatch, sent: bytes, every: bytes, limit: str
) -> None:
    """Each limit is a second here and the others an hour; a byte every tenth of a second changes nothing."""
    for name in ("_IDLE_S", "HEAD_S", "_REQUEST_S"):
        for module in (http_parser, http_protocol):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, 1.0 if name == limit else 3600.0)
    reader, writer = await connect(stubbed.port)
    began = time.monotonic()
    writer.write(sent)
    ended = asyncio.ensure_future(reader.read())
    async with asyncio.timeout(20):
        while not ended.done():
            writer.write(every)
            await asyncio.wait([ended], timeout=0.1)
    assert ended.exception() is None or isinstance(ended.exception(), ConnectionError)
    assert 0.9 < time.monotonic() - began < 4
    writer.close()


class Connection:
    """A `ClientConnection` that notes what it is told."""

    def __init__(self, address: str = "a", *, idle: bool = False, since_s: float = 0.0) -> None:
        self.address, self.idle, self.since_s, self.limit_s = address, idle, since_s, float("inf")
        self.has_left = self.has_unsent = False
        self.told: list[str] = []

    def expire(self) -> None:
        self.told.append("expire")

    def shed(self) -> None:
        self.told.append("shed")

    def close_after_response(self) -> None:
        self.told.append("leave")

    def fail_incomplete_request(self) -> None:
        self.told.append("cut")

    def close(self) -> None:
        self.told.append("close")

    def abort(self) -> None:
        self.told.append("abort")


async def test_of_a_flood_each_is_told_and_only_some_stay_open() -> None:
    connections = ClientConnections(asyncio.get_running_loop(), ConnectionLimits(1, refusals=8))
    served, flood = Connection(), [Connection() for _ in range(14)]
    assert connections.add(served)
    assert not any(connections.add(each) for each in flood)
    assert [each.told for each in flood] == [["abort"]] * 6 + [[]] * 8, "the oldest have had most time to read"
    assert len(connections) == 9
    connections.close()


async def test_who_may_have_asked_already_does_not_make_room() -> None:
    """Of a connection that has just come or begun nobody knows yet what its client has sent."""
    loop = asyncio.get_running_loop()
    connections = ClientConnections(loop, ConnectionLimits(2))
    new, begun = Connection(idle=True, since_s=loop.time()), Connection(since_s=loop.time())
    begun.limit_s = HEAD_S
    assert connections.add(new)
    assert connections.add(begun)
    assert not connections.add(Connection())
    assert (new.told, begun.told) == ([], [])
    new.since_s -= 1
    assert connections.add(Connection(since_s=loop.time())), "the control"
    connections.close()


async def test_where_nobody_is_idle_the_oldest_head_under_way_makes_room() -> None:
    connections = ClientConnections(asyncio.get_running_loop(), ConnectionLimits(4))
    idle, old, young, busy = (
        Connection(idle=True, since_s=5),
        Connection(since_s=2),
        Connection(since_s=3),
        Connection(),
    )
    old.limit_s = young.limit_s = HEAD_S
    assert all(connections.add(each) for each in (idle, old, young, busy))
    for expected in (idle, old, young):
        assert connections.add(Connection())
        assert expected.told == ["shed"]
    assert not connections.add(Connection())
    assert busy.told == []
    connections.close()


async def test_the_longest_idle_makes_room_and_counts_are_exact() -> None:
    connections = ClientConnections(asyncio.get_running_loop(), ConnectionLimits(3, 2))
    first, second, third = Connection("a", idle=True, since_s=2), Connection("a"), Connection("b", idle=True, since_s=1)
    assert all(connections.add(each) for each in (first, second, third))
    refused, new, another, over = (Connection(address) for address in "accd")
    assert not connections.add(refused), "two of one address"
    assert connections.add(new)
    assert third.told == ["shed"], "it has been idle for longest"
    assert connections.add(another)
    assert first.told == ["shed"]
    assert not connections.add(over), "nobody is idle"
    assert (connections.refused_counts["address"], connections.refused_counts["limit"], connections.shed_count) == (
        1,
        1,
        2,
    )
    for each in (first, second, third, refused, new, another, over):
        connections.remove(each)
        connections.remove(each)
    assert len(connections) == 0
    await asyncio.wait_for(connections.wait_empty(), 1)
    assert connections.add(first)
    assert connections.add(second)
    connections.close()


def test_connections_and_files_fit() -> None:
    for files in (*range(40, 1500), 1 << 20):
        connections = connections_for(files)
        assert 2 * connections + refusals_for(files) < files, "clients, their engines, those refused, and some"
        assert 2 * connections + refusals_for(files) + 32 <= files
        assert descriptors_for(connections) <= files
        assert descriptors_for(connections + 1) > files
        assert 2 * backlog_for(files) <= max(2, files // 6), "what one turn accepts, and what it makes room with"
