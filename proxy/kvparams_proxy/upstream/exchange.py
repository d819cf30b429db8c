"""A request to an engine and its response, independent of the connection."""

import asyncio
from typing import Protocol

from kvparams_proxy.upstream.types import ResponseSink, UpstreamError, UpstreamRequest

__all__ = ["ExchangeConnection", "ExchangeOwner", "UpstreamExchange"]


class ExchangeOwner(Protocol):
    """The pool, as exchanges see it."""

    def restart(self, exchange: "UpstreamExchange") -> None:
        """Runs it on a new connection."""
        ...


class ExchangeConnection(Protocol):
    """The connection, as its exchange sees it."""

    def begin(self, exchange: "UpstreamExchange", sink: ResponseSink | None, request: UpstreamRequest) -> None:
        """Sends a request; the answer goes to `sink`."""
        ...

    def close(self) -> None:
        """Closes at once; whoever waits has been told."""
        ...

    def half_close(self) -> bool:
        """Closes the way to the engine, not the way back; returns whether that was possible."""
        ...

    def pause(self) -> None:
        """Stops reading from the socket."""
        ...

    def resume(self) -> None:
        """Reads from the socket again."""
        ...


class UpstreamExchange:
    """A request and its response: a handle to abort or throttle them."""

    __slots__ = ("_begun", "_connecting", "_connection", "_paused", "_pool", "_request", "_retry", "_sink")

    def __init__(self, pool: ExchangeOwner, request: UpstreamRequest, sink: ResponseSink, once: bool) -> None:
        """`once`: never send the request twice, even where the engine has most likely not seen it."""
        self._pool = pool
        self._request = request
        self._sink: ResponseSink | None = sink
        self._connection: ExchangeConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._retry = not once
        self._begun = False
        self._paused = False

    def abort(self, error: UpstreamError) -> None:
        """Aborts the exchange: its connection is closed, and the sink hears `error`. Does nothing once it is over."""
        sink = self._sink
        if sink is not None:
            error.connected = error.sent = self._begun
            self.discard()
            sink.on_done(error)

    def half_close(self) -> bool:
        """Closes the sending direction, and still receives what the engine may have sent already.

        The connection is not used again. Returns false where that cannot be done: it is not connected, or TLS is in
        between.
        """
        self._retry = False
        return self._sink is not None and self._connection is not None and self._connection.half_close()

    def discard(self) -> None:
        """Ends the exchange; the sink hears nothing more."""
        sink, self._sink = self._sink, None
        if sink is None:
            return
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None  # a task that is cancelled before its first step remembers the exchange
        if self._connection is not None:
            self._connection.close()

    def pause(self) -> None:
        """Stops reading, so that the engine fills the socket and then stalls.

        Without a connection yet, the future one is not read.
        """
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Resumes reading."""
        self._paused = False
        if self._connection is not None:
            self._connection.resume()

    def start_on(self, connection: ExchangeConnection) -> None:
        """Sends the request on a connection; only the pool calls it."""
        self._connection = connection
        self._begun = True
        connection.begin(self, self._sink, self._request)
        if self._paused:
            connection.pause()

    def set_connecting(self, task: asyncio.Task[None]) -> None:
        """Notes that a connection is being made; only the pool calls it."""
        self._connecting = task

    @property
    def is_wanted(self) -> bool:
        """True while a sink still wants the response."""
        return self._sink is not None

    def finish(self, error: UpstreamError | None, *, untouched: bool = False) -> None:
        """Ends the exchange; only the connection calls it.

        `untouched`: a reused connection was closed before any byte came.
        """
        sink = self._sink
        if sink is None:
            return
        self._connection = None
        if untouched and self._retry:  # a stale keep-alive connection: the engine has not seen the request
            self._retry = False
            self._pool.restart(self)
            return
        if error is not None and self._begun:
            error.sent = True
        self._sink = None
        sink.on_done(error)
