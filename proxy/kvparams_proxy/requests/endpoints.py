"""The engines' endpoints that are served here, and how a request to each is cut to a prefill leg.

Generating ones are split between prefill and decode; others are passed to one engine as they are. An endpoint has the
same path for clients and engines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kvparams.instances import Role
from kvparams.jsontext.document import MemberSpan, find_members
from kvparams.jsontext.editing import edit

__all__ = ["ENDPOINTS", "APIEndpoint", "EndpointKind", "one_token_changes"]

EndpointKind = Literal["completions", "chat", "generate", "other"]


@dataclass(frozen=True, slots=True)
class APIEndpoint:
    """An endpoint of the engines' API."""

    path: str
    kind: EndpointKind
    role: Role | None = None
    """Who answers alone; None where the work is split."""
    sends_done_event: bool = True
    """Whether its streams end with `data: [DONE]`: one that ends without it was cut off."""

    @property
    def has_choices(self) -> bool:
        """True if its responses have `choices`: a response without one is invalid."""
        return self.kind != "other"

    @property
    def supports_streaming(self) -> bool:
        """True if it answers `"stream": true` with a stream."""
        return self.role is not Role.PREFILL


ENDPOINTS: Final = (
    APIEndpoint("/v1/completions", "completions"),
    APIEndpoint("/v1/chat/completions", "chat"),
    APIEndpoint("/inference/v1/generate", "generate"),
    APIEndpoint("/v1/responses", "other", Role.DECODE, sends_done_event=False),
    *(
        APIEndpoint(path, "other", Role.PREFILL)
        for path in (
            "/v1/embeddings",
            "/v1/rerank",
            "/rerank",
            "/v2/rerank",
            "/v1/score",
            "/score",
            "/classify",
            "/pooling",
            "/tokenize",
            "/detokenize",
        )
    ),
)
"""Source: vLLM 0.32.0 entrypoints. A decode engine that answers alone computes the prompt too. `/v1/messages` is not
among them: its request has no `cache_salt` there, so nothing would keep tenants apart in the cache."""

_SAMPLING: Final = {"max_tokens": b"1", "ignore_eos": b"true"}
_ANSWER: Final = frozenset(
    (
        *("stop", "stop_token_ids", "min_tokens", "n", "best_of", "echo"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "structured_outputs", "response_format"),
    )
)
"""One token, one answer, and it ends because of its length: a prefill that ends in any other way keeps no KV for
decode (vLLM 0.32.0 nixl/base_scheduler.py and mooncake_connector.py, request_finished)."""
_WHOLE: Final = {"stream": b"false"}
_STREAM: Final = frozenset(("stream_options",))
"""A streaming answer carries no `kv_transfer_params` (vLLM 0.32.0 completion/protocol.py)."""
_OPENAI: Final = {**_SAMPLING, **_WHOLE}
_OPENAI_GONE: Final = _ANSWER | _STREAM


def one_token_changes(
    kind: EndpointKind, body: bytes, spans: Mapping[str, MemberSpan], sampling: Mapping[str, MemberSpan] | None = None
) -> dict[str, bytes | None]:
    """Computes the changes to a client's body after which only its prompt is computed.

    They are as for `kvparams.jsontext.editing.edit`. `sampling`: the spans of the members of `sampling_params`, if they
    are known already.
    """
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


def _changes(
    wanted: Mapping[str, bytes], gone: frozenset[str], spans: Mapping[str, MemberSpan]
) -> dict[str, bytes | None]:
    changes: dict[str, bytes | None] = {**wanted}
    if not gone.isdisjoint(spans):
        changes.update((name, None) for name in gone if name in spans)
    return changes
