"""Makes entries of the fleet from Kubernetes pods and endpoint slices. Pure.

What an engine is, its labels and annotations say; several conventions are understood:

| says | ours | others |
|---|---|---|
| role | label `kvparams.io/role` | `llm-d.ai/role`, where `both` is `aggregated`; `model` of production-stack |
| connector | annotation `kvparams.io/connector` | |
| port | annotation `kvparams.io/port` | --k8s-port |
| bootstrap server, KV events | annotations `kvparams.io/bootstrap-port`, `kvparams.io/kv-events-port` | |
| group, compatibility, store | labels or annotations `kvparams.io/group`, `...compatibility`, `...store` | |

production-stack's label says the role through --prefill-model-labels and --decode-model-labels.

Sources: production-stack 0.1.13, `src/vllm_router/service_discovery.py`; llm-d's `llm-d.ai/role` in its inference
scheduler, `pkg/plugins/filter/pd_role.go`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any, Final, cast

__all__ = ["EngineEntry", "endpoint_slice_entries", "pod_entries"]

_PREFIX: Final = "kvparams.io/"
_LLM_D_ROLE: Final = "llm-d.ai/role"
_LLM_D_ROLES: Final[Mapping[str, str]] = {
    "both": "aggregated",
    "prefill-decode": "aggregated",
    "encode-prefill-decode": "aggregated",
    "prefill": "prefill",
    "encode-prefill": "prefill",
    "decode": "decode",
    "encode": "encode",
}
_TEXTS: Final = ("connector", "group", "compatibility", "store")
_MOST_LABELS: Final = 32
_LONGEST_LABEL: Final = 253
_MAX_PORT: Final = 65535
_LONGEST_NAME: Final = 122
"""Of a pod, in an instance's id that has the port behind it."""


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine that a Kubernetes object describes."""

    document: Mapping[str, object]
    """What an entry of the fleet file would say."""
    uid: str
    """Of the pod. Another one is another incarnation, whatever its name."""
    has_role: bool
    """Whether the object says the role itself; otherwise its labels have to."""


def pod_entries(pod: Mapping[str, Any], ports: Sequence[int]) -> Sequence[EngineEntry]:
    """Returns the engines of a pod; none of a pod without an address or that has ended.

    A pod that is being deleted, or that is not ready, gets no new requests.

    Args:
        pod: as the API has it.
        ports: of its engines, where the pod does not say one. Behind several ports are data-parallel ranks.

    Raises:
        ValueError: an annotation cannot be used; the message names it.
    """
    metadata, status = _mapping(pod, "metadata"), _mapping(pod, "status")
    address = status.get("podIP")
    if not isinstance(address, str) or not address or status.get("phase") in ("Succeeded", "Failed"):
        return ()
    conditions = _sequence(status, "conditions")
    is_ready = any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
    drain = not is_ready or metadata.get("deletionTimestamp") is not None
    name, uid, facts = _text(metadata, "name"), _text(metadata, "uid"), _facts(metadata)
    if len(ports) == 1 or facts.port("port") is not None:
        return (_entry(name, uid, address, facts, ports[0], drain=drain),)
    return tuple(_entry(f"{name[:_LONGEST_NAME]}-{port}", uid, address, facts, port, drain=drain) for port in ports)


def endpoint_slice_entries(slice: Mapping[str, Any], port: int) -> Iterator[EngineEntry]:
    """Yields the engines of an endpoint slice; labels and annotations are the slice's own.

    Args:
        slice: as the API has it.
        port: of engines where neither an annotation nor the slice says it.

    Raises:
        ValueError: an annotation cannot be used; the message names it.
    """
    metadata = _mapping(slice, "metadata")
    facts = _facts(metadata)
    ports = [each.get("port") for each in _sequence(slice, "ports")]
    if len(ports) == 1 and isinstance(ports[0], int):
        port = ports[0]
    for endpoint in _sequence(slice, "endpoints"):
        addresses = endpoint.get("addresses")
        if not isinstance(addresses, list) or not addresses:
            continue
        target, conditions = _mapping(endpoint, "targetRef"), _mapping(endpoint, "conditions")
        address = str(cast("list[object]", addresses)[0])
        yield _entry(
            _text(target, "name") or address,
            _text(target, "uid") or address,
            address,
            facts,
            port,
            # A condition that is missing means yes for readiness and no for terminating.
            drain=conditions.get("ready") is False or conditions.get("terminating") is True,
        )


def _entry(name: str, uid: str, address: str, facts: "_Facts", port: int, *, drain: bool) -> EngineEntry:
    host = _host(address)
    document: dict[str, object] = {
        "id": _id(name),
        "url": f"http://{host}:{facts.port('port') or port}",
        "labels": facts.labels,
        "drain": drain,
    }
    role = facts.role()
    if role is not None:
        document["role"] = role
    for member in _TEXTS:
        value = facts.text(member)
        if value is not None:
            document[member] = value
    bootstrap, events = facts.port("bootstrap-port"), facts.port("kv-events-port")
    if bootstrap is not None:
        document["bootstrap"] = f"http://{host}:{bootstrap}"
    if events is not None:
        document["kv_events"] = f"tcp://{host}:{events}"
    if (ranks := facts.text("ranks")) is not None:
        document["ranks"] = ranks
    return EngineEntry(document, uid, role is not None)


@dataclass(frozen=True, slots=True)
class _Facts:
    """The labels and annotations of one object."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    def text(self, name: str) -> str | None:
        """Returns what a label or an annotation of ours says."""
        return self.labels.get(_PREFIX + name) or self.annotations.get(_PREFIX + name)

    def port(self, name: str) -> int | None:
        """Returns a port that an annotation says. Raises ValueError."""
        text = self.text(name)
        if text is None:
            return None
        if not text.isascii() or not text.isdecimal() or not 0 < int(text[:6]) <= _MAX_PORT:
            raise ValueError(f"annotation {_PREFIX}{name} must be a port, from 1 to {_MAX_PORT}")
        return int(text)

    def role(self) -> str | None:
        """Returns the role that a label says."""
        ours = self.text("role")
        if ours is not None:
            return ours
        theirs = self.labels.get(_LLM_D_ROLE)
        return None if theirs is None else _LLM_D_ROLES.get(theirs, theirs)


def _facts(metadata: Mapping[str, Any]) -> _Facts:
    labels = {name: value for name, value in _texts(metadata, "labels").items() if value}
    return _Facts(dict(sorted(labels.items())[:_MOST_LABELS]), _texts(metadata, "annotations"))


def _host(address: str) -> str:
    """Returns an address as it stands in a URL. Raises ValueError."""
    try:
        found = ip_address(address)
    except ValueError:
        raise ValueError("its address is no IP address") from None
    return f"[{found}]" if isinstance(found, IPv6Address) else str(found)


def _id(name: str) -> str:
    """Returns a pod's name as an instance's id, which has at most 128 characters."""
    return name[:128]


def _mapping(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def _sequence(document: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    found = document.get(name)
    items = cast("list[Any]", found) if isinstance(found, list) else []
    return [cast("Mapping[str, Any]", each) for each in items if isinstance(each, dict)]


def _text(document: Mapping[str, Any], name: str) -> str:
    found = document.get(name)
    return found if isinstance(found, str) else ""


def _texts(document: Mapping[str, Any], name: str) -> dict[str, str]:
    found = _mapping(document, name)
    return {key: value for key, value in found.items() if isinstance(value, str) and len(value) <= _LONGEST_LABEL}
