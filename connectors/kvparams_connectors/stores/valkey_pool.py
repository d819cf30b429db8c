"""Connections to the servers of a deployment: opened when needed, kept while they are in a known state.

The one rule: a connection is taken by one thread at a time, and one that is not reusable when it comes back is closed.
"""

import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from typing import Final

from kvparams_connectors.stores.resp import ServerError, command
from kvparams_connectors.stores.valkey_connection import Connection
from kvparams_connectors.stores.valkey_topology import Node

__all__ = ["Access", "Pool", "Refused", "connect"]

_KEPT: Final = 64


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach and to convince a server."""

    connect_s: float
    """The longest that a connection may take, in seconds."""
    user: str = ""
    password: bytes = field(default=b"", repr=False)
    """No password: no AUTH is sent."""
    tls: ssl.SSLContext | None = None


class Refused(Exception):
    """The server answered, and it was a refusal."""

    def __init__(self, error: ServerError) -> None:
        super().__init__(error.text)
        self.error: Final = error


def connect(node: Node, access: Access, deadline: float) -> Connection:
    """A new connection that may be used.

    Raises:
        TimeoutError: the deadline, or the time for connecting, has passed.
        Refused: it does not let us in.
        OSError: it cannot be reached.
    """
    until = min(deadline, time.monotonic() + access.connect_s)
    if until <= time.monotonic():
        raise TimeoutError("the deadline has passed")
    connection = Connection(_socket(node, access.tls, until))
    try:
        if access.password:
            words = (b"AUTH", access.user.encode(), access.password) if access.user else (b"AUTH", access.password)
            connection.until(until)
            connection.send([command(*words)], 1)
            if isinstance(reply := connection.reply(), ServerError):
                raise Refused(reply)
    except BaseException:
        connection.close()
        raise
    return connection


def _socket(node: Node, tls: ssl.SSLContext | None, until: float) -> socket.socket:
    if node.path:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, until - time.monotonic()))
            sock.connect(node.path)
        except BaseException:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((node.host, node.port), max(0.001, until - time.monotonic()))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is None:
            return sock
        sock.settimeout(max(0.001, until - time.monotonic()))
        return tls.wrap_socket(sock, server_hostname=node.host)
    except BaseException:
        sock.close()
        raise


class Pool:
    """Idle connections by server."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._idle: dict[Node, list[Connection]] = {}
        self.opened = 0
        """How many connections were made so far."""

    def take(self, node: Node, deadline: float) -> Connection:
        """An idle connection or a new one; raises as `connect` does."""
        while True:
            with self._lock:
                idle = self._idle.get(node)
                connection = idle.pop() if idle else None
                self.opened += connection is None
            if connection is None:
                connection = connect(node, self._access, deadline)
            elif not connection.reusable:  # the server has closed it meanwhile
                connection.close()
                continue
            connection.until(deadline)
            return connection

    def give_back(self, node: Node, connection: Connection) -> None:
        """Keep it for the next, or close it."""
        if connection.reusable:
            with self._lock:
                idle = self._idle.setdefault(node, [])
                if len(idle) < _KEPT:
                    idle.append(connection)
                    return
        connection.close()

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()
