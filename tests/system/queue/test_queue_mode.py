"""Tests the way from a prefill node to decode nodes and back, over a real broker."""

import asyncio

import pytest

from kvparams_proxy.queue.messages import (
    ResultHead,
    ResultPart,
    WorkItem,
    node_of,
    read_results,
    write_part,
    write_work,
)
from kvparams_proxy.queue.topology import QueueNames
from kvparams_proxy.upstream.types import UpstreamError, UpstreamOverflow, UpstreamTimeout
from tests.support.proxy.fixtures import answer
from tests.support.waiting import stops_changing, until
from tests.system.queue.conftest import Nodes
from tests.system.queue.raw import RawNode, hearing, sent
from tests.system.queue.scenes import LIMIT_S, Chunks, Heard, begun, echo, ended, send


async def test_a_whole_answer_comes_back(nodes: Nodes) -> None:
    way = nodes.prefill()
    decode = await nodes.decode(echo)
    asked = [send(way, b'{"n":%d}' % number)[1] for number in range(50)]
    for number, heard in enumerate(asked):
        await ended(heard)
        assert heard.error is None
        assert (heard.head.status, heard.head.content_type) == (200, b"application/json")
        assert heard.body == b'{"n":%d}' % number
    assert all(b"x-request-id: r-1\r\n" in head for head in decode.engine.heads)
    await until(lambda: decode.consumer.counts["done"] == 50, LIMIT_S)


async def test_a_stream_comes_in_order_as_it_is_made(nodes: Nodes) -> None:
    way = nodes.prefill()
    chunks = Chunks()
    await nodes.decode(chunks)
    _, heard = send(way)
    expected = b""
    for number in range(100):
        data = b"data: %d\n\n" % number
        expected += data
        chunks.chunks.put_nowait(data)
        if number % 10 == 0:
            async with asyncio.timeout(LIMIT_S):
                while heard.body != expected:
                    heard.some.clear()
                    await heard.some.wait()
    chunks.chunks.put_nowait(b"")
    await ended(heard)
    assert heard.error is None
    assert heard.body == expected


@pytest.mark.parametrize("how", ["abort", "discard"])
async def test_who_leaves_in_the_middle_of_a_stream_is_felt_by_the_engine(nodes: Nodes, how: str) -> None:
    way = nodes.prefill()
    chunks = Chunks()
    decode = await nodes.decode(chunks)
    attempt, heard = send(way)
    chunks.chunks.put_nowait(b"data: 1\n\n")
    async with asyncio.timeout(LIMIT_S):
        await heard.some.wait()
    assert not chunks.left.is_set()
    if how == "abort":
        attempt.abort(UpstreamTimeout("gone"))
        assert isinstance(heard.error, UpstreamTimeout)
    else:
        attempt.discard()
    async with asyncio.timeout(LIMIT_S):
        await chunks.left.wait()
    assert heard.ends == (how == "abort")
    assert decode.consumer.counts["cancelled"] == 1
    assert not decode.consumer.running_count


async def test_who_leaves_before_a_node_has_taken_it_costs_an_engine_nothing_for_long(nodes: Nodes) -> None:
    """It is taken, and let go as soon as the node that asked has said so."""
    way = nodes.prefill()
    attempt, _ = send(way)
    await until(lambda: attempt.message is None)  # the broker has it
    attempt.discard()
    chunks = Chunks()
    decode = await nodes.decode(chunks)
    async with asyncio.timeout(LIMIT_S):
        await chunks.left.wait()
    await until(lambda: not decode.consumer.running_count, LIMIT_S)
    assert decode.consumer.counts == {"done": 0, "cancelled": 1, "lost": 0, "refused": 0}


async def test_work_that_is_called_off_before_it_comes_is_not_run(nodes: Nodes) -> None:
    way = nodes.prefill()
    chunks = Chunks()
    decode = await nodes.decode(chunks, room=1)
    _, first = send(way, b"first")
    chunks.chunks.put_nowait(b"1")
    async with asyncio.timeout(LIMIT_S):
        await first.some.wait()
    waiting = [send(way, b"waits")[0] for _ in range(50)]
    await until(lambda: all(each.message is None for each in waiting))  # the broker has it
    for each in waiting:
        each.discard()
    told = asyncio.Event()
    way.send_control(decode.consumer.node, "ask", "p.0", lambda _: told.set())  # after all that has been said before
    async with asyncio.timeout(LIMIT_S):
        await told.wait()
    chunks.chunks.put_nowait(b"")
    await ended(first)
    _, last = send(way, b"last")
    for data in (b"2", b""):
        chunks.chunks.put_nowait(data)
    await ended(last)
    assert (last.error, last.body) == (None, b"2")
    assert decode.engine.bodies == [b"first", b"last"]
    assert decode.consumer.counts["cancelled"] == 50


async def test_nobody_takes_it_for_too_long(nodes: Nodes) -> None:
    way = nodes.prefill(wait_s=0.3)
    _, heard = send(way)
    await ended(heard)
    assert isinstance(heard.error, UpstreamOverflow)
    assert "within 0.3 s" in heard.error.reason


async def test_an_engine_that_breaks_off_is_told_at_once(nodes: Nodes) -> None:
    async def broken(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n123")
        await writer.drain()
        writer.close()

    way = nodes.prefill()
    await nodes.decode(broken)
    _, heard = send(way)
    await ended(heard)
    assert heard.error is not None
    assert heard.error.sent
    assert "before its answer was complete" in heard.error.reason
    assert heard.body == b"123"


async def test_a_refusal_of_the_engine_is_an_answer(nodes: Nodes) -> None:
    async def busy(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"{}", status=b"503 Service Unavailable", extra=b"retry-after: 7\r\n"))

    way = nodes.prefill()
    await nodes.decode(busy)
    _, heard = send(way)
    await ended(heard)
    assert heard.error is None
    assert (heard.head.status, heard.head.retry_after) == (503, b"7")


async def test_what_many_streams_say_at_a_time_goes_in_one_letter(nodes: Nodes) -> None:
    """As an engine's steps have it: a token of each."""
    streams, steps = 8, 20

    async def stepping(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        all_here.release()
        for step in range(steps):
            while stepped <= step:
                await turn.wait()
            writer.write(b"5\r\n%5d\r\n" % step)
        writer.write(b"0\r\n\r\n")

    all_here, turn, stepped = asyncio.Semaphore(0), asyncio.Event(), 0
    decode = await nodes.decode(stepping)
    await until(lambda: decode.consumer.connected, LIMIT_S)
    names = QueueNames(nodes.name)
    async with hearing(nodes.broker.url, names.results("p")) as letters:
        works = [write_work(WorkItem(f"p.{number}", "/v1/completions", b"", b"{}")) for number in range(streams)]
        await sent(nodes.broker.url, names.work, *works)

        def heard_bytes() -> int:
            results = [result for letter in letters for result in read_results(letter)]
            return sum(len(result.body) for result in results if isinstance(result, ResultPart))

        async with asyncio.timeout(LIMIT_S):
            for _ in range(streams):
                await all_here.acquire()
        for _ in range(steps):
            stepped += 1
            turn.set()
            turn.clear()
            await until(lambda stepped=stepped: heard_bytes() == 5 * streams * stepped, LIMIT_S)
        await until(lambda: decode.consumer.counts["done"] == streams, LIMIT_S)
    found = [result for letter in letters for result in read_results(letter)]
    parts = [each for each in found if isinstance(each, ResultPart)]
    for number in range(streams):
        own = sorted(part for part in parts if part.id == f"p.{number}")
        assert b"".join(part.body for part in own) == b"".join(b"%5d" % step for step in range(steps))
    assert 3 * len(letters) < len(found)


class Faulty(Heard):
    """A sink with a fault at its end."""

    def on_done(self, error: UpstreamError | None) -> None:
        super().on_done(error)
        raise RuntimeError("a fault of the proxy")


@pytest.mark.parametrize("fault", ["the node's", "the proxy's"])
async def test_a_fault_in_a_letter_costs_nobody_behind_it(nodes: Nodes, fault: str) -> None:
    way = nodes.prefill()
    await begun(nodes)
    ours, others = Faulty() if fault == "the proxy's" else Heard(), Heard()
    async with RawNode(nodes.broker.url, nodes.name) as node:
        for sink in (ours, others):
            way.exchange(way.request(b"/v1/completions", b"", b"{}"), sink)
        asker = node_of((await node.take()).id)
        good = ResultHead(200, b"text/plain", b"")
        bad = ResultHead(200, b"x" * 1001, b"") if fault == "the node's" else good
        parts = (
            ResultPart(f"{asker}.1", node.name, 0, bad, b"a", True, None),
            ResultPart(f"{asker}.2", "d", 0, good, b"b", True, None),
        )
        await sent(nodes.broker.url, node.names.results(asker), b"".join(map(write_part, parts)))
        await ended(others)
        assert (others.error, others.body) == (None, b"b")
        await ended(ours)
        if fault == "the node's":
            assert ours.error is not None
            assert "an invalid message" in ours.error.reason
            order = await node.told()
            assert (order.order, order.id) == ("cancel", f"{asker}.1")


async def test_what_another_node_says_that_cannot_be_read_ends_nothing(nodes: Nodes) -> None:
    way = nodes.prefill()
    await begun(nodes)
    async with RawNode(nodes.broker.url, nodes.name) as node:
        _, heard = send(way)
        work = await node.take()
        head = ResultHead(200, b"text/plain", b"")
        await node.say(ResultPart(work.id, node.name, 0, head, b"a", False, None))
        await node.say(ResultPart(work.id, "another", 0, head._replace(status=600), b"x", True, None))
        await node.say(ResultPart(work.id, node.name, 1, None, b"b", True, None))
        await ended(heard)
        assert (heard.error, heard.body) == (None, b"ab")


async def test_a_head_of_an_engine_that_cannot_be_told_fails_its_work_alone(nodes: Nodes) -> None:
    async def strange(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if body == b"{}":
            await echo(body, reader, writer)
        else:
            writer.write(answer(b"{}", extra=b"retry-after: %b\r\n" % (b"x" * 20_000)))

    way = nodes.prefill()
    decode = await nodes.decode(strange)
    (_, bad), (_, good) = send(way, b"bad"), send(way)
    assert (await ended(good)).body == b"{}"
    await ended(bad)
    assert bad.error is not None
    assert "head must be" in bad.error.reason
    await until(lambda: decode.consumer.counts["done"] == 2, LIMIT_S)


async def test_a_paused_stream_stops_its_engine_and_no_other_one(nodes: Nodes) -> None:
    """What an engine writes without being read fills a socket, then it waits."""
    written = 0

    async def flood(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        if body == b"{}":
            await echo(body, reader, writer)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 200000000\r\n\r\n")
        for _ in range(200):
            writer.write(bytes(1_000_000))
            await writer.drain()
            written += 1

    way = nodes.prefill()
    await nodes.decode(flood)
    attempt, slow = send(way, b"flood")
    attempt.pause()
    await until(lambda: written > 0, LIMIT_S)
    assert await stops_changing(lambda: written, 0.5) < 50
    assert not slow.body
    _, other = send(way)
    assert (await ended(other)).body == b"{}"
    attempt.resume()
    async with asyncio.timeout(LIMIT_S):
        while len(slow.body) < 5_000_000:
            slow.some.clear()
            await slow.some.wait()
    attempt.discard()
