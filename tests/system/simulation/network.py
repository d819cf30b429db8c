"""Simulates the proxy's ends of its connections, as uvloop's transports behave, with a peer in place of a kernel.

It is as strict as uvloop 0.23: what raises there (writing after the end) raises here. Source: uvloop 0.21.0 to 0.23.0,
handles/stream.pyx and basetransport.pyx.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from tests.support.virtual_loop import VirtualLoop

__all__ = ["Network", "Peer", "Server", "Socket"]


class Peer(Protocol):
    """The other end."""

    def received(self, data: bytes) -> None:
        """The proxy has written that."""
        ...

    def closed(self) -> None:
        """The proxy has closed, after all that was received."""
        ...


class Server(Protocol):
    """What can be connected to."""

    def connecting(self) -> tuple[float, OSError | None] | None:
        """In how many seconds there is a connection or an error; None: never."""
        ...

    def accept(self, socket: "Socket") -> Peer:
        """There is one."""
        ...


class Socket(asyncio.Transport):
    """One connection of the proxy. Delays are drawn by `delay`: 0 is the same turn of the loop or the next."""

    def __init__(self, loop: VirtualLoop, protocol: asyncio.Protocol, delay: Callable[[], float]) -> None:
        super().__init__()
        self.protocol = protocol
        self.peer: Peer
        self.gone = False
        """Whether the protocol has been told that it is over."""
        self.high_water = 65536
        self._loop = loop
        self._delay = delay
        self._closing = False
        self._lost = False
        self._reading = True
        self._inbox: deque[Callable[[], None]] = deque()
        """What has come while nobody read."""
        self._arrival = 0.0
        self._stuck = False
        """Whether the peer reads nothing."""
        self._buffer: list[bytes] = []
        self._size = 0
        self._write_paused = False
        self._peer_gone = False
        self._ended = False
        """Whether the proxy has ended its side: it writes nothing more."""
        self._end_sent = False
        """Whether the peer is told so. What waits to be written comes first."""

    # what the proxy calls

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._alive()
        if self._ended:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not data or self._lost:
            return
        if self._peer_gone:  # it has reset the connection: the kernel says so now
            self._send(self.peer.received, bytes(data))
            self._fail(ConnectionResetError(104, "Connection reset by peer"))
            return
        if self._stuck:
            self._buffer.append(bytes(data))
            self._size += len(data)
            if self._size > self.high_water and not self._write_paused:
                self._write_paused = True
                self.protocol.pause_writing()
            return
        self._send(self.peer.received, bytes(data))

    def get_write_buffer_size(self) -> int:
        return self._size

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._alive()
        if not self._closing and not self._ended:
            self._ended = True
            if not self._size:
                self._send_end()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._reading = False
        if not self._size:
            self._lose(None)

    def abort(self) -> None:
        self._fail(None)

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if self._reading or self._closing:
            return
        self._reading = True
        self._loop.call_soon(self._drain)

    def _alive(self) -> None:
        if self.gone:
            raise RuntimeError("unable to perform operation on a closed transport")

    # what the peer calls

    def arrive(self, data: bytes) -> None:
        """It has sent that."""
        self._come(lambda: self.protocol.data_received(data))

    def end(self) -> None:
        """It has closed, in order; what it is sent from now on is lost."""
        self._come(self._eof)
        self.take()

    def reset(self) -> None:
        """It has gone, with what was on its way."""
        self._peer_gone = True
        self._stuck = False
        if self._size:  # what waits to be written cannot be: that shows at once, even if nobody reads
            self._fail(ConnectionResetError(104, "Connection reset by peer"))
        else:
            self._come(lambda: self._fail(ConnectionResetError(104, "Connection reset by peer")))

    def stop_taking(self) -> None:
        """It reads nothing more for now."""
        self._stuck = True

    def take(self) -> None:
        """It reads all there is, and goes on."""
        self._stuck = False
        buffer, self._buffer, self._size = self._buffer, [], 0
        if self._lost:
            return
        for data in buffer:
            self._send(self.peer.received, data)
        if self._write_paused:
            self._write_paused = False
            self.protocol.resume_writing()
        if self._ended and not self._lost:
            self._send_end()
        if self._closing and not self._lost:
            self._lose(None)

    def vanish(self) -> None:
        """The proxy gave up while it connected: nobody on its side hears more."""
        self._closing = self._lost = self.gone = True
        self._send(self.peer.closed)

    def _come(self, event: Callable[[], None]) -> None:
        if self._reading and not self._inbox:
            event()
        elif not self._closing:
            self._inbox.append(event)

    def _drain(self) -> None:
        while self._inbox and self._reading:
            self._inbox.popleft()()

    def _eof(self) -> None:
        if not self.protocol.eof_received():
            self.close()

    def _fail(self, error: Exception | None) -> None:
        if self._lost or self.gone:
            return
        self._closing = True
        self._reading = False
        self._buffer.clear()
        self._size = 0
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        self._lost = True
        self._send_end()
        self._loop.call_soon(self._over, error)

    def _send_end(self) -> None:
        if not self._end_sent:
            self._end_sent = True
            self._send(self.peer.closed)

    def _over(self, error: Exception | None) -> None:
        if not self.gone:
            self.gone = True
            try:
                self.protocol.connection_lost(error)
            finally:
                self._inbox.clear()

    def _send(self, callback: Callable[..., None], *args: bytes) -> None:
        """In order, each a little later than it was written."""
        now = self._loop.time()
        self._arrival = max(self._arrival, now + self._delay())
        if self._arrival > now:
            self._loop.call_at(self._arrival, callback, *args)
        else:
            self._loop.call_soon(callback, *args)


class Network:
    """Connects the proxy to servers, by port."""

    def __init__(self, loop: VirtualLoop, delay: Callable[[], float]) -> None:
        self._loop = loop
        self._delay = delay
        self.servers: dict[int, Server] = {}
        self.dialled = 0
        """The port to which the last connection was begun."""
        self.sockets: list[Socket] = []
        """All that ever were."""

    async def dial(
        self, factory: Callable[[], asyncio.Protocol], port: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """See `asyncio`'s `create_connection`."""
        done: asyncio.Future[None] = self._loop.create_future()
        made: list[Socket] = []
        self.dialled = port
        verdict = self.servers[port].connecting()

        def connected() -> None:
            if not done.done():
                socket = self.open(factory())
                made.append(socket)
                socket.peer = self.servers[port].accept(socket)
                done.set_result(None)

        def refused(error: OSError) -> None:
            if not done.done():
                done.set_exception(error)

        timer: asyncio.TimerHandle | None = None
        if verdict is not None:
            delay_s, error = verdict
            if error is not None:
                timer = self._loop.call_later(delay_s, refused, error)
            else:
                timer = self._loop.call_later(delay_s, connected)
        try:
            await done
        except BaseException:
            if timer is not None:
                timer.cancel()
            if made:
                made[0].vanish()
            raise
        return made[0], made[0].protocol

    def open(self, protocol: asyncio.Protocol, peer: Peer | None = None) -> Socket:
        """A connection; its peer is to be set before the loop turns, or here where the proxy may speak first."""
        socket = Socket(self._loop, protocol, self._delay)
        if peer is not None:
            socket.peer = peer
        self.sockets.append(socket)
        protocol.connection_made(cast("asyncio.Transport", socket))
        return socket
