"""Tests lost, duplicate and invalid messages: nodes that die, a broker that goes and comes back, dead letters."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest
from aiormq.channel import Channel
from aiormq.exceptions import ConnectionInternalError

from kvparams_proxy.queue.messages import ControlMessage, ResultHead, ResultPart, WorkItem, write_control, write_work
from kvparams_proxy.queue.topology import QueueNames
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import UpstreamError
from tests.support.proxy.fixtures import answer
from tests.support.waiting import until
from tests.system.queue.conftest import Nodes
from tests.system.queue.rabbitmq import RabbitMQ
from tests.system.queue.raw import RawNode, sent, waiting
from tests.system.queue.scenes import LIMIT_S, Chunks, begun, echo, ended, send, taken

HEAD: Final = ResultHead(200, b"text/plain", b"")


@pytest.mark.slow
async def test_work_of_a_node_that_died_is_lost_and_not_run_again_unasked(nodes: Nodes) -> None:
    async with taken(nodes) as (dying, work, heard):
        await dying.say_taken(work)
        await dying.say(ResultPart(work.id, dying.name, 0, HEAD, b"one", False, None))
        async with asyncio.timeout(LIMIT_S):
            await heard.some.wait()
    other = await nodes.decode(echo)
    await ended(heard)
    assert isinstance(heard.error, UpstreamError)
    assert heard.error.reason == "the decode node of the request is gone"
    assert heard.error.sent
    assert not other.engine.bodies
    assert other.consumer.counts["lost"] == 1


async def test_work_that_nobody_had_begun_to_answer_is_lost_at_once(nodes: Nodes) -> None:
    async with taken(nodes) as (_, _, heard):
        pass
    await nodes.decode(echo)
    await ended(heard)
    assert isinstance(heard.error, UpstreamError)


@pytest.mark.parametrize("error", ["internal error", "none"], ids=["internal error", "control-no error"])
async def test_a_node_whose_consumer_the_broker_fails_to_take_comes_back(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """RabbitMQ does so on a machine that is full, with 541; to the nodes of the tests as well."""
    failed: list[str] = []
    consume = Channel.basic_consume

    async def fails_once(self: Channel, queue: str, *arguments: Any, **named: Any) -> Any:
        if queue == QueueNames(nodes.name).work and not failed and error != "none":
            failed.append(queue)
            await self.connection.close(ConnectionInternalError("INTERNAL_ERROR"))
            raise ConnectionInternalError("INTERNAL_ERROR")
        return await consume(self, queue, *arguments, **named)

    monkeypatch.setattr(Channel, "basic_consume", fails_once)
    way = nodes.prefill()
    decode = await nodes.decode(echo)
    assert (await ended(send(way)[1])).error is None
    assert len(decode.engine.bodies) == 1
    assert len(failed) == (error != "none")
    failed.clear()
    async with RawNode(nodes.broker.url, nodes.name, "second"):
        assert len(failed) == (error != "none")


@pytest.mark.slow
async def test_a_node_that_was_told_to_let_it_go_still_says_when_another_one_is_gone(nodes: Nodes) -> None:
    async with taken(nodes) as (dying, work, heard):
        await dying.say_taken(work)
        other = await nodes.decode(echo)
        await until(lambda: other.consumer.connected, LIMIT_S)
        cancel = write_control(ControlMessage("cancel", work.id))  # as if it had run it too
        await sent(nodes.broker.url, QueueNames(nodes.name).control(other.consumer.node), cancel)
    await ended(heard)
    assert isinstance(heard.error, UpstreamError)
    assert heard.error.reason == "the decode node of the request is gone"
    assert other.consumer.counts["lost"] == 1


async def test_a_node_that_has_only_lost_its_connection_goes_on(nodes: Nodes) -> None:
    """Its work is given to another node, which does not run it; its own answer is the one that counts."""
    async with taken(nodes) as (node, work, heard):
        await node.say_taken(work)
        await node.say(ResultPart(work.id, node.name, 0, HEAD, b"one, ", False, None))
        await node.leave()
        other = await nodes.decode(echo)
        await until(lambda: other.consumer.counts["lost"] == 1, LIMIT_S)
        async with node:
            order = await node.told()
            assert (order.order, order.id) == ("ask", work.id)
            await node.say_taken(work)
            await node.say(ResultPart(work.id, node.name, 1, None, b"two", True, None))
            await ended(heard)
    assert heard.error is None
    assert heard.body == b"one, two"
    assert not other.engine.bodies


async def test_parts_that_come_twice_or_too_early_are_put_in_order(nodes: Nodes) -> None:
    async with taken(nodes) as (node, work, heard):
        for number in (2, 0, 0, 2, 1, 1, 3):
            head = HEAD if number == 0 else None
            await node.say(ResultPart(work.id, node.name, number, head, b"%d" % number, number == 3, None))
        await ended(heard)
    assert heard.error is None
    assert heard.body == b"0123"


async def test_of_two_nodes_that_run_the_same_work_one_is_heard_and_the_other_stopped(nodes: Nodes) -> None:
    """The broker has it twice where its confirmation was lost."""
    way = nodes.prefill()
    scripts = [Chunks(), Chunks()]
    decodes = [await nodes.decode(script, room=1) for script in scripts]
    await until(lambda: all(each.consumer.connected and each.consumer.engine_ready for each in decodes), LIMIT_S)
    await until(lambda: bool(way.open_connections))  # else the copy may be first, and the work is not sent any more
    attempt, heard = send(way)
    assert attempt.message is not None
    await sent(nodes.broker.url, QueueNames(nodes.name).work, attempt.message.body)
    await until(lambda: any(each.consumer.counts["cancelled"] for each in decodes), LIMIT_S)
    stopped = next(place for place, each in enumerate(decodes) if each.consumer.counts["cancelled"])
    assert not decodes[stopped].consumer.running_count
    if decodes[stopped].engine.bodies:  # it was asked before it was stopped, as a rule
        async with asyncio.timeout(LIMIT_S):
            await scripts[stopped].left.wait()
    for data in (b"one", b"two", b""):
        scripts[1 - stopped].chunks.put_nowait(data)
    await ended(heard)
    assert heard.body == b"onetwo"
    assert heard.error is None
    assert not scripts[1 - stopped].left.is_set()


async def test_a_node_that_has_run_work_does_not_run_its_copy(nodes: Nodes) -> None:
    """The broker has it twice, as above. The parts of a second answer would be mixed with those of the first."""
    decode = await nodes.decode(echo, room=1)
    way = nodes.prefill()
    await until(lambda: decode.consumer.connected and decode.consumer.engine_ready, LIMIT_S)
    await until(lambda: bool(way.open_connections))
    attempt, heard = send(way)
    assert attempt.message is not None
    copy = attempt.message.body
    await ended(heard)
    await sent(nodes.broker.url, QueueNames(nodes.name).work, copy)
    _, other = send(way)  # it comes behind the copy
    assert (await ended(other)).error is None
    await until(lambda: not decode.consumer.running_count, LIMIT_S)
    assert len(decode.engine.bodies) == 2
    assert decode.consumer.counts == {"done": 2, "cancelled": 0, "lost": 0, "refused": 0}


async def test_what_is_no_work_is_a_dead_letter_and_whoever_asked_is_told(nodes: Nodes) -> None:
    way = nodes.prefill()
    decode = await nodes.decode(echo)
    _, heard = send(way, path=b"/admin/instances")
    await ended(heard)
    assert isinstance(heard.error, UpstreamError)
    assert "nothing is served at /admin/instances" in heard.error.reason
    assert not heard.error.sent
    strange = write_work(WorkItem("p.1", "/v1/completions", b"host: a\r\n", b"{}"))
    await sent(nodes.broker.url, QueueNames(nodes.name).work, b"", b"{}\n{}", b"\xff\n", strange)
    dead = await waiting(nodes.broker.url, QueueNames(nodes.name).dead_letter, 5)
    assert len(dead) == 5
    assert not decode.engine.bodies
    _, good = send(way)  # the control
    assert (await ended(good)).error is None


async def test_what_nobody_takes_in_time_is_a_dead_letter(nodes: Nodes) -> None:
    way = nodes.prefill(wait_s=0.3)
    _, heard = send(way, b"late")
    await ended(heard)
    (dead,) = await waiting(nodes.broker.url, QueueNames(nodes.name).dead_letter, 1)
    assert dead.body.endswith(b"\nlate")
    await nodes.decode(echo)
    _, good = send(nodes.prefill())
    assert (await ended(good)).body == b"{}"


async def test_work_that_takes_every_node_down_is_put_aside(nodes: Nodes) -> None:
    way = nodes.prefill()
    await begun(nodes)
    attempt, _ = send(way, b"poison")
    for _ in range(4):
        async with RawNode(nodes.broker.url, nodes.name) as dying:
            assert (await dying.take()).body == b"poison"
    (dead,) = await waiting(nodes.broker.url, QueueNames(nodes.name).dead_letter, 1)
    assert dead.body.endswith(b"\npoison")
    attempt.discard()


async def test_a_slow_node_takes_less_without_being_told(nodes: Nodes) -> None:
    async def slow(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        writer.write(answer(body))

    async def fast(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        writer.write(answer(body))

    way = nodes.prefill()
    snail, hare = await nodes.decode(slow, room=2), await nodes.decode(fast, room=2)
    await until(lambda: all(each.consumer.connected and each.consumer.engine_ready for each in (snail, hare)), LIMIT_S)
    asked = [send(way)[1] for _ in range(120)]
    for heard in asked:
        assert (await ended(heard)).error is None
    assert len(hare.engine.bodies) > 3 * len(snail.engine.bodies) > 0


async def test_a_node_whose_engine_is_gone_takes_nothing(nodes: Nodes) -> None:
    """It would fail fastest, and so take the most."""
    way = nodes.prefill()
    async with nodes.consumer("http://127.0.0.1:1") as bad:
        await until(lambda: bad.connected, LIMIT_S)
        good = await nodes.decode(echo)
        asked = [send(way)[1] for _ in range(100)]
        errors = [(await ended(heard)).error for heard in asked]
        assert not any(errors)
        assert not bad.engine_ready
    assert len(good.engine.bodies) == 100


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_streams_go_on_over_a_broker_that_was_away(own_broker: RabbitMQ, stack: AsyncExitStack, how: str) -> None:
    nodes = Nodes(own_broker, "pool", stack)
    way = nodes.prefill(wait_s=300.0)
    chunks = Chunks()
    decode = await nodes.decode(chunks, silence_s=300.0)
    _, heard = send(way, b"stream")
    chunks.chunks.put_nowait(b"before, ")
    async with asyncio.timeout(LIMIT_S):
        await heard.some.wait()
    if how == "killed":
        await until(own_broker.has_recorded_queues, 30.0, pause_s=0.1)
    await asyncio.to_thread(own_broker.stop if how == "stopped" else own_broker.kill)
    chunks.chunks.put_nowait(b"meanwhile, ")
    await until(lambda: not decode.consumer.connected, LIMIT_S)
    _, waited = send(way, b"while it is away")
    await asyncio.to_thread(own_broker.start)
    chunks.chunks.put_nowait(b"after")
    chunks.chunks.put_nowait(b"")
    async with asyncio.timeout(200):
        await heard.done.wait()
    assert heard.error is None
    assert heard.body == b"before, meanwhile, after"
    chunks.chunks.put_nowait(b"too")
    chunks.chunks.put_nowait(b"")
    async with asyncio.timeout(200):
        await waited.done.wait()
    assert waited.error is None
    assert waited.body == b"too"
    await until(lambda: not decode.consumer.running_count, LIMIT_S)


async def test_a_node_that_cannot_ask_its_engine_says_so_and_has_its_room_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = nodes.prefill()
    node = await nodes.decode(echo, room=1)

    def fails(self: object, path: bytes, headers: bytes, body: bytes) -> bytes:
        raise RuntimeError("a fault")

    with monkeypatch.context() as patched:
        patched.setattr(UpstreamConnectionPool, "request", fails)
        heard = send(way)[1]
        assert (await ended(heard)).error is not None
        await until(lambda: not node.consumer.running_count, LIMIT_S)
    assert (await ended(send(way, b"well")[1])).body == b"well"
