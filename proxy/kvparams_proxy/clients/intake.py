"""A client's request, checked: the facts a plan needs, where the body's members stand, and what must be stripped.

The one rule: what the proxy itself acts on is checked here, with the member named; everything else passes through
untouched for the engine to judge.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar, cast

from kvparams.errors import JSONTextError
from kvparams.jsontext import Field, JSONLimits, edit, fields, load_object
from kvparams.scheduling import RequestFacts
from kvparams.tokens import MAX_TOKENS
from kvparams_proxy.clients.auth import Client, bind_salt
from kvparams_proxy.clients.endpoints import EndpointKind
from kvparams_proxy.clients.media import without_names
from kvparams_proxy.clients.strip_list import CARRIERS, STRIPPED, SUSPICIOUS, steering_hint
from kvparams_proxy.errors import ProxyError

__all__ = ["Inbound", "read"]

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
_MAX_PROMPTS: Final = 1024
_MAX_SALT: Final = 256
_MAX_MODEL: Final = 1024
_MAX_SESSION: Final = 256


class Inbound(NamedTuple):
    """One request that may be planned."""

    facts: RequestFacts
    body: bytes
    """The client's body without what was stripped, otherwise byte for byte."""
    spans: Mapping[str, Field]
    """Where the members of `body` stand."""
    changes: Mapping[str, bytes | None]
    """What every leg changes in it, whatever it changes beside: cheaper than to change it here, and walk it again."""
    stream: bool
    document: Mapping[str, object] | None = None
    """The body, parsed, where it is needed after this: what was stripped is still in it."""
    stripped: bool = False
    """Whether anything was."""


def read(
    kind: EndpointKind,
    body: bytes,
    request_id: str,
    transfer_id: str,
    limits: JSONLimits,
    client: Client | None = None,
    session: str = "",
    *,
    keep_document: bool = False,
    keep_streamed: bool = False,
) -> Inbound:
    """Check a request's body. The cache salt of one whose client is known is bound to its tenant. `session` is what the
    client calls its conversation; where it is empty, the body's `prompt_cache_key`.

    What it parses to is kept where the caller says so, always or of those who want a stream: kept by every request that
    runs, it costs room in the processor's caches.

    Raises:
        ProxyError: 400 or 413, naming the member and what it should be.
    """
    if len(body) > limits.max_bytes:
        raise ProxyError(413, "invalid_request_error", f"the body is larger than {limits.max_bytes} bytes")
    try:
        document, spans = load_object(body, limits)
    except JSONTextError as error:
        raise ProxyError(400, "invalid_request_error", f"the body was refused: {error}", code="invalid_json") from error
    model = _optional(document, "model", str, "a string")
    try:
        if model is not None and len(model) > _MAX_MODEL:
            raise _invalid("model", f"`model` must have at most {_MAX_MODEL} characters")
        prompts, token_ids = _PROMPTS[kind](document)
        rare, routing_ids = _ORDINARY, None
        if kind == "generate" or not _RARE.isdisjoint(document):
            rare = _rare(kind, document)
            prompts += rare.more_prompts
            if token_ids is not None:
                token_ids, routing_ids = _computed_ids(document, token_ids, prompts)
        _whole(document, "max_tokens", 0 if rare.prompt_only else 1)
        stream = _optional(document, "stream", bool, "true or false") or False
    except ProxyError as error:
        error.model = model
        raise
    changes = _UNCHANGED
    tenant, priority, salt = "", 0, rare.salt
    if client is not None:
        tenant, priority = client.tenant, client.priority
        salt = client.salt if rare.salt is None else bind_salt(tenant, rare.salt)
        changes = {"cache_salt": b'"%b"' % salt.encode()}
    stripped = False
    if not SUSPICIOUS.isdisjoint(document):
        before = body
        body, spans = _strip(document, body, spans)
        stripped = body is not before
    if kind != "completions" and (unnamed := without_names(kind, document, body, spans, tenant)):
        body = edit(body, spans, unnamed)
        spans = fields(body)
        stripped = True
    ids = routing_ids if token_ids is None else token_ids
    tokens = len(body) // _BYTES_PER_TOKEN if ids is None else len(ids)
    facts = RequestFacts(
        request_id,
        transfer_id,
        model,
        prompts,
        rare.choices,
        token_ids,
        salt,
        tenant,
        priority,
        tokens,
        rare.prompt_scored,
        session or rare.session,
    )
    if routing_ids is not None:
        facts = facts._replace(routing_ids=routing_ids)
    return Inbound(
        facts, body, spans, changes, stream, document if keep_document or (keep_streamed and stream) else None, stripped
    )


class _Rare(NamedTuple):
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


_ORDINARY: Final = _Rare()
_UNCHANGED: Final[Mapping[str, bytes | None]] = {}


def _rare(kind: EndpointKind, document: Mapping[str, object]) -> _Rare:
    """Check the members that most requests do not have."""
    echo = kind == "completions" and _optional(document, "echo", bool, "true or false") is True
    prompt_only = echo and document.get("max_tokens") == 0
    for name in _WHOLE & document.keys():
        _whole(document, name, 0 if name == "min_tokens" or prompt_only else 1)
    sampled = cast("dict[str, object]", (document.get("sampling_params") if kind == "generate" else document) or {})
    choices = 1 if kind == "other" else _whole(sampled, "n", 1, _MAX_CHOICES) or 1
    scored = sampled.get("prompt_logprobs") is not None or (echo and document.get("logprobs") is not None)
    _optional(document, "stream_options", dict, "an object")
    salt = _optional(document, "cache_salt", str, "a string")
    if salt is not None and not 0 < len(salt) <= _MAX_SALT:
        raise _invalid("cache_salt", f"`cache_salt` must have 1 to {_MAX_SALT} characters")
    session = _optional(document, "prompt_cache_key", str, "a string") or ""
    more_prompts = 0
    if kind == "completions" and (embeds := document.get("prompt_embeds")) is not None:
        more_prompts = len(cast("list[object]", embeds)) if isinstance(embeds, list) else 1
    # vLLM 0.32.0 runs a beam search without kv_transfer_params (completion/protocol.py, to_beam_search_params).
    beams = kind in ("completions", "chat") and _optional(document, "use_beam_search", bool, "true or false") is True
    return _Rare(choices, salt, scored or prompt_only or beams, prompt_only, session[:_MAX_SESSION], more_prompts)


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


def _invalid(name: str, message: str) -> ProxyError:
    return ProxyError(400, "invalid_request_error", message, param=name, code="invalid_value")


def _optional(document: Mapping[str, object], name: str, kind: type[T], expected: str) -> T | None:
    value = document.get(name)
    if value is None or type(value) is kind:
        return value  # pyright: ignore[reportReturnType]  a cast here would be called eight times a request
    raise _invalid(name, f"`{name}` must be {expected}")


def _whole(document: Mapping[str, object], name: str, least: int, most: int = 2**31 - 1) -> int | None:
    value = _optional(document, name, int, "a whole number")
    if value is not None and not least <= value <= most:
        raise _invalid(name, f"`{name}` must be a whole number from {least} to {most}")
    return value


def _chat(document: Mapping[str, object]) -> tuple[int, None]:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", "`messages` must be a list of at least one message")
    for index, message in enumerate(cast("list[object]", messages)):
        if not isinstance(message, dict) or type(cast("dict[str, object]", message).get("role")) is not str:
            raise _invalid(f"messages[{index}]", "each message must be an object with a `role`")
    return 1, None


def _prompt(document: Mapping[str, object]) -> tuple[int, Sequence[int] | None]:
    """How many prompts there are, and the token ids where it is one prompt of ids."""
    prompt = document.get("prompt")
    if type(prompt) is str:
        if not prompt:
            raise _invalid("prompt", "`prompt` is empty")
        return 1, None
    if not isinstance(prompt, list) or not prompt:
        raise _invalid("prompt", "`prompt` must be a string, a list of token ids, or a list of either, and not empty")
    items = cast("list[object]", prompt)
    if type(items[0]) is int:
        return 1, _token_ids(items, "prompt")
    if len(items) > _MAX_PROMPTS:
        raise _invalid("prompt", f"at most {_MAX_PROMPTS} prompts fit in one request")
    kind = type(items[0])
    for index, item in enumerate(items):
        if type(item) is not kind or kind not in (str, list) or not item:
            raise _invalid(f"prompt[{index}]", "prompts of one request must be all strings or all lists, none empty")
        if kind is list:
            _token_ids(cast("list[object]", item), f"prompt[{index}]")
    if len(items) == 1 and kind is list:
        return 1, _token_ids(cast("list[object]", items[0]), "prompt[0]")
    return len(items), None


def _token_ids(items: list[object], name: str) -> Sequence[int]:
    if len(items) > MAX_TOKENS:
        raise _invalid(name, f"`{name}` must hold at most {MAX_TOKENS} token ids")
    if set(map(type, items)) != {int}:
        raise _invalid(name, f"`{name}` must hold whole numbers only: token ids")
    try:
        return array("I", cast("list[int]", items))
    except OverflowError as error:
        raise _invalid(name, f"`{name}`: a token id is from 0 to 4294967295") from error


def _generate(document: Mapping[str, object]) -> tuple[int, Sequence[int] | None]:
    _optional(document, "sampling_params", dict, "an object")
    ids = document.get("token_ids")
    if not isinstance(ids, list) or not ids:
        raise _invalid("token_ids", "`token_ids` must be a list of at least one token id")
    return 1, _token_ids(cast("list[object]", ids), "token_ids")


def _other(document: Mapping[str, object]) -> tuple[int, None]:
    """It is for the engine to judge, unless its answer would not be JSON."""
    if document.get("encoding_format") not in _ENCODINGS:
        raise _invalid("encoding_format", '`encoding_format` must be "float" or "base64" here')
    return 1, None


_PROMPTS: Final[Mapping[EndpointKind, Callable[[Mapping[str, object]], tuple[int, Sequence[int] | None]]]] = {
    "completions": _prompt,
    "chat": _chat,
    "generate": _generate,
    "other": _other,
}
"""For each kind of request, how many prompts there are, and the token ids where it is one prompt of ids."""


def _strip(
    document: Mapping[str, object], body: bytes, spans: Mapping[str, Field]
) -> tuple[bytes, Mapping[str, Field]]:
    """The body without what only the proxy may say."""
    changes: dict[str, bytes | None] = {name: None for name in STRIPPED if name in document}
    for name, path in CARRIERS.items():
        inner = document.get(name)
        if isinstance(inner, str | list):  # an object to no engine that is known; text of one, perhaps, to another
            changes[name] = None
        elif isinstance(inner, dict):
            before = body[spans[name].value : spans[name].end]
            after = _strip_inside(before, path, hints=name == "nvext")
            if after != before:
                changes[name] = after
    if not changes:
        return body, spans
    body = edit(body, spans, changes)
    return body, fields(body)


def _strip_inside(raw: bytes, path: tuple[str, ...], *, hints: bool = False) -> bytes:
    """The object `raw` without what is stripped, in itself and in the object that `path` leads to; `hints`: it is
    `nvext`."""
    spans = fields(raw)
    changes: dict[str, bytes | None] = {name: None for name in spans if name in STRIPPED}
    if hints:
        changes.update((name, None) for name in steering_hint(spans))
    if path and (field := spans.get(path[0])) is not None:
        inner = raw[field.value : field.end]
        changed = _strip_inside(inner, path[1:]) if inner[0] == 0x7B else None if inner[0] in b'"[' else inner
        if changed != inner:
            changes[path[0]] = changed
    return edit(raw, spans, changes) if changes else raw
