"""The forms of engines' answers, by API: which members hold what the proxy reads, corrects or leaves alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

from kvparams_proxy.execution.usage_forms import CHAT_USAGE, MESSAGES_USAGE, RESPONSES_USAGE, UsageForm
from kvparams_proxy.requests.endpoints import EndpointKind

__all__ = ["CHOICES_FORM", "OTHER_FORM", "PUBLIC_MEMBERS", "AnswerForm", "answer_form"]

PUBLIC_MEMBERS: Final = frozenset(
    (
        "id",
        "object",
        "created",
        "model",
        "choices",
        "usage",
        "system_fingerprint",
        "service_tier",
        "prompt_logprobs",
        "prompt_token_ids",
        "prompt_text",
        "kv_transfer_params",
        "ec_transfer_params",
    )
)
"""Members of the API that hold nothing of an engine, or are looked at by name."""

_SUSPECTS: Final = (b'_params"', b'"error"', b'"nvext"', b'"remote_', b'"bootstrap_')
"""Words in events that may have to be corrected, whatever the API is."""

_MESSAGES_MEMBERS: Final = frozenset(
    (
        *("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "stop_details", "usage"),
        *("container", "context_management", "kv_transfer_params", "ec_transfer_params"),
        *("message", "index", "content_block", "delta"),
    )
)
"""Members of answers of `/v1/messages` and of the events of its streams. Source: Anthropic's API reference."""

_RESPONSES_MEMBERS: Final = frozenset(
    (
        *("id", "object", "created_at", "completed_at", "model", "output", "usage", "status", "error"),
        *("incomplete_details", "instructions", "metadata", "parallel_tool_calls", "temperature", "tool_choice"),
        *("tools", "top_p", "background", "conversation", "max_output_tokens", "max_tool_calls"),
        *("previous_response_id", "prompt", "prompt_cache_key", "prompt_cache_retention", "reasoning"),
        *("safety_identifier", "service_tier", "store", "text", "top_logprobs", "truncation", "user"),
        *("presence_penalty", "frequency_penalty", "kv_transfer_params", "ec_transfer_params"),
        *("input_messages", "output_messages"),
        *("type", "sequence_number", "response", "item", "item_id", "output_index", "content_index", "part", "delta"),
        *("arguments", "name", "logprobs", "refusal", "annotation", "annotation_index", "summary_index", "obfuscation"),
        *("code", "code_interpreter_call_id", "input"),
    )
)
"""Members of answers of `/v1/responses` and of the events of its streams.

Sources: OpenAI's API reference; vLLM 0.32.0 entrypoints/openai/responses/protocol.py.
"""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an API's answers."""

    content: str | None
    """The member that every answer has: a list. None where nothing is known of it."""
    needs_content: bool
    """Whether the list has to hold something."""
    event_wrapper: str | None
    """The member of an event that holds the answer so far; None where events are answers themselves."""
    public_members: frozenset[str]
    """Members that hold nothing of an engine, or are looked at by name."""
    suspects: tuple[bytes, ...]
    """Words in events that may have to be corrected."""
    usage: UsageForm
    omits_params: bool = False
    """Whether an answer without `kv_transfer_params` has no such member; elsewhere it is null."""

    def has_content(self, document: Mapping[str, object]) -> bool:
        """Returns whether a whole answer is one.

        The text in it may be empty: a model may have nothing to say.
        """
        if self.content is None:
            return True
        found = document.get(self.content)
        if not isinstance(found, list):
            return False
        if not self.needs_content:
            return True
        return any(one and isinstance(one, dict) for one in cast("list[object]", found))


CHOICES_FORM: Final = AnswerForm("choices", True, None, PUBLIC_MEMBERS, (b'"prompt_tokens"', *_SUSPECTS), CHAT_USAGE)
OTHER_FORM: Final = AnswerForm(None, False, None, PUBLIC_MEMBERS, (b'"prompt_tokens"', *_SUSPECTS), CHAT_USAGE)
_MESSAGES: Final = AnswerForm(
    "content",
    False,
    "message",
    _MESSAGES_MEMBERS,
    (b'"input_tokens"', b'"message"', *_SUSPECTS),
    MESSAGES_USAGE,
    omits_params=True,
)
_RESPONSES: Final = AnswerForm(
    "output",
    False,
    "response",
    _RESPONSES_MEMBERS,
    (b'"input_tokens"', b'"response"', *_SUSPECTS),
    RESPONSES_USAGE,
)
_FORMS: Final[Mapping[EndpointKind, AnswerForm]] = {
    "completions": CHOICES_FORM,
    "chat": CHOICES_FORM,
    "generate": CHOICES_FORM,
    "messages": _MESSAGES,
    "responses": _RESPONSES,
    "other": OTHER_FORM,
}


def answer_form(kind: EndpointKind) -> AnswerForm:
    """Returns the form of the answers of an endpoint of this kind."""
    return _FORMS[kind]
