"""The HTTP client that plays traces (`replay/arrivals.py`): connections that time and check every answer.

Requests of a trace differ; where all are alike, `load_process.py` runs a generator that costs less.

An answer counts only if it is right. Status 200, framed to its end, and a stream must hold exactly the events it should
and end with `[DONE]`; anything else is an error with a name, and its time is in no percentile. Events end with an empty
line of "\\n\\n", as every engine in the field writes them.
"""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

__all__ = ["Pool", "Request", "Tally", "Target"]

_DONE = b"data: [DONE]\n\n"
_COUNTER = b"@@@@@@@@"
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """A `Target` says where requests go and which answers are right."""

    port: int
    path: str
    body: bytes
    """The first `@@@@@@@@` in it is replaced by a counter of eight digits, so that no two prompts are the same."""
    stream: bool = False
    events: int | None = None
    """Events a stream must have, `[DONE]` included; None: any number."""

    def request(self, serial: int) -> bytes:
        """The bytes of one request."""
        body = self.body.replace(_COUNTER, b"%08d" % (serial % 100_000_000), 1)
        return (
            b"POST %b HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (
                self.path.encode(),
                self.port,
                len(body),
                body,
            )
        )


@dataclass(slots=True)
class Tally:
    """A `Tally` sums up all answers; times are in seconds from when each request should have been sent."""

    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    itl_s: "array[float]" = field(default_factory=lambda: array("d"))
    e2e_s: "array[float]" = field(default_factory=lambda: array("d"))
    lag_s: "array[float]" = field(default_factory=lambda: array("d"))
    """How late the generator itself was with each request: large values mean that it, not the server, was too slow."""
    right: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])
    connections: int = 0


@dataclass(slots=True)
class Request:
    """A `Request` is a request in flight."""

    due_s: float
    """`time.monotonic()` at which it should be sent: its clock starts here."""
    wire: bytes
    measured: bool
    retried: bool = False
    ttft_s: float | None = None
    """From `due_s` to the first byte of the answer's body."""
    error: str | None = None
    """Why the answer was wrong, once it has ended."""


class Pool:
    """A `Pool` holds the connections to one target, as many as it takes.

    `on_done` is called after every request, right or wrong.
    """

    def __init__(self, target: Target, tally: Tally, on_done: Callable[[Request], None]) -> None:
        self.target = target
        self.tally = tally
        self._requests: dict[int, Request] = {}
        self._on_done = on_done
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._emptied = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def send(self, request: Request) -> None:
        """Send it now, on an idle connection or on a new one."""
        self._requests[id(request)] = request
        if self._idle:
            self._idle.pop().send(request)
            return
        task = self._loop.create_task(self._open(request))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def is_open(self, request: Request) -> bool:
        """Returns whether a request was sent here and has not ended."""
        return id(request) in self._requests

    async def _open(self, request: Request) -> None:
        try:
            _, connection = await self._loop.create_connection(lambda: _Connection(self), "127.0.0.1", self.target.port)
        except OSError as error:
            self.settle(request, f"connect: {error.strerror or error}")
            return
        self.tally.connections += 1
        connection.send(request)

    def settle(self, request: Request, error: str | None) -> None:
        """Records that a request has ended."""
        del self._requests[id(request)]
        request.error = error
        if error is not None:
            self.tally.errors[error] += 1
        else:
            self.tally.right += 1
        self._on_done(request)

    def opened(self, connection: "_Connection") -> None:
        """A connection is there."""
        self._all.add(connection)

    def idle(self, connection: "_Connection") -> None:
        """A connection can take another request."""
        self._idle.append(connection)

    def lost(self, connection: "_Connection") -> None:
        """A connection is gone."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if not self._all:
            self._emptied.set()

    async def close(self) -> None:
        """Give up on what is unanswered: an error each, with the time waited so far, so that no percentile hides it."""
        now = time.monotonic()
        for request in tuple(self._requests.values()):
            request.error = "unanswered"
            self.tally.errors[request.error] += 1
            if request.measured:
                self.tally.e2e_s.append(now - request.due_s)
        self._requests.clear()
        for task in tuple(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        if self._all:
            self._emptied.clear()
            for connection in tuple(self._all):
                connection.drop()
            async with asyncio.timeout(_CLOSE_S):
                await self._emptied.wait()


class _Connection(asyncio.Protocol):
    """A `_Connection` is a connection to the target with one request at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tally = pool.tally
        self._stream = pool.target.stream
        self._parser = httptools.HttpResponseParser(self)
        self._transport = cast("asyncio.Transport", None)
        self._request: Request | None = None
        self._dropped = False
        self._fresh = True
        self._now_s = self._last_s = 0.0
        self._events = 0
        self._size = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._pool.opened(self)

    def send(self, request: Request) -> None:
        """Send one request; the connection must be idle."""
        self._request = request
        self._events = self._size = 0
        self._tail = b""
        if request.measured:
            self._tally.lag_s.append(time.monotonic() - request.due_s)
        self._transport.write(request.wire)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._finish("malformed answer")

    def on_body(self, body: bytes) -> None:
        request = self._request
        if request is None:
            return
        if not self._size:
            request.ttft_s = self._now_s - request.due_s
            if request.measured:
                self._tally.ttft_s.append(request.ttft_s)
        self._size += len(body)
        joined = self._tail + body
        if self._stream:
            self._count(joined, request)
        self._tail = joined[-len(_DONE) :]

    def _count(self, joined: bytes, request: Request) -> None:
        # The tail was counted before: only ends of events beyond it are new, one across the seam included.
        new = joined.count(b"\n\n", max(0, len(self._tail) - 1))
        if not new:
            return
        if request.measured:
            if self._events:
                self._tally.itl_s.append(self._now_s - self._last_s)
            self._tally.itl_s.extend([0.0] * (new - 1))  # arrived together
        self._events += new
        self._last_s = self._now_s

    def on_message_complete(self) -> None:
        self._finish(self._verdict())

    def _verdict(self) -> str | None:
        target = self._pool.target
        status = self._parser.get_status_code()
        if status != 200:
            return f"status {status}"
        if not target.stream:
            return None if self._size else "empty answer"
        if self._tail != _DONE:
            return "no [DONE]"
        if target.events is not None and self._events != target.events:
            return f"{self._events} events instead of {target.events}"
        return None

    def _finish(self, error: str | None) -> None:
        request, self._request = self._request, None
        if request is None:
            return
        self._fresh = False
        if error is None and request.measured:
            self._tally.e2e_s.append(self._now_s - request.due_s)
        if error is None and self._parser.should_keep_alive():
            self._pool.idle(self)
        else:
            self.drop()
        self._pool.settle(request, error)

    def drop(self) -> None:
        """Close at once."""
        self._dropped = True
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self)
        request = self._request
        if request is None or self._dropped:
            return
        self._request = None
        if not self._fresh and not self._size and not request.retried:
            # The server closed an idle connection just as it was used again: any client would try once more.
            request.retried = True
            self._pool.send(request)
            return
        self._pool.settle(request, "connection lost")
