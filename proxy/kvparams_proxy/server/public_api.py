"""The routes that everybody may use besides generation: models, health, metrics; and the app's error answers."""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvparams.instances import RequestFacts, Role
from kvparams.version import __version__
from kvparams.versions import SUPPORTED_VERSIONS
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.coordination.fleet_sync import FleetSync
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.health import SPLIT_ROLES, HealthStatus, has_usable_pair, unserved_groups
from kvparams_proxy.fleet.registry.registry import Registry
from kvparams_proxy.server.admin_answers import VersionAnswer
from kvparams_proxy.server.route_helpers import error_response, require_client_of

__all__ = ["EXCEPTION_HANDLERS", "public_routes"]

_COMMON_PATH: Final = "/v1/chat/completions"


def public_routes() -> list[Route]:
    """Returns the routes, for requests whose state has what the lifespan has made."""
    return [
        Route("/v1/models", _models, methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
        Route("/health/{role}", _health, methods=["GET"]),
        Route("/metrics", _metrics, methods=["GET"]),
        Route("/version", _version, methods=["GET"]),
    ]


async def _models(request: Request) -> Response:
    try:
        require_client_of(request)
    except ProxyError as error:
        return error_response(error)
    return JSONResponse({"object": "list", "data": list(_model_cards(request.state.resources, request.state.modes))})


def _model_cards(resources: ExecutionResources, modes: ActiveModes) -> Iterator[dict[str, object]]:
    """Yields the models that can be asked for now, and their further names.

    A model that lacks engines of a role that its requests need is none of them.
    """
    card: dict[str, object] = {"object": "model", "created": 0, "owned_by": "kvparams"}
    served: list[str] = []
    parents = resources.fleet.adapter_parents()
    for model in resources.fleet.models():
        facts = RequestFacts("", "", model, 1, 1, None, None)
        roles = modes.select_manager(facts, _COMMON_PATH, False).roles
        if all(any(m.instance.role is role and m.serves(model) for m in resources.fleet.members) for role in roles):
            served.append(model)
            parent = parents.get(model)
            yield {"id": model, **card, "root": model, **({"parent": parent} if parent else {})}
    for alias, model in sorted(resources.settings.model_aliases.items()):
        if model in served and alias not in served:
            yield {"id": alias, **card, "root": model}


async def _health(request: Request) -> Response:
    """Answers whether requests can be served; for one role, whether its legs can.

    200 "ok": of every needed role at least one engine does what it should.
    200 "degraded": of the roles in `degraded_roles` every engine that answers probes has failed legs lately. Requests
    are still given to these engines, so this proxy should still get requests: other proxies know no better. Likewise
    where `other_proxies` cannot be reached, or one of the `sources` of engines: this one goes on with what it knows.
    503 "draining": the proxy is about to stop.
    503 "unavailable": no engine of the roles in `missing_roles` can be given work, or (`unpaired`) none of the prefill
    and decode engines that can be given work may be paired. Where models have modes of their own, the answer is 503
    only if no model's requests can be served, and otherwise 200 "degraded".
    """
    fleet: Fleet = request.state.resources.fleet
    asked = request.path_params.get("role")
    if asked is not None and asked not in tuple(Role):
        return error_response(ProxyError(404, "not_found_error", f"there is no such role; there are {', '.join(Role)}"))
    if request.state.draining.is_draining:
        return Response(json.dumps({"status": "draining"}), 503, media_type="application/json")
    roles = {role: health for role, health in fleet.health().items() if asked in (None, role)}
    needed = fleet.needed
    missing = [r for r, health in roles.items() if r in needed and health.status is HealthStatus.UNAVAILABLE]
    degraded = [r for r, health in roles.items() if r in needed and health.status is HealthStatus.DEGRADED]
    if asked is None:
        has_pair = has_usable_pair(fleet.members)
        unserved = unserved_groups(fleet.role_groups, roles, has_pair=has_pair)
        unpaired = not has_pair and any(group >= SPLIT_ROLES and group.isdisjoint(missing) for group in unserved)
        unavailable = len(unserved) == len(fleet.role_groups)
    else:
        unserved, unpaired, unavailable = (), False, bool(missing)
    sync: FleetSync | None = request.state.sync
    is_alone = sync is not None and sync.exchange.is_degraded
    registry: Registry = request.state.registry
    sources = {name: state.unreachable for name, state in registry.sources.items() if state.unreachable is not None}
    status = HealthStatus.DEGRADED if degraded or unserved or is_alone or sources else HealthStatus.OK
    body: dict[str, object] = {"status": HealthStatus.UNAVAILABLE if unavailable else status}
    if missing:
        body["missing_roles"] = missing
    if degraded:
        body["degraded_roles"] = degraded
    if unpaired:
        body["unpaired"] = True
    if sources:
        body["sources"] = sources
    if sync is not None:
        body["other_proxies"] = sync.health()
    body["roles"] = {role: health._asdict() for role, health in roles.items()}
    return Response(json.dumps(body), 503 if unavailable else 200, media_type="application/json")


async def _metrics(request: Request) -> Response:
    scrape: Callable[[str], Awaitable[tuple[bytes, str]]] = request.state.scrape
    try:
        text, content_type = await scrape(request.headers.get("accept", ""))
    except ProxyError as error:
        return error_response(error)
    return Response(text, headers={"content-type": content_type})


async def _version(request: Request) -> Response:
    answer = VersionAnswer(version=__version__, protocol=list(SUPPORTED_VERSIONS))
    return Response(answer.model_dump_json(), media_type="application/json")


async def _not_found(request: Request, exc: Exception) -> Response:
    error = cast("HTTPException", exc)
    message = f"{request.method} {request.url.path[:200]} is not served here"
    if error.status_code == 405:
        message += f"; use {', '.join((error.headers or {}).get('Allow', 'another method').split(', '))}"
    elif _is_admin(request.url.path):
        settings: Settings = request.state.resources.settings
        message += "; GET /admin lists the routes" if settings.admin_token else "; --admin-token-file turns /admin on"
    elif request.url.path == "/ui":
        message += "; --viewer-token-file or --admin-token-file turns the live page on"
    headers = {"x-request-id": request.state.resources.new_id(), **(error.headers or {})}
    return error_response(ProxyError(error.status_code, "not_found_error", message), headers)


def _is_admin(path: str) -> bool:
    return path == "/admin" or path.startswith("/admin/")


async def _internal_error(request: Request, exc: Exception) -> Response:
    return error_response(ProxyError(500, "internal_error", "the proxy failed; its log says why"))


EXCEPTION_HANDLERS: Final[dict[Any, Any]] = {404: _not_found, 405: _not_found, 500: _internal_error}
"""Starlette's `exception_handlers`: the answers to paths and methods that are not served, and to faults."""
