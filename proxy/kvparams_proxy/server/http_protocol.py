"""The HTTP/1.1 server side of one client connection, on httptools: parsing, framing, deadlines, and who answers.

A POST to a path of a `DirectEndpoint` takes the short way (`direct_path.py`), everything else goes to the ASGI app
(`asgi_exchange.py`). Requests are parsed and answered one after the other, one in a turn of the event loop; what a
client sends behind the one that is being answered waits as it came, within a bound. It is read all the same: else
nobody would notice that the client leaves.

Sources: RFC 9110 and RFC 9112; httptools 0.6.4 to 0.9.0, parser/parser.pyx (llhttp 9).
"""

import asyncio
import logging
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.body import BodyBudget, declared_length
from kvparams_proxy.server.asgi_exchange import ASGIExchange
from kvparams_proxy.server.connections import HEAD_S, ClientConnections
from kvparams_proxy.server.direct_path import DirectDownstream, DirectEndpoint
from kvparams_proxy.server.response_writer import CONTINUE_RESPONSE, ResponseWriter, error_response

__all__ = ["HTTPProtocol", "ServerContext"]

_HEAD_BYTES: Final = 64 << 10
"""Of bytes that are not body: a head, or chunk sizes, extensions and trailers without a body byte between them."""
_OVERHEAD: Final = 16
"""A byte of the body pays for so many bytes of framing: a chunk of one byte has five."""
_IDLE_S: Final = 75.0
"""A connection on which no request begins is closed after this time."""
_REQUEST_S: Final = 60.0
"""From the first byte of a request to its last; and for an answer to be taken after its end."""
_LINGER_S: Final = 2.0
"""For a client that still sends to read its refusal: to close at once would reset the connection and discard it."""
_AHEAD_BYTES: Final = 256 << 10
"""A connection is read until so many bytes of pipelined requests wait on it."""
_HEAD_END: Final = b"\r\n\r\n"
_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
"""uri-host [":" port], RFC 9110 section 7.2; empty is allowed."""
_LEFT: Final = (7, 8)
"""TCP_CLOSE and TCP_CLOSE_WAIT: the client has reset the connection or closed its side (Linux, net/tcp_states.h)."""
_FOREVER: Final = float("inf")
_HEEDED: Final = frozenset((b"host", b"expect", b"transfer-encoding", b"content-length"))
"""Headers that say how the request is to be read."""
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What all connections of one server share."""

    loop: asyncio.AbstractEventLoop
    app: ASGIApp
    state: Mapping[str, Any]
    """The lifespan's state; each ASGI request gets a copy."""
    endpoints: Mapping[bytes, DirectEndpoint]
    """By path, as it stands in the request line."""
    connections: ClientConnections
    on_refused: Callable[[ProxyError], None]
    """Hears of what was refused before it was a request."""
    bodies: BodyBudget | None = None
    """The budget for the bodies of all requests and for what waits behind a request."""


class _RequestHead(NamedTuple):
    """The head of a request that may be served."""

    method: bytes
    url: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    keep_alive: bool
    expects: bool
    """Whether the client waits for 100 Continue."""


class HTTPProtocol(asyncio.Protocol):
    """One connection: a `ClientConnections` member, and the owner of the response that is being written."""

    __slots__ = (
        "_ahead",
        "_ahead_at",
        "_bad_host",
        "_behind",
        "_body_left",
        "_current",
        "_ended",
        "_expect",
        "_framing",
        "_good_host",
        "_headers",
        "_headers_done",
        "_hosts",
        "_in_message",
        "_input_ignored",
        "_kept_bytes",
        "_leaving",
        "_length",
        "_lingering",
        "_loop",
        "_more",
        "_parser",
        "_reading_paused",
        "_receiving",
        "_scheduled",
        "_service",
        "_tail",
        "_transfer_encoding",
        "_upgrade",
        "_url",
        "_write_paused",
        "address",
        "limit_s",
        "since_s",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, service: ServerContext) -> None:
        self._service = service
        self._loop = service.loop
        self._parser: Any = httptools.HttpRequestParser(self)
        self._current: DirectDownstream | ASGIExchange | None = None
        """The request that is being received or answered."""
        self._receiving: DirectDownstream | ASGIExchange | None = None
        """The same while its body is coming."""
        self._ahead = b""
        """What came behind the request that is being answered, not parsed yet from `_ahead_at` on."""
        self._ahead_at = 0
        self._behind = bytearray()
        """What came later than that."""
        self._kept_bytes = 0
        """How much both hold, as the budget knows it."""
        self._scheduled = False
        """Whether the next turn of the loop goes on with that."""
        self._input_ignored = False
        """Whether what the client sends is not looked at any more: the last answer is on its way."""
        self._more = False
        """Whether there was something that is not looked at."""
        self._tail = b""
        """The last bytes of a head that is not complete: its end may lie across two reads."""
        self._body_left: int | None = 0
        """Bytes of the body that are still to come; None where chunks say it."""
        self._ended = False
        """Whether a request has ended in the piece that is being parsed."""
        self._lingering = False
        self._leaving = False
        """Whether the connection closes when it is idle: the server is draining."""
        self._reading_paused = False
        self._write_paused = False
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
        self.address = ""
        self.since_s = service.loop.time()
        self.limit_s = _IDLE_S

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the connection; refuses it where there are too many."""
        self.transport = cast("asyncio.Transport", transport)
        peer: object = transport.get_extra_info("peername")
        if isinstance(peer, tuple) and peer:
            self.address = str(cast("tuple[object, ...]", peer)[0])
        if not self._service.connections.add(self) and not transport.is_closing():
            message = "the proxy has as many connections as it may have; try again later"
            self._refuse(ProxyError(503, "service_unavailable", message, code="too_many_connections", retry_after_s=1))

    def data_received(self, data: bytes) -> None:
        """Parses what came, up to the end of one request."""
        if self._input_ignored:
            self._more = True
        elif self._ahead or self._behind or self._busy:
            self._behind += data
            self._account()
        else:
            self._parse(data, 0)

    @property
    def _busy(self) -> bool:
        """Whether the client has to wait: for an answer, or until it has taken one."""
        return (self._current is not None and self._receiving is None) or (self._write_paused and self._current is None)

    def _parse(self, data: bytes, at: int) -> None:
        """Feeds the parser piece by piece: a head, then its body, so that no request is parsed with the one before."""
        if not self._in_message:
            self._framing = 0
        size = len(data)
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
                self._ahead, self._ahead_at = data, at
                self._account()
                self._schedule()
                return

    def _piece_end(self, data: bytes, at: int) -> int:
        """The position up to which `data[at:]` belongs to the head or the body that is coming, as far as may be."""
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

    def _account(self) -> None:
        """Tells the budget of bodies what waits behind the request that is being answered."""
        kept = len(self._ahead) - self._ahead_at + len(self._behind)
        more, self._kept_bytes = kept - self._kept_bytes, kept
        bodies = self._service.bodies
        if bodies is not None and more < 0:
            bodies.release(-more)
        elif bodies is not None and more:
            try:
                bodies.reserve(more)
            except ProxyError:
                self._kept_bytes -= more
                self._drop_ahead()
                self._not_served()
                return
        if kept > _AHEAD_BYTES:
            self.pause_reading()

    def _drop_ahead(self) -> None:
        """Forgets what waits."""
        if self._kept_bytes:
            self._ahead, self._ahead_at, self._behind = b"", 0, bytearray()
            self._account()

    def _schedule(self) -> None:
        """Goes on in the next turn of the loop: requests that are answered at once must not hold up the others."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Parses the next request that waits."""
        self._scheduled = False
        if self._input_ignored or self._busy or self.transport.is_closing():
            return
        data, at = self._ahead, self._ahead_at
        if data:
            self._ahead, self._ahead_at = b"", 0
        else:
            data, self._behind = bytes(self._behind), bytearray()
        self._parse(data, at)
        self._account()
        self.resume_reading()
        if self._behind and not self._busy:
            self._schedule()

    def eof_received(self) -> None:
        """A client that closes its side has left."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells whoever answers, and lets go of everything: a body must not wait for the garbage collector."""
        self._service.connections.remove(self)
        self._input_ignored = True
        self._parser = None
        self._receiving = None
        self._drop_ahead()
        self._headers = []
        current, self._current = self._current, None
        if current is not None:
            current.client_gone()

    def pause_writing(self) -> None:
        """The client is slow."""
        self._write_paused = True
        current = self._current
        if current is None:
            return
        if isinstance(current, ASGIExchange) and self._receiving is not current:
            self._wait()  # an app waits in `send`; executions have a time-out of their own
        current.client_slow()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._write_paused = False
        current = self._current
        if current is not None:
            if self._receiving is not current:
                self.limit_s = _FOREVER
            current.client_ready()
        elif not self._input_ignored:
            self._wait()
            if self._kept_bytes:
                self._schedule()

    # the parser's callbacks

    def on_message_begin(self) -> None:
        """A request begins."""
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
        """A piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer: these are dropped."""
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
        head = _RequestHead(parser.get_method(), self._url, version, headers, keep_alive, self._expect is not None)
        self.limit_s = _REQUEST_S
        self._open(head)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._framing = max(0, self._framing - _OVERHEAD * len(body))
        receiving = self._receiving
        if receiving is not None:
            receiving.feed_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._in_message = False
        self._ended = True
        receiving, self._receiving = self._receiving, None
        if receiving is None:
            return
        self._input_ignored = not receiving.keep_alive
        if not receiving.complete:  # otherwise it was refused before its body had come
            self.limit_s = _FOREVER
            receiving.end_body()

    # the connection, as the response sees it

    @property
    def write_paused(self) -> bool:
        """See `Owner.slow`."""
        return self._write_paused

    def pause_reading(self) -> None:
        """See `Owner.hold`."""
        if not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """See `Owner.read_on`."""
        if self._reading_paused and self._kept_bytes <= _AHEAD_BYTES and not self.transport.is_closing():
            self._reading_paused = False
            self.transport.resume_reading()

    def response_complete(self, exchange: ResponseWriter) -> None:
        """See `Owner.answered`: goes on with the next request, if there is one."""
        if exchange is not self._current:
            return
        self._current = None
        unread = self._receiving is exchange
        if unread or self._leaving or not exchange.keep_alive:
            self._end(linger=unread or self._more)
            return
        self._wait()
        self.resume_reading()
        if self._kept_bytes:
            self._schedule()

    # the connection, as the server sees it

    @property
    def idle(self) -> bool:
        """See `ClientConnection.idle`."""
        return self.limit_s == _IDLE_S and not self._input_ignored

    @property
    def has_left(self) -> bool:
        """See `ClientConnection.has_left`. While something is read, the event loop tells."""
        if not self._reading_paused:
            return False
        sock: socket.socket | None = self.transport.get_extra_info("socket")
        if sock is None or self.transport.is_closing():
            return False
        try:
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _LEFT
        except OSError:
            return False

    def expire(self) -> None:
        """See `ClientConnection.expire`."""
        self.transport.abort()

    def shed(self) -> None:
        """See `ClientConnection.shed`."""
        self._input_ignored = True
        self.transport.close()

    def close_after_response(self) -> None:
        """See `ClientConnection.close_after_response`."""
        self._leaving = True
        if self._current is not None:
            self._current.keep_alive = False

    def fail_incomplete_request(self) -> None:
        """See `ClientConnection.fail_incomplete_request`."""
        current = self._current
        if self._in_message if current is None else self._receiving is current:
            self._fail(ProxyError(503, "service_unavailable", "the proxy is shutting down", code="shutting_down"))

    def close(self) -> None:
        """See `ClientConnection.close`."""
        self._input_ignored = True
        self.transport.close()

    def abort(self) -> None:
        """See `ClientConnection.abort`."""
        self._input_ignored = True
        self.transport.abort()

    # inside

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
                _log.exception("a request could not be taken")
                self._fail(ProxyError(500, "internal_error", "the proxy failed; its log says why"))
            except httptools.HttpParserError:
                if not self._input_ignored:
                    self._fail(_bad(400, "this is not a valid HTTP request"))
            return

    def _without_upgrade(self) -> None:
        """Parses the head once more without its Upgrade header, which a server may ignore (RFC 9110, section 7.8). It
        must then read the request as ever; httptools takes the body for another protocol (its issue 124)."""
        method, url, headers = self._parser.get_method(), self._url, self._headers
        version = self._parser.get_http_version()
        if method == b"CONNECT" or not self._upgrade:
            self._fail(ProxyError(405, "invalid_request_error", f"{method.decode()} is not served here"))
            return
        self._parser = httptools.HttpRequestParser(self)
        self._ended = False
        lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
        self._feed(b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), b"".join(lines)))

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
        """Why the request is refused for its head, or None."""
        if version != "1.1" and version != "1.0":
            return _bad(505, f"HTTP/{version} is not spoken here; HTTP/1.1 is")
        if self._hosts != 1 and (version == "1.1" or self._hosts):
            return _bad(400, "there must be one Host header")
        if self._bad_host:
            return _bad(400, "the Host header is not valid")
        coding = self._transfer_encoding
        if coding is not None:
            if version == "1.0":
                return _bad(400, "HTTP/1.0 has no Transfer-Encoding")
            if coding.strip().lower() != b"chunked":
                return _bad(501, "the only Transfer-Encoding that is understood is chunked")
        if self._expect is not None:
            if version == "1.0":
                self._expect = None
            elif self._expect.lower() != b"100-continue":
                return _bad(417, "the only expectation that is met is 100-continue")
        return None

    def _open(self, head: _RequestHead) -> None:
        """Begins to serve a request, unless its head turns out to be wrong."""
        method, url, version, headers, keep_alive, expects = head
        old = version == "1.0"
        keep_alive = keep_alive and not self._leaving
        endpoint = self._service.endpoints.get(url)
        if endpoint is not None and method == b"POST":
            admission = endpoint.admit(headers)
            direct = DirectDownstream(self, endpoint, admission, keep_alive=keep_alive, http_1_0=old)
            self._current = self._receiving = direct
            if admission.error is not None:
                direct.refuse(admission.error)
            elif expects:
                self.transport.write(CONTINUE_RESPONSE)
            return
        try:
            scope = self._scope(method, url, version, headers)
        except (httptools.HttpParserInvalidURLError, UnicodeError):
            self._fail(_bad(400, "the request target is not valid"))
            return
        exchange = ASGIExchange(self, keep_alive=keep_alive, http_1_0=old, expects=expects, bodiless=method == b"HEAD")
        self._current = self._receiving = exchange
        tasks = self._service.connections.tasks
        task = self._loop.create_task(exchange.serve(self._service.app, scope))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _scope(self, method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
        parsed = httptools.parse_url(url)
        raw_path: bytes = parsed.path or b"/"
        path = raw_path.decode("ascii")
        transport = self.transport
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": method.decode("ascii"),
            "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": parsed.query or b"",
            "root_path": "",
            "headers": headers,
            "server": _endpoint(transport.get_extra_info("sockname")),
            "client": _endpoint(transport.get_extra_info("peername")),
            "state": dict(self._service.state),
        }

    def _wait(self) -> None:
        """The client is waited for: to take what was written, for the rest of a head, or for its next request."""
        self.since_s = self._loop.time()
        self.limit_s = _REQUEST_S if self._write_paused else HEAD_S if self._in_message else _IDLE_S

    def _fail(self, error: ProxyError) -> None:
        """Ends a request whose head or framing is wrong, and the connection with it."""
        if self._input_ignored:
            return
        current = self._current
        if current is not None and self._receiving is current and not current.complete:
            current.refuse(error)
            self._end(linger=True)
        elif current is not None:  # it stands behind a request that is being answered
            self._not_served()
        else:
            self._refuse(error)

    def _not_served(self) -> None:
        """Ends the connection once it has answered what it is answering: what comes then is not what it should be."""
        self._input_ignored = self._more = True
        if self._current is None:
            self._end(linger=True)
        else:
            self._current.keep_alive = False

    def _refuse(self, error: ProxyError) -> None:
        """Answers with an error where there is no request to answer."""
        self._service.on_refused(error)
        self.transport.write(error_response(error))
        self._end(linger=True)

    def _end(self, *, linger: bool) -> None:
        """Closes the connection. `linger`: the client may still be sending, and is given time to read the answer."""
        self._input_ignored = True
        self._drop_ahead()
        self._receiving = None
        if self._lingering or self.transport.is_closing():
            return
        self.since_s = self._loop.time()
        if linger and self.transport.can_write_eof():
            self._lingering = True
            self.resume_reading()
            self.limit_s = _LINGER_S
            self.transport.write_eof()
        else:
            self.limit_s = _REQUEST_S  # for the client to take the rest
            self.transport.close()


def _bad(status: int, message: str) -> ProxyError:
    return ProxyError(status, "invalid_request_error", message)


def _endpoint(name: object) -> tuple[str, int] | None:
    if not isinstance(name, tuple):
        return None
    host, port = cast("tuple[object, ...]", name)[:2]
    return str(host), int(cast("int", port))
