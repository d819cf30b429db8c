"""Letters on their way to the broker, each kept until the broker has answered for it.

The one rule: what the broker has not confirmed is sent again, in order, as soon as there is a connection; so whoever
reads must know a letter that comes twice.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Final, Literal

from aiormq.abc import AbstractChannel
from aiormq.exceptions import ChannelPreconditionFailed, DeliveryError
from pamqp.commands import Basic

__all__ = ["Fate", "Letter", "Outbox"]

Fate = Literal["kept", "nowhere", "full", "too large"]
"""`kept`: the broker answers for it. `nowhere`: there is no such queue. `full`: it is. `too large`: the letter is."""
_log: Final = logging.getLogger(__name__)
_AGAIN_S: Final = 0.25
_LIMIT: Final = re.compile(r"max size ([0-9]{1,18})")


class Letter:
    """One message for one queue."""

    __slots__ = ("body", "bounded", "durable", "expires_ms", "sent", "settled", "to")

    def __init__(
        self,
        to: str,
        body: bytes,
        settled: Callable[[Fate], None],
        *,
        durable: bool = True,
        bounded: bool = False,
        expires_ms: int | None = None,
    ) -> None:
        """
        Args:
            to: the name of the queue.
            body: what is sent.
            settled: hears once what became of it, unless it is withdrawn.
            durable: whether it outlives the broker.
            bounded: whether its queue may be full. Where it may not, a refusal is a fault of the broker, and it is sent
                again.
            expires_ms: after so long in the queue it is a dead letter.
        """
        self.to = to
        self.body = body
        self.settled = settled
        self.durable = durable
        self.bounded = bounded
        self.expires_ms = expires_ms
        self.sent = False
        """Whether the broker may have seen it."""


class Outbox:
    """All letters of one node that the broker has not answered for."""

    def __init__(self, most_bytes: int, full: Callable[[bool], None] | None = None) -> None:
        """`full` hears when they are more bytes than that, and when they are few again."""
        self._most_bytes = most_bytes
        self._full = full
        self._letters: dict[Letter, None] = {}
        self._bytes = 0
        self._channel: AbstractChannel | None = None
        self._broken: AbstractChannel | None = None
        """That the broker has closed since there was a connection, because of a letter that was too large."""
        self._longest: int | None = None
        """What the broker takes, if it has said so."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self.is_full = False

    def __len__(self) -> int:
        return len(self._letters)

    def put(self, letter: Letter) -> None:
        """Send it, now or when there is a connection."""
        self._letters[letter] = None
        self._bytes += len(letter.body)
        if self._longest is not None and len(letter.body) > self._longest:
            asyncio.get_running_loop().call_soon(self._settle, letter, "too large")
        elif self._channel is not None:
            self._send(letter, self._channel)
        self._look()

    def withdraw(self, letter: Letter) -> None:
        """Forget it: it is not sent again, and nobody hears of it."""
        if letter in self._letters:
            del self._letters[letter]
            self._bytes -= len(letter.body)
            self._look()

    def opened(self, channel: AbstractChannel) -> None:
        """There is a connection: everything that the broker has not answered for goes out, in order."""
        self._channel = channel
        if self._broken is None:  # it may be another broker
            self._longest = None
        self._broken = None
        for letter in list(self._letters):
            self._send(letter, channel)

    def closed(self) -> None:
        """There is none any more."""
        self._channel = None

    def _send(self, letter: Letter, channel: AbstractChannel) -> None:
        letter.sent = True
        task = asyncio.get_running_loop().create_task(self._publish(letter, channel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _publish(self, letter: Letter, channel: AbstractChannel) -> None:
        self._numbers += 1
        properties = Basic.Properties(
            delivery_mode=2 if letter.durable else 1,
            message_id=f"{self._numbers}",  # by which a returned one is known
            expiration=None if letter.expires_ms is None else f"{letter.expires_ms}",
        )
        try:
            said = await channel.basic_publish(
                letter.body, routing_key=letter.to, properties=properties, mandatory=True
            )
            fate: Fate = "kept" if isinstance(said, Basic.Ack) else "nowhere"
        except DeliveryError:
            if not letter.bounded:
                asyncio.get_running_loop().call_later(_AGAIN_S, self._again, letter)
                return
            fate = "full"
        except ChannelPreconditionFailed as error:
            self._learn(channel, letter, str(error))
            return
        except (Exception, asyncio.CancelledError):  # noqa: BLE001  the connection is lost: it goes out with the next
            return
        self._settle(letter, fate)

    def _again(self, letter: Letter) -> None:
        if letter in self._letters and self._channel is not None:
            self._send(letter, self._channel)

    def _learn(self, channel: AbstractChannel, letter: Letter, said: str) -> None:
        """The broker has closed the channel: a letter was too large, so the largest was. All that were sent hear it."""
        if channel is self._broken:
            return
        self._broken = channel
        found = _LIMIT.search(said)
        sent = (len(each.body) for each in (letter, *self._letters) if each.sent)
        self._longest = longest = int(found[1]) if found is not None else max(sent) - 1
        _log.warning("a message is larger than the broker takes, %d bytes: see its max_message_size", longest)
        for each in [each for each in self._letters if len(each.body) > longest]:
            self._settle(each, "too large")

    def _settle(self, letter: Letter, fate: Fate) -> None:
        if letter in self._letters:
            self.withdraw(letter)
            try:
                letter.settled(fate)
            except Exception:  # noqa: BLE001  a fault of ours must not stop the others
                _log.exception("the fate of a message could not be acted on")

    def _look(self) -> None:
        full = self._bytes > (self._most_bytes // 2 if self.is_full else self._most_bytes)
        if full is not self.is_full:
            self.is_full = full
            if self._full is not None:
                self._full(full)
