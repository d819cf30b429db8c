"""Tests messages that are too large or too many for the broker, and nodes that are shut down.

Whoever waits is told, and other requests go on.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import aio_pika
import httpx
import pytest
from pamqp.common import Arguments

from kvparams_proxy.queue.messages import (
    MalformedMessage,
    ResultMessage,
    ResultPart,
    WorkItem,
    read_results,
    write_work,
)
from kvparams_proxy.queue.outbox import OutboundMessage
from kvparams_proxy.queue.running_work import RunningWork
from kvparams_proxy.queue.topology import QueueNames
from kvparams_proxy.upstream.types import ResponseHead, UpstreamError
from tests.support.proxy.fixtures import answer
from tests.support.waiting import until
from tests.system.queue.cluster import Cluster
from tests.system.queue.conftest import Nodes
from tests.system.queue.rabbitmq import RabbitMQ
from tests.system.queue.raw import RawNode, sent, waiting
from tests.system.queue.scenes import LIMIT_S, Chunks, echo, ended, send, taken
from tests.system.queue.test_lost import HEAD

LIMIT_BYTES: Final = 65_536
BIG: Final = b"x" * 100_000


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def narrow_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """One that takes small messages only."""
    with RabbitMQ(tmp_path_factory.mktemp("narrow"), f"max_message_size = {LIMIT_BYTES}\n") as found:
        yield found


@pytest.fixture
def narrow(narrow_broker: RabbitMQ, names: Iterator[str], stack: AsyncExitStack) -> Nodes:
    return Nodes(narrow_broker, next(names), stack)


async def test_a_request_that_is_too_large_for_the_broker_is_refused_alone(
    narrow: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    way = narrow.prefill()
    await narrow.decode(echo)
    before, big, after = (send(way, body)[1] for body in (b"before", BIG, b"after"))
    for heard, body in ((before, b"before"), (after, b"after")):
        assert (await ended(heard)).error is None
        assert (heard.head.status, heard.body) == (200, body)
    await ended(big)
    assert big.error is None
    assert big.head.status == 413
    assert b"larger than the broker between prefill and decode takes" in big.body
    assert (await ended(send(way, BIG)[1])).head.status == 413
    assert (await ended(send(way)[1])).body == b"{}"
    assert sum("is lost" in said for said in caplog.messages) == 1  # the limit is known then


@pytest.mark.timeout(400)
async def test_a_client_is_told_that_its_request_is_too_large(narrow_broker: RabbitMQ, tmp_path: Path) -> None:
    """Through whole sidecars: prefill has done its part, and the engine that was to go on hears nothing of it."""
    store = f"file://{tmp_path}/kv?size=64MiB"
    async with (
        Cluster.running(tmp_path, narrow_broker, store, decode=[()], pool="whole") as cluster,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{cluster.prefill[0].port}", trust_env=False, timeout=60
        ) as client,
    ):
        url = f"http://127.0.0.1:{cluster.prefill[0].port}/v1/completions"
        asked = {"prompt": "1 2 3", "max_tokens": 4, "ignore_eos": True}
        for stream in (False, True):
            got = await client.post(url, json={**asked, "user": "x" * 100_000, "stream": stream})
            assert got.status_code == 413, got.text
            assert got.json()["error"]["code"] == "too_large"
        good = await client.post(url, json={**asked, "user": "x" * 10_000})  # the control
        assert good.status_code == 200, good.text
        counts = await cluster.counts(cluster.decode[0])
        assert counts['kvparams_queue_work_total{outcome="done"}'] == 1


async def test_a_part_that_is_too_large_for_the_broker_ends_its_answer_alone(narrow: Nodes) -> None:
    async def much(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(BIG * 40 if body == b"much" else body))

    way = narrow.prefill()
    decode = await narrow.decode(much)
    before, big, after = (send(way, body)[1] for body in (b"before", b"much", b"after"))
    for heard, body in ((before, b"before"), (after, b"after")):
        assert (await ended(heard)).error is None
        assert heard.body == body
    await ended(big)
    assert big.error is not None
    assert big.error.reason == "a part of the answer is larger than the broker's max_message_size"
    assert big.error.sent
    await until(lambda: not decode.consumer.running_count, LIMIT_S)


class Told:
    """A decode node that keeps the letters of what it runs until they are settled."""

    def __init__(self) -> None:
        self.node: Final = "d"
        self.silence_s: Final = 1.0
        self.letters: list[OutboundMessage] = []
        self.ends = 0

    def now(self) -> float:
        return 0.0

    def watch(self, running: RunningWork, limit_s: float) -> None:
        """It is not late."""

    def put(self, letter: OutboundMessage, to: str) -> None:
        self.letters.append(letter)

    def withdraw(self, letter: OutboundMessage) -> None:
        self.letters.remove(letter)

    def engine_finished(self, running: RunningWork, error: UpstreamError | None, status: int) -> None:
        """The engine is not looked at here."""

    def work_finished(self, running: RunningWork) -> None:
        self.ends += 1


def test_no_part_is_longer_than_a_mebibyte() -> None:
    told = Told()
    running = RunningWork(told, WorkItem("p.1", "/v1/completions", b"", b""))
    whole = bytes(range(256)) * (5 << 12)  # 5 MiB
    running.on_head(ResponseHead(200, b"text/plain"))
    running.on_body(whole[: 3 << 20])
    running.on_body(whole[3 << 20 :])
    running.on_done(None)
    parts: list[ResultPart] = []
    while told.letters:
        letter = told.letters.pop(0)
        (part,) = read_results(letter.body)
        assert isinstance(part, ResultPart)
        parts.append(part)
        letter.on_settled("kept")
    assert b"".join(part.body for part in parts) == whole
    assert max(len(part.body) for part in parts) == 1 << 20
    assert [part.number for part in parts] == list(range(len(parts)))
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [part.head is not None for part in parts] == [True] + [False] * (len(parts) - 1)
    assert running.complete
    assert told.ends == 1


async def test_a_node_that_leaves_out_a_part_is_heard_no_longer(nodes: Nodes) -> None:
    async with taken(nodes) as (node, work, heard):
        for number in range(1, 300):
            await node.say(ResultPart(work.id, node.name, number, HEAD if number == 1 else None, b"", False, None))
        await ended(heard)
        assert heard.error is not None
        assert heard.error.reason == "the decode node left out a part of the answer"
        order = await node.told()
        assert (order.order, order.id) == ("cancel", work.id)


async def test_a_node_that_is_shut_down_tells_who_waits(nodes: Nodes) -> None:
    way = nodes.prefill()
    chunks = Chunks()
    async with AsyncExitStack() as leaving:
        decode = await Nodes(nodes.broker, nodes.name, leaving).decode(chunks)
        _, heard = send(way)
        chunks.chunks.put_nowait(b"data: 1\n\n")
        async with asyncio.timeout(LIMIT_S):
            await heard.some.wait()
    await ended(heard)
    assert heard.error is not None
    assert heard.error.reason == "its decode node is shutting down"
    assert heard.body == b"data: 1\n\n"
    assert chunks.left.is_set()
    assert not decode.consumer.running_count


@asynccontextmanager
async def stuffed(nodes: Nodes, node: str) -> AsyncGenerator[str]:
    """A result queue of a prefill node that takes no more: the broker says so of what comes."""
    queue = QueueNames(nodes.name).results(node)
    connection = await aio_pika.connect(nodes.broker.url)
    async with connection:
        channel = await connection.channel()
        full: Arguments = {"x-max-length": 1, "x-overflow": "reject-publish", "x-expires": 60_000}
        await channel.declare_queue(queue, durable=True, arguments=full)
        await sent(nodes.broker.url, queue, b"in the way")
        yield queue


async def test_what_the_broker_refuses_is_sent_again_and_its_work_not_given_up(nodes: Nodes) -> None:
    decode = await nodes.decode(echo)
    await until(lambda: decode.consumer.connected, LIMIT_S)
    async with stuffed(nodes, "p") as queue:
        await sent(
            nodes.broker.url, QueueNames(nodes.name).work, write_work(WorkItem("p.1", "/v1/completions", b"", b"{}"))
        )
        await until(lambda: bool(decode.engine.bodies), LIMIT_S)
        assert (await waiting(nodes.broker.url, queue, 1))[0].body == b"in the way"
        found: list[ResultMessage | MalformedMessage] = []
        while not any(isinstance(each, ResultPart) and each.last for each in found):
            (letter,) = await waiting(nodes.broker.url, queue, 1)
            found += read_results(letter.body)
        parts = sorted(each for each in found if isinstance(each, ResultPart))
        assert [(part.number, part.body, part.last) for part in parts] == [(0, b"{}", False), (1, b"", True)]
        await until(lambda: decode.consumer.counts["done"] == 1, LIMIT_S)


async def test_what_a_node_that_leaves_could_tell_nobody_is_given_to_another_one(nodes: Nodes) -> None:
    async with stuffed(nodes, "p"), AsyncExitStack() as leaving:
        decode = await Nodes(nodes.broker, nodes.name, leaving).decode(echo)
        await until(lambda: decode.consumer.connected, LIMIT_S)
        work = WorkItem("p.1", "/v1/completions", b"", b"{}")
        await sent(nodes.broker.url, QueueNames(nodes.name).work, write_work(work))
        await until(lambda: bool(decode.engine.bodies), LIMIT_S)
        await leaving.aclose()
        async with RawNode(nodes.broker.url, nodes.name) as other:
            assert await other.take() == work


async def test_what_is_no_work_is_put_aside_only_when_whoever_asked_has_been_told(nodes: Nodes) -> None:
    async with stuffed(nodes, "p"), AsyncExitStack() as leaving:
        decode = await Nodes(nodes.broker, nodes.name, leaving).decode(echo)
        await until(lambda: decode.consumer.connected, LIMIT_S)
        work = WorkItem("p.1", "/admin/instances", b"", b"{}")
        await sent(nodes.broker.url, QueueNames(nodes.name).work, write_work(work))
        await until(lambda: decode.consumer.counts["refused"] == 1, LIMIT_S)
        await leaving.aclose()
        async with RawNode(nodes.broker.url, nodes.name) as other:
            assert await other.take() == work
