"""The admin API: who is in the fleet and how it goes, changed while the proxy runs. Routes under `/admin`.

`admin_operations` has the routes, `admin_answers` the answers.

A change holds at all workers and at all proxies of the site (`--share`), and is forgotten when the last of them ends. A
request is read only after its token has been verified, and no response contains a secret.
"""

from collections.abc import Awaitable, Callable, Collection, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, cast

from starlette.requests import Request
from starlette.responses import Response
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
from kvparams_proxy.fleet.registry.instance_spec import rank_id
from kvparams_proxy.fleet.registry.registry import Registry
from kvparams_proxy.requests.asgi_body import read_asgi_body
from kvparams_proxy.requests.body import RequestBody
from kvparams_proxy.secret import Secret
from kvparams_proxy.server.admin_answers import (
    Answer,
    GroupDeletedAnswer,
    InstanceDeletedAnswer,
    InstancesAnswer,
    ModeAnswer,
    ModesAnswer,
)
from kvparams_proxy.server.admin_descriptions import (
    describe_fleet,
    describe_instance,
    describe_models,
    describe_request,
)
from kvparams_proxy.server.admin_operations import ADMIN_OPERATIONS
from kvparams_proxy.server.route_explanation import explain_route
from kvparams_proxy.server.route_helpers import error_response
from kvparams_proxy.server.shared_admin import (
    ADMIN_SOURCE,
    SharedAdmin,
    admin_specs,
    checked_spec,
    checked_specs,
    spec_document,
)
from kvparams_proxy.telemetry.proxy_gauges import leases_by_instance
from kvparams_proxy.telemetry.recent_requests import RecentRequests
from kvparams_proxy.workers.worker_link import WorkerLink

__all__ = ["ADMIN_SOURCE", "WORKER_HEADER", "admin_routes"]

WORKER_HEADER: Final = "x-kvparams-worker"
"""The worker that answers, and how many there are, as 2/4."""

_OPENAPI: Final = Path(__file__).with_name("admin_openapi.json")
"""Made by `admin_openapi`, which a running proxy need not import."""
_BODY: Final = JSONLimits(max_bytes=64 << 10, max_depth=6, max_containers=1_000, max_strings=4_000)
"""Far more than the longest list of modes has."""

_Endpoint = Callable[[Registry, Request], Awaitable[Response]]


def admin_routes(token: Secret) -> list[Route]:
    """Returns the routes. They find the `Registry` as `registry` in the state of the lifespan.

    Args:
        token: what callers must show: `Authorization: Bearer <token>`.
    """
    document = _OPENAPI.read_bytes()

    async def get_openapi(registry: Registry, request: Request) -> Response:
        return Response(document, media_type="application/json")

    endpoints: dict[str, _Endpoint] = {**_ENDPOINTS, "get_openapi": get_openapi}
    paths: dict[str, dict[str, _Endpoint]] = {}
    for operation in ADMIN_OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = endpoints[operation.name]
    return [Route(path, _guard(token, methods), methods=list(methods)) for path, methods in paths.items()]


def _guard(token: Secret, methods: Mapping[str, _Endpoint]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            _authorize(token, request)
            endpoint = methods["GET" if request.method == "HEAD" else request.method]
            response = await endpoint(request.state.registry, request)
        except ProxyError as error:
            response = error_response(error)
            if error.status == 401:
                response.headers["www-authenticate"] = 'Bearer realm="kvparams admin"'
        except ConfigError as error:
            code = "invalid_modes" if request.url.path == "/admin/modes" else "invalid_instance"
            response = error_response(ProxyError(400, "invalid_request_error", str(error), code=code))
        response.headers["cache-control"] = "no-store"
        return response

    return answer


def _authorize(token: Secret, request: Request) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.matches(given.encode("latin-1")):
        message = "the admin API needs the admin token: send the header `Authorization: Bearer ...`"
        raise ProxyError(401, "invalid_request_error", message, code="invalid_admin_token")


def _answer(answer: Answer, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(answer.model_dump_json(), status, headers, "application/json")


async def _overview(registry: Registry, request: Request) -> Response:
    return _answer(describe_fleet(registry))


async def _list(registry: Registry, request: Request) -> Response:
    return _instances(registry, request, [member.instance.id for member in registry.fleet.members])


def _leases(request: Request) -> Mapping[str, int]:
    resources: ExecutionResources = request.state.resources
    return leases_by_instance(resources.metrics, resources.kv_releaser)


def _instances(registry: Registry, request: Request, ids: Collection[str]) -> Response:
    """Returns the answer with these instances, in the order of the fleet."""
    held = _leases(request)
    members = (member for member in registry.fleet.members if member.instance.id in ids)
    return _answer(InstancesAnswer(data=[describe_instance(registry, member, held) for member in members]))


def _instance(registry: Registry, request: Request, id: str, status: int = 200) -> Response:
    """Returns the answer with one instance."""
    headers = {"location": f"/admin/instances/{id}"} if status == 201 else None
    return _answer(describe_instance(registry, _member(registry, id), _leases(request)), status, headers)


async def _show(registry: Registry, request: Request) -> Response:
    return _instance(registry, request, _id(registry, request))


async def _add(registry: Registry, request: Request) -> Response:
    entries = await checked_specs(registry, await _body(request))
    for entry in entries:
        _require_free(registry, entry.id)
    if len(admin_specs(registry)) + len(entries) > MAX_INSTANCES:
        raise ProxyError(409, "conflict_error", f"{MAX_INSTANCES} instances may be added here; remove some first")
    registry.publish(ADMIN_SOURCE, [*admin_specs(registry), *entries])
    for entry in entries:
        _shared(request).instance_changed(entry)
    return _instance(registry, request, entries[0].id, 201)


async def _change(registry: Registry, request: Request) -> Response:
    id = _id(registry, request)
    changes = await _body(request)
    drain = changes.pop("drain", None)
    if drain is not None and not isinstance(drain, bool):
        raise ConfigError(("drain: must be true or false",))
    if changes.get("id", id) != id:
        raise ConfigError(("id: cannot be changed; add another instance and remove this one",))
    changes.pop("id", None)
    if changes:
        _require_mine(registry, id, "change it there; here it can only be drained")
        now = registry.owned[id].spec
        if now.rank is not None and "ranks" in changes:
            raise ConfigError(("ranks: cannot be changed; remove these instances and add them again",))
        document = spec_document(now)
        if "connector" in changes:
            del document["store"]
        entry = await checked_spec(registry, document | changes, id)
        if all(other.id != id for other in admin_specs(registry)):  # removed meanwhile
            raise _unknown(id)
        entry = replace(entry, drain=now.drain)
        registry.publish(ADMIN_SOURCE, [entry if other.id == id else other for other in admin_specs(registry)])
        _shared(request).instance_changed(entry)
    if drain is not None:
        registry.drain(id, drain)
        _shared(request).drained(id, drain)
    return _instance(registry, request, id)


async def _remove(registry: Registry, request: Request) -> Response:
    ids = _ids(registry, request)
    for id in ids:
        _require_mine(registry, id, "remove it there, or drain it here")
    registry.publish(ADMIN_SOURCE, [entry for entry in admin_specs(registry) if entry.id not in ids])
    for id in ids:
        _shared(request).instance_removed(id)
    return _answer(InstanceDeletedAnswer(id=request.path_params["id"]))


async def _drain(registry: Registry, request: Request) -> Response:
    return _set_drain(registry, request, True)


async def _undrain(registry: Registry, request: Request) -> Response:
    return _set_drain(registry, request, False)


def _set_drain(registry: Registry, request: Request, on: bool) -> Response:
    ids = _ids(registry, request)
    for id in ids:
        registry.drain(id, on)
        _shared(request).drained(id, on)
    return _instance(registry, request, ids[0])


async def _drain_group(registry: Registry, request: Request) -> Response:
    return _set_group_drain(registry, request, True)


async def _undrain_group(registry: Registry, request: Request) -> Response:
    return _set_group_drain(registry, request, False)


def _set_group_drain(registry: Registry, request: Request, on: bool) -> Response:
    for id in (ids := _of_group(registry, request)):
        registry.drain(id, on)
        _shared(request).drained(id, on)
    return _instances(registry, request, ids)


async def _remove_group(registry: Registry, request: Request) -> Response:
    ids = _of_group(registry, request)
    for id in ids:
        _require_mine(registry, id, "remove the group there, or drain it here")
    registry.publish(ADMIN_SOURCE, [entry for entry in admin_specs(registry) if entry.id not in ids])
    for id in ids:
        _shared(request).instance_removed(id)
    return _answer(GroupDeletedAnswer(id=request.path_params["group"], instances=ids))


def _of_group(registry: Registry, request: Request) -> list[str]:
    group = cast("str", request.path_params["group"])
    ids = [id for id, owned in registry.owned.items() if owned.spec.group == group]
    if not ids:
        message = f"there is no group {group[:128]!r}; GET /admin/instances lists the groups"
        raise ProxyError(404, "not_found_error", message, param="group")
    return ids


async def _models(registry: Registry, request: Request) -> Response:
    return _answer(describe_models(request.state.resources, request.state.modes))


async def _modes(registry: Registry, request: Request) -> Response:
    modes: ActiveModes = request.state.modes
    return _answer(ModesAnswer(modes=[ModeAnswer.model_validate(mode_document(mode)) for mode in modes.active]))


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


def _ids(registry: Registry, request: Request) -> list[str]:
    """Returns the id of an instance, or the ids of all ranks of an entry: it has none itself."""
    id = cast("str", request.path_params["id"])
    if id in registry.owned:
        return [id]
    specs = [owned.spec for owned in registry.owned.values()]
    ids = [each.id for each in specs if each.rank is not None and each.id == rank_id(id, each.rank.number)]
    if not ids:
        raise _unknown(id)
    return ids


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


async def _explain(registry: Registry, request: Request) -> Response:
    return _answer(await explain_route(request))


async def _request(registry: Registry, request: Request) -> Response:
    requests: RecentRequests = request.state.recent_requests
    worker: WorkerLink | None = request.state.worker
    # Each worker knows its own requests: whoever does not find one asks another.
    headers = {} if worker is None else {WORKER_HEADER: f"{worker.identity.number}/{worker.identity.count}"}
    resources: ExecutionResources = request.state.resources
    resources.record_dispatcher.flush()
    found = requests.find(cast("str", request.path_params["id"]))
    if found is None:
        message = "no request with this id is among the last 512 that ended here, or the last that failed or were slow"
        error = ProxyError(404, "not_found_error", message, param="id", code="unknown_request")
        return error_response(error, headers)
    return _answer(describe_request(found), 200, headers)


_ENDPOINTS: Final[Mapping[str, _Endpoint]] = {
    "get_fleet": _overview,
    "list_instances": _list,
    "add_instance": _add,
    "get_instance": _show,
    "change_instance": _change,
    "remove_instance": _remove,
    "drain_instance": _drain,
    "undrain_instance": _undrain,
    "drain_group": _drain_group,
    "undrain_group": _undrain_group,
    "remove_group": _remove_group,
    "list_models": _models,
    "get_modes": _modes,
    "replace_modes": _switch,
    "get_request": _request,
    "explain_route": _explain,
}
"""By the name of an `AdminOperation`."""
