"""The operations of the admin API: one table for the routes, the index at `/admin` and the OpenAPI document."""

from typing import Final, NamedTuple

from kvparams_proxy.server.admin_answers import (
    Answer,
    FleetAnswer,
    GroupDeletedAnswer,
    InstanceAnswer,
    InstanceDeletedAnswer,
    InstancesAnswer,
    ModelsAnswer,
    ModesAnswer,
    RequestAnswer,
    RouteAnswer,
)

__all__ = ["ADMIN_OPERATIONS", "OPENAPI_PATH", "AdminOperation", "OperationBody"]

OPENAPI_PATH: Final = "/admin/openapi.json"


class OperationBody(NamedTuple):
    """The body of a request."""

    schema: str
    """The name of a schema that `admin_openapi` has: `NewInstance`, `InstanceChange`, `Modes` or `ClientRequest`."""
    description: str


class AdminOperation(NamedTuple):
    """A method of a path."""

    name: str
    """Names the operation in the OpenAPI document, and its endpoint in `admin_api`."""
    method: str
    path: str
    summary: str
    answer: type[Answer] | None
    """None: the OpenAPI document itself."""
    status: int = 200
    body: OperationBody | None = None
    errors: tuple[int, ...] = ()
    """Statuses of errors besides 401, and besides 400 and 413 where there is a body."""
    query: tuple[tuple[str, str], ...] = ()
    """Names and descriptions of query parameters. None is required."""


_MODES: Final = OperationBody("Modes", "the modes from now on; running requests are not touched")
_EXPLAINED: Final = OperationBody(
    "ClientRequest", "the body of a client's request; its header x-session-id counts as the client's does"
)
_QUERY: Final = (
    ("path", "the endpoint of the request (default: /v1/completions)"),
    ("tenant", "the tenant of the request, if the proxy has client keys"),
)

ADMIN_OPERATIONS: Final = (
    AdminOperation(
        "get_fleet", "GET", "/admin", "Sources and roles of the fleet, and the routes of this API", FleetAnswer
    ),
    AdminOperation("get_openapi", "GET", OPENAPI_PATH, "This API as an OpenAPI 3.1 document", None),
    AdminOperation("list_instances", "GET", "/admin/instances", "Every engine and its state", InstancesAnswer),
    AdminOperation(
        "add_instance",
        "POST",
        "/admin/instances",
        "Add an engine",
        InstanceAnswer,
        201,
        OperationBody("NewInstance", "the engine; `id` and `url` are required"),
        (409,),
    ),
    AdminOperation(
        "get_instance", "GET", "/admin/instances/{id}", "An engine and its state", InstanceAnswer, errors=(404,)
    ),
    AdminOperation(
        "change_instance",
        "PATCH",
        "/admin/instances/{id}",
        "Change an engine that was added here; of other engines only `drain`",
        InstanceAnswer,
        200,
        OperationBody("InstanceChange", "the members to change"),
        (404, 409),
    ),
    AdminOperation(
        "remove_instance",
        "DELETE",
        "/admin/instances/{id}",
        "Remove an engine that was added here, or all ranks of an entry; running requests go on",
        InstanceDeletedAnswer,
        errors=(404, 409),
    ),
    AdminOperation(
        "drain_instance",
        "POST",
        "/admin/instances/{id}/drain",
        "Give it, or all ranks of an entry, no new requests",
        InstanceAnswer,
        errors=(404,),
    ),
    AdminOperation(
        "undrain_instance",
        "POST",
        "/admin/instances/{id}/undrain",
        "Give it, or all ranks of an entry, new requests again",
        InstanceAnswer,
        errors=(404,),
    ),
    AdminOperation(
        "drain_group",
        "POST",
        "/admin/groups/{group}/drain",
        "Give no new requests to any engine of a group",
        InstancesAnswer,
        errors=(404,),
    ),
    AdminOperation(
        "undrain_group",
        "POST",
        "/admin/groups/{group}/undrain",
        "Give new requests to the engines of a group again",
        InstancesAnswer,
        errors=(404,),
    ),
    AdminOperation(
        "remove_group",
        "DELETE",
        "/admin/groups/{group}",
        "Remove all engines of a group, if all were added here",
        GroupDeletedAnswer,
        errors=(404, 409),
    ),
    AdminOperation("list_models", "GET", "/admin/models", "Every model, and what holds for it", ModelsAnswer),
    AdminOperation(
        "get_modes",
        "GET",
        "/admin/modes",
        "How requests for models without modes of their own are coordinated",
        ModesAnswer,
    ),
    AdminOperation(
        "replace_modes",
        "PUT",
        "/admin/modes",
        "Coordinate new requests differently, but those for models with modes of their own",
        ModesAnswer,
        body=_MODES,
    ),
    AdminOperation(
        "get_request",
        "GET",
        "/admin/requests/{id}",
        "One of the last 512 requests that ended: when each of its states began; by request, transfer or trace id",
        RequestAnswer,
        errors=(404,),
    ),
    AdminOperation(
        "explain_route",
        "POST",
        "/admin/explain-route",
        "Where a request would go now, and why; nothing is sent",
        RouteAnswer,
        body=_EXPLAINED,
        errors=(404, 503),
        query=_QUERY,
    ),
)
