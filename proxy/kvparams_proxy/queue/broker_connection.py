"""The connection of one node to the broker: made, lost, made again.

Users declare their queues anew on each connection, since the broker may have lost everything.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from random import random
from typing import Final

import aio_pika
from aio_pika.abc import AbstractChannel as OuterChannel
from aio_pika.abc import AbstractConnection
from aiormq.abc import AbstractChannel

from kvparams_proxy.secret import Secret

__all__ = ["BrokerConnection"]

_log: Final = logging.getLogger(__name__)
_FIRST_S: Final = 0.1
_LONGEST_S: Final = 2.0
_CONNECT_S: Final = 10.0
_CLOSE_S: Final = 2.0
_HEARTBEAT_S: Final = 15


class BrokerConnection:
    """Keeps one connection, with two channels on it: one to read, one to write with confirmations."""

    def __init__(
        self,
        url: Secret,
        opened: Callable[[AbstractChannel, AbstractChannel], Awaitable[None]],
        closed: Callable[[], None],
    ) -> None:
        """Starts to connect.

        Args:
            url: `amqp://` or `amqps://`, with a password where the broker wants one.
            opened: is given the channel to read and the one to write, each time anew; declares and consumes.
            closed: hears that both are gone.
        """
        self._url = url
        self._opened = opened
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._lost_s: float | None = self._loop.time()
        self._found_s = 0.0
        self._over: asyncio.Future[str] | None = None
        self._said = False
        self._task = self._loop.create_task(self._keep(), name="broker")

    @property
    def disconnected_for_s(self) -> float:
        """The seconds since the connection was lost; 0 while there is one."""
        return 0.0 if self._lost_s is None else self._loop.time() - self._lost_s

    @property
    def connected_for_s(self) -> float:
        """The seconds since the connection was made; 0 while there is none."""
        return 0.0 if self._lost_s is not None else self._loop.time() - self._found_s

    def reconnect(self) -> None:
        """Reconnects, when the broker does not answer on the connection."""
        if self._over is not None and not self._over.done():
            self._over.set_result("it does not answer")

    def close(self) -> None:
        """Begins to close the connection."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Waits until the connection is closed."""
        await asyncio.wait([self._task])

    async def _keep(self) -> None:
        pause_s = _FIRST_S
        while True:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    connection = await aio_pika.connect(self._url.reveal(), heartbeat=_HEARTBEAT_S)
            except Exception as error:  # noqa: BLE001  whatever the network, the broker or the library has
                self._say(f"the broker cannot be reached ({type(error).__name__}); the node tries again")
            else:
                if await self._serve(connection):
                    pause_s = _FIRST_S
            await asyncio.sleep(pause_s * (0.5 + random() / 2))
            pause_s = min(pause_s * 2, _LONGEST_S)

    async def _serve(self, connection: AbstractConnection) -> bool:
        """Serves one connection until it ends. Returns whether it was of use."""
        used = False
        try:
            async with asyncio.timeout(_CONNECT_S):
                reading = connection.channel(publisher_confirms=False)
                writing = connection.channel(publisher_confirms=True, on_return_raises=False)
                await reading.initialize()
                await writing.initialize()
                reads, writes = await reading.get_underlay_channel(), await writing.get_underlay_channel()
                await self._opened(reads, writes)
            used, self._lost_s, self._found_s, self._said = True, None, self._loop.time(), False
            self._say(f"the connection to the broker is lost ({await self._end(connection, reading, writing, reads)})")
        except Exception as error:  # noqa: BLE001  as above
            self._say(f"the broker refuses the queues ({type(error).__name__}: {error})")
        finally:
            if self._lost_s is None:
                self._lost_s = self._loop.time()
            self._closed()
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await connection.close()
            except Exception:  # noqa: BLE001  it is to be gone, and nothing else
                _log.debug("a connection to the broker could not be closed in good order")
        return used

    async def _end(
        self, connection: AbstractConnection, reading: OuterChannel, writing: OuterChannel, reads: AbstractChannel
    ) -> str:
        """Waits until a channel is closed, or the broker cancels a consumer. Returns the reason."""
        over: asyncio.Future[str] = self._loop.create_future()
        self._over = over

        def end(_: object, error: BaseException | None = None) -> None:
            if not over.done():
                over.set_result(str(error) or type(error).__name__)

        for each in (connection, reading, writing):
            each.close_callbacks.add(end)
        reads.on_consumer_cancel_callbacks.add(end)
        if connection.is_closed or reading.is_closed or writing.is_closed:
            return "closed at once"
        return await over

    def _say(self, what: str) -> None:
        if not self._said:
            self._said = True
            _log.warning("%s", what)
