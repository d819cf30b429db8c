"""A client's request, checked: the facts a plan needs, where the body's members stand, and what must be stripped.

The proxy checks the members that it acts on (`member_checks.py`). All other members pass through untouched, and the
engine judges them.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from kvparams.errors import JSONTextError
from kvparams.instances import RequestFacts
from kvparams.jsontext.document import (
    JSONLimits,
    MemberSpan,
    load_short_object,
    read_object,
)
from kvparams.jsontext.editing import edit_with_spans
from kvparams.jsontext.packed_lists import load_packed
from kvparams.jsontext.receivers import AbridgedObjectReceiver
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.authentication import AuthenticatedClient, tenant_cache_salt
from kvparams_proxy.requests.body_stripping import ParsedBody, strip_in_steps
from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.requests.forbidden_fields import (
    INSPECTED_MEMBERS,
    NESTED_CARRIERS,
)
from kvparams_proxy.requests.long_body_receivers import (
    CompletionPromptReceiver,
    MessagesReceiver,
    PromptInputReceiver,
    TokenIdsReceiver,
)
from kvparams_proxy.requests.media_detection import find_media_in_steps, may_have_media
from kvparams_proxy.requests.media_uuids import media_uuid_changes, strip_media_uuids_in_steps
from kvparams_proxy.requests.member_checks import CheckedMembers, check_members

__all__ = ["ParsedRequest", "parse_request", "parse_request_in_steps"]

T = TypeVar("T")
_BYTES_PER_TOKEN: Final = 4
"""About, in text; limits in tokens need no more."""
_NEEDED: Final = frozenset(
    (*NESTED_CARRIERS, "messages", "prompt", "token_ids", "input", "tool_choice", "stream_options")
)
"""Members whose values are looked at, whatever else there is."""
_TOKEN_IDS: Final[Mapping[EndpointKind, str]] = {"completions": "prompt", "generate": "token_ids"}
"""The member that may be a long list of token ids."""
_UNCHANGED: Final[Mapping[str, bytes | None]] = {}


@dataclass(slots=True)
class ParsedRequest:
    """A parsed request that is ready to be planned."""

    facts: RequestFacts
    body: bytes
    """The client's body without what was stripped, otherwise byte for byte."""
    member_spans: Mapping[str, MemberSpan]
    """Where the members of `body` stand."""
    changes: Mapping[str, bytes | None]
    """What every leg changes in it, whatever it changes beside: cheaper than to change it here, and walk it again."""
    stream: bool
    document: Mapping[str, object] | None = None
    """The body, parsed, where it is needed after this: what was stripped is still in it."""
    was_stripped: bool = False
    """Whether anything was."""
    is_document_complete: bool = True
    """Whether `document` is all that the body says. In one of a long body, members that are long are replaced by
    something short of their kind."""
    sampling_spans: Mapping[str, MemberSpan] | None = None
    """Where the members of a `sampling_params` that is long stand in its text."""
    previous_response: str | None = None
    """The response that this one goes on from, where there is one: its engine has to answer."""


def parse_request(
    kind: EndpointKind,
    body: bytes,
    request_id: str,
    transfer_id: str,
    limits: JSONLimits,
    client: AuthenticatedClient | None = None,
    session: str = "",
    keep_document: bool = False,
    keep_streamed: bool = False,
    find_media: bool = False,
) -> ParsedRequest | None:
    """Parses a request's body at once, or returns None for one that is to be read in steps.

    The cache salt of one whose client is known is bound to its tenant. `session` is what the client calls its
    conversation; where it is empty, the body's `prompt_cache_key`.

    What it parses to is kept where the caller says so, always or of those who want a stream: kept by every request that
    runs, it costs room in the processor's caches. `find_media`: `RequestFacts.media` is needed.

    Raises:
        ProxyError: 400 or 413, naming the member and what it should be.
    """
    ids = _TOKEN_IDS.get(kind)
    try:
        found = (ids and load_packed(body, ids, limits)) or load_short_object(body, limits)
    except JSONTextError as error:
        raise _refused(body, limits, error) from error
    if found is None:
        return None
    document, spans = found
    members = check_members(kind, document, None)
    rest = body
    if not INSPECTED_MEMBERS.isdisjoint(document):
        rest, spans, _, _ = _finish(strip_in_steps(ParsedBody(document, spans), body))
    if kind != "completions":
        changes = media_uuid_changes(kind, document, rest, spans, "" if client is None else client.tenant)
        if changes:
            rest, spans = edit_with_spans(rest, spans, changes)
    kept = document if keep_document or (keep_streamed and members[4]) else None
    parsed = _request(members, rest, spans, request_id, transfer_id, client, session, kept, rest is not body)
    if find_media and may_have_media(kind, document) and (media := _finish(find_media_in_steps(kind, rest, spans))):
        parsed.facts = parsed.facts._replace(media=media)
    return parsed


def parse_request_in_steps(
    kind: EndpointKind,
    body: bytes,
    request_id: str,
    transfer_id: str,
    limits: JSONLimits,
    client: AuthenticatedClient | None = None,
    session: str = "",
    keep_document: bool = False,
    keep_streamed: bool = False,
    find_media: bool = False,
) -> Generator[None, None, ParsedRequest]:
    """Parses a request's body of any length in steps of bounded work.

    Raises:
        ProxyError: as for `parse_request`.
    """
    at_once = parse_request(
        kind, body, request_id, transfer_id, limits, client, session, keep_document, keep_streamed, find_media
    )
    if at_once is not None:
        return at_once
    receiver = _receiver(kind)
    try:
        yield from read_object(body, receiver, limits)
    except JSONTextError as error:
        raise _refused(body, limits, error) from error
    document = receiver.document
    yield
    members = check_members(kind, document, receiver)
    rest, spans, sampling, features = yield from strip_in_steps(ParsedBody(document, receiver.fields, receiver), body)
    if kind != "completions":
        tenant = "" if client is None else client.tenant
        rest, spans = yield from strip_media_uuids_in_steps(kind, rest, spans, tenant, features)
    kept = document if keep_document or (keep_streamed and members[4]) else None
    inbound = _request(members, rest, spans, request_id, transfer_id, client, session, kept, rest is not body)
    inbound.is_document_complete, inbound.sampling_spans = receiver.whole, sampling
    if find_media and (media := (yield from find_media_in_steps(kind, rest, spans))):
        inbound.facts = inbound.facts._replace(media=media)
    yield  # whoever gets it copies it
    return inbound


def _finish(steps: Generator[None, None, T]) -> T:
    """Returns what steps lead to that take no long time together."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _refused(body: bytes, limits: JSONLimits, error: JSONTextError) -> ProxyError:
    if len(body) > limits.max_bytes:
        return ProxyError(413, "invalid_request_error", f"the body is larger than {limits.max_bytes} bytes")
    return ProxyError(400, "invalid_request_error", f"the body was refused: {error}", code="invalid_json")


def _receiver(kind: EndpointKind) -> AbridgedObjectReceiver:
    """Returns what receives a long body of this kind."""
    special: dict[str, AbridgedObjectReceiver | PromptInputReceiver] = {
        name: AbridgedObjectReceiver(special={inner: AbridgedObjectReceiver() for inner in path})
        for name, path in NESTED_CARRIERS.items()
    }
    if kind == "completions":
        special["prompt"] = CompletionPromptReceiver()
    elif kind in ("chat", "messages"):
        special["messages"] = MessagesReceiver()
    elif kind == "responses":
        special["input"] = PromptInputReceiver("")
    elif kind == "generate":
        special["token_ids"] = TokenIdsReceiver("token_ids")
        special["features"] = AbridgedObjectReceiver()
    return AbridgedObjectReceiver(_NEEDED, special)


def _request(
    members: CheckedMembers,
    body: bytes,
    spans: Mapping[str, MemberSpan],
    request_id: str,
    transfer_id: str,
    client: AuthenticatedClient | None,
    session: str,
    document: Mapping[str, object] | None,
    was_stripped: bool,
) -> ParsedRequest:
    """Returns the request with this body."""
    model, prompts, ids, routing_ids, stream, rare = members
    changes = _UNCHANGED
    tenant, priority, salt = "", 0, rare.salt
    if client is not None:
        tenant, priority = client.tenant, client.priority
        salt = client.cache_salt if rare.salt is None else tenant_cache_salt(tenant, rare.salt)
        changes = {"cache_salt": b'"%b"' % salt.encode()}
    known = routing_ids if ids is None else ids
    tokens = len(body) // _BYTES_PER_TOKEN if known is None else len(known)
    facts = RequestFacts(
        request_id,
        transfer_id,
        model,
        prompts,
        rare.choices,
        ids,
        salt,
        tenant,
        priority,
        tokens,
        rare.prompt_scored,
        session or rare.session,
    )
    if routing_ids is not None:
        facts = facts._replace(routing_ids=routing_ids)
    parsed = ParsedRequest(facts, body, spans, changes, stream, document, was_stripped)
    if rare.previous_response is not None:
        parsed.previous_response = rare.previous_response
    return parsed
