"""Serves one request through an ASGI app: for everything that is not on the short way of `direct_path.py`.

Source of the messages: the ASGI specification 2.3, HTTP connection scope.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Scope

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.downstream import HIGH_WATERMARK_BYTES
from kvparams_proxy.server.response_writer import CONTINUE_RESPONSE, ResponseConnection, ResponseWriter

__all__ = ["ASGIExchange"]

_log: Final = logging.getLogger(__name__)
_LINE: Final = frozenset(b"\r\n\0")


class ASGIExchange(ResponseWriter):
    """A request and its response, as the ASGI app receives and sends them."""

    __slots__ = (
        "_bodiless",
        "_body",
        "_delivered",
        "_event",
        "_expects",
        "_flow",
        "_left",
        "_refused",
        "_started",
        "_whole",
    )

    def __init__(
        self, owner: ResponseConnection, *, keep_alive: bool, http_1_0: bool, expects: bool, bodiless: bool
    ) -> None:
        """Creates the exchange; `serve` runs it.

        Args:
            owner: the connection.
            keep_alive: see `ResponseWriter`.
            http_1_0: likewise.
            expects: whether the client waits for 100 Continue before it sends the body.
            bodiless: whether the response has no body: the method is HEAD.
        """
        super().__init__(owner, keep_alive, http_1_0)
        self._body = bytearray()
        self._whole = False
        self._delivered = False
        """Whether the app has the end of the body."""
        self._expects = expects
        self._bodiless = bodiless
        self._started = self._refused = False
        self._left: int | None = None
        """How much of the body is still to be sent, where its length was said."""
        self._event = asyncio.Event()
        self._flow = asyncio.Event()
        if not owner.write_paused:
            self._flow.set()

    # the request, from the connection

    def feed_body(self, data: bytes) -> None:
        """Receives a piece of the body; what the app does not take stops the connection from reading."""
        if self.complete:
            return
        self._body += data
        self._event.set()
        if len(self._body) > HIGH_WATERMARK_BYTES:
            self.owner.pause_reading()

    def end_body(self) -> None:
        """Hears that the body is complete."""
        self._whole = True
        self._event.set()

    def refuse(self, error: ProxyError) -> None:
        """Answers in place of the app, which hears that the client has left."""
        self.keep_alive = False
        if self._started:
            self._transport.abort()
            return
        self._started = self._refused = True
        body = error.body()
        self.head(error.status, b"content-type: application/json\r\n" + error.headers(), len(body))
        self.body(body)
        self._event.set()
        self.end()

    # the client, from the connection

    def client_gone(self) -> None:
        """Hears that the connection is lost."""
        self.disconnected = True
        self._event.set()
        self._flow.set()

    def client_slow(self) -> None:
        """Hears that the transport's buffer is full."""
        self._flow.clear()

    def client_ready(self) -> None:
        """Hears that the transport's buffer is empty again."""
        self._flow.set()

    # the app

    async def serve(self, app: ASGIApp, scope: Scope) -> None:
        """Serves the request. Never raises for what the app does, but when it is cancelled."""
        try:
            await app(scope, self.receive, self.send)
        except Exception:  # noqa: BLE001  a fault of the app: this request ends and the others go on
            _log.exception("a request ended with a fault of the proxy")
        if not (self.complete or self.disconnected):
            if self._started:
                self._transport.abort()
            else:
                self.refuse(ProxyError(500, "internal_error", "the proxy failed; its log says why"))

    async def receive(self) -> Message:
        """Returns the next piece of the body, or that the client has left or has its answer."""
        if self._expects and not (self._started or self.disconnected):
            self._transport.write(CONTINUE_RESPONSE)
        self._expects = False
        while not (self.disconnected or self.complete):
            if not self._delivered and (self._body or self._whole):
                piece, self._body = bytes(self._body), bytearray()
                self._delivered = self._whole
                self.owner.resume_reading()
                return {"type": "http.request", "body": piece, "more_body": not self._whole}
            self._event.clear()
            await self._event.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Writes what the app answers, as fast as the client takes it.

        Raises:
            RuntimeError: the messages are not in order, or the body is not as long as was said.
        """
        await self._flow.wait()
        if self.disconnected or self._refused:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self._started:
            self._started = True
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self._started and not self.complete:
            self._send(message.get("body", b""), last=not message.get("more_body", False))
        else:
            raise RuntimeError(f"the app sends {kind!r} out of order")

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        lines: list[bytes] = []
        for name, value in headers:
            lower = name.lower()
            if lower == b"content-length":
                self._left = int(value)
            elif lower == b"connection":
                self.keep_alive = self.keep_alive and b"close" not in value.lower()
            elif lower != b"transfer-encoding":
                if not _LINE.isdisjoint(name) or not _LINE.isdisjoint(value):
                    raise RuntimeError("a header holds a line break")
                lines.append(b"%b: %b\r\n" % (lower, value))
        if self._bodiless and self._left is None:
            self._left = 0
        if not self._whole:  # what is left of the body is not read: the connection ends, and the client must know
            self.keep_alive = False
        self.head(status, b"".join(lines), self._left)

    def _send(self, data: bytes, *, last: bool) -> None:
        if not self._bodiless:
            if self._left is not None:
                self._left -= len(data)
                if self._left < 0 or (last and self._left):
                    raise RuntimeError("the body is not as long as its content-length")
            if data:
                self.body(data)
        if last:
            self._event.set()
            self.end()
