"""Carries messages between the proxies of a site over the publish/subscribe channels of a Valkey server.

There is one channel for announcements, which all hear, and for each proxy one to it and one from it: who has heard an
announcement of a proxy subscribes to what comes from it.

Requests never wait for the server. A task sends what stands in a bounded queue, another one receives; each connects
again whenever its connection is lost. The proxy hears its own announcements, too: as long as it does, the way there and
back works, and a server that is stopped or does not answer is noticed within `_SILENCE_S`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from valkey.asyncio import Valkey
from valkey.exceptions import ValkeyError

from kvparams.replication.messages import MAX_MESSAGE_BYTES, sender_of
from kvparams_proxy.config.share_url import ShareURL
from kvparams_proxy.coordination.transport import MessageReceiver

__all__ = ["ValkeyTransport"]

_QUEUE_BYTES: Final = 4 << 20
"""What waits to be sent; what was queued first is lost first."""
_BATCH: Final = 64
"""Messages that are sent together."""
_SILENCE_S: Final = 2.0
_CONNECT_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
_MEMBER_TTL_S: Final = 10
_MOST_FOLLOWED: Final = 512
"""Twice as many proxies as an exchange knows: whoever may publish can invent some."""
_FAREWELL_S: Final = 0.2
_CANCELLATIONS: Final = 10
"""At most, of a task that goes on after the first one."""
_TURN_S: Final = 0.005
"""After so long the event loop does something else before the next messages are read."""
_log: Final = logging.getLogger(__name__)


class ValkeyTransport:
    """A `Transport` over one Valkey server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, url: ShareURL, own_id: int) -> None:
        """Creates a transport that is not started. `own_id`: the number of this proxy's exchange."""
        self._loop = loop
        self._url = url
        self._own_id = own_id
        self._own_channel = f"{url.prefix}:to:{own_id:016x}"
        self._all_channel = f"{url.prefix}:all"
        self._from_channel = f"{url.prefix}:from:{own_id:016x}"
        self._followed: dict[int, float] = {}
        """The proxies whose channels are subscribed to, and when each was heard last."""
        self._queue: deque[tuple[float, str, bytes]] = deque()
        """When each message was queued, its channel, and the message."""
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._sent_all = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._receive: MessageReceiver | None = None
        self._heard_own_at: float | None = None
        self.problem = "not connected yet"
        """Why the last connection ended."""

    @property
    def is_connected(self) -> bool:
        """True while this proxy hears its own messages."""
        return self._heard_own_at is not None and self._loop.time() - self._heard_own_at < _SILENCE_S

    def start(self, receive: MessageReceiver) -> None:
        """See `Transport`."""
        self._receive = receive
        self._tasks = [
            self._loop.create_task(self._keep(self._send_queue), name="send to other proxies"),
            self._loop.create_task(self._keep(self._receive_all), name="receive from other proxies"),
        ]

    def send(self, message: bytes, receiver: int = 0) -> None:
        """See `Transport`."""
        self._put(f"{self._url.prefix}:to:{receiver:016x}" if receiver else self._from_channel, message)

    def announce(self, message: bytes) -> None:
        """See `Transport`."""
        self._put(self._all_channel, message)

    def _put(self, channel: str, message: bytes) -> None:
        self._queue.append((self._loop.time(), channel, message))
        self._sent_all.clear()
        self._queued_bytes += len(message)
        while self._queued_bytes > _QUEUE_BYTES:
            self._drop_first()
        self._wake.set()

    async def close(self) -> None:
        """See `Transport`. What is queued is sent if the server takes it at once."""
        if self.is_connected:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self._sent_all.wait()
        # The client may take a cancellation for the end of its own wait: then another one ends the task.
        pending = set(self._tasks)
        for _ in range(_CANCELLATIONS):
            if not pending:
                break
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=_FAREWELL_S)

    async def _keep(self, run: Callable[[Any], Awaitable[None]]) -> None:
        """Runs one side, again and again: each time with a new connection."""
        pause_s = _FIRST_PAUSE_S
        while True:
            began = self._loop.time()
            client = Valkey.from_url(
                self._url.server,
                socket_connect_timeout=_CONNECT_S,
                socket_timeout=_SILENCE_S,
                single_connection_client=True,
            )
            try:
                await run(client)
            except (ValkeyError, OSError, TimeoutError) as error:
                self.problem = str(error) or type(error).__name__
                _log.debug("the server of other proxies: %s", self.problem)
            except Exception as error:  # noqa: BLE001  what the client raises where a server does not speak its protocol
                self.problem = f"the server does not speak the protocol of Valkey ({type(error).__name__})"
                _log.debug("the server of other proxies: %s", self.problem, exc_info=error)
            finally:
                with suppress(ValkeyError, OSError, TimeoutError):
                    await client.aclose()
            if self._loop.time() - began > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _drop_first(self) -> None:
        self._queued_bytes -= len(self._queue.popleft()[-1])

    async def _send_queue(self, client: Any) -> None:
        await client.ping()
        # What was queued while nobody could hear it is out of date: siblings ask for what they have missed.
        while self._queue and self._queue[0][0] < self._loop.time() - _SILENCE_S:
            self._drop_first()
        said_at = -float(_MEMBER_TTL_S)
        while True:
            if not self._queue:
                self._sent_all.set()
                self._wake.clear()
                await self._wake.wait()
            pipe = client.pipeline(transaction=False)
            for _ in range(min(_BATCH, len(self._queue))):
                _, channel, message = self._queue.popleft()
                self._queued_bytes -= len(message)
                pipe.publish(channel, message)
            now = self._loop.time()
            if now - said_at > _MEMBER_TTL_S / 3:
                said_at = now
                pipe.set(f"{self._url.prefix}:member:{self._own_id:016x}", b"1", ex=_MEMBER_TTL_S)
            await pipe.execute()

    async def _receive_all(self, client: Any) -> None:
        async with client.pubsub(ignore_subscribe_messages=True) as channels:
            self._followed.clear()
            await channels.subscribe(self._all_channel, self._own_channel)
            self._heard_own_at = self._loop.time()
            turn_ends = self._loop.time() + _TURN_S
            while True:
                message: Any = await channels.get_message(timeout=_SILENCE_S)
                now = self._loop.time()
                if message is not None:
                    sender = self._take(message["data"], now)
                    if sender is not None:
                        await self._follow(channels, sender, now)
                if now - self._heard_own_at > _SILENCE_S:
                    raise TimeoutError("the server does not answer")
                if now > turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = self._loop.time() + _TURN_S

    async def _follow(self, channels: Any, sender: int, now: float) -> None:
        """Subscribes to what comes from a proxy that is heard for the first time, and no more to the most silent."""
        is_new = sender not in self._followed
        self._followed[sender] = now
        if not is_new:
            return
        await channels.subscribe(self._channel_from(sender))
        if len(self._followed) > _MOST_FOLLOWED:
            silent = min(self._followed, key=self._followed.__getitem__)
            del self._followed[silent]
            await channels.unsubscribe(self._channel_from(silent))

    def _channel_from(self, sender: int) -> str:
        return f"{self._url.prefix}:from:{sender:016x}"

    def _take(self, data: object, now: float) -> int | None:
        """Passes on a message. Returns who it says that it is from, unless that is this proxy."""
        if not isinstance(data, bytes) or len(data) > MAX_MESSAGE_BYTES or self._receive is None:
            return None
        sender = sender_of(data)
        if sender == self._own_id:
            self._heard_own_at = now
            return None
        self._receive(data)
        return sender
