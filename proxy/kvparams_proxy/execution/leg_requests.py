"""Builds the request of a leg: the client's body with the changes that the plan asks for.

Apart from these changes the client's bytes are sent unchanged.
"""

from typing import Final, cast

from kvparams.jsontext.editing import edit, edit_pieces, edit_with_spans
from kvparams.routing.plan import Leg
from kvparams_proxy.execution.stream_continuation import StreamRecorder
from kvparams_proxy.execution.stream_resumption import is_resumable, resumed_body_changes
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.requests.intake import ParsedRequest
from kvparams_proxy.requests.response_ids import ResponseIds
from kvparams_proxy.upstream.types import UpstreamBody

__all__ = ["build_leg_request", "make_stream_recorder"]

_RESUMED_AT: Final = b"/v1/completions"
"""A stream is continued as a completion of token ids, whatever it was."""
_LONG_BYTES: Final = 256 << 10
"""A longer body is not copied for a leg."""
_IDS: Final = {"return_token_ids": b"true"}


def make_stream_recorder(endpoint: APIEndpoint, inbound: ParsedRequest) -> StreamRecorder | None:
    """Returns a recorder for the stream of a request that can be continued, or None for other requests."""
    document, facts = inbound.document, inbound.facts
    if document is None or endpoint.kind not in ("completions", "chat"):
        return None
    if not is_resumable(document, inbound.stream, facts.prompts, facts.choices):
        return None
    options = document.get("stream_options")
    return StreamRecorder(
        chat=endpoint.kind == "chat",
        keep_ids=document.get("return_token_ids") is True,
        count=isinstance(options, dict) and cast("dict[str, object]", options).get("include_usage") is True,
    )


def build_leg_request(
    endpoint: APIEndpoint,
    inbound: ParsedRequest,
    leg: Leg,
    recorder: StreamRecorder | None,
    response_ids: ResponseIds | None = None,
    rank_key: str | None = None,
) -> tuple[bytes, UpstreamBody]:
    """Returns the path and the body of one leg.

    `response_ids` names the response of a leg that answers the client. `rank_key` is the member that names the
    data-parallel rank of the leg's instance, where its dialect has one.
    """
    body, spans = inbound.body, inbound.member_spans
    path = endpoint.path.encode()
    changes = {**inbound.changes, **leg.changes} if inbound.changes else leg.changes
    if recorder is not None and leg.answers_client:
        changes = {**_IDS, **changes}
    if response_ids is not None and endpoint.kind == "responses" and leg.answers_client:
        named = response_ids.make(inbound.facts.tenant, leg.instance.id)
        changes = {**changes, "request_id": b'"%b"' % named.encode()}
    if rank_key is not None and leg.instance.rank is not None and endpoint.kind != "other":
        changes = {**changes, rank_key: b"%d" % leg.instance.rank.index}
    if leg.resume_from is not None and inbound.document is not None:
        path = _RESUMED_AT
        body, spans = edit_with_spans(
            body, spans, resumed_body_changes(inbound.document, leg.resume_from, chat=endpoint.kind == "chat")
        )
    if len(body) <= _LONG_BYTES:
        return path, edit(body, spans, changes)
    pieces = edit_pieces(body, spans, changes)
    return path, (body,) if pieces is None else tuple(pieces)
