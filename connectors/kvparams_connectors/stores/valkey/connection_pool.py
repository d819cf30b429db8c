"""Connections to the servers of a deployment: how one is made, and the pool that keeps them.

A connection that is handed out has been let in by its server.
"""

import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Final

from kvparams.native import NATIVE
from kvparams_connectors.stores import connection_pool
from kvparams_connectors.stores.deadline_socket import tcp_socket
from kvparams_connectors.stores.valkey.connection import ValkeyConnection
from kvparams_connectors.stores.valkey.resp import ErrorReply, encode_command
from kvparams_connectors.stores.valkey.topology import ValkeyNode

__all__ = ["ValkeyAccess", "ValkeyConnectionPool", "ValkeyRefusedError", "connect"]


_UNIX_BUFFER: Final = 1 << 20
"""Linux gives a unix socket 208 KiB, and does not enlarge that by itself: a value would wait for the server five times.
The system may allow less."""


@dataclass(frozen=True, slots=True)
class ValkeyAccess:
    """Holds what reaching and convincing a server takes."""

    connect_s: float
    """The longest that a connection may take, in seconds."""
    user: str = ""
    password: bytes = field(default=b"", repr=False)
    """No password: no AUTH is sent."""
    tls: ssl.SSLContext | None = None


class ValkeyRefusedError(Exception):
    """The server answered, and it was a refusal."""

    def __init__(self, error: ErrorReply) -> None:
        super().__init__(error.text)
        self.error: Final = error


def connect(node: ValkeyNode, access: ValkeyAccess, deadline: float) -> ValkeyConnection:
    """A new connection that may be used.

    Raises:
        TimeoutError: the deadline, or the time for connecting, has passed.
        ValkeyRefusedError: it does not let us in.
        OSError: it cannot be reached.
    """
    until = min(deadline, time.monotonic() + access.connect_s)
    if until <= time.monotonic():
        raise TimeoutError("the deadline has passed")
    connection = ValkeyConnection(_socket(node, access.tls, until))
    try:
        if access.password:
            words = (b"AUTH", access.user.encode(), access.password) if access.user else (b"AUTH", access.password)
            connection.set_deadline(until)
            connection.send([encode_command(*words)], 1)
            if isinstance(reply := connection.reply(), ErrorReply):
                raise ValkeyRefusedError(reply)
    except BaseException:
        connection.close()
        raise
    return connection


def _socket(node: ValkeyNode, tls: ssl.SSLContext | None, until: float) -> socket.socket:
    if node.path:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, until - time.monotonic()))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
            sock.connect(node.path)
        except BaseException:
            sock.close()
            raise
        return sock
    sock = tcp_socket(node.host, node.port, until)
    if tls is None:
        return sock
    try:
        sock.settimeout(max(0.001, until - time.monotonic()))
        return tls.wrap_socket(sock, server_hostname=node.host)
    except BaseException:
        sock.close()
        raise


class ValkeyConnectionPool(connection_pool.ServerConnectionPool[ValkeyNode, ValkeyConnection]):
    """Idle connections by server."""

    def __init__(self, access: ValkeyAccess) -> None:
        super().__init__(lambda node, deadline: connect(node, access, deadline))
        self.is_native: Final = NATIVE is not None and access.tls is None
        """Whether native code can use the connections."""
