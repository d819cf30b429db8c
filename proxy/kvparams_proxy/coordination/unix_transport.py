"""Carries messages between the proxies of one machine: unix sockets in a private directory.

Each proxy listens on a socket named after its number, and connects to those of the others, whose names it finds in the
directory. A connection carries messages one way (`SOCK_SEQPACKET` keeps them apart). What a proxy does not take waits
in a bounded queue; beyond that it is lost, and the proxy notices the gap.
"""

import asyncio
import os
import socket
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvparams.replication.messages import MAX_MESSAGE_BYTES
from kvparams_proxy.coordination.transport import MessageReceiver

__all__ = ["UnixTransport"]

_QUEUE_BYTES: Final = 4 << 20
"""What waits for one proxy."""
_LOOK_S: Final = 0.25
"""How often the directory is looked at."""
_AT_ONCE: Final = 4
"""Messages that are read before the event loop does something else."""
_BACKLOG: Final = 64


class UnixTransport:
    """A `Transport` between the workers of one machine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, directory: Path, own_id: int) -> None:
        """Creates a transport that is not started. `own_id`: the number of this proxy's exchange."""
        self._loop = loop
        self._directory = directory
        self._path = directory / f"{own_id:016x}.sock"
        self._listener: socket.socket | None = None
        self._receive: MessageReceiver | None = None
        self._incoming: set[socket.socket] = set()
        self._outgoing: dict[int, _Outgoing] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_connected(self) -> bool:
        """True once it is started."""
        return self._listener is not None

    def start(self, receive: MessageReceiver) -> None:
        """See `Transport`.

        Raises:
            OSError: the directory cannot be used.
        """
        self._receive = receive
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            # Others take a socket that nobody listens on for one that was left behind, so it gets its name last.
            unnamed = self._path.with_suffix(".new")
            listener.bind(str(unnamed))
            listener.listen(_BACKLOG)
            unnamed.rename(self._path)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._loop.add_reader(listener.fileno(), self._accept)
        self._look()

    def send(self, message: bytes, receiver: int = 0) -> None:
        """See `Transport`."""
        if receiver:
            one = self._outgoing.get(receiver)
            if one is not None:
                one.send(message)
            return
        for each in self._outgoing.values():
            each.send(message)

    def announce(self, message: bytes) -> None:
        """See `Transport`."""
        self.send(message)

    async def close(self) -> None:
        """See `Transport`."""
        if self._timer is not None:
            self._timer.cancel()
        for each in self._outgoing.values():
            each.close()
        self._outgoing.clear()
        for incoming in list(self._incoming):
            self._drop(incoming)
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with suppress(OSError):
                self._path.unlink()

    def _look(self) -> None:
        """Connects to proxies that have come, and forgets those that have ended."""
        self._timer = self._loop.call_later(_LOOK_S, self._look)
        self._outgoing = {id: each for id, each in self._outgoing.items() if not each.is_closed}
        with suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                name, _, kind = entry.name.partition(".")
                if kind == "sock" and entry.path != str(self._path):
                    with suppress(ValueError):
                        self._connect(int(name, 16), entry.path)

    def _connect(self, id: int, path: str) -> None:
        if id in self._outgoing:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            connection.connect(path)
        except BlockingIOError:  # it is too busy to accept: tried again soon
            connection.close()
        except OSError:  # it was killed, or has just ended
            connection.close()
            with suppress(OSError):
                os.unlink(path)
        else:
            self._outgoing[id] = _Outgoing(self._loop, connection)

    def _accept(self) -> None:
        if self._listener is None:
            return
        with suppress(OSError):
            incoming, _ = self._listener.accept()
            incoming.setblocking(False)
            self._incoming.add(incoming)
            self._loop.add_reader(incoming.fileno(), self._readable, incoming)

    def _readable(self, incoming: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if incoming not in self._incoming or self._receive is None:
                return
            try:
                message = incoming.recv(MAX_MESSAGE_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._drop(incoming)
                return
            self._receive(message)

    def _drop(self, incoming: socket.socket) -> None:
        self._incoming.discard(incoming)
        self._loop.remove_reader(incoming.fileno())
        incoming.close()


class _Outgoing:
    """The connection to one other proxy."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        self._loop = loop
        self._connection = connection
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self.is_closed = False

    def send(self, message: bytes) -> None:
        """Sends a message, or keeps it until there is room."""
        if self.is_closed:
            return
        if not self._queue:
            try:
                self._connection.send(message)
            except BlockingIOError:
                self._loop.add_writer(self._connection.fileno(), self._writable)
            except OSError:
                self.close()
                return
            else:
                return
        if self._queued_bytes + len(message) > _QUEUE_BYTES:
            return
        self._queue.append(message)
        self._queued_bytes += len(message)

    def close(self) -> None:
        """Closes the connection."""
        if not self.is_closed:
            self.is_closed = True
            self._loop.remove_writer(self._connection.fileno())
            self._connection.close()

    def _writable(self) -> None:
        while self._queue:
            try:
                self._connection.send(self._queue[0])
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            self._queued_bytes -= len(self._queue.popleft())
        self._loop.remove_writer(self._connection.fileno())
