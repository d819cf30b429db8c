"""Connections to servers, opened when needed and kept while they are in a known state.

A connection is taken by one thread at a time, and one that is not reusable when it comes back is closed.
"""

import threading
from collections.abc import Callable, Hashable
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["PoolableConnection", "ServerConnectionPool"]

_KEPT: Final = 64


class PoolableConnection(Protocol):
    """A connection that may be kept."""

    @property
    def is_reusable(self) -> bool:
        """Returns whether nothing is owed or unread, and the peer is still there."""
        ...

    def set_deadline(self, deadline: float) -> None:
        """From now on waits end at `deadline`, on the clock of `time.monotonic`."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


P = TypeVar("P", bound=Hashable)
C = TypeVar("C", bound=PoolableConnection)


class ServerConnectionPool(Generic[P, C]):
    """Idle connections by server."""

    def __init__(self, connect: Callable[[P, float], C]) -> None:
        """Opens no connection yet.

        Args:
            connect: opens a connection to a server until a deadline on the clock of `time.monotonic`, or raises.
        """
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: dict[P, list[C]] = {}
        self.opened_count = 0
        """How many connections were made so far."""

    def acquire(self, server: P, deadline: float) -> C:
        """An idle connection or a new one; raises as `connect` does."""
        while True:
            with self._lock:
                idle = self._idle.get(server)
                connection = idle.pop() if idle else None
                self.opened_count += connection is None
            if connection is None:
                connection = self._connect(server, deadline)
            elif not connection.is_reusable:  # the server has closed it meanwhile
                connection.close()
                continue
            connection.set_deadline(deadline)
            return connection

    def release(self, server: P, connection: C) -> None:
        """Keep it for the next, or close it."""
        if connection.is_reusable:
            with self._lock:
                idle = self._idle.setdefault(server, [])
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
