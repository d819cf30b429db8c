"""Handles a request from the wire to its execution: authentication, parsing, and error responses.

The same for both ways in, the short one (`direct_path.py`) and ASGI. A client that may not ask is refused before its
body is read.
"""

import logging
from collections.abc import Callable, Generator, Iterable
from typing import Final

from pydantic_core import to_json

from kvparams.instances import InstanceRestriction, Role
from kvparams.routing.managers.aggregated import Aggregated
from kvparams.routing.managers.interface import DisaggregatedRequestManager
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.event_loop.step_runner import StepRunner, StepTask
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.execution.executor import Execution
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.requests.authentication import (
    APIKeyAuthenticator,
    AuthenticatedClient,
    require_client,
    session_from_header,
)
from kvparams_proxy.requests.body import BodyBudget, body_too_large_error, declared_length
from kvparams_proxy.requests.downstream import Downstream
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.requests.forbidden_fields import FORWARDED_HEADERS, is_safe_request_id
from kvparams_proxy.requests.intake import ParsedRequest, parse_request, parse_request_in_steps
from kvparams_proxy.server.admission import Admission
from kvparams_proxy.server.prefill_partners import PARTNER_HEADERS, PrefillPartners
from kvparams_proxy.server.stored_responses import find_response_instance
from kvparams_proxy.telemetry.request_record import RefusedRequest
from kvparams_proxy.telemetry.tracing import TraceContext
from kvparams_proxy.tokenization.service import RoutingTokens

__all__ = ["RequestHandler"]

_log: Final = logging.getLogger(__name__)
_BOTH: Final = (Role.AGGREGATED,)
_HEEDED: Final = FORWARDED_HEADERS | {
    *(b"x-request-id", b"content-encoding", b"authorization", b"x-api-key", b"x-session-id"),
    *(b"content-type", b"content-length"),
    *PARTNER_HEADERS,
}
"""Headers that matter."""
_JSON: Final = b"application/json"
_NOT_JSON: Final = "the Content-Type must be application/json"
"""vLLM 0.32.0 asks the same (entrypoints/openai/utils.py, validate_json_request): a page of another site can make a
browser send any other type without asking first."""
_SHORT_LENGTH: Final = 6
"""Digits of a Content-Length that is below any limit worth a look."""
_COSTLY_BYTES: Final = 1 << 20
"""To put together a longer body has taken milliseconds of this turn already."""


class RequestHandler:
    """Handles the requests of one endpoint: a `kvparams_proxy.server.direct_path.DirectEndpoint`."""

    def __init__(
        self,
        resources: ExecutionResources,
        modes: ActiveModes,
        keys: APIKeyAuthenticator | None,
        endpoint: APIEndpoint,
        bodies: BodyBudget,
        alone: Role | None = None,
        partners: PrefillPartners | None = None,
    ) -> None:
        """Creates the handler of one endpoint.

        `bodies`: what the bodies of all requests may take together; `alone`: whose engines answer, where the work is
        not split; `partners`: where requests may name their prefill instance.
        """
        self._resources = resources
        self._modes = modes
        self._alone = None if alone is None else Aggregated(role=alone)
        self._partners = partners
        self._keys = keys
        self._endpoint = endpoint
        self.bodies = bodies
        self.max_bytes = resources.settings.body.max_bytes

    def admit(self, headers: Iterable[tuple[bytes, bytes]]) -> Admission:
        """Checks the headers, whose names are in lower case."""
        given: bytes | None = None
        error: ProxyError | None = None
        authorization: bytes | None = None
        api_key: bytes | None = None
        forwarded: list[bytes] = []
        session = ""
        typed = False
        partner: dict[bytes, bytes] = {}
        for name, value in headers:
            if name not in _HEEDED:
                continue
            if name == b"content-type":
                typed = value == _JSON or value.partition(b";")[0].strip().lower() == _JSON
            elif name == b"content-length":
                if len(value) > _SHORT_LENGTH:
                    error = self._length_error(value) or error
            elif name == b"x-request-id":
                given = value
            elif name == b"content-encoding" and value.lower() != b"identity":
                error = ProxyError(415, "invalid_request_error", "the body must not have a Content-Encoding")
            elif name == b"authorization":
                if authorization is not None:
                    error = ProxyError(400, "invalid_request_error", "there must be one Authorization header")
                authorization = value
            elif name == b"x-api-key":
                if api_key is not None:
                    error = ProxyError(400, "invalid_request_error", "there must be one x-api-key header")
                api_key = value
            elif name == b"x-session-id":
                session = session_from_header(value)
            elif name in FORWARDED_HEADERS:
                forwarded.append(b"%b: %b\r\n" % (name, value))
            elif name in PARTNER_HEADERS:
                partner[name] = value
        if authorization is None and api_key is not None and self._endpoint.error_form == "anthropic":
            authorization = b"Bearer " + api_key  # as Anthropic's clients send it
        if not typed and error is None:
            error = ProxyError(415, "invalid_request_error", _NOT_JSON)
        client: AuthenticatedClient | None = None
        if self._keys is not None:
            try:
                client = require_client(self._keys, authorization)
            except ProxyError as unauthorized:
                error = unauthorized.with_traceback(None)  # which would hold this very frame
            authorization = None  # it is a key of ours
        transfer = self._resources.new_id()
        request = transfer
        if given is not None:
            if is_safe_request_id(given):
                request = given.decode()
            else:
                self._resources.metrics.stripped["request_id"] += 1
        admission = Admission(request, transfer, forwarded, authorization, client, error, session)
        if self._partners is not None and error is None:
            try:
                admission.partner = self._partners.find(partner, request)
            except ProxyError as refused:
                admission.error = refused.with_traceback(None)
        return admission

    def _length_error(self, value: bytes) -> ProxyError | None:
        """Returns why a request with this Content-Length is refused, or None."""
        try:
            return body_too_large_error(self.max_bytes) if declared_length(value) > self.max_bytes else None
        except ProxyError as error:
            return error.with_traceback(None)

    def handle(
        self, admission: Admission, body: bytes, downstream: Downstream, done: Callable[[], None] | None = None
    ) -> None:
        """Executes the request or refuses it, now or later. `done` hears of its end."""
        if admission.error is not None:  # raised once more, it would hold what it is raised through
            self.refuse(admission, admission.error, downstream)
            if done is not None:
                done()
            return
        resources = self._resources
        try:
            inbound = parse_request(
                self._endpoint.kind,
                body,
                admission.request_id,
                admission.transfer_id,
                resources.settings.body,
                admission.client,
                admission.session_id,
                resources.token_service is not None,
                resources.settings.continuation,
                self.finds_media,
            )
            if inbound is None:
                _LongBodyRead(self, admission, downstream, done).begin(body)
                return
            self.execute(admission, inbound, downstream, done)
        except ProxyError as refused:
            self.refuse(admission, refused, downstream)
            if done is not None:
                done()

    @property
    def finds_media(self) -> bool:
        """Returns whether bodies are searched for images, audio and video: only encode engines need to know."""
        return self._resources.fleet.has_encode_instances

    @property
    def step_runner(self) -> StepRunner:
        """The runner of long work."""
        return self._resources.step_runner

    def parse_in_steps(self, admission: Admission, body: bytes) -> Generator[None, None, ParsedRequest]:
        """Parses a long body.

        Raises:
            ProxyError: it is refused.
        """
        resources = self._resources
        return parse_request_in_steps(
            self._endpoint.kind,
            body,
            admission.request_id,
            admission.transfer_id,
            resources.settings.body,
            admission.client,
            admission.session_id,
            resources.token_service is not None,
            resources.settings.continuation,
            self.finds_media,
        )

    def check_model(self, model: str | None) -> None:
        """Refuses a request whose model no engine serves.

        Raises:
            ProxyError: 404, `model_not_found`.
        """
        if model is not None and not self._resources.fleet.may_serve_model(model):
            message = f"the model {model[:200]!r} is not served here; see /v1/models"
            unknown = ProxyError(404, "not_found_error", message, param="model", code="model_not_found")
            unknown.model = model
            raise unknown

    def execute(
        self, admission: Admission, inbound: ParsedRequest, downstream: Downstream, done: Callable[[], None] | None
    ) -> None:
        """Executes a request whose body was parsed.

        Raises:
            ProxyError: its model is not served here.
        """
        resources = self._resources
        if inbound.was_stripped:
            resources.metrics.stripped["body"] += 1
        if resources.settings.model_aliases:
            self.resolve_alias(inbound)
        self.check_model(inbound.facts.model)
        if inbound.previous_response is not None:
            self._restrict_to_state(inbound, inbound.previous_response)
        if admission.partner is not None:
            inbound.facts = inbound.facts._replace(
                restrictions={**inbound.facts.restrictions, Role.PREFILL: admission.partner}
            )
        trace, forwarded, authorization = None, admission.forwarded, admission.authorization
        if resources.tracer is not None:
            trace, forwarded = resources.tracer.begin(forwarded)
        upstream = b"".join(forwarded)

        if resources.token_service is None:
            self._execute(inbound, upstream, authorization, downstream, done, trace)
            return

        def routed(prompt: RoutingTokens | None) -> None:
            if prompt is not None:
                facts = inbound.facts
                tokens = prompt.tokens or facts.prompt_tokens
                inbound.facts = facts._replace(routing_ids=prompt.ids, prompt_tokens=tokens)
            if not (resources.settings.continuation and inbound.stream):  # it is not continued
                inbound.document = None
            self._execute(inbound, upstream, authorization, downstream, done, trace)

        resources.token_service.find(self._endpoint.kind, inbound, routed)

    def resolve_alias(self, inbound: ParsedRequest) -> None:
        """Replaces a further name of a model by the one that engines know."""
        asked = inbound.facts.model
        model = None if asked is None else self._resources.settings.model_aliases.get(asked)
        if model is not None:
            inbound.facts = inbound.facts._replace(model=model)
            inbound.changes = {**inbound.changes, "model": to_json(model)}

    def _restrict_to_state(self, inbound: ParsedRequest, previous: str) -> None:
        """Has a request answered by the engine that has made the response it goes on from.

        Raises:
            ProxyError: that engine is not known.
        """
        tenant = inbound.facts.tenant
        found = find_response_instance(self._resources, previous, tenant, "previous_response_id")
        limit = InstanceRestriction(frozenset((found.id,)), is_required=True)
        inbound.facts = inbound.facts._replace(restrictions={found.role: limit})

    def _execute(
        self,
        inbound: ParsedRequest,
        upstream: bytes,
        authorization: bytes | None,
        downstream: Downstream,
        done: Callable[[], None] | None,
        trace: TraceContext | None,
    ) -> None:
        """Executes a request that is ready to be routed. Arguments are as for `Execution`."""
        manager = self.select_manager(inbound)
        execution = Execution(
            self._resources, manager, self._endpoint, inbound, upstream, authorization, downstream, done, trace
        )
        self._resources.start_batcher.schedule(execution.run)

    def select_manager(self, inbound: ParsedRequest) -> DisaggregatedRequestManager:
        """Returns the manager of a request. Where one engine does both, it serves all that is not split."""
        manager = self._modes.select_manager(inbound.facts, self._endpoint.path, inbound.stream)
        return manager if self._alone is None or manager.roles == _BOTH else self._alone

    def refuse(self, admission: Admission, error: ProxyError, downstream: Downstream) -> None:
        """Answers with an error in place of an execution."""
        self._tell(admission, error)
        answer = error.body(self._endpoint.error_form)
        request_id = admission.request_id.encode()
        lines = b"content-type: application/json\r\n%bx-request-id: %b\r\n" % (error.headers(), request_id)
        downstream.head(error.status, lines, len(answer))
        downstream.body(answer)
        downstream.end()

    def _tell(self, admission: Admission, error: ProxyError) -> None:
        """Records a request that is refused before its execution."""
        resources = self._resources
        tenant = "" if admission.client is None else admission.client.tenant
        trace = None if resources.tracer is None else resources.tracer.begin(admission.forwarded)[0]
        resources.record_dispatcher.refused(
            RefusedRequest(admission.request_id, self._endpoint.path, error, tenant, error.model, trace)
        )


class _LongBodyRead:
    """A request whose body is being read in steps: a `DownstreamObserver`."""

    __slots__ = ("_admission", "_done", "_downstream", "_generate", "_work")

    def __init__(
        self, generate: RequestHandler, admission: Admission, downstream: Downstream, done: Callable[[], None] | None
    ) -> None:
        self._generate = generate
        self._admission = admission
        self._downstream = downstream
        self._done = done
        self._work: StepTask | None = None

    def begin(self, body: bytes) -> None:
        """Parses the body, now or later. Most are parsed within the time available in any turn of the loop."""
        generate = self._generate
        steps = generate.parse_in_steps(self._admission, body)
        work = generate.step_runner.run(steps, self._read, self._failed, at_once=len(body) < _COSTLY_BYTES)
        if not work.is_finished:
            self._work = work
            self._downstream.watch(self)

    def _read(self, inbound: ParsedRequest) -> None:
        self._work = None
        self._generate.execute(self._admission, inbound, self._downstream, self._done)

    def _failed(self, error: Exception) -> None:
        self._work = None
        if isinstance(error, ProxyError):
            self._generate.refuse(self._admission, error, self._downstream)
        else:
            _log.error("a request ended with a fault of the proxy", exc_info=error)
            self._downstream.drop()
        if self._done is not None:
            self._done()

    def client_gone(self) -> None:
        """See `DownstreamObserver`. What is read of the body is dropped."""
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
            if self._done is not None:
                self._done()

    def client_slow(self) -> None:
        """See `DownstreamObserver`. Nothing is written yet."""

    def client_ready(self) -> None:
        """See `DownstreamObserver`."""
