"""The short way for the requests that matter: from the HTTP parser to the proxy, from the proxy to the transport.

A generating request takes no ASGI message, task or event on this way. Everything else goes through `asgi_exchange.py`.
"""

import logging
from typing import Final, Protocol

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.body import BodyBudget, RequestBody
from kvparams_proxy.requests.downstream import Downstream, DownstreamObserver
from kvparams_proxy.server.admission import Admission
from kvparams_proxy.server.response_writer import ResponseConnection, ResponseWriter

__all__ = ["DIRECT_ENDPOINTS_KEY", "DirectDownstream", "DirectEndpoint"]

DIRECT_ENDPOINTS_KEY: Final = "kvparams.direct"
"""The key in the lifespan's state under which the app offers its `DirectEndpoint`s, by path."""
_log: Final = logging.getLogger(__name__)


class DirectEndpoint(Protocol):
    """Handles generating requests."""

    max_bytes: int
    """The largest body that is accepted."""
    bodies: BodyBudget
    """What all bodies together may take."""

    def admit(self, headers: list[tuple[bytes, bytes]]) -> Admission:
        """Looks at the headers, whose names are in lower case, before the body comes."""
        ...

    def handle(self, admission: Admission, body: bytes, downstream: Downstream) -> None:
        """Answers the request, now or later, through `downstream`."""
        ...

    def refuse(self, admission: Admission, error: ProxyError, downstream: Downstream) -> None:
        """Answers with an error before the body has come."""
        ...


class DirectDownstream(ResponseWriter):
    """A generating request and its response: a `Downstream`, and the receiver of the body."""

    __slots__ = ("_admission", "_body", "_endpoint", "_watcher")

    def __init__(
        self,
        owner: ResponseConnection,
        endpoint: DirectEndpoint,
        admission: Admission,
        keep_alive: bool,
        http_1_0: bool,
    ) -> None:
        super().__init__(owner, keep_alive, http_1_0)
        self._endpoint = endpoint
        self._admission = admission
        self._body = RequestBody(endpoint.max_bytes, endpoint.bodies)
        self._watcher: DownstreamObserver | None = None

    # the request, from the connection

    def feed_body(self, data: bytes) -> None:
        """Receives a piece of the body."""
        if self.complete:  # it was refused: the rest is of no interest
            return
        try:
            self._body.add(data)
        except ProxyError as error:
            self.refuse(error)

    def end_body(self) -> None:
        """Hears that the body is complete."""
        try:
            self._endpoint.handle(self._admission, self._body.join(), self)
        except Exception:  # noqa: BLE001  whatever it is, this connection ends and the others go on
            _log.exception("a request ended with a fault of the proxy")
            self.drop()

    def refuse(self, error: ProxyError) -> None:
        """Answers with an error before the body is there. The body is not waited for."""
        self._body.release()
        self.keep_alive = False
        self._endpoint.refuse(self._admission, error, self)

    # the answer, as `Downstream`; `head` and `body` are the response writer's

    def watch(self, watcher: DownstreamObserver) -> None:
        """See `Downstream.watch`."""
        self._watcher = watcher
        if self.disconnected or self._transport.is_closing():
            self.client_gone()
        elif self.owner.write_paused:
            watcher.client_slow()

    def end(self) -> None:
        """See `Downstream.end`."""
        self._watcher = None
        self._body.release()
        super().end()

    def drop(self) -> None:
        """See `Downstream.drop`."""
        self._transport.abort()
        self.client_gone()

    # the client, from the connection

    def client_gone(self) -> None:
        """Hears that the connection is lost."""
        self.disconnected = True
        self._body.release()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.client_gone()

    def client_slow(self) -> None:
        """Hears that the transport's buffer is full."""
        if self._watcher is not None:
            self._watcher.client_slow()

    def client_ready(self) -> None:
        """Hears that the transport's buffer is empty again."""
        if self._watcher is not None:
            self._watcher.client_ready()
