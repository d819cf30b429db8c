"""A client's request, checked: the facts a plan needs, where the body's members stand, and what must be stripped.

The proxy checks the members that it acts on (`member_checks.py`). All other members pass through untouched, and the
engine judges them.
"""

from collections.abc import Generator, Mapping
from typing import Final, NamedTuple

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
from kvparams_proxy.requests.media_uuids import media_uuid_changes, strip_media_uuids_in_steps
from kvparams_proxy.requests.member_checks import check_members

__all__ = ["ParsedRequest", "parse_request", "parse_request_in_steps"]

_BYTES_PER_TOKEN: Final = 4
"""About, in text; limits in tokens need no more."""
_NEEDED: Final = frozenset((*NESTED_CARRIERS, "messages", "prompt", "token_ids", "stream_options"))
"""Members whose values are looked at, whatever else there is."""
_TOKEN_IDS: Final[Mapping[EndpointKind, str]] = {"completions": "prompt", "generate": "token_ids"}
"""The member that may be a long list of token ids."""
_UNCHANGED: Final[Mapping[str, bytes | None]] = {}


class ParsedRequest(NamedTuple):
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


def parse_request(
    kind: EndpointKind,
    body: bytes,
    request_id: str,
    transfer_id: str,
    limits: JSONLimits,
    client: AuthenticatedClient | None = None,
    session: str = "",
    *,
    keep_document: bool = False,
    keep_streamed: bool = False,
) -> ParsedRequest | None:
    """Parses a request's body at once, or returns None for one that is to be read in steps.

    The cache salt of one whose client is known is bound to its tenant. `session` is what the client calls its
    conversation; where it is empty, the body's `prompt_cache_key`.

    What it parses to is kept where the caller says so, always or of those who want a stream: kept by every request that
    runs, it costs room in the processor's caches.

    Raises:
        ProxyError: 400 or 413, naming the member and what it should be.
    """
    read_ = _parsed(kind, body, limits)
    if read_ is None:
        return None
    steps = _checked(kind, body, read_, request_id, transfer_id, client, session, keep_document, keep_streamed)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def parse_request_in_steps(
    kind: EndpointKind,
    body: bytes,
    request_id: str,
    transfer_id: str,
    limits: JSONLimits,
    client: AuthenticatedClient | None = None,
    session: str = "",
    *,
    keep_document: bool = False,
    keep_streamed: bool = False,
) -> Generator[None, None, ParsedRequest]:
    """Parses a request's body of any length in steps of bounded work.

    Raises:
        ProxyError: as for `parse_request`.
    """
    read_ = _parsed(kind, body, limits)
    if read_ is None:
        receiver = _receiver(kind)
        try:
            yield from read_object(body, receiver, limits)
        except JSONTextError as error:
            raise _refused(body, limits, error) from error
        read_ = ParsedBody(receiver.document, receiver.fields, receiver)
        yield
    inbound = yield from _checked(
        kind, body, read_, request_id, transfer_id, client, session, keep_document, keep_streamed
    )
    yield  # whoever gets it copies it
    return inbound


def _parsed(kind: EndpointKind, body: bytes, limits: JSONLimits) -> ParsedBody | None:
    """Reads a body that takes no long time."""
    ids = _TOKEN_IDS.get(kind)
    try:
        found = (ids and load_packed(body, ids, limits)) or load_short_object(body, limits)
        return None if found is None else ParsedBody(*found)
    except JSONTextError as error:
        raise _refused(body, limits, error) from error


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
    elif kind == "chat":
        special["messages"] = MessagesReceiver()
    elif kind == "generate":
        special["token_ids"] = TokenIdsReceiver("token_ids")
        special["features"] = AbridgedObjectReceiver()
    return AbridgedObjectReceiver(_NEEDED, special)


def _checked(
    kind: EndpointKind,
    body: bytes,
    read_: ParsedBody,
    request_id: str,
    transfer_id: str,
    client: AuthenticatedClient | None,
    session: str,
    keep_document: bool,
    keep_streamed: bool,
) -> Generator[None, None, ParsedRequest]:
    document, spans, receiver = read_
    model, prompts, ids, routing_ids, stream, rare = check_members(kind, document, receiver)
    changes = _UNCHANGED
    tenant, priority, salt = "", 0, rare.salt
    if client is not None:
        tenant, priority = client.tenant, client.priority
        salt = client.cache_salt if rare.salt is None else tenant_cache_salt(tenant, rare.salt)
        changes = {"cache_salt": b'"%b"' % salt.encode()}
    stripped, sampling, features = False, None, None
    if receiver is not None or not INSPECTED_MEMBERS.isdisjoint(document):
        before = body
        body, spans, sampling, features = yield from strip_in_steps(read_, body)
        stripped = body is not before
    if kind != "completions":
        before = body
        if receiver is None:
            changes_of_names = media_uuid_changes(kind, document, body, spans, tenant)
            if changes_of_names:
                body, spans = edit_with_spans(body, spans, changes_of_names)
        else:
            body, spans = yield from strip_media_uuids_in_steps(kind, body, spans, tenant, features)
        stripped = stripped or body is not before
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
    kept = document if keep_document or (keep_streamed and stream) else None
    whole = receiver is None or receiver.whole
    return ParsedRequest(facts, body, spans, changes, stream, kept, stripped, whole, sampling)
