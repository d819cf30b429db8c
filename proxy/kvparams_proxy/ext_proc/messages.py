"""Reads and writes the messages of Envoy's ext_proc service, as the endpoint picker protocol 1.0.0 uses them.

Sources: gateway-api-inference-extension docs/proposals/004-endpoint-picker-protocol, and external_processor.proto of
Envoy 1.40. The classes of messages have no types, so nothing outside this module reads a field of one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.ext_proc.message_types import ProcessingRequest, ProcessingResponse

__all__ = [
    "DESTINATION",
    "NAMESPACE",
    "SERVICE",
    "SUBSET",
    "SUBSET_NAMESPACE",
    "BodyMode",
    "MalformedGatewayMessage",
    "Message",
    "ResponseMaker",
    "body_mode",
    "buffered_body_answer",
    "chunk",
    "destination_answer",
    "encode",
    "header_pairs",
    "immediate_error",
    "is_last",
    "kind_of",
    "parse",
    "pass_chunk",
    "pass_unchanged",
    "response_maker",
    "served_endpoint",
    "streamed_body",
    "subset_hint",
]

Message = Any
"""A `ProcessingRequest` or a `ProcessingResponse`."""
BodyMode = Literal["none", "streamed", "buffered", "partial", "duplex"]
MessageKind = Literal[
    "request_headers", "request_body", "request_trailers", "response_headers", "response_body", "response_trailers"
]
ResponseMaker = Literal["engine", "nobody", "gateway"]
"""`nobody`: the data plane has made the response, because the engine did not. `gateway`: it had other reasons."""

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION: Final = "x-gateway-destination-endpoint"
"""The header, and the key of the metadata, that names the endpoints in the order in which they are tried."""
_SERVED: Final = f"{DESTINATION}-served"
SUBSET: Final = f"{DESTINATION}-subset"
NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_EXT_PROC: Final = "envoy.filters.http.ext_proc"
_UPSTREAM_ADDRESS: Final = "upstream.address"
_CODE_DETAILS: Final = "response.code_details"
_FROM_ENGINE: Final = "via_upstream"
_UNREACHED: Final = ("upstream_", "no_healthy_upstream")
"""How details begin where an engine was asked in vain (Envoy 1.40, "Response Code Details"). Others are about
the client or the gateway, such as `request_payload_too_large` or `stream_idle_timeout`."""
_CHUNK_BYTES: Final = 62_000
"""The largest chunk of a body that Envoy accepts is 64 KB (gateway-api-inference-extension pkg/epp/util/envoy)."""
_BODY_MODES: Final[tuple[BodyMode, ...]] = ("none", "streamed", "buffered", "partial", "duplex")
"""By the numbers of `ProcessingMode.BodySendMode`."""

_SET: Final = 2
"""`HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD`."""
_ERROR_STATUSES: Final = frozenset((*range(400, 418), *range(421, 425), 426, 428, 429, 431, *range(500, 509), 510, 511))
"""Of those that `StatusCode` knows. Envoy takes no others (http_status.proto)."""


class MalformedGatewayMessage(ValueError):
    """A data plane has sent what the protocol does not have."""


parse: Final[Any] = ProcessingRequest.FromString
encode: Final[Any] = ProcessingResponse.SerializeToString


def kind_of(request: Message) -> MessageKind | None:
    """Returns which part of a request or response a message carries; None for a kind that Envoy 1.40 does not know."""
    kind: MessageKind | None = request.WhichOneof("request")
    return kind


def body_mode(request: Message) -> tuple[BodyMode, BodyMode]:
    """Returns how the first message of a stream says that bodies of the request and of the response are sent."""
    config = request.protocol_config
    of_request: int = config.request_body_mode
    of_response: int = config.response_body_mode
    return _BODY_MODES[of_request], _BODY_MODES[of_response]


def header_pairs(request: Message) -> list[tuple[bytes, bytes]]:
    """Returns the headers, pseudo headers among them, with names in lower case as Envoy sends them.

    Raises:
        MalformedGatewayMessage: it has none.
    """
    kind = kind_of(request)
    if kind not in ("request_headers", "response_headers"):
        raise MalformedGatewayMessage(f"a message with headers was expected, not {kind}")
    headers = getattr(request, kind).headers.headers
    return [(each.key.encode(), each.raw_value or each.value.encode()) for each in headers]


def is_last(request: Message) -> bool:
    """Returns whether nothing follows these headers or this chunk."""
    last: bool = getattr(request, request.WhichOneof("request")).end_of_stream
    return last


def chunk(request: Message) -> bytes:
    """Returns a piece of a body."""
    body: bytes = getattr(request, request.WhichOneof("request")).body
    return body


def subset_hint(request: Message) -> frozenset[str] | None:
    """Returns the endpoints to choose from, `ip:port` each; None where the data plane does not restrict the choice."""
    metadata = request.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata or SUBSET not in metadata[SUBSET_NAMESPACE].fields:
        return None
    value = metadata[SUBSET_NAMESPACE].fields[SUBSET]
    if value.HasField("list_value"):
        return frozenset(each.string_value.strip() for each in value.list_value.values)
    return frozenset(part for each in value.string_value.split(",") if (part := each.strip()))


def served_endpoint(request: Message) -> str | None:
    """Returns the endpoint that answered, `ip:port`, from the protocol's metadata or from Envoy's own attribute."""
    metadata = request.metadata_context.filter_metadata
    if NAMESPACE in metadata and _SERVED in metadata[NAMESPACE].fields:
        return metadata[NAMESPACE].fields[_SERVED].string_value or None
    return _attribute(request, _UPSTREAM_ADDRESS)


def response_maker(request: Message) -> ResponseMaker:
    """Returns who has made a response, as far as the data plane tells."""
    details = _attribute(request, _CODE_DETAILS)
    if details is None or details == _FROM_ENGINE:
        return "engine"
    return "nobody" if details.startswith(_UNREACHED) else "gateway"


def destination_answer(
    endpoints: Sequence[str], headers: Mapping[str, bytes], removed: Iterable[str], *, to_body: bool = False
) -> Message:
    """Returns the answer that names the destination, in a header and in metadata.

    Args:
        endpoints: `ip:port` each, in the order in which they are tried.
        headers: further headers to set.
        removed: headers to remove.
        to_body: whether it answers a whole body, and not the headers.
    """
    value = ",".join(endpoints)
    answer = ProcessingResponse()
    common = (answer.request_body if to_body else answer.request_headers).response
    common.clear_route_cache = True
    _set(common.header_mutation, DESTINATION, value.encode())
    for name, content in headers.items():
        _set(common.header_mutation, name, content)
    common.header_mutation.remove_headers.extend(removed)
    answer.dynamic_metadata.fields[NAMESPACE].struct_value.fields[DESTINATION].string_value = value
    return answer


def buffered_body_answer(answer: Message, body: bytes | None) -> Message:
    """Adds to `destination_answer(to_body=True)` what replaces the body. None leaves the body as it is."""
    if body is not None:
        answer.request_body.response.body_mutation.body = body
    return answer


def streamed_body(body: bytes, *, ends: bool = True) -> Iterator[Message]:
    """Yields a body in chunks that Envoy accepts. `ends`: whether no trailers follow."""
    for start in range(0, max(1, len(body)), _CHUNK_BYTES):
        piece = body[start : start + _CHUNK_BYTES]
        answer = ProcessingResponse()
        streamed = answer.request_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = piece, ends and start + _CHUNK_BYTES >= len(body)
        yield answer


def pass_chunk(request: Message) -> Message:
    """Returns the answer to a chunk of a body in full duplex, which passes unchanged."""
    answer, kind = ProcessingResponse(), request.WhichOneof("request")
    streamed = getattr(answer, kind).response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = chunk(request), is_last(request)
    return answer


def pass_unchanged(kind: MessageKind, headers: Mapping[str, bytes] | None = None) -> Message:
    """Returns the answer to a part that passes unchanged, apart from headers that are set in it."""
    answer = ProcessingResponse()
    part = getattr(answer, kind)
    part.SetInParent()
    if headers:
        for name, content in headers.items():
            _set(part.response.header_mutation, name, content)
    return answer


def immediate_error(error: ProxyError, request_id: str) -> Message:
    """Returns the message that has the data plane answer with an error itself."""
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = error.status if error.status in _ERROR_STATUSES else 500
    immediate.body, immediate.details = error.body(), error.name.replace(" ", "_")
    _set(immediate.headers, "content-type", b"application/json")
    _set(immediate.headers, "x-request-id", request_id.encode())
    for line in error.headers().split(b"\r\n"):
        name, _, value = line.partition(b": ")
        if name:
            _set(immediate.headers, name.decode(), value)
    return answer


def _set(mutation: Message, name: str, value: bytes) -> None:
    option = mutation.set_headers.add(append_action=_SET)
    option.header.key, option.header.raw_value = name, value


def _attribute(request: Message, name: str) -> str | None:
    if _EXT_PROC not in request.attributes or name not in request.attributes[_EXT_PROC].fields:
        return None
    text: str = request.attributes[_EXT_PROC].fields[name].string_value
    return text or None
