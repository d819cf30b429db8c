"""The HTTP/1.1 server side of one client connection: deadlines, and who answers.

A POST to a path of a `DirectEndpoint` takes the short way (`direct_path.py`), everything else goes to the ASGI app
(`asgi_exchange.py`). `http_parser.py` parses requests; `pipelined_input.py` keeps what comes behind the current one.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final, cast

import httptools
from starlette.types import ASGIApp

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.body import BodyBudget
from kvparams_proxy.server.asgi_exchange import ASGIExchange
from kvparams_proxy.server.connections import HEAD_S, ClientConnections
from kvparams_proxy.server.direct_path import DirectDownstream, DirectEndpoint
from kvparams_proxy.server.http_parser import bad_request
from kvparams_proxy.server.pipelined_input import PipelinedInput
from kvparams_proxy.server.request_head import RequestHead
from kvparams_proxy.server.response_writer import CONTINUE_RESPONSE, ResponseWriter, error_response

__all__ = ["HTTPProtocol", "ServerContext"]

_IDLE_S: Final = 75.0
"""A connection on which no request begins is closed after this time."""
_REQUEST_S: Final = 60.0
"""From the first byte of a request to its last; and for an answer to be taken after its end."""
_LINGER_S: Final = 2.0
"""For a client that still sends to read its refusal: to close at once would reset the connection and discard it."""
_LEFT: Final = (7, 8)
"""TCP_CLOSE and TCP_CLOSE_WAIT: the client has reset the connection or closed its side (Linux, net/tcp_states.h)."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The context that all connections of one server share."""

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


class HTTPProtocol(PipelinedInput, asyncio.Protocol):
    """A client connection: a `ClientConnections` member, and the owner of the response that is being written."""

    __slots__ = ("_leaving", "_lingering", "_service", "address")

    def __init__(self, service: ServerContext) -> None:
        super().__init__(service.loop, _IDLE_S, service.bodies)
        self._service = service
        self._lingering = False
        self._leaving = False
        """Whether the connection closes when it is idle: the server is draining."""
        self.address = ""

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the connection; refuses it where there are too many."""
        self.transport = cast("asyncio.Transport", transport)
        peer: object = transport.get_extra_info("peername")
        if isinstance(peer, tuple) and peer:
            self.address = str(cast("tuple[object, ...]", peer)[0])
        if not self._service.connections.add(self) and not transport.is_closing():
            message = "the proxy has reached its limit of connections; try again later"
            self._refuse(ProxyError(503, "service_unavailable", message, code="too_many_connections", retry_after_s=1))

    def eof_received(self) -> None:
        """Treats a client that closes its side as gone."""

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
        """Hears that the client is slow."""
        self._write_paused = True
        current = self._current
        if current is None:
            return
        if self._receiving is not current:
            self._limit_response()
        current.client_slow()

    def resume_writing(self) -> None:
        """Hears that the client has caught up."""
        self._write_paused = False
        current = self._current
        if current is not None:
            if self._receiving is not current:
                self._limit_response()
            current.client_ready()
        elif not self._input_ignored:
            self._wait()
            if self._kept_bytes:
                self._schedule()

    # the connection, as the response sees it

    @property
    def write_paused(self) -> bool:
        """See `ResponseConnection.write_paused`."""
        return self._write_paused

    def response_complete(self, exchange: ResponseWriter) -> None:
        """See `ResponseConnection.response_complete`: goes on with the next request, if there is one."""
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
    def has_unsent(self) -> bool:
        """See `ClientConnection.has_unsent`."""
        return self.transport.get_write_buffer_size() > 0

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

    def _open(
        self,
        method: bytes,
        url: bytes,
        version: str,
        headers: list[tuple[bytes, bytes]],
        keep_alive: bool,
        expects: bool,
    ) -> None:
        """Begins to serve a request, unless its head turns out to be wrong."""
        self.limit_s = _REQUEST_S
        old = version == "1.0"
        keep_alive = keep_alive and not self._leaving
        endpoint = self._service.endpoints.get(url)
        if endpoint is not None and method == b"POST":
            admission = endpoint.admit(headers)
            direct = DirectDownstream(self, endpoint, admission, keep_alive, old)
            self._current = self._receiving = direct
            if admission.error is not None:
                direct.refuse(admission.error)
            elif expects:
                self.transport.write(CONTINUE_RESPONSE)
            return
        try:
            head = RequestHead(method, url, version, headers)
            scope = head.asgi_scope(self.transport, self._service.state)
        except (httptools.HttpParserInvalidURLError, UnicodeError):
            self._fail(bad_request(400, "the request target is not valid"))
            return
        exchange = ASGIExchange(self, keep_alive=keep_alive, http_1_0=old, expects=expects, bodiless=method == b"HEAD")
        self._current = self._receiving = exchange
        tasks = self._service.connections.tasks
        task = self._loop.create_task(exchange.serve(self._service.app, scope))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _limit_response(self) -> None:
        if self._write_paused and isinstance(self._current, ASGIExchange):
            self._wait()  # an app waits in `send`; executions have a time-out of their own
        else:
            self.limit_s = inf

    def _wait(self) -> None:
        """Starts the time-out for the client: to read the response, for the rest of a head, or for its next request."""
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
            self.limit_s = _REQUEST_S if self.transport.get_write_buffer_size() else _LINGER_S
            self.transport.write_eof()
        else:
            self.limit_s = _REQUEST_S  # for the client to take the rest
            self.transport.close()
