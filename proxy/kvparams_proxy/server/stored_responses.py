"""Routes to responses that an engine keeps: `/v1/responses/{id}`, and to cancel one that runs in the background.

Only the engine that has made a response knows it. Its id tells which one that is (`requests/response_ids.py`).
"""

import asyncio
from contextlib import suppress
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvparams.errors import JSONTextError
from kvparams.instances import Instance
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.answer_forms import answer_form
from kvparams_proxy.execution.engine_errors import engine_error_response
from kvparams_proxy.execution.engine_response import LONG_RESPONSE_BYTES, EngineResponse
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.execution.response_corrector import ResponseCorrector
from kvparams_proxy.server.route_helpers import authorization_header, error_response, require_client_of
from kvparams_proxy.upstream.types import (
    ResponseCollector,
    ResponseHead,
    UpstreamError,
    UpstreamTimeout,
)

__all__ = ["find_response_instance", "response_routes"]

_LONGEST_ID: Final = 128
_TIMEOUT_S: Final = 10.0
_STREAM: Final = "the stream of a stored response is not served here; read the response without `stream`"
_TOO_SLOW: Final = "took too long to answer"


def response_routes() -> list[Route]:
    """Returns the routes, for requests whose state has what the lifespan has made."""
    return [
        Route("/v1/responses/{response_id}", _retrieve, methods=["GET"]),
        Route("/v1/responses/{response_id}/cancel", _cancel, methods=["POST"]),
    ]


def find_response_instance(
    resources: ExecutionResources, response_id: str, tenant: str, param: str = "response_id"
) -> Instance:
    """Returns the instance that has made a response for this tenant.

    Raises:
        ProxyError: 404, none of the fleet has.
    """
    instances = (member.instance for member in resources.fleet.members)
    found = resources.response_ids.find(response_id, tenant, instances)
    if found is None:
        message = (
            f"the response {response_id[:_LONGEST_ID]!r} is not known here: its engine has left, the proxy has "
            "restarted, or it is not yours; send the items of the conversation in `input`"
        )
        raise ProxyError(404, "not_found_error", message, param=param, code="previous_response_not_found")
    return found


async def _retrieve(request: Request) -> Response:
    if request.query_params.get("stream", "false").lower() not in ("", "0", "false"):
        return error_response(ProxyError(400, "invalid_request_error", _STREAM, param="stream", code="not_supported"))
    return await _answer(request, cancels=False)


async def _cancel(request: Request) -> Response:
    return await _answer(request, cancels=True)


async def _answer(request: Request, *, cancels: bool) -> Response:
    resources: ExecutionResources = request.state.resources
    response_id: str = request.path_params["response_id"]
    try:
        client = require_client_of(request)
        instance = find_response_instance(resources, response_id, "" if client is None else client.tenant)
        # A client's key of ours is for no engine.
        passed = authorization_header(request) if client is None else None
        body = await _ask(resources, instance, response_id, passed, cancels=cancels)
    except ProxyError as error:
        return error_response(error)
    return Response(body, media_type="application/json")


async def _ask(
    resources: ExecutionResources, instance: Instance, response_id: str, authorization: bytes | None, *, cancels: bool
) -> bytes:
    """Returns what the instance answers, without what it says of itself.

    Raises:
        ProxyError: it answers with an error, or not at all.
    """
    pool = resources.pools[instance.id]
    headers = b"" if authorization is None or pool.has_own_key else b"authorization: %b\r\n" % authorization
    path = b"/v1/responses/" + response_id.encode()
    asked = pool.request(path + b"/cancel", headers, b"") if cancels else pool.get(path, headers)
    ended: asyncio.Future[tuple[ResponseHead, bytes, UpstreamError | None]] = resources.loop.create_future()

    def answered(head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
        if not ended.done():
            ended.set_result((head, raw, error))

    exchange = pool.exchange(asked, ResponseCollector(resources.settings.upstream_limits.answer_bytes, answered))
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            head, raw, error = await ended
    except TimeoutError:
        exchange.abort(UpstreamTimeout(_TOO_SLOW))
        raise ProxyError(504, "timeout", f"the {instance.role} engine {_TOO_SLOW}", code="engine_timeout") from None
    finally:
        exchange.discard()
    failed = ProxyError(502, "upstream_error", f"the {instance.role} engine gave no answer", code="engine_failed")
    if error is not None:
        raise failed
    addresses, own_key = resources.engine_addresses, pool.has_own_key
    if head.status != 200:
        raise engine_error_response(instance.role, head.status, raw, addresses, response_id.encode(), own_key=own_key)
    with suppress(UpstreamError, JSONTextError):
        corrector = ResponseCorrector("", addresses, answer_form("responses"))
        return b"".join(corrector.correct_response(await _parse(resources, raw), is_stored=True))
    raise failed


async def _parse(resources: ExecutionResources, raw: bytes) -> EngineResponse:
    """Parses a response, a long one in steps."""
    response = EngineResponse(raw, answer_form("responses"))
    if len(raw) > LONG_RESPONSE_BYTES:
        parsed: asyncio.Future[EngineResponse] = resources.loop.create_future()
        steps = response.parse_in_steps("", resources.engine_addresses)
        task = resources.step_runner.run(steps, parsed.set_result, parsed.set_exception)
        try:
            return await parsed
        finally:
            task.cancel()
    return response
