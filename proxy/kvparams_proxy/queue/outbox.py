"""Keeps messages on their way to the broker, each until the broker has confirmed or refused it.

A message costs nodes and broker about the same however much is in it, and a step of an engine brings tokens of many
streams: letters that may be joined leave together, at most once in a few milliseconds for each queue.

Messages that the broker has not confirmed are sent again, in order, after a reconnect. Readers must therefore recognize
duplicates.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

from aiormq.abc import AbstractChannel
from aiormq.exceptions import ChannelClosed, ChannelPreconditionFailed, DeliveryError
from pamqp.commands import Basic

__all__ = ["DeliveryOutcome", "OutboundMessage", "Outbox"]

DeliveryOutcome = Literal["kept", "nowhere", "full", "too large"]
"""`kept`: the broker answers for it. `nowhere`: there is no such queue. `full`: it is. `too large`: the letter is."""
_log: Final = logging.getLogger(__name__)
_AGAIN_S: Final = 0.25
_GAP_S: Final = 0.004
"""Between two messages of joined letters for one queue: less than the step of an engine that streams, as a rule."""
_MOST_JOINED: Final = 64 << 10
_LIMIT: Final = re.compile(r"max size ([0-9]{1,18})")
_CONTENT_TOO_LARGE: Final = 311
"""What AMQP has for it; RabbitMQ says `PRECONDITION_FAILED`."""


class OutboundMessage:
    """A message for one queue."""

    __slots__ = (
        "body",
        "durable",
        "expires_ms",
        "may_be_joined",
        "on_settled",
        "queue_is_bounded",
        "queue_name",
        "sent",
    )

    def __init__(
        self,
        to: str,
        body: bytes,
        settled: Callable[[DeliveryOutcome], None],
        *,
        durable: bool = True,
        bounded: bool = False,
        expires_ms: int | None = None,
        joins: bool = False,
    ) -> None:
        """Creates a message that is not sent yet.

        Args:
            to: the name of the queue.
            body: what is sent.
            settled: hears once what became of it, unless it is withdrawn.
            durable: whether it outlives the broker.
            bounded: whether its queue may be full. Where it may not, a refusal is a fault of the broker, and it is sent
                again.
            expires_ms: after so long in the queue it is a dead letter.
            joins: whether it may be in one message with others for that queue, which are all as this one is otherwise.
        """
        self.queue_name = to
        self.body = body
        self.on_settled = settled
        self.durable = durable
        self.queue_is_bounded = bounded
        self.expires_ms = expires_ms
        self.may_be_joined = joins
        self.sent = False
        """Whether the broker may have seen it."""


class Outbox:
    """The unconfirmed messages of one node."""

    def __init__(self, most_bytes: int, full: Callable[[bool], None] | None = None) -> None:
        """`full` hears when they are more bytes than that, and when they are few again."""
        self._most_bytes = most_bytes
        self._full = full
        self._letters: dict[OutboundMessage, None] = {}
        self._bytes = 0
        self._channel: AbstractChannel | None = None
        self._broken: AbstractChannel | None = None
        """That the broker has closed since there was a connection, because of a letter that was too large."""
        self._longest: int | None = None
        """What the broker takes, as far as it is known."""
        self._most_joined = _MOST_JOINED
        self._gathered: dict[str, list[OutboundMessage]] = {}
        """By queue, for the next message: from when one was sent until nothing has come for a gap."""
        self._flying: dict[asyncio.Task[None], int] = {}
        """How long each message is."""
        self._numbers = 0
        self.is_full = False

    def __len__(self) -> int:
        return len(self._letters)

    def put(self, letter: OutboundMessage) -> None:
        """Sends a message, now or when there is a connection."""
        self._letters[letter] = None
        self._bytes += len(letter.body)
        if self._longest is not None and len(letter.body) > self._longest:
            asyncio.get_running_loop().call_soon(self._settle, letter, "too large")
        elif self._channel is not None:
            self._post(letter, self._channel)
        self._look()

    def withdraw(self, letter: OutboundMessage) -> None:
        """Withdraws a message: it is not sent again, and its outcome is not reported."""
        if letter in self._letters:
            del self._letters[letter]
            self._bytes -= len(letter.body)
            self._look()

    def opened(self, channel: AbstractChannel) -> None:
        """Sends all unconfirmed messages, in order, on a new connection."""
        self._channel = channel
        if self._broken is None:  # it may be another broker
            self._longest, self._most_joined = None, _MOST_JOINED
        self._broken = None
        for letter in list(self._letters):
            self._post(letter, channel)

    def closed(self) -> None:
        """Hears that the connection is lost."""
        self._channel = None
        self._gathered.clear()

    def _post(self, letter: OutboundMessage, channel: AbstractChannel) -> None:
        if not letter.may_be_joined:
            self._send((letter,), channel)
        elif (gathered := self._gathered.get(letter.queue_name)) is not None:
            gathered.append(letter)
        else:
            self._gathered[letter.queue_name] = [letter]
            asyncio.get_running_loop().call_soon(self._flush, letter.queue_name)

    def _flush(self, to: str) -> None:
        """Sends the messages that were gathered for a queue."""
        letters = [letter for letter in self._gathered.pop(to, ()) if letter in self._letters]
        if letters and self._channel is not None:
            self._gathered[to] = []
            asyncio.get_running_loop().call_later(_GAP_S, self._flush, to)
            for together in _bundles(letters, min(self._most_joined, self._longest or _MOST_JOINED)):
                self._send(together, self._channel)

    def _send(self, letters: Sequence[OutboundMessage], channel: AbstractChannel) -> None:
        for letter in letters:
            letter.sent = True
        body = letters[0].body if len(letters) == 1 else b"".join(letter.body for letter in letters)
        task = asyncio.get_running_loop().create_task(self._publish(letters, body, channel))
        self._flying[task] = len(body)
        task.add_done_callback(self._flying.pop)

    async def _publish(self, letters: Sequence[OutboundMessage], body: bytes, channel: AbstractChannel) -> None:
        self._numbers += 1
        like = letters[0]
        properties = Basic.Properties(
            delivery_mode=2 if like.durable else 1,
            message_id=f"{self._numbers}",  # by which a returned one is known
            expiration=None if like.expires_ms is None else f"{like.expires_ms}",
        )
        try:
            said = await channel.basic_publish(body, routing_key=like.queue_name, properties=properties, mandatory=True)
            fate: DeliveryOutcome = "kept" if isinstance(said, Basic.Ack) else "nowhere"
        except DeliveryError:
            if not like.queue_is_bounded:
                asyncio.get_running_loop().call_later(_AGAIN_S, self._again, letters)
                return
            fate = "full"
        except ChannelClosed as error:  # else the connection is lost: as below
            if isinstance(error, ChannelPreconditionFailed) or _CONTENT_TOO_LARGE in error.args[:1]:
                self._learn(channel, str(error))
            return
        except (Exception, asyncio.CancelledError):  # noqa: BLE001  the connection is lost: it goes out with the next
            return
        for letter in letters:
            self._settle(letter, fate)

    def _again(self, letters: Sequence[OutboundMessage]) -> None:
        for letter in letters:
            if letter in self._letters and self._channel is not None:
                self._post(letter, self._channel)

    def _learn(self, channel: AbstractChannel, said: str) -> None:
        """Learns the size limit from a channel that the broker closed because a message was too large.

        Without a stated limit, the largest message in flight was too large. All in flight that exceed it hear so.

        Where it does not say what it takes, and the largest was of several letters, they go one by one from now on:
        then the next one that is too large is known.
        """
        if channel is self._broken:
            return
        self._broken = channel
        found = _LIMIT.search(said)
        self._longest = longest = int(found[1]) if found is not None else max(self._flying.values()) - 1
        _log.warning("a message of %d bytes is larger than the broker's max_message_size", longest)
        too_large = [each for each in self._letters if len(each.body) > longest]
        if found is None and not too_large:
            self._most_joined = 0
        for each in too_large:
            self._settle(each, "too large")

    def _settle(self, letter: OutboundMessage, fate: DeliveryOutcome) -> None:
        if letter in self._letters:
            self.withdraw(letter)
            try:
                letter.on_settled(fate)
            except Exception:  # noqa: BLE001  a fault of ours must not stop the others
                _log.exception("the fate of a message could not be acted on")

    def _look(self) -> None:
        full = self._bytes > (self._most_bytes // 2 if self.is_full else self._most_bytes)
        if full is not self.is_full:
            self.is_full = full
            if self._full is not None:
                self._full(full)


def _bundles(letters: Sequence[OutboundMessage], most_bytes: int) -> Iterator[Sequence[OutboundMessage]]:
    """Yields messages in order, in groups up to that total size, but at least one each."""
    begin, size = 0, 0
    for place, letter in enumerate(letters):
        size += len(letter.body)
        if size > most_bytes and place > begin:
            yield letters[begin:place]
            begin, size = place, len(letter.body)
    yield letters[begin:]
