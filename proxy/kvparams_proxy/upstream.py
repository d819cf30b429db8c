"""The HTTP/1.1 client of the data path: one pool of connections for each engine, answers delivered by callbacks.

`httpx` costs milliseconds of CPU a request at 64 concurrent ones; this costs tens of microseconds. It sends POST with
a body it already holds and reads what HTTP/1.1 allows for an answer. The one rule: a sink hears `on_done` exactly once,
whatever happens, and nothing after it.
"""

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import httptools

__all__ = ["Collect", "Exchange", "Head", "Pool", "Sink", "UpstreamError", "UpstreamLimits", "UpstreamTimeout"]


Request = tuple[bytes, bytes]
"""Head and body, as they are sent: putting them together would copy the body once more."""


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """What one engine may take of this process."""

    connections: int = 2048
    """Open to one engine at a time, idle ones included."""
    connect_s: float = 5.0
    """For a connection to be made, TLS included."""
    idle_s: float = 30.0
    """A connection unused for longer is closed rather than tried."""
    head_bytes: int = 64 << 10
    """Status line and headers of one answer."""
    answer_bytes: int = 64 << 20
    """An answer that is collected before it is used."""


class UpstreamError(Exception):
    """An exchange with an engine did not come to its end."""

    def __init__(self, reason: str, *, connected: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.connected = connected
        """False when no connection was made: the engine cannot have seen the request."""


class UpstreamTimeout(UpstreamError):
    """The engine said nothing for too long."""


@dataclass(slots=True)
class Head:
    """Status line and headers of an answer."""

    status: int = 0
    content_type: bytes = b""
    length: int | None = None
    """Of the body, where the engine says it beforehand."""
    framed: bool = False
    """False when only the end of the connection ends the body."""
    retry_after: bytes | None = None


class Sink(Protocol):
    """Hears an answer. All calls come from the event loop; an exception from one of them aborts the exchange."""

    def on_head(self, head: Head) -> None:
        """Status and headers are complete."""
        ...

    def on_body(self, data: bytes) -> None:
        """A piece of the body, chunk framing removed."""
        ...

    def on_flush(self) -> None:
        """Everything that arrived together has been delivered: now is the time to write it on."""
        ...

    def on_done(self, error: UpstreamError | None) -> None:
        """The answer is complete, or will never be."""
        ...


class Exchange:
    """One request and its answer: a handle to abort or throttle it."""

    __slots__ = ("_connecting", "_connection", "_pool", "_request", "_retry", "_sink")

    def __init__(self, pool: "Pool", request: Request, sink: Sink) -> None:
        self._pool = pool
        self._request = request
        self._sink: Sink | None = sink
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._retry = True

    def abort(self, error: UpstreamError) -> None:
        """End it now: the connection is closed, the engine sees that, the sink hears `error`. No-op when it is over."""
        sink = self._sink
        if sink is None:
            return
        self._sink = None
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()
        sink.on_done(error)

    def pause(self) -> None:
        """Stop reading: what the engine goes on sending fills the socket, then stalls its stream."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        if self._connection is not None:
            self._connection.resume()

    def run_on(self, connection: "Connection") -> None:
        """For the pool: send the request there."""
        self._connection = connection
        connection.begin(self, cast("Sink", self._sink), self._request)

    def connect(self, task: asyncio.Task[None]) -> None:
        """For the pool: a connection is being made."""
        self._connecting = task

    @property
    def waiting(self) -> bool:
        """Whether somebody still wants the answer."""
        return self._sink is not None

    def finish(self, error: UpstreamError | None, *, untouched: bool = False) -> None:
        """For the connection: the answer ended. `untouched`: a reused connection was closed before any byte came."""
        sink = self._sink
        if sink is None:
            return
        self._connection = None
        if untouched and self._retry:  # a stale keep-alive connection: the engine has not seen the request
            self._retry = False
            self._pool.restart(self)
            return
        self._sink = None
        sink.on_done(error)


class Connection(asyncio.Protocol):
    """One connection to an engine; carries one exchange at a time."""

    __slots__ = (
        "_complete",
        "_exchange",
        "_head",
        "_head_bytes",
        "_head_done",
        "_keep_alive",
        "_parser",
        "_paused",
        "_pool",
        "_reused",
        "_sink",
        "_strange",
        "idle_since",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._sink: Sink | None = None
        self._reused = False
        self._strange = False
        self._paused = False
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._head = Head()
        self._head_bytes = 0
        self._head_done = False
        self._complete = False
        self._keep_alive = False

    # what the pool and the exchange call

    def begin(self, exchange: Exchange, sink: Sink, request: Request) -> None:
        """Send a request; the answer goes to `sink`."""
        self._exchange = exchange
        self._sink = sink
        self._reset()
        self.transport.writelines(request)

    def close(self) -> None:
        """Close at once; whoever waits has been told."""
        self._exchange = self._sink = None
        self.transport.abort()

    def pause(self) -> None:
        """Stop reading from the socket."""
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read from the socket again."""
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse what came and deliver it, then flush once."""
        sink = self._sink
        if sink is None:  # an idle engine has nothing to say
            self.transport.abort()
            return
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if not self._head_done and self._head_bytes > self._pool.limits.head_bytes:
                raise ValueError("its headers are too long")
            sink.on_flush()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError) as error:
            self._fail(UpstreamError(f"the engine's answer is not usable HTTP ({_reason(error)})"))
            return
        if self._complete:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete a body that only the end delimits; otherwise the answer is cut off."""
        self._pool.forget(self)
        exchange, self._exchange, self._sink = self._exchange, None, None
        if exchange is None:
            return
        if self._head_done and not self._head.framed and exc is None:
            exchange.finish(None)
            return
        untouched = self._reused and self._head_bytes == 0
        exchange.finish(
            UpstreamError("the engine closed the connection before its answer was complete"), untouched=untouched
        )

    # httptools' callbacks

    def on_message_begin(self) -> None:
        """A second answer to one request would be somebody else's."""
        if self._complete:
            self._strange = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep the few headers that matter."""
        if self._head_done:  # trailers
            return
        name = name.lower()
        head = self._head
        if name == b"content-type":
            head.content_type = value
        elif name == b"content-length":
            head.length = int(value)
            head.framed = True
        elif name == b"transfer-encoding":
            head.framed = True
        elif name == b"retry-after":
            head.retry_after = value

    def on_headers_complete(self) -> None:
        """Deliver the head, unless it is a mere 100 Continue."""
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                raise ValueError("it switches protocols")
            return
        head = self._head
        head.status = status
        if status in (204, 304):
            head.length = 0
            head.framed = True
        self._head_done = True
        if self._sink is not None:
            self._sink.on_head(head)

    def on_body(self, data: bytes) -> None:
        """Deliver a piece of the body."""
        if self._sink is not None and not self._complete:
            self._sink.on_body(data)

    def on_message_complete(self) -> None:
        """Remember it: the connection must not be used again before the parser has returned."""
        if self._head_done:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()  # the parser forgets it when it returns
        else:  # the end of a 1xx answer
            self._head = Head()

    def _end(self) -> None:
        exchange, self._exchange, self._sink = self._exchange, None, None
        if self._strange or not self._keep_alive or self.transport.is_closing():
            self.transport.close()
        else:
            self.resume()
            self._reused = True
            self._pool.put_back(self)
        if exchange is not None:
            exchange.finish(None)

    def _fail(self, error: UpstreamError) -> None:
        exchange, self._exchange, self._sink = self._exchange, None, None
        self.transport.abort()
        if exchange is not None:
            exchange.finish(error)


class Pool:
    """The connections to one engine."""

    def __init__(self, url: str, limits: UpstreamLimits, tls: ssl.SSLContext | None = None) -> None:
        """`url` is `http(s)://host[:port]`; `tls` is used for https and defaults to the system's trust."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise ValueError(f"an engine's URL is http://host:port or https://host:port, not {url!r}")
        self.limits: Final = limits
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._authority = parts.netloc.rpartition("@")[2].encode()
        self._prefixes: dict[bytes, bytes] = {}
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._connecting = 0
        self._loop = asyncio.get_running_loop()

    def request(self, path: bytes, headers: bytes, body: bytes) -> Request:
        """A POST. `headers` are whole lines, each ending in CRLF."""
        prefix = self._prefixes.get(path)
        if prefix is None:
            prefix = self._prefixes[path] = (
                b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\naccept: */*\r\n"
                % (path, self._authority)
            )
        return b"%b%bcontent-length: %d\r\n\r\n" % (prefix, headers, len(body)), body

    def exchange(self, request: Request, sink: Sink) -> Exchange:
        """Send `request`, deliver its answer to `sink`."""
        exchange = Exchange(self, request, sink)
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                exchange.run_on(connection)
                return exchange
        self.restart(exchange)
        return exchange

    def restart(self, exchange: Exchange) -> None:
        """Run `exchange` on a new connection."""
        if len(self._open) + self._connecting >= self.limits.connections:
            self._loop.call_soon(
                exchange.finish, UpstreamError("too many connections to the engine are open", connected=False)
            )
            return
        self._connecting += 1
        exchange.connect(self._loop.create_task(self._connect(exchange)))

    async def _connect(self, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(self.limits.connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self), self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            exchange.finish(UpstreamError(f"no connection to the engine ({_reason(error)})", connected=False))
            return
        finally:
            self._connecting -= 1
        self._open.add(connection)
        if exchange.waiting:
            exchange.run_on(connection)
        else:
            self.put_back(connection)

    def put_back(self, connection: Connection) -> None:
        """For the connection: it is idle."""
        now = connection.idle_since = self._loop.time()
        self._idle.append(connection)
        while now - self._idle[0].idle_since > self.limits.idle_s:
            self._idle.popleft().transport.close()

    def forget(self, connection: Connection) -> None:
        """For the connection: it is closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    @property
    def open_connections(self) -> int:
        """Idle ones included."""
        return len(self._open)

    def close(self) -> None:
        """Close every connection; exchanges that run hear that they were cut off."""
        for connection in list(self._open):
            connection.transport.abort()


class Collect:
    """A sink that gathers a whole answer: `await sink.answer` gives (head, body) or raises `UpstreamError`."""

    __slots__ = ("_head", "_limit", "_parts", "_size", "answer")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_bytes: int) -> None:
        self.answer: asyncio.Future[tuple[Head, bytes]] = loop.create_future()
        self._head = Head()
        self._limit = limit_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def on_head(self, head: Head) -> None:
        """Keep it."""
        self._head = head

    def on_body(self, data: bytes) -> None:
        """Gather, up to the limit."""
        self._size += len(data)
        if self._size > self._limit:
            raise ValueError(f"it is longer than {self._limit} bytes")
        self._parts.append(data)

    def on_flush(self) -> None:
        """Nothing to do: the answer is used as a whole."""

    def on_done(self, error: UpstreamError | None) -> None:
        """Wake whoever waits."""
        if self.answer.done():
            return
        if error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result((self._head, self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)))


def _reason(error: BaseException) -> str:
    """In words, without addresses."""
    cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) and error.__context__ else error
    if isinstance(cause, ConnectionRefusedError):
        return "refused"
    if isinstance(cause, TimeoutError):
        return "timed out"
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {cause.reason or 'failed'}"
    if isinstance(cause, OSError):
        return cause.strerror.split("(")[0].strip().lower() if cause.strerror else "network error"
    return str(cause) or type(cause).__name__
