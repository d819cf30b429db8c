"""Simulates channels to the broker, as aiormq and aio-pika show them, and the broker's side of each.

It is as strict as aiormq 7.2: a closed channel raises, a canceled call closes its channel, and unconfirmed messages
fail when their channel closes.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import count
from typing import Any, Protocol, cast

from aiormq.abc import DeliveredMessage
from aiormq.exceptions import (
    ChannelClosed,
    ChannelInvalidStateError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
)
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from tests.system.simulation.broker import Broker, Handed, Message, Reader, Refusal

__all__ = ["Callbacks", "Channel", "Event", "Outer"]

_ERRORS = {404: ChannelNotFoundEntity, 405: ChannelLockedResource, 406: ChannelPreconditionFailed}
Callback = Callable[[DeliveredMessage], Coroutine[Any, Any, Any]]
Event = Callable[[], object]


class Wire(Protocol):
    """The connection that a channel is on."""

    broker: Broker
    who: str
    loop: asyncio.AbstractEventLoop

    def up(self, what: str, event: Event) -> None:
        """Something for the broker, unless it goes wrong."""
        ...

    def down(self, event: Event) -> None:
        """Something for the node."""
        ...

    def nack(self) -> bool:
        """Whether the broker cannot take what was published."""
        ...


class Callbacks:
    """`close_callbacks`."""

    def __init__(self, sender: object) -> None:
        self._sender = sender
        self._all: list[Callable[..., object]] = []

    def add(self, callback: Callable[..., object]) -> None:
        """One more."""
        self._all.append(callback)

    def __call__(self, error: BaseException) -> None:
        for callback in self._all:
            callback(self._sender, error)


class Channel:
    """aiormq's, and the broker's side of it."""

    def __init__(self, wire: Wire, confirms: bool) -> None:
        self.wire = wire
        self.confirms = confirms
        self.is_closed = False
        self.on_consumer_cancel_callbacks: set[Callable[[Any], object]] = set()
        self.close_callbacks = Callbacks(self)
        self._loop = wire.loop
        self._lock = asyncio.Lock()
        self._answer: asyncio.Future[Any] | None = None
        self._giving_up = False
        self._consumers: dict[str, Callback] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._confirmations: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(1)
        # the broker's side
        self.owner: object = wire
        self.who = wire.who
        self.unacked: dict[int, Handed] = {}
        self.readers: dict[str, Reader] = {}
        self._there = True
        self._tags = count(1)
        self._prefetch = 0

    # as aiormq's

    async def open(self) -> None:
        """`Channel.Open`, and `Confirm.Select`."""
        await self._call("opens a channel", lambda: None)
        if self.confirms:
            await self._call("selects confirmations", lambda: None)

    async def queue_declare(
        self,
        queue: str,
        *,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        """See aiormq."""
        declare = partial(self._broker.declare, self, queue, durable, exclusive, auto_delete, arguments or {})
        await self._call("declares", declare)

    async def basic_qos(self, *, prefetch_count: int) -> None:
        """See aiormq."""

        def limit() -> None:
            self._prefetch = prefetch_count

        await self._call("sets its prefetch", limit)

    async def basic_consume(
        self, queue: str, callback: Callback, *, no_ack: bool = False, consumer_tag: str | None = None
    ) -> None:
        """See aiormq."""
        tag = consumer_tag or f"ctag{len(self._consumers)}"
        self._consumers[tag] = callback
        consume = lambda: self._broker.consume(self, queue, tag, no_ack, self._prefetch)  # noqa: E731
        await self._call("consumes", consume)

    async def basic_cancel(self, tag: str) -> None:
        """See aiormq."""
        await self._call("cancels", partial(self._broker.cancel, self, tag), lambda: self._consumers.pop(tag, None))

    async def basic_publish(
        self, body: bytes, *, routing_key: str, properties: Basic.Properties, mandatory: bool
    ) -> Basic.Ack | DeliveredMessage | None:
        """See aiormq."""
        assert mandatory
        self._alive()
        number = next(self._numbers)
        confirmation: asyncio.Future[Any] = self._loop.create_future()
        confirmation.add_done_callback(_look)
        self._confirmations[number] = confirmation
        self.wire.up("publishes", partial(self._published, number, routing_key, body, properties))
        return await confirmation

    async def basic_ack(self, delivery_tag: int, multiple: bool = False, wait: bool = True) -> None:
        """See aiormq."""
        self._alive()
        settle = partial(self._broker.settle, self, delivery_tag, multiple, well=True)
        self.wire.up("acknowledges", partial(self._said, settle))

    async def basic_reject(self, delivery_tag: int, *, requeue: bool = True, wait: bool = True) -> None:
        """See aiormq."""
        assert not requeue
        self._alive()
        settle = partial(self._broker.settle, self, delivery_tag, False, well=False)
        self.wire.up("rejects", partial(self._said, settle))

    def _alive(self) -> None:
        if self.is_closed or self._giving_up:
            raise ChannelInvalidStateError("closed")

    async def _call(self, what: str, order: Event, then: Event | None = None) -> None:
        """One after the other, each waits for its answer."""
        self._alive()
        async with self._lock:
            self._alive()
            answer = self._answer = self._loop.create_future()
            answer.add_done_callback(_look)
            self.wire.up(what, partial(self._obeyed, order, partial(self._answered, answer, then)))
            try:
                await answer
            except asyncio.CancelledError:
                if not self.is_closed:
                    self._give_up()
                raise

    def _give_up(self) -> None:
        """aiormq does not know what the next answer would be to."""
        self._giving_up = True
        self.wire.up("closes a channel", self._end)

    def _answered(self, answer: "asyncio.Future[Any]", then: Event | None) -> None:
        if then is not None:
            then()
        if not answer.done():
            answer.set_result(None)

    def closed(self, error: BaseException) -> None:
        """By the broker, or with the connection."""
        if self.is_closed:
            return
        self.is_closed = True
        for task in list(self._tasks):
            task.cancel()
        for waiting in (self._answer, *self._confirmations.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
        self._loop.call_soon(self.close_callbacks, error)

    # the broker's side

    @property
    def _broker(self) -> Broker:
        return self.wire.broker

    def _obeyed(self, order: Event, answer: Event) -> None:
        if self._said(order):
            self.wire.down(answer)

    def _said(self, order: Event) -> bool:
        """Whether the broker has done it."""
        if not self._there:  # it hears nothing of a channel that it has closed
            return False
        try:
            order()
        except Refusal as refusal:
            self.end()
            error = _ERRORS[refusal.code](refusal.text)
            self.wire.down(partial(self.closed, error))
            return False
        return True

    def _published(self, number: int, to: str, body: bytes, properties: Basic.Properties) -> None:
        if self._there and self.wire.nack():
            self._confirm(number, False, body)
        else:
            self._said(lambda: self._confirm(number, self._broker.publish(self, to, body, properties), body))

    def _confirm(self, number: int, taken: bool | None, body: bytes) -> None:
        def confirmed() -> None:
            confirmation = self._confirmations.pop(number)
            if confirmation.done():
                return
            if taken is False:
                confirmation.set_exception(DeliveryError(None, Basic.Nack(number)))
            elif taken:
                confirmation.set_result(Basic.Ack(number))
            else:
                back = Basic.Return(reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key="")
                confirmation.set_result(DeliveredMessage(back, ContentHeader(), body, cast("Any", self)))

        self.wire.down(confirmed)

    def hand(self, reader: Reader, message: Message) -> int:
        """See `broker.Channel.hand`."""
        tag = next(self._tags)
        deliver = Basic.Deliver(reader.tag, tag, message.handed, "", reader.queue.name)
        self.wire.down(
            partial(
                self._delivered,
                reader.tag,
                DeliveredMessage(deliver, ContentHeader(body_size=len(message.body)), message.body, cast("Any", self)),
            )
        )
        return tag

    def _delivered(self, tag: str, message: DeliveredMessage) -> None:
        consumer = self._consumers.get(tag)
        if consumer is not None and not self.is_closed:
            task = self._loop.create_task(consumer(message))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    def cancelled(self, reader: Reader) -> None:
        """See `broker.Channel.cancelled`."""

        def heard() -> None:
            if self._consumers.pop(reader.tag, None) is not None:
                for callback in list(self.on_consumer_cancel_callbacks):
                    callback(Basic.Cancel(reader.tag))

        self.wire.down(heard)

    def _end(self) -> None:
        self.end()
        self.wire.down(partial(self.closed, ChannelClosed(None, None)))

    def end(self) -> None:
        """The broker has closed it."""
        if self._there:
            self._there = False
            self._broker.ended(self)


class Outer:
    """aio-pika's channel around aiormq's."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.close_callbacks = channel.close_callbacks

    @property
    def is_closed(self) -> bool:
        """See aio-pika."""
        return self._channel.is_closed

    async def initialize(self) -> None:
        """See aio-pika."""
        await self._channel.open()

    async def get_underlay_channel(self) -> Channel:
        """See aio-pika."""
        return self._channel


def _look(future: "asyncio.Future[Any]") -> None:
    """Whoever waited for it may have gone."""
    if not future.cancelled():
        future.exception()
