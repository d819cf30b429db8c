"""Types of exchanges with an engine: limits, errors, the head of an answer, and its sink.

The client itself is `connection_pool.py` (one for each engine) over `connection.py`. A sink's `on_done` is called
exactly once, whatever happens, and no method of it after that.
"""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, cast

import httptools

__all__ = [
    "MAX_BYTES_PER_TURN",
    "NO_HEAD",
    "BodyBuffer",
    "ResponseCollector",
    "ResponseHead",
    "ResponseSink",
    "UpstreamBody",
    "UpstreamError",
    "UpstreamErrorResponse",
    "UpstreamLimits",
    "UpstreamOverflow",
    "UpstreamRequest",
    "UpstreamTimeout",
    "describe_error",
    "join_body",
]

MAX_BYTES_PER_TURN: Final = 64 << 10
"""The most of one answer that is delivered in one turn of the event loop, whatever a read or a message brings."""
UpstreamBody = bytes | tuple[bytes | memoryview, ...]
"""A long one may be in pieces, which are parts of the client's body: nobody copies it then."""
UpstreamRequest = tuple[bytes, UpstreamBody]
"""Head and body, as they are sent: putting them together would copy a long body once more."""


def join_body(body: UpstreamBody) -> bytes:
    """Joins the pieces of a body."""
    return body if isinstance(body, bytes) else b"".join(body)


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Limits on the resources that one engine may use in this process."""

    connections: int = 2048
    """Open to one engine at a time, idle ones included."""
    connect_s: float = 5.0
    """For a connection to be made, TLS included."""
    idle_s: float = 90.0
    """A connection unused for longer is closed rather than tried."""
    head_bytes: int = 64 << 10
    """Status line and headers of one answer."""
    answer_bytes: int = 64 << 20
    """An answer that is collected before it is used."""


class UpstreamError(Exception):
    """An exchange with an engine did not complete."""

    def __init__(self, reason: str, *, connected: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.connected = connected
        """False when no connection was made."""
        self.sent = connected
        """Whether the engine may have seen the request: also where only a second connection could not be made."""


class UpstreamTimeout(UpstreamError):
    """The engine said nothing for too long."""


class UpstreamErrorResponse(UpstreamError):
    """The engine has said in its answer that there is none."""

    def __init__(self, error: Mapping[str, object]) -> None:
        super().__init__("the engine reports an error")
        self.error = error
        """Its error object. What may be in it is not for clients."""
        self.preceding_events = b""
        """Events that came with it and belong to the answer."""


class UpstreamOverflow(UpstreamError):
    """The engine has all the connections it may have; that is no reason to think it gone."""


@dataclass(slots=True)
class ResponseHead:
    """Status line and headers of an answer."""

    status: int = 0
    content_type: bytes = b""
    framed: bool = False
    """False when only the end of the connection ends the body."""
    retry_after: bytes = b""
    """As it came; empty where it did not."""


NO_HEAD: Final = ResponseHead()
"""That of an answer that has not come. Nobody changes it."""


class ResponseSink(Protocol):
    """Hears an answer. All calls come from the event loop; an exception from one of them aborts the exchange."""

    def on_head(self, head: ResponseHead) -> None:
        """Receives the status and the headers."""
        ...

    def on_body(self, data: bytes) -> None:
        """Receives the part of the body that came in one read, without chunk framing."""
        ...

    def on_done(self, error: UpstreamError | None) -> None:
        """Hears that the answer is complete, or will never be."""
        ...


class BodyBuffer:
    """Gathers a body that comes in pieces: in memory of its own size, however small they are."""

    __slots__ = ("_first", "_limit", "_rest")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._first = b""
        self._rest: bytearray | None = None

    def add(self, data: bytes) -> None:
        """Keeps a piece.

        Raises:
            ValueError: the body is longer than the limit.
        """
        rest = self._rest
        if rest is None:
            size = len(self._first) + len(data)
            if not self._first:  # nearly always the only one
                self._first = data
            else:
                self._rest = bytearray(self._first)
                self._rest += data
                self._first = b""
        else:
            rest += data
            size = len(rest)
        if size > self._limit:
            raise ValueError(f"it is longer than {self._limit} bytes")

    def take(self) -> bytes:
        """Returns the body so far, and forgets it. A long one is a `bytearray`: to copy it would take long."""
        first, rest = self._first, self._rest
        self._first, self._rest = b"", None
        if rest is None:
            return first
        return bytes(rest) if len(rest) <= MAX_BYTES_PER_TURN else cast("bytes", rest)


class ResponseCollector(BodyBuffer):
    """A sink that gathers a whole answer and calls `done(head, body, error)` once, at its end."""

    __slots__ = ("_done", "_head")

    def __init__(
        self, limit_bytes: int, done: Callable[[ResponseHead, bytes, UpstreamError | None], None] | None = None
    ) -> None:
        """A subclass that overrides `on_done` needs no `done`."""
        self._limit = limit_bytes  # as `super().__init__` does, which costs a call for each leg
        self._first = b""
        self._rest = None
        self._done = done
        self._head = NO_HEAD

    def on_head(self, head: ResponseHead) -> None:
        """Keeps the head."""
        self._head = head

    def on_body(self, data: bytes) -> None:
        """Gathers the body, up to the limit."""
        if self._first or self._rest is not None or len(data) > self._limit:
            self.add(data)
        else:
            self._first = data

    def on_done(self, error: UpstreamError | None) -> None:
        """Passes the answer to `done`."""
        if self._done is not None:
            self._done(self._head, self._first if self._rest is None else self.take(), error)


def describe_error(error: BaseException) -> str:
    """Describes an error in words, without addresses."""
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
