"""Provides a decode node that handles one message after the other as the test says, and a view into queues."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, Self

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from aiormq.exceptions import ConnectionInternalError

from kvparams_proxy.queue.messages import (
    ControlMessage,
    ResultPart,
    WorkItem,
    WorkTaken,
    node_of,
    read_control,
    read_work,
    write_part,
    write_result,
)
from kvparams_proxy.queue.topology import QueueNames
from tests.support.waiting import until

__all__ = ["RawNode", "hearing", "sent", "waiting"]

LIMIT_S: Final = 20.0
ENTER_S: Final = 100.0
"""The broker takes a minute to find out that it is too slow."""


class RawNode:
    """An async context; `leave` and `enter` again is what a node does that has lost its connection."""

    def __init__(self, url: str, pool: str, name: str = "draw") -> None:
        self._url = url
        self.names: Final = QueueNames(pool)
        self.name: Final = name
        self._work: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        self._orders: asyncio.Queue[ControlMessage] = asyncio.Queue()
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None

    async def __aenter__(self) -> Self:
        await until(self._has_entered, ENTER_S, pause_s=0.1)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()

    async def _has_entered(self) -> bool:
        """Connects and consumes. Returns False where the broker closes the connection with an internal error.

        RabbitMQ 3.10.8 does so, with 541, where a quorum queue does not take a consumer in time (rabbit_channel.erl).
        Nodes connect again then.
        """
        self._connection = await aio_pika.connect(self._url)
        try:
            self._channel = channel = await self._connection.channel()
            await channel.set_qos(prefetch_count=1)
            control = await channel.declare_queue(self.names.control(self.name), exclusive=True, auto_delete=True)
            await control.consume(self._ordered, no_ack=True)
            await (await channel.get_queue(self.names.work)).consume(self._work.put)
        except ConnectionInternalError:
            await self._connection.close()
            return False
        return True

    async def leave(self) -> None:
        """The connection is gone, with all that was not acknowledged."""
        if self._connection is not None:
            await self._connection.close()

    async def take(self) -> WorkItem:
        """The next work; not acknowledged."""
        async with asyncio.timeout(LIMIT_S):
            return read_work((await self._work.get()).body)

    async def told(self) -> ControlMessage:
        """The next order."""
        async with asyncio.timeout(LIMIT_S):
            return await self._orders.get()

    async def say_taken(self, work: WorkItem) -> None:
        """Tell whoever asked."""
        await self._send(write_result(WorkTaken(work.id, self.name)), self.names.results(node_of(work.id)))

    async def say(self, part: ResultPart) -> None:
        """A piece of an answer."""
        await self._send(write_part(part), self.names.results(node_of(part.id)))

    async def _send(self, body: bytes, to: str) -> None:
        assert self._channel is not None
        await self._channel.default_exchange.publish(aio_pika.Message(body, delivery_mode=2), to)

    async def _ordered(self, message: AbstractIncomingMessage) -> None:
        self._orders.put_nowait(read_control(message.body))


@asynccontextmanager
async def hearing(url: str, results: str) -> AsyncGenerator[list[bytes]]:
    """A result queue of that name, and the letters that come."""
    letters: list[bytes] = []

    async def heard(message: AbstractIncomingMessage) -> None:
        letters.append(message.body)

    connection = await aio_pika.connect(url)
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(results, durable=True, arguments={"x-expires": 15_000})
        await queue.consume(heard, no_ack=True)
        yield letters


async def sent(url: str, queue: str, *bodies: bytes) -> None:
    """Put something into a queue."""
    connection = await aio_pika.connect(url)
    try:
        channel = await connection.channel()
        for body in bodies:
            await channel.default_exchange.publish(aio_pika.Message(body, delivery_mode=2), queue)
    finally:
        await connection.close()


async def waiting(url: str, queue: str, least: int) -> list[AbstractIncomingMessage]:
    """The messages of a queue, once they are so many; they are taken out."""
    found: list[AbstractIncomingMessage] = []
    connection = await aio_pika.connect(url)
    try:
        channel = await connection.channel()

        async def is_enough() -> bool:
            while len(found) < least:
                message = await (await channel.get_queue(queue)).get(no_ack=True, fail=False)
                if message is None:
                    return False
                found.append(message)
            return True

        await until(is_enough, LIMIT_S, pause_s=0.05)
    finally:
        await connection.close()
    return found
