"""What a leg sends: the client's body with the changes that the plan asks for, spliced in.

The one rule: the client's words go out as they came in, but for these changes.
"""

from typing import Final, cast

from kvparams.jsontext import edit, edit_pieces, edited
from kvparams.plan import Leg
from kvparams_proxy.clients.endpoints import Endpoint
from kvparams_proxy.clients.intake import Inbound
from kvparams_proxy.execution.continuation import Recorder, resumable, resumed_body
from kvparams_proxy.upstream.terms import Body

__all__ = ["leg_request", "recorder_for"]

_RESUMED_AT: Final = b"/v1/completions"
"""A stream is continued as a completion of token ids, whatever it was."""
_LONG_BYTES: Final = 256 << 10
"""A longer body is not copied for a leg."""
_IDS: Final = {"return_token_ids": b"true"}


def recorder_for(endpoint: Endpoint, inbound: Inbound) -> Recorder | None:
    """What remembers the stream of a request that can be continued; None for others."""
    document, facts = inbound.document, inbound.facts
    if document is None or endpoint.kind not in ("completions", "chat"):
        return None
    if not resumable(document, inbound.stream, facts.prompts, facts.choices):
        return None
    options = document.get("stream_options")
    return Recorder(
        chat=endpoint.kind == "chat",
        keep_ids=document.get("return_token_ids") is True,
        count=isinstance(options, dict) and cast("dict[str, object]", options).get("include_usage") is True,
    )


def leg_request(endpoint: Endpoint, inbound: Inbound, leg: Leg, recorder: Recorder | None) -> tuple[bytes, Body]:
    """The path and the body of one leg."""
    body, spans = inbound.body, inbound.spans
    path = endpoint.path.encode()
    changes = {**inbound.changes, **leg.changes} if inbound.changes else leg.changes
    if recorder is not None and leg.answers_client:
        changes = {**_IDS, **changes}
    if leg.resumed is not None and inbound.document is not None:
        path = _RESUMED_AT
        body, spans = edited(body, spans, resumed_body(inbound.document, leg.resumed, chat=endpoint.kind == "chat"))
    if len(body) <= _LONG_BYTES:
        return path, edit(body, spans, changes)
    pieces = edit_pieces(body, spans, changes)
    return path, (body,) if pieces is None else tuple(pieces)
