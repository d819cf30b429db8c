"""uvicorn's HTTP/1.1 protocol with a short way for the requests that matter.

A generating request goes from the parser to the proxy and its answer to the transport, with no ASGI message, task or
event in between; everything else goes through uvicorn as ever. Source of what is touched: uvicorn 0.54.0,
protocols/http/httptools_impl.py. The one rule: what is answered here is a request like any other to uvicorn: it counts
in its shutdown, and requests behind it on the connection wait for it.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvparams_proxy.clients.downstream import Downstream, Watcher
from kvparams_proxy.clients.generate import Admission
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.telemetry.account import Refusal

__all__ = ["DIRECT", "DirectDownstream", "DirectEndpoint", "DirectProtocol"]

DIRECT: Final = "kvparams.direct"
"""Where in the lifespan's state the app offers its `DirectEndpoint`s, by path."""
_log: Final = logging.getLogger(__name__)
_HEAD_BYTES: Final = 64 << 10
"""Of a client's request: line, headers, trailers."""
_BODY_S: Final = 60.0
"""For a whole request to arrive, and for a whole answer to be taken after its end."""
_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}


class DirectEndpoint(Protocol):
    """What is done with a generating request."""

    max_bytes: int
    """Of its body."""

    def admit(self, headers: list[tuple[bytes, bytes]]) -> Admission:
        """Look at the headers, whose names are in lower case, before the body comes."""
        ...

    def begin(self, admission: Admission, body: bytes, downstream: Downstream) -> None:
        """Answer it, now or later, through `downstream`."""
        ...

    def refuse(self, admission: Admission, error: ProxyError, downstream: Downstream) -> None:
        """Answer with an error before the body has come."""
        ...


class _NoEvent:
    """What nobody waits for."""

    def set(self) -> None:
        """uvicorn sets a cycle's event when its client leaves."""


_NO_EVENT: Final = _NoEvent()


class DirectDownstream:
    """One such request and its answer: see `Downstream`. It stands where uvicorn keeps its `RequestResponseCycle`."""

    __slots__ = (
        "_admission",
        "_chunked",
        "_endpoint",
        "_parts",
        "_protocol",
        "_size",
        "_waiting",
        "_watcher",
        "disconnected",
        "http_1_0",
        "keep_alive",
        "message_event",
        "response_complete",
    )

    def __init__(
        self, protocol: "DirectProtocol", endpoint: DirectEndpoint, admission: Admission, keep_alive: bool
    ) -> None:
        self._protocol = protocol
        self._endpoint = endpoint
        self._admission = admission
        self._parts: list[bytes] = []
        self._size = 0
        self._watcher: Watcher | None = None
        self._chunked = False
        self._waiting = b""
        self.message_event = _NO_EVENT
        self.disconnected = False
        self.response_complete = False
        self.keep_alive = keep_alive
        self.http_1_0 = False

    # the request, from the protocol

    def more(self, data: bytes) -> None:
        """A piece of its body."""
        self._size += len(data)
        if self._size <= self._endpoint.max_bytes:
            self._parts.append(data)
        elif not self.response_complete:
            message = f"the body is larger than {self._endpoint.max_bytes} bytes"
            self.refuse(ProxyError(413, "invalid_request_error", message))

    def complete(self) -> None:
        """All of it is here."""
        parts = self._parts
        self._parts = []
        try:
            self._endpoint.begin(self._admission, parts[0] if len(parts) == 1 else b"".join(parts), self)
        except Exception:  # noqa: BLE001  whatever it is, this connection ends and the others go on
            _log.exception("a request ended with a fault of the proxy")
            self.drop()

    def refuse(self, error: ProxyError) -> None:
        """Answer with an error, before the body is there: it is not waited for."""
        self.keep_alive = False
        self._endpoint.refuse(self._admission, error, self)

    # the answer, as `Downstream`

    def watch(self, watcher: Watcher) -> None:
        """See `Downstream.watch`."""
        self._watcher = watcher
        if self.disconnected or self._protocol.transport.is_closing():
            self.client_gone()
        elif self._protocol.flow.write_paused:
            watcher.client_slow()

    def head(self, status: int, headers: bytes, length: int | None) -> None:
        """See `Downstream.head`. It leaves with the first piece of the body, in one write."""
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self.http_1_0:  # knows no chunks: the end of the connection ends the body
            framing = b""
            self.keep_alive = False
        else:
            framing = b"transfer-encoding: chunked\r\n"
            self._chunked = True
        close = b"" if self.keep_alive else b"connection: close\r\n"
        self._waiting = b"%b%b%b%b\r\n" % (line, headers, framing, close)
        if length == 0:
            self._write(b"")

    def body(self, data: bytes) -> None:
        """See `Downstream.body`."""
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._waiting:
            self._write(data)
        elif not self.disconnected:
            self._protocol.transport.write(data)

    def end(self) -> None:
        """See `Downstream.end`."""
        if self._chunked:
            self._write(b"0\r\n\r\n")
        self._watcher = None
        self.response_complete = True
        if not self.keep_alive:
            self._protocol.transport.close()
        self._protocol.answered()

    def _write(self, data: bytes) -> None:
        if self._waiting:
            data = self._waiting + data
            self._waiting = b""
        if not self.disconnected:
            self._protocol.transport.write(data)

    def drop(self) -> None:
        """See `Downstream.drop`."""
        self._protocol.transport.abort()
        self.client_gone()

    # the client, from the protocol

    def client_gone(self) -> None:
        """The connection is lost."""
        self.disconnected = True
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.client_gone()

    def client_slow(self) -> None:
        """The transport's buffer is full."""
        if self._watcher is not None:
            self._watcher.client_slow()

    def client_ready(self) -> None:
        """The transport's buffer is empty again."""
        if self._watcher is not None:
            self._watcher.client_ready()


class DirectProtocol(HttpToolsProtocol):
    """See the module."""

    parser: Any
    """An `httptools.HttpRequestParser`."""
    cycle: Any
    """uvicorn's `RequestResponseCycle`, or what stands in its place."""
    _direct: DirectDownstream | None = None
    """The request that is being received or answered here, if any."""
    _unheard = 0
    """Bytes received since the parser last had something to say: of headers or trailers that have not ended yet."""
    _since_s = 0.0
    """When the connection began to wait: for a request, for the rest of one, for its answer to be taken."""
    _asgi: RequestResponseCycle | None = None
    """The request that uvicorn answers now, or answered last; `cycle` is the one that came last."""
    _busy = False
    """Whether a whole request is being answered: then nobody is waited for."""
    _held = False
    """Whether the client is not listened to before it has taken its answers: their number would have no bound."""
    _timer = None

    def connection_made(self, transport: Any) -> None:
        """A client has come. One timer watches it for as long as it stays; requests only note the time."""
        super().connection_made(transport)
        self._endpoints: Mapping[bytes, DirectEndpoint] = self.app_state.get(DIRECT, {})
        self._since_s = self.loop.time()
        self._rest()

    def data_received(self, data: bytes) -> None:
        """Parse what came; refuse what is not HTTP, and headers without an end: uvicorn would keep all of them."""
        self._unheard += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse("this is not a valid HTTP request")
            return
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()
        if self._unheard > _HEAD_BYTES and not self.transport.is_closing():
            self._refuse("the headers are too long")

    def on_message_begin(self) -> None:
        """A request begins. What only uvicorn's own way needs is made when it is taken."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        if not self.flow.write_paused:  # asking for more is no reason to be waited for
            self._since_s = self.loop.time()

    def on_headers_complete(self) -> None:
        """Choose the way."""
        self._unheard = 0
        endpoint = self._endpoints.get(self.url)
        parser = self.parser
        if (
            endpoint is not None
            and (self.cycle is None or self.cycle.response_complete)
            and not self.expect_100_continue
            and parser.get_method() == b"POST"
            and not parser.should_upgrade()
        ):
            old = parser.get_http_version() == "1.0"
            admission = endpoint.admit(self.headers)
            self.headers = []  # nobody looks at them again
            direct = DirectDownstream(self, endpoint, admission, not old and parser.should_keep_alive())
            direct.http_1_0 = old
            self._direct = direct
            self.cycle = direct
            if admission.error is not None:
                direct.refuse(admission.error)
            return
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers.extend(headers)  # the scope holds this very list
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._unheard = 0
        if self._direct is not None and self.cycle is self._direct:
            self._direct.more(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        direct = self._direct
        if direct is None or self.cycle is not direct:
            super().on_message_complete()
            self._busy = not self.cycle.response_complete
        elif not direct.response_complete:
            self._busy = True
            direct.complete()
            if self._held and not direct.response_complete:  # it is listened to, so that its leaving is noticed
                self._held = False
                self.flow.resume_reading()

    def answered(self) -> None:
        """For the answer: it is complete."""
        self._direct = None
        self.on_response_complete()

    def on_response_complete(self) -> None:
        """Go on with the next request, if there is one already."""
        self.server_state.total_requests += 1
        self._busy = False
        self._since_s = self.loop.time()
        if self.transport.is_closing():
            return
        if self.pipeline:
            self.flow.resume_reading()
            self._busy = True
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self.flow.write_paused:
            self._hold()
        elif self.flow.read_paused:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._asgi = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever answers at once; uvicorn would tell the app when it next asks, and only the last request's."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)
        if self._asgi is not None and not self._asgi.response_complete:
            self._asgi.disconnected = True
            self._asgi.message_event.set()
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.client_gone()

    def pause_writing(self) -> None:
        """The client is slow."""
        super().pause_writing()
        if self._direct is not None:
            self._direct.client_slow()
        elif not self._busy:
            self._hold()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self._since_s = self.loop.time()
        if self._held:
            self._held = False
            if not self.pipeline and not self.transport.is_closing():
                self.flow.resume_reading()
        if self._direct is not None:
            self._direct.client_ready()

    def _hold(self) -> None:
        if not self.transport.is_closing():
            self._held = True
            self.flow.pause_reading()

    def _unset_keepalive_if_required(self) -> None:
        """There is no timer for each request here: see `_rest`."""

    def _rest(self) -> None:
        """Close a connection on which a client has been waited for for too long; look again later otherwise."""
        now = self.loop.time()
        if self._busy and (self._direct is not None or not self.flow.write_paused):
            self._since_s = now
        limit_s = self.timeout_keep_alive if self.cycle is None or self.cycle.response_complete else _BODY_S
        left_s = self._since_s + limit_s - now
        if left_s <= 0:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(min(max(left_s, 1.0), limit_s), self._rest)

    def _refuse(self, message: str) -> None:
        """Not a request that could be answered in its turn."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # it stands behind, or within, one that is being answered
            return
        error = ProxyError(400, "invalid_request_error", message)
        if (resources := self.app_state.get("resources")) is not None:
            resources.metrics.refused(Refusal("", b"", error))
        body = error.body()
        lines = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(_STATUS_LINES[400] + lines + body)
        self.transport.close()
