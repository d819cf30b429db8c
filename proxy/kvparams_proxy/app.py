"""The proxy as a Starlette app: routes, and what lives as long as the app does.

The one rule: everything is made in the lifespan and passed on; there is no app, pool or client at module level.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from secrets import token_hex
from typing import Any, Final, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvparams import plugins
from kvparams.coordination import RequestManager
from kvparams.dialects import Dialect
from kvparams.scheduling import Role, SchedulingPolicy
from kvparams_proxy.downstream import ASGIDownstream, Downstream, open_downstream
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.executor import Execution, Resources
from kvparams_proxy.fleet import Fleet
from kvparams_proxy.intake import Endpoint, harmless, read
from kvparams_proxy.metrics import Metrics
from kvparams_proxy.pool import Pool
from kvparams_proxy.probes import Prober
from kvparams_proxy.settings import Settings
from kvparams_proxy.watch import Watch

__all__ = ["create_app"]

_FORWARDED: Final = frozenset((b"authorization", b"traceparent", b"tracestate"))
"""The only client headers that engines see: others can steer an engine's KV connector (`x-data-parallel-rank`, ...)."""


def create_app(settings: Settings, tls: ssl.SSLContext | None = None) -> Starlette:
    """The proxy.

    Args:
        settings: what the operator decided.
        tls: how to trust engines behind https; the system's way by default.

    Raises:
        PluginError: a policy, manager or dialect that is named is not registered.
    """
    policy = cast("type[SchedulingPolicy]", plugins.load("policies", settings.policy))
    manager = cast("type[RequestManager]", plugins.load("managers", settings.manager))
    spoken = {instance.dialect for instance in settings.instances}
    dialects = {name: cast("Dialect", plugins.load("dialects", name)) for name in spoken}
    fleet = Fleet(settings.instances, {role: policy() for role in Role})
    metrics = Metrics(fleet)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[Mapping[str, Any]]:
        loop = asyncio.get_running_loop()
        pools = {i.id: Pool(i.url, settings.upstream, tls) for i in settings.instances}
        resources = Resources(loop, fleet, manager(), dialects, pools, metrics, settings, _identifiers(), Watch(loop))
        async with Prober(fleet, settings.probe_s, tls):
            yield {"resources": resources}
        for pool in pools.values():
            pool.close()

    endpoints: dict[str, Endpoint] = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
    generate = {path: Generate(endpoint, path) for path, endpoint in endpoints.items()}
    app = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generate.items()),
            Route("/v1/models", _models, methods=["GET"]),
            Route("/health", _health, methods=["GET"]),
            Route("/metrics", _metrics, methods=["GET"]),
        ],
        middleware=[Middleware(_Shortcut, endpoints=generate)],
        lifespan=lifespan,
        exception_handlers={404: _not_found, 405: _not_found, 500: _bug},
    )
    app.router.redirect_slashes = False  # `/v1/models/` is another path, and not served
    return app


class _Shortcut:
    """Hands generating requests straight to their endpoint, past the router, which costs CPU on every one of them."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is not None and scope["method"] == "POST":
            await endpoint(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class Generate:
    """The ASGI app of one generating endpoint."""

    def __init__(self, endpoint: Endpoint, path: str) -> None:
        """`path` is that of the engines too, however the client has spelled it."""
        self._endpoint: Endpoint = endpoint
        self._path = path.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, refuse it or have it executed."""
        resources: Resources = scope["state"]["resources"]
        given: bytes | None = None
        encoded = False
        headers: list[bytes] = []
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                given = value
            elif name == b"content-encoding" and value.lower() != b"identity":
                encoded = True
            elif name in _FORWARDED:
                headers.append(b"%b: %b\r\n" % (name, value))
        transfer = resources.new_id()
        request = given.decode() if given is not None and harmless(given) else transfer
        try:
            if encoded:
                raise ProxyError(415, "invalid_request_error", "the body must come without a content-encoding")
            body = await _body(receive, resources.settings.body.max_bytes)
            inbound = read(self._endpoint, body, request, transfer, resources.settings.body)
            if (model := inbound.facts.model) is not None and not resources.fleet.know_model(model):
                message = f"the model {model[:200]!r} is not served here; see /v1/models"
                raise ProxyError(404, "not_found_error", message, param="model", code="model_not_found")
        except ProxyError as error:
            resources.metrics.outcomes["refused"] += 1
            await _error(error, request)(scope, receive, send)
            return
        except ConnectionError:  # the client left while it was sending
            resources.metrics.outcomes["gone"] += 1
            return
        downstream: Downstream = await open_downstream(scope, receive, send)
        try:
            await Execution(resources, self._path, inbound, b"".join(headers), downstream).run()
            if isinstance(downstream, ASGIDownstream):
                await downstream.finished()
        finally:
            if isinstance(downstream, ASGIDownstream):
                downstream.close()


def _identifiers() -> Callable[[], str]:
    """Makes ids that no other process and no later run makes. Unique, not secret: none costs fresh entropy."""
    run, numbers = token_hex(12), count()
    return lambda: f"{run}-{next(numbers):x}"


async def _body(receive: Receive, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client has left")
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise ProxyError(413, "invalid_request_error", f"the body is larger than {limit_bytes} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _error(error: ProxyError, request: str | None = None) -> Response:
    headers = {} if request is None else {"x-request-id": request}
    return Response(error.body(), error.status, headers, "application/json")


async def _models(request: Request) -> Response:
    models = request.state.resources.fleet.models()
    data = [{"id": model, "object": "model", "created": 0, "owned_by": "kvparams"} for model in models]
    return JSONResponse({"object": "list", "data": data})


async def _health(request: Request) -> Response:
    missing = request.state.resources.fleet.missing_roles()
    body = {"status": "ok"} if not missing else {"status": "unavailable", "missing_roles": missing}
    return Response(json.dumps(body), 503 if missing else 200, media_type="application/json")


async def _metrics(request: Request) -> Response:
    return Response(request.state.resources.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _not_found(request: Request, exc: Exception) -> Response:
    error = cast("HTTPException", exc)
    message = f"{request.method} {request.url.path[:200]} is not served here"
    if error.status_code == 405:
        message += f"; use {', '.join((error.headers or {}).get('Allow', 'another method').split(', '))}"
    response = _error(ProxyError(error.status_code, "not_found_error", message))
    response.headers.update(error.headers or {})
    return response


async def _bug(request: Request, exc: Exception) -> Response:
    return _error(ProxyError(500, "internal_error", "the proxy failed; its log says why"))
