"""The answers of the admin API, as models. The OpenAPI document is generated from them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvparams.instances import Role
from kvparams.routing.breaker import BreakerState
from kvparams_proxy.fleet.member import MemberState

__all__ = [
    "AdminRouteAnswer",
    "Answer",
    "CandidateAnswer",
    "ErrorAnswer",
    "ErrorDescription",
    "FleetAnswer",
    "GroupDeletedAnswer",
    "InstanceAnswer",
    "InstanceDeletedAnswer",
    "InstancesAnswer",
    "ModeAnswer",
    "ModelAnswer",
    "ModelsAnswer",
    "ModesAnswer",
    "RequestAnswer",
    "RequestStateAnswer",
    "RoleAnswer",
    "RouteAnswer",
    "SourceAnswer",
    "VersionAnswer",
]


def _is(text: str, **others: Any) -> Any:
    return Field(description=text, **others)


class Answer(BaseModel):
    """An answer, or a part of one. Every member is always there."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        defer_build=True,  # most proxies give few of these answers
        json_schema_serialization_defaults_required=True,
    )


class AdminRouteAnswer(Answer):
    """A route of the admin API."""

    method: str
    path: Annotated[str, _is("braces stand around what is to be filled in: /admin/instances/{id}")]
    summary: str


class SourceAnswer(Answer):
    """A source of instances: the command line, the fleet file, discovery, or this API."""

    name: str
    instances: Annotated[int, _is("instances that belong to it now")]
    applied: Annotated[int, _is("versions that were put to use")]
    refused: Annotated[int, _is("versions that could not be used")]
    problems: Annotated[list[str], _is("what is wrong with its last version; empty if that is in force")]
    conflicts: Annotated[list[str], _is("ids that it wants and that belong to another source")]


class RoleAnswer(Answer):
    """The instances of one role, counted by state."""

    total: int
    ready: Annotated[int, _is("instances that do what they should")]
    draining: int
    broken: Annotated[int, _is("instances that answer probes while their requests fail")]
    waiting: Annotated[int, _is("requests that wait in the proxy for room on one of them")]
    usable: Annotated[int, _is("instances that can be given requests")]


class FleetAnswer(Answer):
    """The fleet as a whole, and an index of this API."""

    object: Literal["fleet"] = "fleet"
    sources: list[SourceAnswer]
    roles: dict[Role, RoleAnswer]
    routes: Annotated[list[AdminRouteAnswer], _is("the routes of this API; /admin/openapi.json describes them")]


class InstanceAnswer(Answer):
    """An engine: what is declared, and what is observed. Keys and certificates are not shown."""

    object: Literal["instance"] = "instance"
    id: str
    url: str
    rank: Annotated[int | None, _is("which data-parallel rank behind its URL it is; null if the URL is one engine")]
    role: Role
    connector: str
    bootstrap: str | None
    addresses: list[str]
    kv_events: str | None
    kv_events_replay: str | None
    store: str | None
    group: str | None
    compatibility: str | None
    labels: dict[str, str]
    source: Annotated[str, _is("the source that it belongs to; only those of `admin` can be changed or removed here")]
    incarnation: Annotated[str, _is("changes when the engine restarts; its earlier KV is gone then")]
    state: MemberState
    ready: Annotated[bool, _is("whether its last probe was answered well")]
    draining: Annotated[bool, _is("whether it gets no new requests")]
    breaker: Annotated[
        BreakerState, _is("closed while its requests succeed; open after failures, which keeps new requests away")
    ]
    in_flight: Annotated[int, _is("requests that run there, of all workers and proxies that are known")]
    tokens: Annotated[int, _is("prompt tokens of these")]
    max_requests: Annotated[
        int | None, _is("the largest number of requests that run there, by the models that it serves; null: no limit")
    ]
    leases: Annotated[int, _is("transfers whose KV it holds and that nobody has fetched yet")]
    models: Annotated[list[str] | None, _is("the models that it serves; null until it has said so")]
    loaded_adapters: Annotated[
        list[str] | None,
        _is("the LoRA adapters that it should have loaded, the least recently used first; null if it serves none"),
    ]
    has_key: Annotated[bool, _is("whether the proxy has an API key for it")]


class InstancesAnswer(Answer):
    """Several engines."""

    object: Literal["list"] = "list"
    data: list[InstanceAnswer]


class InstanceDeletedAnswer(Answer):
    """An engine that was removed. Its running requests go on to their end."""

    object: Literal["instance"] = "instance"
    id: str
    deleted: Literal[True] = True


class GroupDeletedAnswer(Answer):
    """A group that was removed. Its running requests go on to their end."""

    object: Literal["group"] = "group"
    id: str
    instances: Annotated[list[str], _is("the ids of its instances")]
    deleted: Literal[True] = True


class ModeAnswer(Answer):
    """A mode, as in the fleet file."""

    use: Annotated[str, _is("the name of the mode")]
    when: Annotated[dict[str, Any], _is("the requests that it is for; all without a condition")]
    priority: int
    options: dict[str, Any]


class ModesAnswer(Answer):
    """The modes, by which requests are coordinated."""

    object: Literal["modes"] = "modes"
    modes: list[ModeAnswer]


class ModelAnswer(Answer):
    """A model that engines serve, or for which something is set, and what holds for its requests."""

    id: str
    entry: Annotated[
        str | None,
        _is("the entry of `models` in the fleet file that holds: its own or its base model's; null: as for all models"),
    ]
    aliases: Annotated[list[str], _is("further names that clients may use")]
    policy: str
    modes: list[ModeAnswer]
    max_requests: Annotated[
        dict[Role, int | None],
        _is(
            "the largest number of requests on one of its engines; null: no limit. Where an engine serves several "
            "models with an entry, the lowest holds"
        ),
    ]
    instances: Annotated[list[str], _is("the ids of the instances that serve it now")]


class ModelsAnswer(Answer):
    """The models, each with what holds for it."""

    object: Literal["models"] = "models"
    data: list[ModelAnswer]


class CandidateAnswer(Answer):
    """An engine that the request could go to. Estimates are null where the policy ignores what engines have cached."""

    id: str
    in_flight: Annotated[int, _is("requests that run there")]
    tokens_in_flight: Annotated[int, _is("prompt tokens of these")]
    max_requests: Annotated[int | None, _is("the largest number of requests that run there; null: no limit")] = None
    cached: Annotated[int | None, _is("prompt tokens that it should have cached")] = None
    fetched: Annotated[int | None, _is("prompt tokens that it should fetch")] = None
    source: Annotated[str | None, _is("the engine from which it should fetch; null for a store, or nothing")] = None
    computed: Annotated[int | None, _is("prompt tokens that it should compute")] = None
    wait_s: Annotated[float | None, _is("seconds until the work before it is done")] = None
    fetch_s: Annotated[float | None, _is("seconds for fetching")] = None
    load_s: Annotated[float | None, _is("seconds for loading the LoRA adapter that is asked for")] = None
    compute_s: Annotated[float | None, _is("seconds for computing")] = None
    first_token_s: Annotated[float | None, _is("expected seconds to the first token")] = None
    excluded: Annotated[
        str | None, _is("why the request would not go there now: no room, slow start, or its pairs fail")
    ] = None
    legs_seen: Annotated[int | None, _is("requests from which its speed was learned")] = None


class RouteAnswer(Answer):
    """The route that a request would take now, and the reasons."""

    object: Literal["route"] = "route"
    policy: Annotated[str, _is("the policy for this model")]
    mode: Annotated[str | None, _is("the mode that coordinates this request")] = None
    role: Annotated[Role, _is("prefill where the request is split, or the role of the engine that does all of it")]
    tokens: Annotated[int, _is("tokens of the prompt; an estimate if `estimated` is true")]
    ids: Annotated[
        Literal["client", "tokenizer", "engine", "bytes"] | None,
        _is("where the token ids come from; null if they are unknown"),
    ]
    estimated: Annotated[bool, _is("whether numbers of tokens are estimates from the text's length")]
    chosen: Annotated[str, _is("the id of an instance")]
    decision: Annotated[str, _is("the reasons, as text")]
    candidates: list[CandidateAnswer]
    waits: Annotated[bool, _is("whether it would wait for room; `chosen` is then the choice if there were room")] = (
        False
    )
    notes: Annotated[list[str], _is("what this answer leaves out")] = []
    accuracy: Annotated[float | None, _is("the share of tokens predicted to be cached that were; null without any")]
    alarm: Annotated[bool, _is("whether that share is too low")]


class RequestStateAnswer(Answer):
    """A state that the request was in."""

    state: Annotated[str, _is("queued, encode, prefill, result, decode, first_byte, done and so on")]
    instance: Annotated[str | None, _is("the engine of the leg that runs in this state")]
    start_ms: Annotated[float, _is("since the request began")]
    duration_ms: float


class RequestAnswer(Answer):
    """A request that has ended, with the facts that the request log has."""

    object: Literal["request"] = "request"
    id: str
    transfer_ids: list[str]
    tenant: str
    model: str | None
    endpoint: str
    stream: bool
    outcome: Annotated[str, _is("ok, refused, failed, midway or gone")]
    status: int | None
    error: Annotated[str | None, _is("the code of the error")]
    started: Annotated[float, _is("seconds since 1970")]
    total_ms: float
    states: Annotated[list[RequestStateAnswer], _is("in their order, each as often as the request was in it")]
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    retries: int
    answer_bytes: int
    trace_id: Annotated[str | None, _is("null where the request is not sampled")]


class VersionAnswer(Answer):
    """The version of the proxy."""

    version: Annotated[str, _is("of kvparams")]
    protocol: Annotated[list[str], _is("the versions of the kvparams protocol that it speaks")]


class ErrorDescription(Answer):
    """An error in OpenAI's format."""

    message: Annotated[str, _is("what is wrong, and what to do")]
    type: str
    param: Annotated[str | None, _is("the member or parameter that is wrong")]
    code: Annotated[str | int | None, _is("a short name of the error")]


class ErrorAnswer(Answer):
    """An error."""

    error: ErrorDescription
