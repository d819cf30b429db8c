"""Checks the members of a request that the proxy itself acts on; each error names the member."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar, cast

from kvparams.jsontext.receivers import AbridgedObjectReceiver
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.requests.long_body_receivers import (
    INVALID_MESSAGES_MESSAGE,
    INVALID_PROMPT_MESSAGE,
    MAX_PROMPTS,
    PromptInputReceiver,
    has_role,
    invalid_member_error,
    token_id_array,
)

__all__ = ["CheckedMembers", "RareMembers", "check_members"]

T = TypeVar("T")

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
_RARE_OF_KIND: Final[Mapping[EndpointKind, frozenset[str]]] = {
    "messages": _RARE | {"tool_choice"},
    "responses": _RARE | {"background", "truncation", "previous_response_id"},
}
"""The same of endpoints that have further ones."""
_WHOLE: Final = frozenset(("max_tokens", "max_completion_tokens", "min_tokens"))
_ENCODINGS: Final = (None, "float", "base64")
"""vLLM 0.32.0 answers the others with application/octet-stream (entrypoints/pooling)."""
_ONE_CHOICE: Final = ("messages", "responses", "other")
_UNCUT: Final = (None, "disabled")
_MAX_CHOICES: Final = 128
_MAX_SALT: Final = 256
_MAX_MODEL: Final = 1024
_MAX_SESSION: Final = 256


class RareMembers(NamedTuple):
    """Members that most requests do not have."""

    choices: int = 1
    salt: str | None = None
    prompt_scored: bool = False
    prompt_only: bool = False
    """It wants its prompt back, and nothing more (vLLM 0.32.0 completion/protocol.py: echo_without_generation)."""
    session: str = ""
    """OpenAI's `prompt_cache_key`: requests of one key have their beginning in common."""
    more_prompts: int = 0
    """Prompts that came as embeddings, beside those in `prompt` (vLLM 0.32.0 renderers/online_renderer.py)."""
    previous_response: str | None = None
    """The response that a request to `/v1/responses` goes on from. Only the engine that has made it knows it."""


_ORDINARY: Final = RareMembers()


CheckedMembers = tuple[str | None, int, Sequence[int] | None, Sequence[int] | None, bool, RareMembers]
"""The members of a body that the proxy acts on, checked: the model; the number of prompts; the token ids of the prompt,
where it is one of them and the engine computes exactly these; the ids that the engine probably computes, where there
are none for that reason; whether a stream is asked for; and what most requests do not have."""


def check_members(
    kind: EndpointKind, document: Mapping[str, object], receiver: AbridgedObjectReceiver | None
) -> CheckedMembers:
    """Checks a body. `receiver`: what has received it, where it is long.

    Raises:
        ProxyError: 400, naming the member and what it should be.
    """
    model = _optional(document, "model", str, "a string")
    try:
        if model is not None and len(model) > _MAX_MODEL:
            raise invalid_member_error("model", f"`model` must have at most {_MAX_MODEL} characters")
        prompts, ids = _prompts(kind, document, receiver)
        rare, routing_ids = _ORDINARY, None
        if kind == "generate" or not _RARE_OF_KIND.get(kind, _RARE).isdisjoint(document):
            rare = _rare_members(kind, document)
            prompts += rare.more_prompts
            if ids is not None:
                ids, routing_ids = _computed_ids(document, ids, prompts)
        limit = "max_output_tokens" if kind == "responses" else "max_tokens"
        most = _whole(document, limit, 0 if rare.prompt_only else 1)
        if most is None and kind == "messages":
            raise invalid_member_error("max_tokens", "`max_tokens` is required: a whole number from 1 on")
        stream = _optional(document, "stream", bool, "true or false") or False
    except ProxyError as error:
        error.model = model
        raise
    return model, prompts, ids, routing_ids, stream, rare


def _rare_members(kind: EndpointKind, document: Mapping[str, object]) -> RareMembers:
    """Checks the members that most requests do not have."""
    echo = kind == "completions" and _optional(document, "echo", bool, "true or false") is True
    prompt_only = echo and document.get("max_tokens") == 0
    for name in _WHOLE & document.keys():
        _whole(document, name, 0 if name == "min_tokens" or prompt_only else 1)
    sampled = document
    if kind == "generate":
        sampled = cast("dict[str, object]", _optional(document, "sampling_params", dict, "an object") or {})
    choices = 1 if kind in _ONE_CHOICE else _whole(sampled, "n", 1, _MAX_CHOICES) or 1
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
    previous = None
    whole = scored or prompt_only or beams
    if kind == "messages":
        whole = whole or _forces_tool(document)
    elif kind == "responses":
        previous = _optional(document, "previous_response_id", str, "a string")
        whole = whole or previous is not None or _runs_whole(document)
    return RareMembers(choices, salt, whole, prompt_only, session[:_MAX_SESSION], more_prompts, previous)


def _forces_tool(document: Mapping[str, object]) -> bool:
    """Returns whether `/v1/messages` must call one named tool.

    A prefill leg would cut the call's arguments short, which vLLM takes for its own fault (0.32.0 anthropic/serving.py,
    `messages_full_converter`), and another choice could be another prompt.
    """
    choice = document.get("tool_choice")
    return isinstance(choice, dict) and cast("dict[str, object]", choice).get("type") == "tool"


def _runs_whole(document: Mapping[str, object]) -> bool:
    """Returns whether one engine has to run a whole request of `/v1/responses`.

    In the background an engine answers before it has fetched any KV. Where it may cut the prompt, it does so by
    `max_output_tokens`, which a prefill leg changes (vLLM 0.32.0 responses/protocol.py, `build_tok_params`).
    """
    in_background = _optional(document, "background", bool, "true or false") is True
    return in_background or document.get("truncation") not in _UNCUT


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


def _input(document: Mapping[str, object]) -> tuple[int, None]:
    given = document.get("input")
    if not given or not isinstance(given, str | list):
        raise invalid_member_error("input", "`input` must be a string or a list of items, and not empty")
    return 1, None


def _prompt(document: Mapping[str, object]) -> tuple[int, Sequence[int] | None]:
    """Returns how many prompts there are, and the token ids where it is one prompt of ids."""
    prompt = document.get("prompt")
    if type(prompt) is str:
        if not prompt:
            raise invalid_member_error("prompt", "`prompt` is empty")
        return 1, None
    if isinstance(prompt, array):  # whoever has read it has packed them
        return 1, cast("array[int]", prompt)
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
    if isinstance(ids, array):
        return 1, cast("array[int]", ids)
    if not isinstance(ids, list) or not ids:
        raise invalid_member_error("token_ids", "`token_ids` must be a list of at least one token id")
    return 1, token_id_array(cast("list[object]", ids), "token_ids")


def _other(document: Mapping[str, object]) -> tuple[int, None]:
    """Leaves the body to the engine to judge, unless its answer would not be JSON."""
    if document.get("encoding_format") not in _ENCODINGS:
        raise invalid_member_error("encoding_format", '`encoding_format` must be "float" or "base64"')
    return 1, None


_PROMPTS: Final[Mapping[EndpointKind, Callable[[Mapping[str, object]], tuple[int, Sequence[int] | None]]]] = {
    "completions": _prompt,
    "chat": _chat,
    "generate": _generate,
    "messages": _chat,
    "responses": _input,
    "other": _other,
}
"""For each kind of request, how many prompts there are, and the token ids where it is one prompt of ids."""


def _prompts(
    kind: EndpointKind, document: Mapping[str, object], receiver: AbridgedObjectReceiver | None
) -> tuple[int, Sequence[int] | None]:
    """Returns how many prompts there are, and the token ids where it is one prompt of ids."""
    if receiver is not None:
        for name in ("prompt", "messages", "input", "token_ids"):
            long = receiver.long.get(name)
            if isinstance(long, PromptInputReceiver):
                return long.prompts()
    return _PROMPTS[kind](document)
