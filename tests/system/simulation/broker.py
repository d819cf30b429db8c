"""Simulates a broker as nodes meet it: RabbitMQ's queues, as far as `kvparams_proxy.queue` uses them.

It has quorum and classic queues, prefetch, redelivery, dead letters, messages and queues that expire, and
confirmations. `tests/system/queue/test_model.py` runs the same script here and against a real RabbitMQ; rely only on
what it compares. `wire.py` simulates connections and their faults.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple, Protocol

__all__ = ["Broker", "Handed", "Message", "Queue", "Reader", "Refusal", "Watcher"]


class Refusal(Exception):
    """The broker closes the channel, with this code and these words."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Message:
    """One that the broker has."""

    __slots__ = ("body", "expires_at", "handed", "number", "persistent", "returned")

    def __init__(self, number: int, body: bytes, persistent: bool, expires_at: float | None) -> None:
        self.number = number
        self.body = body
        self.persistent = persistent
        self.expires_at = expires_at
        self.handed = False
        """Whether somebody may have seen it before."""
        self.returned = 0
        """How often it came back."""


class Reader:
    """Who consumes a queue: one consumer on one channel."""

    __slots__ = ("channel", "no_ack", "prefetch", "queue", "tag", "unacked")

    def __init__(self, channel: "Channel", tag: str, queue: "Queue", no_ack: bool, prefetch: int) -> None:
        self.channel = channel
        self.tag = tag
        self.queue = queue
        self.no_ack = no_ack
        self.prefetch = prefetch
        self.unacked = 0

    @property
    def has_room(self) -> bool:
        """Whether one more message may be on its way to it."""
        return self.no_ack or not self.prefetch or self.unacked < self.prefetch


class Handed(NamedTuple):
    """A delivery that is not acknowledged."""

    queue: "Queue"
    message: Message
    reader: Reader


class Channel(Protocol):
    """What the broker needs of one."""

    owner: object
    """The connection that it is on."""
    who: str
    """Whose that is."""
    unacked: dict[int, Handed]
    readers: dict[str, Reader]

    def hand(self, reader: Reader, message: Message) -> int:
        """Deliver it; the tag that it gets."""
        ...

    def cancelled(self, reader: Reader) -> None:
        """The queue is gone."""
        ...


class Watcher(Protocol):
    """Sees what becomes of messages."""

    def accepted(self, who: str, queue: str, body: bytes) -> None:
        """It is in a queue."""
        ...

    def returned(self, who: str, queue: str, body: bytes) -> None:
        """There is no such queue."""
        ...

    def delivered(self, who: str, queue: str, body: bytes, *, again: bool) -> None:
        """It is on its way."""
        ...

    def settled(self, who: str, queue: str, body: bytes, *, well: bool) -> None:
        """Whoever had it has acknowledged it, or has put it aside."""
        ...

    def died(self, queue: str, body: bytes, why: str) -> None:
        """It is a dead letter."""
        ...


class Queue:
    """One of them; `arguments` as they were declared."""

    def __init__(
        self, name: str, durable: bool, owner: object | None, auto_delete: bool, arguments: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.durable = durable
        self.owner = owner
        """The connection whose own it is."""
        self.auto_delete = auto_delete
        self.arguments = dict(arguments)
        self.quorum = arguments.get("x-queue-type") == "quorum"
        self.back: deque[Message] = deque()
        """Quorum: what came back, in that order; it goes first."""
        self.ready: deque[Message] = deque()
        self.readers: deque[Reader] = deque()
        self.unacked = 0
        self.used_at = 0.0

    def __len__(self) -> int:
        return len(self.back) + len(self.ready)

    @property
    def first(self) -> deque[Message]:
        """Where the next one stands."""
        return self.back or self.ready

    def put_back(self, message: Message) -> None:
        """A classic queue has it where it was."""
        if self.quorum:
            self.back.append(message)
            return
        place = next((at for at, other in enumerate(self.ready) if other.number > message.number), len(self.ready))
        self.ready.insert(place, message)


class Broker:
    """All queues. Everything is done at once: time passes on the way to it and back."""

    def __init__(self, loop: asyncio.AbstractEventLoop, watcher: Watcher | None = None) -> None:
        self.loop = loop
        self.watcher = watcher
        self.queues: dict[str, Queue] = {}
        self.longest: int | None = None
        """Its `max_message_size`."""
        self._numbers = count()

    # what channels ask

    def declare(
        self,
        channel: Channel,
        name: str,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        arguments: Mapping[str, Any],
    ) -> None:
        """Make it, or see that it is as it is said to be.

        Raises:
            Refusal: it is another one, or somebody else's.
        """
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = Queue(
                name, durable, channel.owner if exclusive else None, auto_delete, arguments
            )
        elif queue.owner is not None and queue.owner is not channel.owner:
            raise Refusal(405, f"RESOURCE_LOCKED - cannot obtain exclusive access to locked queue '{name}'")
        elif (queue.durable, queue.arguments, queue.owner is not None) != (durable, dict(arguments), exclusive):
            raise Refusal(406, f"PRECONDITION_FAILED - inequivalent arg for queue '{name}'")
        self._use(queue)

    def consume(self, channel: Channel, name: str, tag: str, no_ack: bool, prefetch: int) -> None:
        """From now on what comes is delivered.

        Raises:
            Refusal: there is no such queue, or it is somebody else's.
        """
        queue = self.queues.get(name)
        if queue is None:
            raise Refusal(404, f"NOT_FOUND - no queue '{name}' in vhost '/'")
        if queue.owner is not None and queue.owner is not channel.owner:
            raise Refusal(405, f"RESOURCE_LOCKED - cannot obtain exclusive access to locked queue '{name}'")
        reader = channel.readers[tag] = Reader(channel, tag, queue, no_ack, prefetch)
        queue.readers.append(reader)
        self.loop.call_soon(self._pump, queue)

    def cancel(self, channel: Channel, tag: str) -> None:
        """Nothing more for that consumer; what it has it keeps."""
        reader = channel.readers.pop(tag, None)
        if reader is not None:
            self._leave(reader)

    def publish(self, channel: Channel, name: str, body: bytes, properties: Any) -> bool | None:
        """Put it into a queue: whether it was taken; None where there is no such queue.

        Raises:
            Refusal: it is too large.
        """
        if self.longest is not None and len(body) > self.longest:
            text = f"message size {len(body)} is larger than configured max size {self.longest}"
            raise Refusal(406, f"PRECONDITION_FAILED - {text}")
        queue = self.queues.get(name)
        if queue is None:
            if self.watcher is not None:
                self.watcher.returned(channel.who, name, body)
            return None
        most = queue.arguments.get("x-max-length")
        if most is not None and queue.arguments.get("x-overflow") == "reject-publish" and len(queue) >= most:
            return False
        expiration = properties.expiration
        self._put(queue, body, properties.delivery_mode == 2, None if expiration is None else int(expiration))
        if self.watcher is not None:
            self.watcher.accepted(channel.who, name, body)
        return True

    def settle(self, channel: Channel, tag: int, multiple: bool, *, well: bool) -> None:
        """It is acknowledged, or put aside; `multiple`: and all before it on that channel.

        Raises:
            Refusal: nobody has been given that.
        """
        if tag not in channel.unacked:
            raise Refusal(406, f"PRECONDITION_FAILED - unknown delivery tag {tag}")
        for each in [each for each in channel.unacked if each == tag or (multiple and each < tag)]:
            queue, message, reader = channel.unacked.pop(each)
            queue.unacked -= 1
            reader.unacked -= 1
            if self.watcher is not None:
                self.watcher.settled(channel.who, queue.name, message.body, well=well)
            if not well:
                self._bury(queue, message, "rejected")
            self.loop.call_soon(self._pump, queue)

    def ended(self, channel: Channel) -> None:
        """The channel is closed: what it had not acknowledged is given to somebody else."""
        for reader in list(channel.readers.values()):
            self._leave(reader)
        channel.readers.clear()
        unacked = list(channel.unacked.values())
        channel.unacked.clear()
        for queue, message, reader in unacked:
            queue.unacked -= 1
            reader.unacked -= 1
            self._come_back(queue, message)

    def left(self, owner: object) -> None:
        """The connection is closed, after its channels: so are its own queues."""
        for queue in [queue for queue in self.queues.values() if queue.owner is owner]:
            self.delete(queue.name)

    def delete(self, name: str) -> None:
        """By an operator, or because nobody needs it."""
        queue = self.queues.pop(name, None)
        for reader in list(queue.readers) if queue is not None else ():
            reader.channel.readers.pop(reader.tag, None)
            reader.channel.cancelled(reader)

    def restart(self) -> None:
        """After all connections are gone: what is not durable is forgotten."""
        for queue in list(self.queues.values()):
            if not queue.durable:
                del self.queues[queue.name]
                continue
            for line in (queue.back, queue.ready):
                kept = [message for message in line if message.persistent]
                line.clear()
                line.extend(kept)
            self._use(queue)

    def put(self, name: str, body: bytes) -> None:
        """By somebody else."""
        if (queue := self.queues.get(name)) is not None:
            self._put(queue, body, persistent=True, expires_ms=None)

    # inside

    def _expire(self, queue: Queue, at: float) -> None:
        if self.loop.time() < at:  # a real loop may be early, by as much as its clock is coarse
            self.loop.call_at(at, self._expire, queue, at)
        else:
            self._pump(queue)

    def _put(self, queue: Queue, body: bytes, persistent: bool, expires_ms: int | None) -> None:
        limits = [ms for ms in (expires_ms, queue.arguments.get("x-message-ttl")) if ms is not None]
        expires_at = self.loop.time() + min(limits) / 1000 if limits else None
        queue.ready.append(Message(next(self._numbers), body, persistent, expires_at))
        most = queue.arguments.get("x-max-length")
        if most is not None and len(queue) > most:  # without `reject-publish` the oldest goes
            self._bury(queue, queue.first.popleft(), "maxlen")
        if expires_at is not None:
            self.loop.call_at(expires_at, self._expire, queue, expires_at)
        self.loop.call_soon(self._pump, queue)

    def _come_back(self, queue: Queue, message: Message) -> None:
        if self.queues.get(queue.name) is not queue:
            return
        message.handed = True
        message.returned += 1
        limit = queue.arguments.get("x-delivery-limit")
        if limit is not None and message.returned > limit:
            self._bury(queue, message, "delivery_limit")
            return
        queue.put_back(message)
        self.loop.call_soon(self._pump, queue)

    def _bury(self, queue: Queue, message: Message, why: str) -> None:
        """Its time is over, or nobody will have it."""
        to = queue.arguments.get("x-dead-letter-routing-key")
        if to is None:
            return
        if self.watcher is not None:
            self.watcher.died(queue.name, message.body, why)
        if (dead := self.queues.get(to)) is not None:
            self._put(dead, message.body, message.persistent, None)

    def _pump(self, queue: Queue) -> None:
        """Deliver what may be delivered; take out what has expired."""
        now = self.loop.time()
        while len(queue) and self.queues.get(queue.name) is queue:
            head = queue.first[0]
            if head.expires_at is not None and head.expires_at <= now:
                queue.first.popleft()
                self._bury(queue, head, "expired")
                continue
            reader = next((reader for reader in queue.readers if reader.has_room), None)
            if reader is None:
                return
            queue.readers.remove(reader)  # they take turns
            queue.readers.append(reader)
            self._hand(queue, queue.first.popleft(), reader)

    def _hand(self, queue: Queue, message: Message, reader: Reader) -> None:
        if self.watcher is not None:
            self.watcher.delivered(reader.channel.who, queue.name, message.body, again=message.handed)
        tag = reader.channel.hand(reader, message)
        if not reader.no_ack:
            reader.channel.unacked[tag] = Handed(queue, message, reader)
            reader.unacked += 1
            queue.unacked += 1

    def _leave(self, reader: Reader) -> None:
        queue = reader.queue
        if reader in queue.readers:
            queue.readers.remove(reader)
            if queue.auto_delete and not queue.readers:
                self.queues.pop(queue.name, None)
            else:
                self._use(queue)

    def _use(self, queue: Queue) -> None:
        """Somebody has declared it, or reads it no more: from then on it counts as unused."""
        queue.used_at = self.loop.time()
        expires = queue.arguments.get("x-expires")
        if expires is not None:
            self.loop.call_later(expires / 1000, self._unused, queue, queue.used_at)

    def _unused(self, queue: Queue, since: float) -> None:
        if not queue.readers and queue.used_at == since and self.queues.get(queue.name) is queue:
            self.delete(queue.name)
