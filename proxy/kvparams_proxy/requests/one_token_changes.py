"""The changes to a client's body after which an engine computes only its prompt: a prefill leg.

Such a leg gives one token and one answer, no stream, and ends because of its length: a prefill that ends in any other
way keeps no KV for decode (vLLM 0.32.0 mooncake_connector.py, request_finished). NIXL also keeps it where one stops.
Members that change the prompt stay as the client wrote them.
"""

from collections.abc import Callable, Mapping
from typing import Final, cast

from pydantic_core import from_json, to_json

from kvparams.jsontext.document import MemberSpan, find_members
from kvparams.jsontext.editing import edit
from kvparams_proxy.requests.endpoints import EndpointKind

__all__ = ["one_token_changes"]

_Spans = Mapping[str, MemberSpan]

_SAMPLING: Final = {"max_tokens": b"1", "ignore_eos": b"true"}
_ANSWER: Final = frozenset(
    (
        *("stop", "stop_token_ids", "min_tokens", "n", "best_of", "echo"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "structured_outputs", "response_format"),
    )
)
_WHOLE: Final = {"stream": b"false"}
_STREAM: Final = frozenset(("stream_options",))
"""A streaming answer carries no `kv_transfer_params` (vLLM 0.32.0 completion/protocol.py)."""
_OPENAI: Final = {**_SAMPLING, **_WHOLE}
_OPENAI_GONE: Final = _ANSWER | _STREAM

_MESSAGES: Final = {"max_tokens": b"1", **_WHOLE}
"""The request has no `ignore_eos` (vLLM 0.32.0 anthropic/protocol.py)."""
_MESSAGES_GONE: Final = frozenset(("stop_sequences",))

_RESPONSES: Final = {"max_output_tokens": b"1", "ignore_eos": b"true", "store": b"false", **_WHOLE}
"""Nothing is stored on the prefill engine: the response is decode's."""
_RESPONSES_GONE: Final = frozenset(
    (
        *("background", "stop", "stop_token_ids", "structured_outputs", "include", "top_logprobs", "stream_options"),
        *("enable_response_messages", "max_tool_calls"),
    )
)

_LONGEST_OBJECT: Final = 256 << 10
"""In bytes. A longer one would hold the event loop: it stays as the client wrote it, and prefill's engine judges it."""


def one_token_changes(
    kind: EndpointKind, body: bytes, spans: _Spans, sampling: _Spans | None = None
) -> dict[str, bytes | None]:
    """Computes the changes to a client's body after which only its prompt is computed.

    They are as for `kvparams.jsontext.editing.edit`. `sampling`: the spans of the members of `sampling_params`, if they
    are known already.
    """
    special = _SPECIAL.get(kind)
    if special is not None:
        return special(body, spans)
    if kind == "generate":
        changes = _changes(_WHOLE, _STREAM, spans)
        field = spans.get("sampling_params")
        inner = b"{}"
        if field is not None and body[field.value] == 0x7B:  # it may be null
            inner = body[field.value : field.end]
        inside = find_members(inner) if sampling is None else sampling
        changes["sampling_params"] = edit(inner, inside, _changes(_SAMPLING, _ANSWER, inside))
        return changes
    changes = _changes(_OPENAI, _OPENAI_GONE, spans)
    if "max_completion_tokens" in spans:
        changes["max_completion_tokens"] = b"1"
    return changes


def _messages(body: bytes, spans: _Spans) -> dict[str, bytes | None]:
    """Returns the changes for `/v1/messages`.

    vLLM refuses a budget for thinking that is not below `max_tokens`, and exempts only legs of its own connectors. The
    budget limits the answer; the prompt is the same without it (anthropic/serving.py, `_handle_thinking`).
    """
    changes = _changes(_MESSAGES, _MESSAGES_GONE, spans)
    if _object(body, spans, "thinking").get("type") == "enabled":
        changes["thinking"] = None
    _without(changes, body, spans, "output_config", "format")
    return changes


def _responses(body: bytes, spans: _Spans) -> dict[str, bytes | None]:
    """Returns the changes for `/v1/responses`."""
    changes = _changes(_RESPONSES, _RESPONSES_GONE, spans)
    _without(changes, body, spans, "text", "format")
    return changes


_SPECIAL: Final[Mapping[EndpointKind, Callable[[bytes, _Spans], dict[str, bytes | None]]]] = {
    "messages": _messages,
    "responses": _responses,
}


def _without(changes: dict[str, bytes | None], body: bytes, spans: _Spans, name: str, member: str) -> None:
    """Adds the removal of a member of the object `name`: the format of the answer."""
    members = _object(body, spans, name)
    if member in members:
        changes[name] = to_json({each: value for each, value in members.items() if each != member})


def _object(body: bytes, spans: _Spans, name: str) -> Mapping[str, object]:
    """Returns a member that is an object of usual length, or an empty one where it is none."""
    field = spans.get(name)
    if field is None or body[field.value] != 0x7B or field.end - field.value > _LONGEST_OBJECT:
        return {}
    return cast("dict[str, object]", from_json(body[field.value : field.end]))


def _changes(wanted: Mapping[str, bytes], gone: frozenset[str], spans: _Spans) -> dict[str, bytes | None]:
    changes: dict[str, bytes | None] = {**wanted}
    if not gone.isdisjoint(spans):
        changes.update((name, None) for name in gone if name in spans)
    return changes
