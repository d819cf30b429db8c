"""The way back to the client: one interface, two ways to write.

`ASGIDownstream` works on any ASGI server. `DirectDownstream` writes to uvicorn's transport without a task switch for
every event; `RelayProtocol` offers it to the app in the request's scope. The one rule: a writer never waits; it says
when to pause and when the client has gone, and drops what is written after that.
"""

import asyncio
from http import HTTPStatus
from typing import Any, Final, Protocol

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["ASGIDownstream", "DirectDownstream", "Downstream", "RelayProtocol", "Watcher", "open_downstream"]

EXTENSION: Final = "kvparams.downstream"
"""Where in `scope["extensions"]` the server offers a `DirectDownstream`."""
_HIGH_WATER: Final = 64 << 10
"""Bytes not yet taken by the client from which its engine is throttled (uvicorn's own limit too)."""
_HEAD_BYTES: Final = 64 << 10
"""Of a client's request: line, headers, trailers."""
_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}


class Watcher(Protocol):
    """Whoever must know what becomes of the client."""

    def client_gone(self) -> None:
        """It left before the answer was complete."""
        ...

    def client_slow(self) -> None:
        """It takes less than it is given: pause."""
        ...

    def client_ready(self) -> None:
        """It has caught up: go on."""
        ...


class Downstream(Protocol):
    """One answer to one client. `head`, then `body` as often as needed, then `end`; each at once."""

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` from now on. If the client has left already, it hears so now."""
        ...

    def head(self, status: int, headers: bytes, length: int | None) -> None:
        """Begin. `headers` are whole lines, each ending in CRLF; `length` of the body, or None for a stream."""
        ...

    def body(self, data: bytes) -> None:
        """A piece of the body."""
        ...

    def end(self) -> None:
        """The body is complete."""
        ...


class DirectDownstream:
    """Writes to uvicorn's transport. Source of what it touches: uvicorn 0.54.0, httptools_impl.py."""

    __slots__ = ("_chunked", "_cycle", "_protocol", "_waiting", "_watcher")

    def __init__(self, protocol: "RelayProtocol", cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._watcher: Watcher | None = None
        self._chunked = False
        self._waiting: list[bytes] = []

    async def ready(self) -> None:
        """Wait until the client has taken what it was answered before on this connection, or has left."""
        flow = self._protocol.flow
        if flow.write_paused:
            await flow.drain()

    def watch(self, watcher: Watcher) -> None:
        """See `Downstream.watch`."""
        self._watcher = watcher
        if self._cycle.disconnected or self._protocol.transport.is_closing():
            self.client_gone()
        else:
            self._protocol.relayed = self

    def head(self, status: int, headers: bytes, length: int | None) -> None:
        """See `Downstream.head`. It leaves with the first piece of the body, in one write."""
        cycle = self._cycle
        cycle.response_started = True
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif cycle.scope["http_version"] == "1.0":  # knows no chunks: the end of the connection ends the body
            framing = b""
            cycle.keep_alive = False
        else:
            framing = b"transfer-encoding: chunked\r\n"
            self._chunked = True
        close = b"" if cycle.keep_alive else b"connection: close\r\n"
        self._waiting.append(b"%b%b%b%b\r\n" % (line, headers, framing, close))
        if length is None:
            return
        if length == 0:
            self._write(b"")

    def body(self, data: bytes) -> None:
        """See `Downstream.body`."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        """See `Downstream.end`."""
        if self._chunked:
            self._write(b"0\r\n\r\n")
        cycle = self._finish()
        if not cycle.keep_alive:
            self._protocol.transport.close()
        cycle.on_response()

    def client_gone(self) -> None:
        """For the protocol: the connection is lost."""
        self._cycle.disconnected = True
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.client_gone()

    def client_slow(self) -> None:
        """For the protocol: the transport's buffer is full."""
        if self._watcher is not None:
            self._watcher.client_slow()

    def client_ready(self) -> None:
        """For the protocol: the transport's buffer is empty again."""
        if self._watcher is not None:
            self._watcher.client_ready()

    def _write(self, data: bytes) -> None:
        if self._waiting:
            self._waiting.append(data)
            data = b"".join(self._waiting)
            self._waiting.clear()
        if not self._cycle.disconnected:
            self._protocol.transport.write(data)

    def _finish(self) -> RequestResponseCycle:
        self._watcher = None
        self._protocol.relayed = None
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        return cycle


class RelayProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, which also offers a `DirectDownstream` for each request."""

    relayed: DirectDownstream | None = None
    """The one that is being written to, if any."""
    _unheard = 0
    """Bytes received since the parser last had something to say: of headers or trailers that have not ended yet."""

    def data_received(self, data: bytes) -> None:
        """Refuse headers without an end: uvicorn would keep all of them."""
        self._unheard += len(data)
        super().data_received(data)
        if self._unheard > _HEAD_BYTES and not self.transport.is_closing():
            if self.relayed is None:
                self.send_400_response("The headers are too long.")
            else:  # of a request behind the one that is being answered
                self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._unheard = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Offer it before the app's task has begun."""
        self._unheard = 0
        super().on_headers_complete()
        self.scope["extensions"] = {EXTENSION: DirectDownstream(self, self.cycle)}  # pyright: ignore[reportGeneralTypeIssues]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the relay at once; uvicorn would tell the app when it next asks."""
        super().connection_lost(exc)
        if self.relayed is not None:
            self.relayed.client_gone()

    def pause_writing(self) -> None:
        """The client is slow."""
        super().pause_writing()
        if self.relayed is not None:
            self.relayed.client_slow()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        if self.relayed is not None:
            self.relayed.client_ready()


class ASGIDownstream:
    """Writes through `send`, by a task of its own; watches `receive` for the client's leaving by another."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._watcher: Watcher | None = None
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._size = 0
        self._slow = False
        self._gone = False
        self._writer = asyncio.ensure_future(self._write())
        self._reader = asyncio.ensure_future(self._watch())

    def watch(self, watcher: Watcher) -> None:
        """See `Downstream.watch`."""
        if self._gone:
            watcher.client_gone()
        else:
            self._watcher = watcher

    def head(self, status: int, headers: bytes, length: int | None) -> None:
        """See `Downstream.head`."""
        pairs = [tuple(line.split(b": ", 1)) for line in headers.split(b"\r\n") if line]
        if length is not None:
            pairs.append((b"content-length", b"%d" % length))
        self._put({"type": "http.response.start", "status": status, "headers": pairs})

    def body(self, data: bytes) -> None:
        """See `Downstream.body`."""
        self._size += len(data)
        self._put({"type": "http.response.body", "body": data, "more_body": True})
        if self._size > _HIGH_WATER and not self._slow:
            self._slow = True
            if self._watcher is not None:
                self._watcher.client_slow()

    def end(self) -> None:
        """See `Downstream.end`."""
        self._watcher = None
        self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def finished(self) -> None:
        """Wait until the client has taken everything, or has left."""
        try:
            await self._writer
        except OSError:  # the server found the client gone while writing (ASGI 2.4)
            self._gone = True

    def close(self) -> None:
        """Nothing will be written or heard any more, whatever came between."""
        self._reader.cancel()
        self._writer.cancel()

    def _put(self, message: dict[str, Any]) -> None:
        if not self._gone:
            self._messages.put_nowait(message)

    async def _write(self) -> None:
        while True:
            message = await self._messages.get()
            if not message:
                return
            await self._send(message)
            self._size -= len(message.get("body", b""))
            if self._slow and self._size < _HIGH_WATER // 4:
                self._slow = False
                if self._watcher is not None:
                    self._watcher.client_ready()
            if message["type"] == "http.response.body" and not message["more_body"]:
                return

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.client_gone()
        self._messages.put_nowait({})


async def open_downstream(scope: Scope, receive: Receive, send: Send) -> Downstream:
    """The fastest way this server offers."""
    offered = scope.get("extensions", {}).pop(EXTENSION, None)  # else scope and answer would keep each other alive
    if not isinstance(offered, DirectDownstream):
        return ASGIDownstream(receive, send)
    await offered.ready()
    return offered
