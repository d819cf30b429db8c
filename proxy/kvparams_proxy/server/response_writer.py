"""Writes one HTTP/1.1 response to a transport: status line, framing, body, end.

Both ways to answer share it: `direct_path.DirectDownstream`, without any task or event, and
`asgi_exchange.ASGIExchange`.
"""

import asyncio
from http import HTTPStatus
from typing import Final, Protocol

from kvparams_proxy.errors import ProxyError

__all__ = ["CONTINUE_RESPONSE", "ResponseConnection", "ResponseWriter", "error_response"]

CONTINUE_RESPONSE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}


class ResponseConnection(Protocol):
    """The connection, as a response sees it."""

    transport: asyncio.Transport

    @property
    def write_paused(self) -> bool:
        """True while the client has not read what was written before."""
        ...

    def pause_reading(self) -> None:
        """Stops reading from the client."""
        ...

    def resume_reading(self) -> None:
        """Reads from the client again."""
        ...

    def response_complete(self, exchange: "ResponseWriter") -> None:
        """Hears that `exchange` has written the last byte of its response."""
        ...


class ResponseWriter:
    """Writes one response. Call `head`, then `body` as often as needed, then `end`."""

    __slots__ = ("_chunked", "_pending", "_transport", "complete", "disconnected", "http_1_0", "keep_alive", "owner")

    def __init__(self, owner: ResponseConnection, keep_alive: bool, http_1_0: bool) -> None:
        self.owner = owner
        self._transport = owner.transport
        self._chunked = False
        self._pending = b""
        """The head, which leaves with the first piece of the body in one write."""
        self.keep_alive = keep_alive
        """Whether the connection serves another request after this one."""
        self.http_1_0 = http_1_0
        self.complete = False
        """Whether the response has been written to its end."""
        self.disconnected = False
        """Whether the client has left: nothing is written any more."""

    def head(self, status: int, headers: bytes, length: int | None) -> None:
        """Begins the response.

        Args:
            status: the status code.
            headers: whole lines, each ending in CRLF, without any framing header.
            length: the size of the body in bytes; None for a stream.
        """
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self.http_1_0:  # HTTP/1.0 has no chunks: the end of the connection ends the body
            framing = b""
            self.keep_alive = False
        else:
            framing = b"transfer-encoding: chunked\r\n"
            self._chunked = True
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        self._pending = line + headers + framing + end
        if length == 0:
            self._write(b"")

    def body(self, data: bytes) -> None:
        """Sends a piece of the body."""
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._pending:
            self._write(data)
        elif not self.disconnected:
            self._transport.write(data)

    def end(self) -> None:
        """Ends the body and tells the connection."""
        if self._chunked:
            self._write(b"0\r\n\r\n")
        elif self._pending:  # a head without a body, as HEAD asks for
            self._write(b"")
        self.complete = True
        self.owner.response_complete(self)

    def _write(self, data: bytes) -> None:
        if self._pending:
            data = self._pending + data
            self._pending = b""
        if not self.disconnected:
            self._transport.write(data)


def error_response(error: ProxyError) -> bytes:
    """Returns a whole response that reports `error` and ends the connection."""
    body = error.body()
    line = _STATUS_LINES.get(error.status) or b"HTTP/1.1 %d \r\n" % error.status
    lines = b"content-type: application/json\r\n%bcontent-length: %d\r\nconnection: close\r\n\r\n"
    return line + lines % (error.headers(), len(body)) + body
