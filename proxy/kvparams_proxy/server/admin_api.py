"""The admin API: who is in the fleet and how it goes, changed while the proxy runs. Routes under `/admin`.

    GET    /admin                          sources and roles
    GET    /admin/instances                every instance and its state
    POST   /admin/instances                add one: {"id", "url", "role", "connector", "bootstrap", "addresses",
                                           "kv_events", "kv_events_replay", "store", "group", "compatibility", "labels",
                                           "drain"}
    GET    /admin/instances/{id}           one of them
    PATCH  /admin/instances/{id}           change what is given; of others' instances only `drain`
    DELETE /admin/instances/{id}           remove one that was added here; its legs go on to their end
    POST   /admin/instances/{id}/drain     no new requests; .../undrain again
    POST   /admin/groups/{group}/drain     all of one group at once; .../undrain again
    DELETE /admin/groups/{group}           remove all of one group, where all were added here
    GET    /admin/modes                    how requests are coordinated: {"modes": [...]}, as in the fleet file
    PUT    /admin/modes                    the same from now on; requests that run are not touched
    POST   /admin/explain-route            where this request would go now, and why; ?path= and ?tenant=

A change holds at all workers and at all proxies of the site (`--share`), and is forgotten when the last of them ends. A
request is read only after its token has been verified, and no response contains a secret.
"""

from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import replace
from typing import Final, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvparams.errors import JSONTextError
from kvparams.jsontext.document import JSONLimits, read_object
from kvparams.jsontext.receivers import OPEN_OBJECT, TreeBuilder
from kvparams_proxy.config.fleet_document import MAX_INSTANCES
from kvparams_proxy.config.mode_parsing import mode_document, parse_modes
from kvparams_proxy.config_errors import ConfigError, ConfigProblems
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.registry.registry import Registry
from kvparams_proxy.requests.asgi_body import read_asgi_body
from kvparams_proxy.requests.body import RequestBody
from kvparams_proxy.secret import Secret
from kvparams_proxy.server.route_explanation import explain_route
from kvparams_proxy.server.shared_admin import ADMIN_SOURCE, SharedAdmin, admin_specs, checked_spec, spec_document
from kvparams_proxy.telemetry.proxy_gauges import leases_by_instance

__all__ = ["ADMIN_SOURCE", "admin_routes"]

_BODY: Final = JSONLimits(max_bytes=64 << 10, max_depth=6, max_containers=1_000, max_strings=4_000)
"""Far more than the longest list of modes has."""

_Endpoint = Callable[[Registry, Request], Awaitable[Response]]


def admin_routes(token: Secret) -> list[Route]:
    """Returns the routes. They find the `Registry` as `registry` in the state of the lifespan.

    Args:
        token: what callers must show: `Authorization: Bearer <token>`.
    """
    endpoints: tuple[tuple[str, str, _Endpoint], ...] = (
        ("GET", "/admin", _overview),
        ("GET", "/admin/instances", _list),
        ("POST", "/admin/instances", _add),
        ("GET", "/admin/instances/{id}", _show),
        ("PATCH", "/admin/instances/{id}", _change),
        ("DELETE", "/admin/instances/{id}", _remove),
        ("POST", "/admin/instances/{id}/drain", _drain),
        ("POST", "/admin/instances/{id}/undrain", _undrain),
        ("POST", "/admin/groups/{group}/drain", _drain_group),
        ("POST", "/admin/groups/{group}/undrain", _undrain_group),
        ("DELETE", "/admin/groups/{group}", _remove_group),
        ("GET", "/admin/modes", _modes),
        ("PUT", "/admin/modes", _switch),
        ("POST", "/admin/explain-route", lambda registry, request: explain_route(request)),
    )
    paths: dict[str, dict[str, _Endpoint]] = {}
    for method, path, endpoint in endpoints:
        paths.setdefault(path, {})[method] = endpoint
    return [Route(path, _guard(token, methods), methods=list(methods)) for path, methods in paths.items()]


def _guard(token: Secret, methods: Mapping[str, _Endpoint]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            _authorize(token, request)
            endpoint = methods["GET" if request.method == "HEAD" else request.method]
            response = await endpoint(request.state.registry, request)
        except ProxyError as error:
            response = Response(error.body(), error.status, media_type="application/json")
            if error.status == 401:
                response.headers["www-authenticate"] = 'Bearer realm="kvparams admin"'
        except ConfigError as error:
            refused = ProxyError(400, "invalid_request_error", str(error), code="invalid_instance")
            response = Response(refused.body(), 400, media_type="application/json")
        response.headers["cache-control"] = "no-store"
        return response

    return answer


def _authorize(token: Secret, request: Request) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.matches(given.encode("latin-1")):
        message = "the admin API needs the admin token: send the header `Authorization: Bearer ...`"
        raise ProxyError(401, "invalid_request_error", message, code="invalid_admin_token")


async def _overview(registry: Registry, request: Request) -> Response:
    sources = [
        {
            "name": name,
            "instances": sum(owned.source == name for owned in registry.owned.values()),
            "applied": state.applied_count,
            "refused": state.refused_count,
            "problems": state.problems,
            "conflicts": state.conflicts,
        }
        for name, state in registry.sources.items()
    ]
    roles = {role: health._asdict() for role, health in registry.fleet.health().items()}
    return JSONResponse({"object": "fleet", "sources": sources, "roles": roles})


async def _list(registry: Registry, request: Request) -> Response:
    held = _leases(request)
    data = [_instance_document(registry, member, held) for member in registry.fleet.members]
    return JSONResponse({"object": "list", "data": data})


async def _show(registry: Registry, request: Request) -> Response:
    return JSONResponse(_instance_document(registry, _member(registry, _id(registry, request)), _leases(request)))


async def _add(registry: Registry, request: Request) -> Response:
    entry = await checked_spec(registry, await _body(request))
    _require_free(registry, entry.id)
    if len(admin_specs(registry)) >= MAX_INSTANCES:
        raise ProxyError(409, "conflict_error", f"{MAX_INSTANCES} instances were added here; remove some first")
    registry.publish(ADMIN_SOURCE, [*admin_specs(registry), entry])
    _shared(request).instance_changed(entry)
    headers = {"location": f"/admin/instances/{entry.id}"}
    return JSONResponse(_instance_document(registry, _member(registry, entry.id), _leases(request)), 201, headers)


async def _change(registry: Registry, request: Request) -> Response:
    id = _id(registry, request)
    changes = await _body(request)
    drain = changes.pop("drain", None)
    if drain is not None and not isinstance(drain, bool):
        raise ConfigError(("drain: must be true or false",))
    if changes.get("id", id) != id:
        raise ConfigError(("id: cannot be changed; add another instance and remove this one",))
    if changes:
        _require_mine(registry, id, "change it there; here it can only be drained")
        now = registry.owned[id].spec
        document = spec_document(now)
        if "connector" in changes:
            del document["store"]
        entry = await checked_spec(registry, document | changes)
        if all(other.id != id for other in admin_specs(registry)):  # removed meanwhile
            raise _unknown(id)
        entry = replace(entry, drain=now.drain)
        registry.publish(ADMIN_SOURCE, [entry if other.id == id else other for other in admin_specs(registry)])
        _shared(request).instance_changed(entry)
    if drain is not None:
        registry.drain(id, drain)
        _shared(request).drained(id, drain)
    return JSONResponse(_instance_document(registry, _member(registry, id), _leases(request)))


async def _remove(registry: Registry, request: Request) -> Response:
    id = _id(registry, request)
    _require_mine(registry, id, "remove it there, or drain it here")
    registry.publish(ADMIN_SOURCE, [entry for entry in admin_specs(registry) if entry.id != id])
    _shared(request).instance_removed(id)
    return JSONResponse({"object": "instance", "id": id, "deleted": True})


async def _drain(registry: Registry, request: Request) -> Response:
    return _set_drain(registry, request, True)


async def _undrain(registry: Registry, request: Request) -> Response:
    return _set_drain(registry, request, False)


def _set_drain(registry: Registry, request: Request, on: bool) -> Response:
    id = _id(registry, request)
    registry.drain(id, on)
    _shared(request).drained(id, on)
    return JSONResponse(_instance_document(registry, _member(registry, id), _leases(request)))


async def _drain_group(registry: Registry, request: Request) -> Response:
    return _set_group_drain(registry, request, True)


async def _undrain_group(registry: Registry, request: Request) -> Response:
    return _set_group_drain(registry, request, False)


def _set_group_drain(registry: Registry, request: Request, on: bool) -> Response:
    for id in (ids := _of_group(registry, request)):
        registry.drain(id, on)
        _shared(request).drained(id, on)
    held = _leases(request)
    return JSONResponse(
        {"object": "list", "data": [_instance_document(registry, _member(registry, id), held) for id in ids]}
    )


async def _remove_group(registry: Registry, request: Request) -> Response:
    ids = _of_group(registry, request)
    for id in ids:
        _require_mine(registry, id, "remove the group there, or drain it here")
    registry.publish(ADMIN_SOURCE, [entry for entry in admin_specs(registry) if entry.id not in ids])
    for id in ids:
        _shared(request).instance_removed(id)
    return JSONResponse({"object": "group", "id": request.path_params["group"], "instances": ids, "deleted": True})


def _of_group(registry: Registry, request: Request) -> list[str]:
    group = cast("str", request.path_params["group"])
    ids = [id for id, owned in registry.owned.items() if owned.spec.group == group]
    if not ids:
        message = f"there is no group {group[:128]!r}; GET /admin/instances lists the groups"
        raise ProxyError(404, "not_found_error", message, param="group")
    return ids


async def _modes(registry: Registry, request: Request) -> Response:
    modes: ActiveModes = request.state.modes
    return JSONResponse({"object": "modes", "modes": [mode_document(mode) for mode in modes.active]})


async def _switch(registry: Registry, request: Request) -> Response:
    problems = ConfigProblems()
    body = await _body(request)
    wanted = parse_modes(body.get("modes"), "modes", problems)
    problems.raise_if_any()
    modes: ActiveModes = request.state.modes
    modes.replace(wanted, ADMIN_SOURCE)
    _shared(request).modes_changed()
    return await _modes(registry, request)


async def _body(request: Request) -> dict[str, object]:
    try:
        raw = await read_asgi_body(request.receive, RequestBody(_BODY.max_bytes))
    except ConnectionError:
        raise ProxyError(400, "invalid_request_error", "the body is incomplete") from None
    try:
        resources: ExecutionResources = request.state.resources
        return await resources.step_runner.complete(_document(raw))
    except JSONTextError as error:
        raise ProxyError(400, "invalid_request_error", f"the body: {error}") from error


def _document(raw: bytes) -> Generator[None, None, dict[str, object]]:
    """Reads a body in steps; what may stand in 64 KiB takes tens of milliseconds."""
    built = TreeBuilder(OPEN_OBJECT)
    yield from read_object(raw, built, _BODY)
    return cast("dict[str, object]", built.value)


def _id(registry: Registry, request: Request) -> str:
    id = cast("str", request.path_params["id"])
    if id not in registry.owned:
        raise _unknown(id)
    return id


def _member(registry: Registry, id: str) -> Member:
    return next(member for member in registry.fleet.members if member.instance.id == id)


def _unknown(id: str) -> ProxyError:
    message = f"there is no instance {id[:128]!r}; GET /admin/instances lists them"
    return ProxyError(404, "not_found_error", message, param="id")


def _require_free(registry: Registry, id: str) -> None:
    if (owned := registry.owned.get(id)) is not None:
        message = f"an instance {id!r} from {owned.source} exists already; choose another id"
        raise ProxyError(409, "conflict_error", message, param="id")


def _require_mine(registry: Registry, id: str, instead: str) -> None:
    source = registry.owned[id].source
    if source != ADMIN_SOURCE:
        raise ProxyError(409, "conflict_error", f"{id} belongs to {source}: {instead}", param="id")


def _shared(request: Request) -> SharedAdmin:
    """Returns what tells a change to the other proxies."""
    shared: SharedAdmin = request.state.shared_admin
    return shared


def _leases(request: Request) -> Mapping[str, int]:
    resources: ExecutionResources = request.state.resources
    return leases_by_instance(resources.metrics, resources.kv_releaser)


def _instance_document(registry: Registry, member: Member, held: Mapping[str, int]) -> dict[str, object]:
    """Returns the description of an instance for an operator, without secrets."""
    instance = member.instance
    owned = registry.owned[instance.id]
    return {
        "object": "instance",
        "id": instance.id,
        "url": instance.url,
        "role": instance.role,
        "connector": instance.dialect,
        "bootstrap": instance.bootstrap,
        "addresses": list(instance.addresses),
        "kv_events": instance.kv_events,
        "kv_events_replay": instance.kv_events_replay,
        "store": instance.store,
        "group": instance.group,
        "compatibility": instance.compatibility,
        "labels": dict(instance.labels),
        "source": owned.source,
        "incarnation": instance.incarnation,
        "state": member.state,
        "ready": member.ready,
        "draining": member.draining,
        "breaker": member.breaker.state,
        "in_flight": member.in_flight,
        "tokens": member.tokens,
        "leases": held.get(instance.id, 0),
        "models": None if member.models is None else sorted(member.models),
        "has_key": owned.spec.credentials.key is not None,
    }
