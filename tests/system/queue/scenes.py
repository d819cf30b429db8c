"""Provides the first steps of queue tests: a request is sent, a decode node takes it, and both ends are observed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from kvparams_proxy.queue.messages import WorkItem
from kvparams_proxy.queue.pending_reply import PendingReply as Attempt
from kvparams_proxy.queue.queue_upstream import QueueUpstream
from kvparams_proxy.upstream.types import ResponseHead, UpstreamError
from tests.support.proxy.fixtures import answer
from tests.support.waiting import until
from tests.system.queue.conftest import Nodes
from tests.system.queue.raw import RawNode

__all__ = ["LIMIT_S", "Chunks", "Heard", "Taken", "begun", "echo", "ended", "send", "taken"]

LIMIT_S: Final = 20.0
HEADERS: Final = b"x-request-id: r-1\r\n"


class Heard:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.head = ResponseHead()
        self.body = b""
        self.error: UpstreamError | None = None
        self.ends = 0
        self.some = asyncio.Event()
        self.done = asyncio.Event()

    def on_head(self, head: ResponseHead) -> None:
        assert not self.head.status
        self.head = head

    def on_body(self, data: bytes) -> None:
        assert not self.ends
        self.body += data
        self.some.set()

    def on_done(self, error: UpstreamError | None) -> None:
        self.error = error
        self.ends += 1
        self.done.set()


def send(way: QueueUpstream, body: bytes = b"{}", path: bytes = b"/v1/completions") -> tuple[Attempt, Heard]:
    heard = Heard()
    return way.exchange(way.request(path, HEADERS, body), heard), heard


async def ended(heard: Heard) -> Heard:
    async with asyncio.timeout(LIMIT_S):
        await heard.done.wait()
    assert heard.ends == 1
    return heard


async def echo(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(body))


class Chunks:
    """Streams one chunk each time it is let, until it is told to end; knows who left."""

    def __init__(self) -> None:
        self.chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self.begun = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        self.begun.set()
        gone = asyncio.ensure_future(reader.read(1))
        while True:
            chunk = asyncio.ensure_future(self.chunks.get())
            await asyncio.wait((gone, chunk), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                chunk.cancel()
                self.left.set()
                return
            data = chunk.result()
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            if not data:
                gone.cancel()
                await asyncio.wait([gone])
                return
            await writer.drain()


async def begun(nodes: Nodes) -> None:
    """The queues are there."""
    async with nodes.consumer("http://127.0.0.1:1") as consumer:
        await until(lambda: consumer.connected, LIMIT_S)


class Taken(NamedTuple):
    """Work that a decode node has in its hands."""

    node: RawNode
    work: WorkItem
    heard: Heard
    """Of it, by whoever asked."""


@asynccontextmanager
async def taken(nodes: Nodes) -> AsyncGenerator[Taken]:
    """Somebody has asked, and a node that does as the test says has taken it, without a word."""
    way = nodes.prefill()
    await begun(nodes)
    async with RawNode(nodes.broker.url, nodes.name) as node:
        _, heard = send(way)
        yield Taken(node, await node.take(), heard)
