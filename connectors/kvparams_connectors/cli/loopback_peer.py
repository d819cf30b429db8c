"""The floor that every store over a network has: a bare TCP connection to another process of this machine.

The other process answers `P size payload` with one byte when it has everything, and `G size` with `size` bytes. It
reads into and sends from one buffer that was touched before, so that nothing but the socket is measured.

    python -m kvparams_connectors.cli.loopback_peer PORT    the other process; it ends with its connection
"""

import socket
import struct
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

__all__ = ["LoopbackPeer", "run_loopback_peer"]

_REQUEST: Final = struct.Struct("<cQ")
_MAX_BYTES: Final = 1 << 30
_WAIT_S: Final = 30.0


class LoopbackPeer:
    """A `LoopbackPeer` is a connection to the other process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def put(self, source: memoryview) -> None:
        """Send all of `source`, and wait until it has arrived."""
        self._connection.sendmsg([_REQUEST.pack(b"P", source.nbytes)])
        self._connection.sendall(source)
        _receive(self._connection, memoryview(bytearray(1)))

    def get(self, target: memoryview) -> None:
        """Fill all of `target`."""
        self._connection.sendall(_REQUEST.pack(b"G", target.nbytes))
        _receive(self._connection, target)


@contextmanager
def run_loopback_peer() -> Generator[LoopbackPeer]:
    """Start the other process and connect to it.

    Raises:
        OSError: it could not be started, or did not call back.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_WAIT_S)
        command = [sys.executable, "-m", __name__, str(server.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            try:
                connection, _ = server.accept()
                with connection:
                    _prepare(connection)
                    yield LoopbackPeer(connection)
            finally:
                process.kill()


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(_WAIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, target: memoryview) -> bool:
    """Fill `target`; False if the other side has gone."""
    at = 0
    while at < target.nbytes:
        count = connection.recv_into(target[at:])
        if not count:
            return False
        at += count
    return True


def _serve(port: int) -> None:
    memory = bytearray(1 << 16)
    request = memoryview(bytearray(_REQUEST.size))
    with socket.create_connection(("127.0.0.1", port), _WAIT_S) as connection:
        _prepare(connection)
        connection.settimeout(None)  # it ends with the process that started it
        while _receive(connection, request):
            what, size = _REQUEST.unpack(request)
            if size > _MAX_BYTES:
                return
            if size > len(memory):
                memory = bytearray(b"\1") * size
            content = memoryview(memory)[:size]
            if what == b"G":
                connection.sendall(content)
            elif _receive(connection, content):
                connection.sendall(b"K")


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
