"""Carries messages between the proxies of one machine: datagrams over unix sockets in a directory.

Each proxy binds a socket named after its number. The directory belongs to the supervisor, and only its user may enter
it. A datagram that does not fit into a sibling's buffer is lost, and the sibling notices the gap.
"""

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvparams.replication.messages import MAX_MESSAGE_BYTES
from kvparams_proxy.coordination.transport import MessageReceiver

__all__ = ["UnixTransport"]

_BUFFER_BYTES: Final = 4 << 20
_LOOK_S: Final = 0.25
"""How often the directory is looked at."""
_AT_ONCE: Final = 16
"""Messages that are read before the event loop does something else."""


class UnixTransport:
    """A `Transport` between the workers of one machine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, directory: Path, own_id: int) -> None:
        """Creates a transport that is not started. `own_id`: the number of this proxy's exchange."""
        self._loop = loop
        self._directory = directory
        self._path = directory / f"{own_id:016x}.sock"
        self._socket: socket.socket | None = None
        self._receive: MessageReceiver | None = None
        self._others: dict[int, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.lost = 0
        """Messages that a sibling had no room for."""

    @property
    def is_connected(self) -> bool:
        """True once it is started."""
        return self._socket is not None

    @property
    def connections(self) -> int:
        """One: there is no connection that could be lost."""
        return 1

    def start(self, receive: MessageReceiver) -> None:
        """See `Transport`.

        Raises:
            OSError: the directory cannot be used.
        """
        self._receive = receive
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        own.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            own.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        own.bind(str(self._path))
        self._socket = own
        self._loop.add_reader(own.fileno(), self._readable)
        self._look()

    def send(self, message: bytes, receiver: int = 0) -> None:
        """See `Transport`."""
        if receiver:
            others = [self._others[receiver]] if receiver in self._others else []
        else:
            others = list(self._others.values())
        for path in others:
            self._send(message, path)

    async def close(self) -> None:
        """See `Transport`."""
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            with suppress(OSError):
                self._path.unlink()

    def _look(self) -> None:
        """Looks for the sockets of other proxies."""
        self._timer = self._loop.call_later(_LOOK_S, self._look)
        found: dict[int, str] = {}
        with suppress(OSError):
            for entry in os.scandir(self._directory):
                name, dot, kind = entry.name.partition(".")
                if dot and kind == "sock" and entry.path != str(self._path):
                    with suppress(ValueError):
                        found[int(name, 16)] = entry.path
        self._others = found

    def _send(self, message: bytes, path: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(message, path)
        except (ConnectionRefusedError, FileNotFoundError):  # its proxy was killed, or has just ended
            with suppress(OSError):
                os.unlink(path)
            self._others = {id: other for id, other in self._others.items() if other != path}
        except OSError:
            self.lost += 1

    def _readable(self) -> None:
        for _ in range(_AT_ONCE):
            if self._socket is None or self._receive is None:
                return
            try:
                message = self._socket.recv(MAX_MESSAGE_BYTES + 1)
            except OSError:
                return
            self._receive(message)
