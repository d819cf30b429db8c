"""The way back to the client: the interface, and the way that works on any ASGI server.

The faster way, straight to the transport, is `server/direct_path.py`.

Invariant: a writer never waits. It says when to pause and when the client has gone, and drops later writes. Otherwise
answers would pile up for a client that does not read.
"""

import asyncio
from typing import Any, Final, Protocol

from starlette.types import Receive, Send

__all__ = ["HIGH_WATERMARK_BYTES", "ASGIDownstream", "Downstream", "DownstreamObserver"]

HIGH_WATERMARK_BYTES: Final = 64 << 10
"""Bytes not yet taken by the client from which its engine is throttled (uvicorn's own limit too)."""


class DownstreamObserver(Protocol):
    """An object that hears about the client's connection."""

    def client_gone(self) -> None:
        """Hears that the client left before the answer was complete."""
        ...

    def client_slow(self) -> None:
        """Hears that the client reads less than it is sent, so that the sender should pause."""
        ...

    def client_ready(self) -> None:
        """Hears that the client has caught up, so that the sender should go on."""
        ...


class Downstream(Protocol):
    """A response to one client. Call `head`, then `body` as often as needed, then `end`; none of them waits."""

    def watch(self, watcher: DownstreamObserver) -> None:
        """Notifies `watcher` from now on, and at once if the client has left already."""
        ...

    def head(self, status: int, headers: bytes, length: int | None) -> None:
        """Begins the response.

        `headers` are whole lines, each ending in CRLF; `length` is that of the body, or None for a stream.
        """
        ...

    def body(self, data: bytes) -> None:
        """Sends a piece of the body."""
        ...

    def end(self) -> None:
        """Ends the body."""
        ...

    def drop(self) -> None:
        """Breaks the connection to a client that does not read. The watcher hears `client_gone`."""
        ...


class ASGIDownstream:
    """Writes through `send`, by a task of its own; watches `receive` for the client's leaving by another."""

    def __init__(self, receive: Receive, send: Send, *, closes: bool = False) -> None:
        """`closes`: the server is told to close the connection behind the answer."""
        self._closes = closes
        self._receive = receive
        self._send = send
        self._watcher: DownstreamObserver | None = None
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._size = 0
        self._slow = False
        self._gone = False
        self._writer = asyncio.ensure_future(self._write())
        self._reader = asyncio.ensure_future(self._watch())

    def watch(self, watcher: DownstreamObserver) -> None:
        """See `Downstream.watch`."""
        if self._gone:
            watcher.client_gone()
        else:
            self._watcher = watcher

    def head(self, status: int, headers: bytes, length: int | None) -> None:
        """See `Downstream.head`."""
        pairs = [tuple(line.split(b": ", 1)) for line in headers.split(b"\r\n") if line]
        if self._closes:
            pairs.append((b"connection", b"close"))
        if length is not None:
            pairs.append((b"content-length", b"%d" % length))
        self._put({"type": "http.response.start", "status": status, "headers": pairs})

    def body(self, data: bytes) -> None:
        """See `Downstream.body`."""
        self._size += len(data)
        self._put({"type": "http.response.body", "body": data, "more_body": True})
        if self._size > HIGH_WATERMARK_BYTES and not self._slow:
            self._slow = True
            if self._watcher is not None:
                self._watcher.client_slow()

    def end(self) -> None:
        """See `Downstream.end`."""
        self._watcher = None
        self._put({"type": "http.response.body", "body": b"", "more_body": False})

    def drop(self) -> None:
        """See `Downstream.drop`. The server closes the connection when the app returns without an end."""
        self._leave()
        self._writer.cancel()

    async def finished(self) -> None:
        """Waits until the client has taken everything, or has left."""
        try:
            await asyncio.wait([self._writer])
            if not self._writer.cancelled():
                self._writer.result()
        except OSError:  # the server found the client gone while writing (ASGI 2.4)
            self._gone = True

    def close(self) -> None:
        """Stops writing and watching."""
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
            if self._slow and self._size < HIGH_WATERMARK_BYTES // 4:
                self._slow = False
                if self._watcher is not None:
                    self._watcher.client_ready()
            if message["type"] == "http.response.body" and not message["more_body"]:
                return

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()
        self._messages.put_nowait({})

    def _leave(self) -> None:
        self._gone = True
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.client_gone()
