"""Writes the response of one request to its client: a document, the end of a stream, or an error."""

import logging
from collections.abc import Sequence
from typing import Final, cast

from kvparams.routing.request_lifecycle import RequestOutcome
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.answer_forms import answer_form
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.engine_response import LONG_RESPONSE_BYTES
from kvparams_proxy.execution.response_corrector import ResponseCorrector
from kvparams_proxy.requests.downstream import Downstream
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.telemetry.request_record import RequestRecord

__all__ = ["ClientResponse"]

_log: Final = logging.getLogger(__name__)
_JSON: Final = b"content-type: application/json\r\n"


class ClientResponse(ResponseCorrector):
    """The response of one request: corrects what engines answer, and writes it."""

    __slots__ = ("_account", "_downstream", "_endpoint", "_expose_route")

    def __init__(
        self,
        downstream: Downstream,
        endpoint: APIEndpoint,
        account: RequestRecord,
        addresses: EngineAddresses,
        expose_route: bool,
    ) -> None:
        """Creates the response; nothing is sent yet.

        Args:
            downstream: the client.
            endpoint: how its streams look.
            account: where bytes and errors are counted, and which instances were sent a leg.
            addresses: of the engines.
            expose_route: whether headers name the instances.
        """
        super().__init__(account.facts.request_id, addresses, answer_form(endpoint.kind))
        self._downstream = downstream
        self._endpoint = endpoint
        self._account = account
        self._expose_route = expose_route

    def headers(self) -> bytes:
        """Returns the header lines of every response: the request id, and the route where that is shown."""
        lines = b"x-request-id: " + self._account.facts.request_id.encode() + b"\r\n"
        if not self._expose_route:
            return lines
        lines += b"".join(b"x-kvparams-%b: %b\r\n" % (i.role.encode(), i.id.encode()) for i in self._account.route)
        decision = self._account.decision
        if decision is None:
            return lines
        return lines + b"x-kvparams-decision: %b\r\n" % decision.summary(self._account.engine_prompt_tokens).encode()

    def send_document(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Writes a whole JSON answer."""
        size = sum(map(len, pieces))
        self._downstream.head(200, _JSON + self.headers(), size)
        if size > LONG_RESPONSE_BYTES:  # the head goes alone: it would be put together with the first piece
            self._downstream.body(b"")
        for piece in cast("Sequence[bytes]", pieces):
            self._downstream.body(piece)
        self._account.answer_bytes += size

    def send_ending(self, events: bytes) -> None:
        """Writes the last events of a stream that its engine has not sent."""
        self._downstream.body(events)
        self._account.answer_bytes += len(events)

    def send_error(self, error: ProxyError) -> RequestOutcome:
        """Writes an error, in the stream if the client has a part of it already, and ends the response.

        Returns:
            How the request has ended.
        """
        answering = self._account.lifecycle.answering
        self._account.record_error(error)
        if error.status >= 500 or answering:
            self._log_failure(error)
        if answering:
            body = error.sse_event(self._endpoint.error_form)
        else:
            body = error.body(self._endpoint.error_form)
            self._downstream.head(error.status, _JSON + error.headers() + self.headers(), len(body))
        self._downstream.body(body)
        self._account.answer_bytes += len(body)
        self._downstream.end()
        return "midway" if answering else "refused" if error.status < 500 else "failed"

    def _log_failure(self, error: ProxyError) -> None:
        route = " -> ".join(instance.id for instance in self._account.route) or "no engine"
        said = f"{error.message} ({error.detail[:500]!r})" if error.detail else error.message
        _log.warning("request %s (%s): %s", self._account.facts.request_id, route, said)
