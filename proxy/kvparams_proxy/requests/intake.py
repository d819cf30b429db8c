"""A client's request, checked: the facts a plan needs, where the body's members stand, and what must be stripped.

The one rule: what the proxy itself acts on is checked here, with the member named; everything else passes through
untouched for the engine to judge.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar, cast

from kvparams.errors import JSONTextError
from kvparams.instances import RequestFacts
from kvparams.jsontext.document import JSONLimits, MemberSpan, find_members, load_short_object, read_object
from kvparams.jsontext.editing import edit_with_spans, find_removals, remove_ranges, shift_spans
from kvparams.jsontext.receivers import AbridgedObjectReceiver
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.authentication import AuthenticatedClient, tenant_cache_salt
from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.requests.forbidden_fields import (
    FORBIDDEN_MEMBERS,
    INSPECTED_MEMBERS,
    NESTED_CARRIERS,
    forbidden_nvext_members,
)
from kvparams_proxy.requests.long_body_receivers import (
    INVALID_MESSAGES_MESSAGE,
    INVALID_PROMPT_MESSAGE,
    MAX_PROMPTS,
    CompletionPromptReceiver,
    MessagesReceiver,
    PromptInputReceiver,
    TokenIdsReceiver,
    has_role,
    invalid_member_error,
    token_id_array,
)
from kvparams_proxy.requests.media_uuids import media_uuid_changes, strip_media_uuids_in_steps

__all__ = ["ParsedRequest", "parse_request", "parse_request_in_steps"]

T = TypeVar("T")

_WHOLE: Final = frozenset(("max_tokens", "max_completion_tokens", "min_tokens"))
_RARE: Final = frozenset(
    (
        "max_completion_tokens",
        "min_tokens",
        "n",
        "stream_options",
        "cache_salt",
        "prompt_logprobs",
        "echo",
        "prompt_cache_key",
        "truncate_prompt_tokens",
        "content_parts",
        "prompt_embeds",
        "use_beam_search",
    )
)
_BYTES_PER_TOKEN: Final = 4
"""About, in text; limits in tokens need no more."""
_ENCODINGS: Final = (None, "float", "base64")
"""vLLM 0.32.0 answers the others with application/octet-stream (entrypoints/pooling)."""
_MAX_CHOICES: Final = 128
_MAX_SALT: Final = 256
_MAX_MODEL: Final = 1024
_MAX_SESSION: Final = 256


class ParsedRequest(NamedTuple):
    """One request that may be planned."""

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


class _ParsedBody(NamedTuple):
    """A body that is JSON."""

    document: Mapping[str, object]
    spans: Mapping[str, MemberSpan]
    receiver: AbridgedObjectReceiver | None = None
    """What has received it, where it is long."""


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
    """Check a request's body, at once, or return None for one that is to be read in steps.

    The cache salt of one whose client is known is bound to its tenant. `session` is what the client calls its
    conversation; where it is empty, the body's `prompt_cache_key`.

    What it parses to is kept where the caller says so, always or of those who want a stream: kept by every request that
    runs, it costs room in the processor's caches.

    Raises:
        ProxyError: 400 or 413, naming the member and what it should be.
    """
    read_ = _parsed(body, limits)
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
    """Do the same in steps of bounded work, for a body of any length.

    Raises:
        ProxyError: as for `parse_request`.
    """
    read_ = _parsed(body, limits)
    if read_ is None:
        receiver = _receiver(kind)
        try:
            yield from read_object(body, receiver, limits)
        except JSONTextError as error:
            raise _refused(body, limits, error) from error
        read_ = _ParsedBody(receiver.document, receiver.fields, receiver)
        yield
    inbound = yield from _checked(
        kind, body, read_, request_id, transfer_id, client, session, keep_document, keep_streamed
    )
    yield  # whoever gets it copies it
    return inbound


def _parsed(body: bytes, limits: JSONLimits) -> _ParsedBody | None:
    """Reads a body that takes no long time."""
    try:
        found = load_short_object(body, limits)
        return None if found is None else _ParsedBody(*found)
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
    read_: _ParsedBody,
    request_id: str,
    transfer_id: str,
    client: AuthenticatedClient | None,
    session: str,
    keep_document: bool,
    keep_streamed: bool,
) -> Generator[None, None, ParsedRequest]:
    document, spans, receiver = read_
    model = _optional(document, "model", str, "a string")
    try:
        if model is not None and len(model) > _MAX_MODEL:
            raise invalid_member_error("model", f"`model` must have at most {_MAX_MODEL} characters")
        prompts, ids = _prompts(kind, document, receiver)
        rare, routing_ids = _ORDINARY, None
        if kind == "generate" or not _RARE.isdisjoint(document):
            rare = _rare_members(kind, document)
            prompts += rare.more_prompts
            if ids is not None:
                ids, routing_ids = _computed_ids(document, ids, prompts)
        _whole(document, "max_tokens", 0 if rare.prompt_only else 1)
        stream = _optional(document, "stream", bool, "true or false") or False
    except ProxyError as error:
        error.model = model
        raise
    changes = _UNCHANGED
    tenant, priority, salt = "", 0, rare.salt
    if client is not None:
        tenant, priority = client.tenant, client.priority
        salt = client.cache_salt if rare.salt is None else tenant_cache_salt(tenant, rare.salt)
        changes = {"cache_salt": b'"%b"' % salt.encode()}
    stripped, sampling, features = False, None, None
    if receiver is not None or not INSPECTED_MEMBERS.isdisjoint(document):
        before = body
        body, spans, sampling, features = yield from _strip_in_steps(read_, body)
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


def _prompts(
    kind: EndpointKind, document: Mapping[str, object], receiver: AbridgedObjectReceiver | None
) -> tuple[int, Sequence[int] | None]:
    """How many prompts there are, and the token ids where it is one prompt of ids."""
    if receiver is not None:
        for name in ("prompt", "messages", "token_ids"):
            long = receiver.long.get(name)
            if isinstance(long, PromptInputReceiver):
                return long.prompts()
    return _PROMPTS[kind](document)


class _RareMembers(NamedTuple):
    """What most requests do not ask for."""

    choices: int = 1
    salt: str | None = None
    prompt_scored: bool = False
    prompt_only: bool = False
    """It wants its prompt back, and nothing more (vLLM 0.32.0 completion/protocol.py: echo_without_generation)."""
    session: str = ""
    """OpenAI's `prompt_cache_key`: requests of one key have their beginning in common."""
    more_prompts: int = 0
    """Prompts that came as embeddings, beside those in `prompt` (vLLM 0.32.0 renderers/online_renderer.py)."""


_ORDINARY: Final = _RareMembers()
_NEEDED: Final = frozenset((*NESTED_CARRIERS, "messages", "prompt", "token_ids", "stream_options"))
"""Members whose values are looked at, whatever else there is."""
_UNCHANGED: Final[Mapping[str, bytes | None]] = {}


def _rare_members(kind: EndpointKind, document: Mapping[str, object]) -> _RareMembers:
    """Check the members that most requests do not have."""
    echo = kind == "completions" and _optional(document, "echo", bool, "true or false") is True
    prompt_only = echo and document.get("max_tokens") == 0
    for name in _WHOLE & document.keys():
        _whole(document, name, 0 if name == "min_tokens" or prompt_only else 1)
    sampled = document
    if kind == "generate":
        sampled = cast("dict[str, object]", _optional(document, "sampling_params", dict, "an object") or {})
    choices = 1 if kind == "other" else _whole(sampled, "n", 1, _MAX_CHOICES) or 1
    scored = sampled.get("prompt_logprobs") is not None or (echo and document.get("logprobs") is not None)
    _optional(document, "stream_options", dict, "an object")
    salt = _optional(document, "cache_salt", str, "a string")
    if salt is not None and not 0 < len(salt) <= _MAX_SALT:
        raise invalid_member_error("cache_salt", f"`cache_salt` must have 1 to {_MAX_SALT} characters")
    session = _optional(document, "prompt_cache_key", str, "a string") or ""
    more_prompts = 0
    if kind == "completions" and (embeds := document.get("prompt_embeds")) is not None:
        more_prompts = len(cast("list[object]", embeds)) if isinstance(embeds, list) else 1
    # vLLM 0.32.0 runs a beam search without kv_transfer_params (completion/protocol.py, to_beam_search_params).
    beams = kind in ("completions", "chat") and _optional(document, "use_beam_search", bool, "true or false") is True
    return _RareMembers(
        choices, salt, scored or prompt_only or beams, prompt_only, session[:_MAX_SESSION], more_prompts
    )


def _computed_ids(
    document: Mapping[str, object], ids: Sequence[int], prompts: int
) -> tuple[Sequence[int] | None, Sequence[int] | None]:
    """Returns the ids that an engine certainly computes for a prompt of `ids`, and those it probably computes.

    Exactly one of the two is None, or both where the request has further prompts. Engines may be told to cut a prompt
    (vLLM 0.32.0 renderers/params.py, `_truncation_slice`: to how many tokens -1 stands for and which side goes by
    default, only the engine knows) or to put media into it (`content_parts` of `/inference/v1/generate`). A document
    whose prefix is not what the engine computes would be refused, so then it has none.
    """
    if prompts > 1:
        return None, None
    keep = _whole(document, "truncate_prompt_tokens", -1)
    if keep is not None and keep < len(ids):
        if keep > 0:
            ids = ids[:keep] if document.get("truncation_side") == "right" else ids[-keep:]
        return None, ids
    return (None, ids) if document.get("content_parts") else (ids, None)


def _optional(document: Mapping[str, object], name: str, kind: type[T], expected: str) -> T | None:
    value = document.get(name)
    if value is None or type(value) is kind:
        return value  # pyright: ignore[reportReturnType]  a cast here would be called eight times a request
    raise invalid_member_error(name, f"`{name}` must be {expected}")


def _whole(document: Mapping[str, object], name: str, least: int, most: int = 2**31 - 1) -> int | None:
    value = _optional(document, name, int, "a whole number")
    if value is not None and not least <= value <= most:
        raise invalid_member_error(name, f"`{name}` must be a whole number from {least} to {most}")
    return value


def _chat(document: Mapping[str, object]) -> tuple[int, None]:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid_member_error("messages", INVALID_MESSAGES_MESSAGE)
    for index, message in enumerate(cast("list[object]", messages)):
        if not has_role(message):
            raise invalid_member_error(f"messages[{index}]", "each message must be an object with a `role`")
    return 1, None


def _prompt(document: Mapping[str, object]) -> tuple[int, Sequence[int] | None]:
    """How many prompts there are, and the token ids where it is one prompt of ids."""
    prompt = document.get("prompt")
    if type(prompt) is str:
        if not prompt:
            raise invalid_member_error("prompt", "`prompt` is empty")
        return 1, None
    if not isinstance(prompt, list) or not prompt:
        raise invalid_member_error("prompt", INVALID_PROMPT_MESSAGE)
    items = cast("list[object]", prompt)
    if type(items[0]) is int:
        return 1, token_id_array(items, "prompt")
    if len(items) > MAX_PROMPTS:
        raise invalid_member_error("prompt", f"at most {MAX_PROMPTS} prompts fit in one request")
    kind = type(items[0])
    for index, item in enumerate(items):
        if type(item) is not kind or kind not in (str, list) or not item:
            raise invalid_member_error(
                f"prompt[{index}]", "prompts of one request must be all strings or all lists, none empty"
            )
        if kind is list:
            token_id_array(cast("list[object]", item), f"prompt[{index}]")
    if len(items) == 1 and kind is list:
        return 1, token_id_array(cast("list[object]", items[0]), "prompt[0]")
    return len(items), None


def _generate(document: Mapping[str, object]) -> tuple[int, Sequence[int] | None]:
    ids = document.get("token_ids")
    if not isinstance(ids, list) or not ids:
        raise invalid_member_error("token_ids", "`token_ids` must be a list of at least one token id")
    return 1, token_id_array(cast("list[object]", ids), "token_ids")


def _other(document: Mapping[str, object]) -> tuple[int, None]:
    """It is for the engine to judge, unless its answer would not be JSON."""
    if document.get("encoding_format") not in _ENCODINGS:
        raise invalid_member_error("encoding_format", '`encoding_format` must be "float" or "base64" here')
    return 1, None


_PROMPTS: Final[Mapping[EndpointKind, Callable[[Mapping[str, object]], tuple[int, Sequence[int] | None]]]] = {
    "completions": _prompt,
    "chat": _chat,
    "generate": _generate,
    "other": _other,
}
"""For each kind of request, how many prompts there are, and the token ids where it is one prompt of ids."""


class _StrippedBody(NamedTuple):
    """A body without what only the proxy may say."""

    body: bytes
    spans: Mapping[str, MemberSpan]
    sampling: Mapping[str, MemberSpan] | None
    """Where the members of a long `sampling_params` stand in its text."""
    features: Mapping[str, MemberSpan] | None
    """The same of long `features`."""


def _strip_in_steps(read_: _ParsedBody, body: bytes) -> Generator[None, None, _StrippedBody]:
    """Strips a body, in steps: each of them may copy it, or pass through all of its members."""
    document, spans, receiver = read_
    gone = [name for name in FORBIDDEN_MEMBERS if name in document]
    cuts: list[tuple[int, int]] = []
    for name, path in NESTED_CARRIERS.items():
        inner = document.get(name)
        if isinstance(inner, str | list):  # an object to no engine that is known; text of one, perhaps, to another
            gone.append(name)
        elif isinstance(inner, dict):
            cuts += _cuts_inside(body, spans[name], path, _long_object(receiver, name), hints=name == "nvext")
            yield
    cuts += find_removals(body, spans, gone)
    cuts.sort()
    after, places = body, spans
    if cuts:
        after = remove_ranges(body, cuts)
        yield
        places = shift_spans(spans, cuts)
        yield
    inside: list[Mapping[str, MemberSpan] | None] = []
    for name in ("sampling_params", "features"):
        long = _long_object(receiver, name)
        inside.append(None if long is None else shift_spans(long.fields, cuts, places[name].value))
        yield
    return _StrippedBody(after, places, *inside)


def _cuts_inside(
    body: bytes, place: MemberSpan, path: tuple[str, ...], long: AbridgedObjectReceiver | None, *, hints: bool = False
) -> list[tuple[int, int]]:
    """What to cut out of the object at `place`, and of the object in it that `path` leads to. `long`: what has received
    it, if it is long; `hints`: it is `nvext`."""
    if long is not None:
        spans = long.fields
    else:
        inside = find_members(body[place.value : place.end])
        spans = {name: MemberSpan(*(place.value + at for at in field)) for name, field in inside.items()}
    gone = [name for name in spans if name in FORBIDDEN_MEMBERS]
    if hints:
        gone += forbidden_nvext_members(spans)
    cuts: list[tuple[int, int]] = []
    if path and (inner := spans.get(path[0])) is not None:
        first = body[inner.value]
        if first == 0x7B:
            cuts = _cuts_inside(body, inner, path[1:], _long_object(long, path[0]))
        elif first in b'"[':
            gone.append(path[0])
    return cuts + find_removals(body, spans, gone)


def _long_object(receiver: AbridgedObjectReceiver | None, name: str) -> AbridgedObjectReceiver | None:
    """What has received this member, if it is a long object."""
    long = None if receiver is None else receiver.long.get(name)
    return long if isinstance(long, AbridgedObjectReceiver) else None
