"""Decides which streams another engine can continue, and builds the request for the rest."""

from collections.abc import Mapping
from typing import Final, cast

from pydantic_core import to_json

from kvparams.routing.plan import StreamProgress
from kvparams_proxy.requests.long_body_receivers import is_text_message

__all__ = ["is_resumable", "resumed_body_changes"]

_STATEFUL: Final = (
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "stop",
    "tools",
    "functions",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "presence_penalty",
    "frequency_penalty",
    "use_beam_search",
    "logits_processors",
    "bad_words",
    "truncate_prompt_tokens",
    "mm_processor_kwargs",
    "media_io_kwargs",
)
"""Members whose effect at one place depends on more than the token ids before it, or that say more than text."""
_LOGPROBS: Final = ("logprobs", "prompt_logprobs")
_REASONING: Final = frozenset(("include_reasoning", "reasoning_effort", "reasoning"))
"""What a completion cannot tell from the answer."""
_CHAT_ONLY: Final = (
    "messages",
    "logprobs",
    "top_logprobs",
    "max_completion_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "add_special_tokens",
    "tool_choice",
    "parallel_tool_calls",
    "documents",
)


def is_resumable(document: Mapping[str, object], stream: bool, prompts: int, choices: int) -> bool:
    """Returns whether a stream for this request could be continued on another engine."""
    if not stream or not prompts == choices == 1 or any(document.get(name) for name in _STATEFUL):
        return False
    if any(type(document.get(name)) is int for name in _LOGPROBS):  # 0 asks for those of the tokens chosen
        return False
    listed = document.get("messages")
    messages = cast("list[object]", listed) if isinstance(listed, list) else []
    return _REASONING.isdisjoint(document) and all(map(is_text_message, messages))


def resumed_body_changes(
    document: Mapping[str, object], sent: StreamProgress, *, chat: bool
) -> dict[str, bytes | None]:
    """Returns what changes in the client's body when the rest of its answer is asked of `/v1/completions`."""
    changes: dict[str, bytes | None] = {name: None for name in _CHAT_ONLY if name in document} if chat else {}
    ids = [*sent.prompt_ids, *sent.answer_ids]
    changes["prompt"] = to_json(ids)
    limit = document.get("max_completion_tokens") if chat else None
    limit = document.get("max_tokens") if limit is None else limit
    if limit is None and not chat and "max_tokens" not in document:
        limit = 16  # what OpenAI and vLLM take where a completion says nothing
    if isinstance(limit, int):
        changes["max_tokens"] = b"%d" % max(1, limit - len(sent.answer_ids))
    else:
        changes["max_tokens"] = b"null"
    least = document.get("min_tokens")
    if isinstance(least, int):
        changes["min_tokens"] = b"%d" % max(0, least - len(sent.answer_ids))
    return changes
