"""Parses the requests of one client connection, on httptools: heads, bodies, and what is wrong with them.

Input goes to the parser piece by piece, a head and then its body, so that no request is parsed with the one before it.
A request whose head is ordinary is read by native code, where there is some, and httptools sees nothing of it.

Sources: RFC 9110 and RFC 9112; httptools 0.6.4 to 0.9.0, parser/parser.pyx (llhttp 9).
"""

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from typing import Any, Final

import httptools

from kvparams.native import NATIVE
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.body import declared_length
from kvparams_proxy.server.asgi_exchange import ASGIExchange
from kvparams_proxy.server.connections import HEAD_S
from kvparams_proxy.server.direct_path import DirectDownstream

__all__ = ["RequestParser", "bad_request"]

_HEAD_BYTES: Final = 64 << 10
"""Of bytes that are not body: a head, or chunk sizes, extensions and trailers without a body byte between them."""
_OVERHEAD: Final = 16
"""A byte of the body pays for so many bytes of framing: a chunk of one byte has five."""
_HEAD_END: Final = b"\r\n\r\n"
_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
"""uri-host [":" port], RFC 9110 section 7.2; empty is allowed."""
_HEEDED: Final = frozenset((b"host", b"expect", b"transfer-encoding", b"content-length"))
"""Headers that say how the request is to be read."""
_log: Final = logging.getLogger(__name__)


class RequestParser(ABC):
    """The parsing half of a connection. The subclass answers requests and ends the connection."""

    __slots__ = (
        "_bad_host",
        "_body_left",
        "_ended",
        "_expect",
        "_framing",
        "_good_host",
        "_headers",
        "_headers_done",
        "_hosts",
        "_in_message",
        "_input_ignored",
        "_length",
        "_loop",
        "_more",
        "_ordinary",
        "_parser",
        "_receiving",
        "_tail",
        "_transfer_encoding",
        "_upgrade",
        "_url",
        "limit_s",
        "since_s",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        """`limit_s`: the time for the first request to begin."""
        self._loop = loop
        self._parser: Any = httptools.HttpRequestParser(self)
        self._receiving: DirectDownstream | ASGIExchange | None = None
        """The request whose body is coming."""
        self._input_ignored = False
        """Whether what the client sends is not looked at any more: the last answer is on its way."""
        self._more = False
        """Whether there was something that is not looked at."""
        self._ordinary = False
        """Whether native code has read the head of the request that is coming."""
        self._tail = b""
        """The last bytes of a head that is not complete: its end may lie across two reads."""
        self._body_left: int | None = 0
        """Bytes of the body that are still to come; None where chunks say it."""
        self._ended = False
        """Whether a request has ended in the piece that is being parsed."""
        self._framing = 0
        """Bytes that have come since there was progress: a head, or a piece of a body."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._headers_done = False
        self._in_message = False
        """Whether a request has begun to arrive and is not whole."""
        self._hosts = 0
        self._good_host: bytes | None = None
        """A Host header that was found valid: clients repeat theirs."""
        self._bad_host = False
        self._transfer_encoding: bytes | None = None
        self._length = 0
        """The Content-Length, as the parser has accepted it."""
        self._expect: bytes | None = None
        self._upgrade = False
        self.since_s = loop.time()
        self.limit_s = limit_s

    # what the subclass does

    @abstractmethod
    def _open(
        self,
        method: bytes,
        url: bytes,
        version: str,
        headers: list[tuple[bytes, bytes]],
        keep_alive: bool,
        expects: bool,
    ) -> None:
        """Begins to serve a request.

        Args:
            method: of the request, as are the next three.
            url: as it stands in the request line.
            version: of HTTP.
            headers: their names in lower case.
            keep_alive: whether the client wants to go on with another request.
            expects: whether it waits for 100 Continue.
        """

    @abstractmethod
    def _limit_response(self) -> None:
        """Sets the time-out for the client while its request, which is whole, is answered."""

    @abstractmethod
    def _keep(self, data: bytes, at: int) -> None:
        """Keeps `data[at:]`, which stands behind the end of a request, until that is answered."""

    @abstractmethod
    def _fail(self, error: ProxyError) -> None:
        """Ends a request whose head or framing is wrong, and the connection with it."""

    @abstractmethod
    def _not_served(self) -> None:
        """Ends the connection once it has answered what it is answering."""

    # pieces

    def _parse(self, data: bytes, at: int) -> None:
        """Feeds the parser piece by piece: a head, then its body, so that no request is parsed with the one before."""
        size = len(data)
        if not self._in_message:
            self._framing = 0
            if NATIVE is not None and not self._tail and (found := NATIVE.request_head(data, at)) is not None:
                at = self._begin(*found)
        if self._ordinary:
            self._parse_body(data, at)
            return
        while at < size:
            end = self._piece_end(data, at)
            if end == at:
                message = f"more than {_HEAD_BYTES} bytes of headers, trailers or chunk extensions"
                self._fail(ProxyError(431, "invalid_request_error", message))
                return
            self._framing += end - at
            self._ended = False
            self._feed(data if end - at == size else memoryview(data)[at:end])
            at = end
            if self._input_ignored:
                self._more = self._more or at < size
                return
            if self._ended and at < size:
                self._keep(data, at)
                return

    def _begin(self, end: int, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], length: int) -> int:
        """Begins a request whose head native code has read. Returns the position behind the head."""
        self._in_message = self._headers_done = self._ordinary = True
        self._body_left = length
        self.since_s = self._loop.time()
        try:
            self._open(method, target, "1.1", headers, True, False)
        except Exception:  # noqa: BLE001  a fault of the proxy: the client is told, as it is where httptools calls
            self._fail_internally()
        return end

    def _parse_body(self, data: bytes, at: int) -> None:
        """Passes on the body of an ordinary request."""
        left = self._body_left or 0
        end = min(at + left, len(data))
        if end > at:
            self._body_left = left = left - (end - at)
            receiving = self._receiving
            if receiving is not None:
                receiving.feed_body(data[at:end])
        if self._input_ignored:
            self._more = self._more or end < len(data)
            return
        if left == 0:
            self._ordinary = False
            self.on_message_complete()
            if self._input_ignored:
                self._more = self._more or end < len(data)
            elif end < len(data):
                self._keep(data, end)

    def _piece_end(self, data: bytes, at: int) -> int:
        """Returns the end of the head or body that `data[at:]` belongs to, as far as may be parsed."""
        size = len(data)
        if self._in_message and self._headers_done:
            left = self._body_left
            if left is not None:
                end = min(at + left, size)
                self._body_left = left - (end - at)
                return end
            return min(at + max(0, _HEAD_BYTES - self._framing), size)
        if not self._in_message and data[at] in b"\r\n":  # empty lines before a request are allowed
            return min(size - len(data[at:].lstrip(b"\r\n")), at + max(0, _HEAD_BYTES - self._framing))
        tail = self._tail
        found = (tail + data[at : at + len(_HEAD_END)]).find(_HEAD_END) if tail else -1
        if found >= 0:
            end = at + found + len(_HEAD_END) - len(tail)
        else:
            found = data.find(_HEAD_END, at)
            end = size if found < 0 else found + len(_HEAD_END)
        self._tail = (tail + data[max(at, end - 3) : end])[-3:] if found < 0 else b""
        return min(end, at + max(0, _HEAD_BYTES - self._framing))

    def _feed(self, data: bytes | memoryview) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._input_ignored:
                    return
                data = memoryview(data)[upgrade.args[0] :]
                self._without_upgrade()
                if data and not self._input_ignored:
                    continue
            except httptools.HttpParserCallbackError:
                self._fail_internally()
            except httptools.HttpParserError:
                if not self._input_ignored:
                    self._fail(bad_request(400, "this is not a valid HTTP request"))
            return

    def _fail_internally(self) -> None:
        """Ends a request with which something in the proxy has failed."""
        _log.exception("a request could not be taken")
        self._fail(ProxyError(500, "internal_error", "the proxy failed; its log says why"))

    def _without_upgrade(self) -> None:
        """Parses the head once more without its Upgrade header, which a server may ignore (RFC 9110, section 7.8).

        It must then read the request as ever; httptools takes the body for another protocol (its issue 124).
        """
        method, url, headers = self._parser.get_method(), self._url, self._headers
        version = self._parser.get_http_version()
        if method == b"CONNECT" or not self._upgrade:
            self._fail(ProxyError(405, "invalid_request_error", f"{method.decode()} is not served here"))
            return
        self._parser = httptools.HttpRequestParser(self)
        self._ended = False
        lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
        self._feed(b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), b"".join(lines)))

    # httptools' callbacks

    def on_message_begin(self) -> None:
        """Handles the beginning of a request."""
        if self._ended:  # behind the last chunk of another one, in one piece with it
            self._not_served()
        self._in_message = True
        self._url = b""
        self._headers = []
        self._headers_done = False
        self._hosts = self._length = 0
        self._bad_host = self._upgrade = False
        self._transfer_encoding = self._expect = None
        if not self._input_ignored:
            self.since_s = self._loop.time()
            self.limit_s = HEAD_S

    def on_url(self, url: bytes) -> None:
        """Receives a piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receives a header. Trailers are dropped."""
        if self._headers_done:
            return
        name = name.lower()
        if name in _HEEDED:
            self._heed(name, value)
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Chooses who answers."""
        self._framing = 0
        self._headers_done = True
        self._body_left = None if self._transfer_encoding is not None else self._length
        if self._input_ignored:
            return
        parser = self._parser
        if parser.should_upgrade():
            self._upgrade = True  # httptools takes no body now: see `_without_upgrade`
            return
        version = parser.get_http_version()
        ordinary = version == "1.1" and self._hosts == 1 and not self._bad_host and self._transfer_encoding is None
        if not ordinary or self._expect is not None:
            error = self._head_error(version)
            if error is not None:
                self._fail(error)
                return
        headers, self._headers = self._headers, []
        keep_alive = version == "1.1" and parser.should_keep_alive()
        self._open(parser.get_method(), self._url, version, headers, keep_alive, self._expect is not None)

    def on_body(self, body: bytes) -> None:
        """Receives a piece of the body."""
        self._framing = max(0, self._framing - _OVERHEAD * len(body))
        receiving = self._receiving
        if receiving is not None:
            receiving.feed_body(body)

    def on_message_complete(self) -> None:
        """Handles the end of a request."""
        self._in_message = False
        self._ended = True
        receiving, self._receiving = self._receiving, None
        if receiving is None:
            return
        self._input_ignored = not receiving.keep_alive
        if not receiving.complete:  # otherwise it was refused before its body had come
            self._limit_response()
            receiving.end_body()

    # heads

    def _heed(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
            if value != self._good_host:
                if _HOST.fullmatch(value) is None:
                    self._bad_host = True
                else:
                    self._good_host = value
        elif name == b"content-length":
            self._length = declared_length(value)  # the parser has accepted it
        elif name == b"expect":
            self._expect = value
        else:
            known = self._transfer_encoding
            self._transfer_encoding = value if known is None else b"%b, %b" % (known, value)

    def _head_error(self, version: str) -> ProxyError | None:
        """Returns the reason to refuse the request for its head, or None."""
        if version != "1.1" and version != "1.0":
            return bad_request(505, f"HTTP/{version} is not supported; use HTTP/1.1")
        if self._hosts != 1 and (version == "1.1" or self._hosts):
            return bad_request(400, "there must be one Host header")
        if self._bad_host:
            return bad_request(400, "the Host header is not valid")
        coding = self._transfer_encoding
        if coding is not None:
            if version == "1.0":
                return bad_request(400, "HTTP/1.0 has no Transfer-Encoding")
            if coding.strip().lower() != b"chunked":
                return bad_request(501, "the only supported Transfer-Encoding is chunked")
        if self._expect is not None:
            if version == "1.0":
                self._expect = None
            elif self._expect.lower() != b"100-continue":
                return bad_request(417, "the only supported expectation is 100-continue")
        return None


def bad_request(status: int, message: str) -> ProxyError:
    """Returns the error of a request that is not valid."""
    return ProxyError(status, "invalid_request_error", message)
