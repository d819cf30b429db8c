"""Compares the simulated broker with a real RabbitMQ on the same script of operations.

A script waits for each expected message. A message that comes behind it proves that an unexpected one did not come.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import aio_pika
import pytest
from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import ChannelInvalidStateError, ChannelLockedResource, ChannelPreconditionFailed
from pamqp.commands import Basic

from kvparams_proxy.queue.topology import QueueNames, declare_control, declare_results, declare_work
from tests.system.queue.rabbitmq import RabbitMQ
from tests.system.queue.scenes import LIMIT_S
from tests.system.simulation.broker import Broker, Message, Queue
from tests.system.simulation.wire import Port

Seen = list[object]
Connect = Callable[..., Awaitable[Any]]


class Peer:
    """One connection with two channels, made as `kvparams_proxy.queue.broker_connection` makes it."""

    def __init__(self, connection: Any, reads: AbstractChannel, writes: AbstractChannel) -> None:
        self._connection = connection
        self.reads = reads
        self.writes = writes
        self.got: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
        self.closed = asyncio.Event()

    async def consume(self, queue: str, prefetch: int, tag: str = "one") -> None:
        """From now on; with its own word for how much may come."""
        await self.reads.basic_qos(prefetch_count=prefetch)
        await self.reads.basic_consume(queue, self.heard, consumer_tag=tag)

    def lost(self, _channel: object, _error: BaseException | None) -> None:
        """The channel to read is closed."""
        self.closed.set()

    async def heard(self, message: DeliveredMessage) -> None:
        """Something has come."""
        self.got.put_nowait(message)

    async def next(self) -> DeliveredMessage:
        """What comes."""
        async with asyncio.timeout(LIMIT_S):
            return await self.got.get()

    async def see(self, many: int) -> Seen:
        """So many: what they say, and whether they may have been seen before."""
        found = [await self.next() for _ in range(many)]
        return [(message.body.decode(), bool(message.redelivered)) for message in found]

    async def say(self, queue: str, *bodies: str, durable: bool = True, expires_ms: int | None = None) -> list[str]:
        """Publish; how the broker has answered for each."""
        return [await self._publish(queue, body, durable, expires_ms) for body in bodies]

    async def _publish(self, queue: str, body: str, durable: bool, expires_ms: int | None) -> str:
        expiration = None if expires_ms is None else f"{expires_ms}"
        mode = 2 if durable else 1
        properties = Basic.Properties(delivery_mode=mode, message_id=body, expiration=expiration)
        said = await self.writes.basic_publish(body.encode(), routing_key=queue, properties=properties, mandatory=True)
        return type(said).__name__

    async def leave(self) -> None:
        """With all that it has not acknowledged."""
        await self._connection.close()


class Side:
    """One of the two brokers."""

    def __init__(self, connect: Connect, url: str, names: QueueNames, stack: AsyncExitStack) -> None:
        self._connect = connect
        self._url = url
        self.names: Final = names
        self._stack = stack

    async def peer(self) -> Peer:
        """Somebody connects."""
        connection = await self._connect(self._url, heartbeat=15)
        self._stack.push_async_callback(connection.close)
        reading = connection.channel(publisher_confirms=False)
        writing = connection.channel(publisher_confirms=True, on_return_raises=False)
        await reading.initialize()
        await writing.initialize()
        peer = Peer(connection, await reading.get_underlay_channel(), await writing.get_underlay_channel())
        reading.close_callbacks.add(peer.lost)
        return peer

    async def worker(self, prefetch: int) -> Peer:
        """Somebody who consumes work."""
        peer = await self.peer()
        await declare_work(peer.writes, self.names)
        await peer.consume(self.names.work, prefetch)
        return peer


async def what_is_not_acknowledged_is_given_to_the_next(side: Side) -> Seen:
    writer = await side.peer()
    first = await side.worker(2)
    said = await writer.say(side.names.work, *"12345")
    one, two = await first.next(), await first.next()
    assert one.delivery_tag is not None
    await first.reads.basic_ack(one.delivery_tag)
    three = await first.next()
    seen: Seen = [said, [(each.body, each.redelivered) for each in (one, two, three)], first.got.qsize()]
    await first.leave()
    second = await side.worker(10)
    await writer.say(side.names.work, "last")
    return [*seen, await second.see(5), second.got.qsize()]


async def several_at_once_are_acknowledged_together(side: Side) -> Seen:
    writer, reader = await side.peer(), await side.peer()
    queue = side.names.results("p1")
    await declare_results(reader.reads, queue)
    await reader.consume(queue, 3)
    await writer.say(queue, *"12345")
    _, two, _ = [await reader.next() for _ in range(3)]
    assert two.delivery_tag is not None
    await reader.reads.basic_ack(two.delivery_tag, multiple=True, wait=False)
    seen = await reader.see(2)
    await reader.leave()
    again = await side.peer()
    await declare_results(again.reads, queue)
    await again.consume(queue, 0)
    await writer.say(queue, "last")
    return [seen, await again.see(4)]


async def who_cancels_keeps_what_it_has(side: Side) -> Seen:
    writer, reader = await side.peer(), await side.worker(2)
    await writer.say(side.names.work, *"1234")
    seen = await reader.see(2)
    await reader.reads.basic_cancel("one")
    await reader.consume(side.names.work, 1, "two")
    seen += await reader.see(1)
    other = await side.worker(10)
    await writer.say(side.names.work, "last")
    return [seen, await other.see(2), reader.got.qsize()]


async def consumers_take_turns(side: Side) -> Seen:
    writer = await side.peer()
    readers = [await side.worker(2), await side.worker(2)]
    await writer.say(side.names.work, *"1234")
    return [len([await reader.next() for _ in range(2)]) for reader in readers]


async def dead_letters_are_put_aside(side: Side) -> Seen:
    writer, reader = await side.peer(), await side.worker(1)
    await writer.say(side.names.work, "rejected")
    message = await reader.next()
    assert message.delivery_tag is not None
    await reader.reads.basic_reject(message.delivery_tag, requeue=False, wait=False)
    looking = await side.peer()
    await looking.consume(side.names.dead_letter, 0)
    seen = await looking.see(1)
    await reader.leave()
    await writer.say(side.names.work, "poison")
    taken: Seen = []
    for _ in range(4):
        dying = await side.worker(1)
        taken += await dying.see(1)
        await dying.leave()
    seen += await looking.see(1)
    await writer.say(side.names.work, "late", expires_ms=50)
    return [taken, *seen, *await looking.see(1)]


async def the_oldest_goes_where_there_is_no_room(side: Side) -> Seen:
    peer = await side.peer()
    queue = f"{side.names.prefix}.short"
    await peer.reads.queue_declare(queue, durable=True, arguments={"x-max-length": 2})
    await peer.say(queue, *"123")
    await peer.consume(queue, 0)
    return await peer.see(2)


async def a_queue_of_ones_own_goes_with_its_connection(side: Side) -> Seen:
    writer, owner, other = await side.peer(), await side.peer(), await side.peer()
    queue = side.names.control("d1")
    seen: Seen = [await writer.say(queue, "too early", durable=False)]
    await declare_control(owner.reads, queue)
    await owner.reads.basic_consume(queue, owner.heard, no_ack=True)
    with pytest.raises(ChannelLockedResource):
        await declare_control(other.reads, queue)
    async with asyncio.timeout(LIMIT_S):
        await other.closed.wait()
    seen += [await writer.say(queue, "heard", durable=False), await owner.see(1), other.writes.is_closed]
    await owner.leave()
    return [*seen, await writer.say(queue, "too late", durable=False)]


async def who_acknowledges_what_it_was_not_given_is_cut_off(side: Side) -> Seen:
    writer, reader = await side.peer(), await side.worker(1)
    await writer.say(side.names.work, "1")
    seen = await reader.see(1)
    await reader.reads.basic_ack(77, wait=False)
    async with asyncio.timeout(LIMIT_S):
        await reader.closed.wait()
    with pytest.raises(ChannelInvalidStateError):
        await reader.reads.basic_ack(1)
    other = await side.worker(1)
    return [*seen, *await other.see(1), reader.writes.is_closed]


async def a_queue_that_is_another_one_is_refused(side: Side) -> Seen:
    peer = await side.peer()
    await declare_results(peer.reads, side.names.results("p1"))
    with pytest.raises(ChannelPreconditionFailed):
        await peer.writes.queue_declare(side.names.results("p1"), durable=True)
    return [peer.reads.is_closed, peer.writes.is_closed]


async def a_call_that_is_given_up_costs_its_channel(side: Side) -> Seen:
    writer, reader = await side.peer(), await side.worker(1)
    await writer.say(side.names.work, "1")
    seen = await reader.see(1)
    for _ in range(1000):  # until one is given up between the question and the answer
        call = asyncio.ensure_future(reader.reads.basic_qos(prefetch_count=5))
        for _ in range(3):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        if reader.closed.is_set() or (not call.cancelled() and call.exception() is not None):
            break
    async with asyncio.timeout(LIMIT_S):
        await reader.closed.wait()
    with pytest.raises(ChannelInvalidStateError):
        await reader.reads.basic_qos(prefetch_count=5)
    other = await side.worker(1)
    return [*seen, *await other.see(1)]


async def what_is_published_when_the_connection_ends_fails(side: Side) -> Seen:
    peer = await side.peer()
    await peer.leave()
    with pytest.raises((ChannelInvalidStateError, ConnectionError)):
        await peer.say("nowhere", "1")
    return [peer.reads.is_closed, peer.writes.is_closed]


SCRIPTS: Final = (
    what_is_not_acknowledged_is_given_to_the_next,
    several_at_once_are_acknowledged_together,
    who_cancels_keeps_what_it_has,
    consumers_take_turns,
    dead_letters_are_put_aside,
    the_oldest_goes_where_there_is_no_room,
    a_queue_of_ones_own_goes_with_its_connection,
    who_acknowledges_what_it_was_not_given_is_cut_off,
    a_queue_that_is_another_one_is_refused,
    a_call_that_is_given_up_costs_its_channel,
    what_is_published_when_the_connection_ends_fails,
)


class Well:
    """Nothing goes wrong, and nothing takes time: `wire.Faults`."""

    def delay(self) -> float:
        return 0.0

    def trouble(self, who: str, where: str, kinds: tuple[str, ...]) -> str | None:
        return None

    def choice(self, among: tuple[float, ...]) -> float:
        return among[0]


@pytest.fixture
async def model() -> Port:
    return Port(Broker(asyncio.get_running_loop()), Well())


@asynccontextmanager
async def sides(broker: RabbitMQ, model: Port, names: Iterator[str]) -> AsyncGenerator[tuple[Side, Side]]:
    pool = QueueNames(next(names))
    async with AsyncExitStack() as stack:
        yield (
            Side(aio_pika.connect, broker.url, pool, stack),
            Side(model.connect, "amqp://somebody", pool, stack),
        )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
async def test_the_same_is_seen(
    script: Callable[[Side], Awaitable[Seen]], shared_broker: RabbitMQ, model: Port, names: Iterator[str]
) -> None:
    async with sides(shared_broker, model, names) as (real, simulated):
        seen = await script(real)
        assert await script(simulated) == seen
        assert seen


class Forgetful(Broker):
    """It does not say that somebody had a message before, and has it again at the end."""

    def _come_back(self, queue: Queue, message: Message) -> None:
        message.returned += 1
        queue.ready.append(message)
        asyncio.get_running_loop().call_soon(self._pump, queue)


async def test_a_model_that_is_not_alike_is_seen(model: Port) -> None:
    """The control."""
    other = Port(Forgetful(asyncio.get_running_loop()), Well())
    async with AsyncExitStack() as stack:
        good, bad = (Side(port.connect, "amqp://somebody", QueueNames("pool"), stack) for port in (model, other))
        script = what_is_not_acknowledged_is_given_to_the_next
        assert await script(good) != await script(bad)
