"""Relays TCP between a store and its server and degrades it: delays, or cuts in the middle of a value.

Its faults depend on the bytes that have passed, never on chance or time.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final, Self

from tests.support.processes import free_ports

__all__ = ["Relay"]


class Relay:
    """Passes connections on to a port of this machine."""

    def __init__(self, target: int, *, delay_s: float = 0.0) -> None:
        """Args:
        target: where to.
        delay_s: how long every round trip takes: what the server says first, after the client has spoken, waits.
        """
        (self.port,) = free_ports(1)
        self._target = target
        self._delay_s = delay_s
        self.cut_after: int | None = None
        """Reset a connection once the server has said so many bytes more, on all connections together."""
        self.trickle_s = 0.0
        """If not 0, the server's bytes arrive one by one, so many seconds apart."""
        self.change: Callable[[bytes], bytes] = lambda data: data
        """What becomes of what the server says."""
        self.round_trips = 0
        """How often the server has answered so far, as `delay_s` counts it."""
        self._spoken = False
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._sockets: list[socket.socket] = []
        self._threads: Final[list[threading.Thread]] = []
        self._begin(self._accept)

    @property
    def url(self) -> str:
        """The server, through here."""
        return f"valkey://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._sockets:
                _hang_up(sock)
        for thread in self._threads:
            thread.join(10)

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets += [client, server]
            self._begin(lambda client=client, server=server: self._carry(client, server, back=False))
            self._begin(lambda client=client, server=server: self._carry(server, client, back=True))

    def _carry(self, source: socket.socket, target: socket.socket, *, back: bool) -> None:
        try:
            while data := source.recv(65536):
                if back:
                    if self._spoken:
                        time.sleep(self._delay_s)
                        self._spoken = False
                        self.round_trips += 1
                    data, cut = self._allowed(self.change(data))
                    while self.trickle_s and data:
                        target.sendall(data[:1])
                        data = data[1:]
                        time.sleep(self.trickle_s)
                    target.sendall(data)
                    if cut:
                        break
                else:
                    self._spoken = True  # before the server can answer
                    target.sendall(data)
        except OSError:
            pass
        for sock in (source, target):
            _hang_up(sock)

    def _allowed(self, data: bytes) -> tuple[bytes, bool]:
        """What of `data` may pass, and whether the connection ends behind it."""
        with self._lock:
            if self.cut_after is None:
                return data, False
            if len(data) <= self.cut_after:
                self.cut_after -= len(data)
                return data, False
            data, self.cut_after = data[: self.cut_after], None
            return data, True


def _hang_up(sock: socket.socket) -> None:
    """Reset the connection, and let whoever waits for it know."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RD)
    except OSError:
        pass
    sock.close()
