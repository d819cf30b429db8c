"""The open connections of clients: how many there may be, how long each may wait, and how they end.

A connection over the limit takes the place of the one that has been idle for longest, or else of the one whose head has
been under way for longest; where there is neither, it is answered 503. One sweep a second holds all deadlines: a timer
for each connection would have to be moved at each byte.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from heapq import nsmallest
from typing import Final, Protocol

__all__ = ["HEAD_S", "ClientConnection", "ClientConnections", "ConnectionLimits"]

HEAD_S: Final = 20.0
"""For how long a client is waited for from the first byte of a request to the end of its head. A connection with this
limit has no request yet."""

_SWEEP_S: Final = 1.0
_UNREAD_S: Final = 0.1
"""A connection is not closed to make room before this time: its request may have come and not been read yet."""
_EVICTED_SHARE: Final = 64
"""One in so many idle connections is closed at a time, so that a flood does not search all of them for each."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on the connections of clients."""

    total: int
    """Open at a time."""
    per_address: int | None = None
    """Open at a time from one IP address; None for no such limit."""
    refusals: int = 64
    """Connections over the limit that may be open at a time, each until its client has read why it is refused."""

    def __post_init__(self) -> None:
        if self.total < 1 or self.refusals < 1 or (self.per_address is not None and self.per_address < 1):
            raise ValueError("there must be room for at least one connection")


class ClientConnection(Protocol):
    """A connection, as `ClientConnections` sees it."""

    address: str
    """The client's IP address; empty where there is none."""
    since_s: float
    """When the client began to be waited for."""
    limit_s: float
    """For how long it may be waited for; infinite while a request is being answered."""

    @property
    def idle(self) -> bool:
        """True while the connection waits for a request to begin."""
        ...

    @property
    def has_unsent(self) -> bool:
        """True while a part of an answer waits for the client to take it."""
        ...

    @property
    def has_left(self) -> bool:
        """True if the client has left while the connection was not read. The event loop does not notice this."""
        ...

    def expire(self) -> None:
        """Ends the connection: its client was waited for for too long."""
        ...

    def shed(self) -> None:
        """Closes the connection, which has no request, to make room for another."""
        ...

    def close_after_response(self) -> None:
        """Makes the request that runs, or else the next one, the connection's last."""
        ...

    def fail_incomplete_request(self) -> None:
        """Answers a request that has not arrived completely with an error: the proxy shuts down."""
        ...

    def close(self) -> None:
        """Closes the connection when what was written has been sent."""
        ...

    def abort(self) -> None:
        """Closes the connection at once."""
        ...


class ClientConnections:
    """The connections to one server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: ConnectionLimits) -> None:
        self._loop = loop
        self._limits = limits
        self._open: set[ClientConnection] = set()
        self._refused: dict[ClientConnection, None] = {}
        """In the order in which they came."""
        self._by_address: Counter[str] = Counter()
        self._sweeper: asyncio.TimerHandle | None = None
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.tasks: set[asyncio.Task[None]] = set()
        """The ASGI tasks that run."""
        self.refused_counts: Counter[str] = Counter()
        """Connections that were not served, by reason: `limit` or `address`."""
        self.shed_count = 0
        """Connections without a request that were closed to make room."""
        self.expired_count = 0
        """Connections that were closed because their client was waited for for too long."""

    def __len__(self) -> int:
        return len(self._open) + len(self._refused)

    @property
    def limits(self) -> ConnectionLimits:
        """The limits as they were given."""
        return self._limits

    def add(self, connection: ClientConnection) -> bool:
        """Counts a new connection and returns whether it is served.

        One that is not stays among the refused ones until it is removed, or until as many as
        `ConnectionLimits.refusals` came after it.
        """
        self._empty.clear()
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)
        per_address = self._limits.per_address
        if per_address is not None and self._by_address[connection.address] >= per_address:
            return self._refuse(connection, "address")
        if len(self._open) >= self._limits.total and not self._make_room():
            return self._refuse(connection, "limit")
        self._open.add(connection)
        if per_address is not None:
            self._by_address[connection.address] += 1
        if self._draining:
            connection.close_after_response()
        return True

    def remove(self, connection: ClientConnection) -> None:
        """Counts a connection no more: it is lost."""
        self._refused.pop(connection, None)
        if connection in self._open:
            self._open.discard(connection)
            self._uncount(connection)
        if not self:
            self._empty.set()

    def _uncount(self, connection: ClientConnection) -> None:
        if self._limits.per_address is not None:
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    async def wait_empty(self) -> None:
        """Waits until there is no connection."""
        await self._empty.wait()

    def drain(self) -> None:
        """Lets each connection, new ones too, serve one more request and close."""
        self._draining = True
        for connection in list(self._open):
            connection.close_after_response()

    def close_idle(self) -> None:
        """Closes the connections on which no request has begun."""
        for connection in list(self._open):
            if connection.idle:
                connection.shed()

    def fail_incomplete_requests(self) -> None:
        """Ends what waits for the rest of a request, with an error to its client."""
        for connection in list(self._open):
            connection.fail_incomplete_request()

    def close(self) -> None:
        """Closes every connection once what was written is sent, and cancels the tasks that run. No timer is left."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self.tasks:
            task.cancel()
        for connection in self._all():
            connection.close()

    def abort(self) -> None:
        """Closes every connection at once."""
        for connection in self._all():
            connection.abort()

    def _all(self) -> list[ClientConnection]:
        return [*self._open, *self._refused]

    def _refuse(self, connection: ClientConnection, why: str) -> bool:
        self.refused_counts[why] += 1
        if len(self._refused) >= self._limits.refusals:
            oldest = next(iter(self._refused))
            del self._refused[oldest]
            oldest.abort()
        self._refused[connection] = None
        return False

    def _make_room(self) -> bool:
        """Closes the longest idle connections, and returns whether there were any.

        Without idle ones it closes those whose heads have been under way for longest. One whose client has not taken
        its answer is neither: closed in order it would stay open, uncounted, for as long as that client likes.
        """
        before = self._loop.time() - _UNREAD_S
        waiting = [each for each in self._open if each.idle and each.since_s <= before and not each.has_unsent]
        if not waiting:
            heads = [each for each in self._open if each.limit_s == HEAD_S and each.since_s <= before]
            waiting = [each for each in heads if not each.has_unsent]
        for connection in nsmallest(1 + len(waiting) // _EVICTED_SHARE, waiting, key=_since):
            self.remove(connection)
            connection.shed()
            self.shed_count += 1
        return bool(waiting)

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in self._all():
            if connection.has_left:
                connection.abort()
            elif now - connection.since_s >= connection.limit_s:
                self.expired_count += 1
                connection.expire()
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep) if self._open or self._refused else None


def _since(connection: ClientConnection) -> float:
    return connection.since_s
