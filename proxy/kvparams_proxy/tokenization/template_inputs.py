"""A chat request as its template sees it: messages flattened, tools and further variables in place.

All of it as vLLM 0.32.0 does before it renders (renderers/chat_utils.py, parse_chat_messages;
entrypoints/openai/chat_completion/protocol.py, build_chat_params and _normalize_messages_before). Content that is not
text, or that the engine would refuse, is rejected instead of guessed.
"""

import json
from collections.abc import Collection, Mapping
from typing import Final, cast

from kvparams_proxy.tokenization.content_format import ContentFormat
from kvparams_proxy.tokenization.errors import UnsupportedChatError

__all__ = ["template_messages", "template_variables"]


_TEXT_KEYS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Where the text of a part stands, by its type."""
_SKIPPED: Final = ("text", "refusal")
"""Of these types a part without text is left out."""
_MOST_ARGUMENTS: Final = 128 << 10
"""Characters of a call's arguments: the parser lets no other thread run meanwhile."""
_BILLING: Final = "x-anthropic-billing-header"
"""A first line of system text that vLLM takes away, since it changes with every request."""
_ARGUMENTS: Final = frozenset(
    (
        *("conversation", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
"""Names that transformers 5.19 apply_chat_template takes for itself: no template sees them."""


def template_messages(messages: object, form: ContentFormat, *, developer: bool) -> list[dict[str, object]]:
    """Returns the messages that a template gets. `developer`: whether it knows that role; else it is `system`.

    Raises:
        UnsupportedChatError: they cannot be said as text here.
    """
    if not isinstance(messages, list):
        raise UnsupportedChatError("the messages are no list")
    found = [_message(message, form) for message in cast("list[object]", messages)]
    if not developer and any(message["role"] == "developer" for message in found):
        found = _as_system(found)
    return found


def template_variables(document: Mapping[str, object], declared: Collection[str]) -> dict[str, object]:
    """Returns the further variables of a template for a chat request. `declared` are the names that it reads.

    Raises:
        UnsupportedChatError: the client wants another template, or says what the engine refuses.
    """
    given = document.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise UnsupportedChatError("chat_template_kwargs is no object")
    wanted = cast("dict[str, object]", given or {})
    if document.get("chat_template") is not None or not wanted.keys().isdisjoint(("chat_template", "tokenize")):
        raise UnsupportedChatError("a template of its own")
    effort = document.get("reasoning_effort")
    found = {name: value for name, value in wanted.items() if name in declared and name not in _ARGUMENTS}
    for name in ("documents", "reasoning_effort"):
        if document.get(name) is not None:
            found[name] = document[name]
    if effort is not None and "enable_thinking" not in wanted:
        found["enable_thinking"] = effort != "none"
    generation = document.get("add_generation_prompt")
    going_on = document.get("continue_final_message")
    found["add_generation_prompt"] = True if generation is None else generation
    found["continue_final_message"] = False if going_on is None else going_on
    tools = document.get("tools")
    if tools is not None:
        found["tools"] = _tools(tools)
    return found


def _message(message: object, form: ContentFormat) -> dict[str, object]:
    if not isinstance(message, dict):
        raise UnsupportedChatError("a message is no object")
    said = cast("dict[str, object]", message)
    role = said.get("role")
    if not isinstance(role, str):
        raise UnsupportedChatError("a message without a role")
    texts = _texts(said.get("content"))
    if role == "system":
        texts = [text for text in map(_without_billing, texts) if text is not None]
    content: object = "\n".join(texts)
    if form == "openai" and role != "tool":
        content = [{"type": "text", "text": text} for text in texts]
    found: dict[str, object] = {"role": role, "content": content}
    if role == "assistant":
        calls = said.get("tool_calls")
        if calls:
            found["tool_calls"] = _calls(calls)
        reasoning = said.get("reasoning")
        if reasoning is None:
            reasoning = said.get("reasoning_content")
        if reasoning is not None:
            found["reasoning"] = found["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in said:
        found["tool_call_id"] = said["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(said.get(name), str):
            found[name] = said[name]
    if role == "developer":
        found["tools"] = said.get("tools")
    return found


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise UnsupportedChatError("content is neither text nor a list")
    texts: list[str] = []
    for part in cast("list[object]", content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise UnsupportedChatError("a part is neither text nor an object")
        said = cast("dict[str, object]", part)
        kind = said.get("type")
        key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
        if key is None or said.get("uuid") is not None:
            raise UnsupportedChatError("a part is not text")
        text = said.get(key)
        if text is None and kind in _SKIPPED:
            continue
        if not isinstance(text, str):
            raise UnsupportedChatError("a part's text is no text")
        texts.append(text)
    return texts


def _without_billing(text: str) -> str | None:
    return text if not text.startswith(_BILLING) else text.partition("\n")[2] or None


def _calls(calls: object) -> list[dict[str, object]]:
    """Returns calls of tools, with their members in the order that vLLM's typed dictionaries give them."""
    if not isinstance(calls, list):
        raise UnsupportedChatError("tool_calls is no list")
    found: list[dict[str, object]] = []
    for call in cast("list[object]", calls):
        said = cast("dict[str, object]", call) if isinstance(call, dict) else {}
        function = said.get("function")
        if said.get("type", "function") != "function" or not isinstance(function, dict):
            raise UnsupportedChatError("a call of something that is no function")
        named = cast("dict[str, object]", function)
        ordered: dict[str, object] = {"arguments": _arguments(named.get("arguments"))}
        if "name" in named:
            ordered["name"] = named["name"]
        entry: dict[str, object] = {"id": said["id"]} if "id" in said else {}
        found.append({**entry, "function": ordered, "type": "function"})
    return found


def _arguments(arguments: object) -> dict[str, object]:
    """Returns the arguments as an object; another value becomes an empty one."""
    if isinstance(arguments, str):
        if len(arguments) > _MOST_ARGUMENTS:
            raise UnsupportedChatError("the arguments of a call are too long")
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return cast("dict[str, object]", arguments) if isinstance(arguments, dict) else {}


def _tools(tools: object) -> list[dict[str, object]]:
    """Returns tools with the members that vLLM knows, in its order, absent ones named."""
    if not isinstance(tools, list) or not tools:
        raise UnsupportedChatError("tools must be a list of at least one")
    found: list[dict[str, object]] = []
    for tool in cast("list[object]", tools):
        said = cast("dict[str, object]", tool) if isinstance(tool, dict) else {}
        function = said.get("function")
        if not isinstance(function, dict):
            raise UnsupportedChatError("a tool that is no function")
        named = cast("dict[str, object]", function)
        later = said.get("defer_loading")
        entry = {name: named.get(name) for name in ("name", "description", "parameters")}
        rest = {"strict": named.get("strict"), "defer_loading": named.get("defer_loading", later)}
        entry |= {name: value for name, value in rest.items() if value is not None}
        outer = {} if later is None else {"defer_loading": later}
        found.append({"type": "function", "function": entry, **outer})
    return found


def _as_system(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Merges all system and developer messages into one system message at the front."""
    system = ("system", "developer")
    said = [message for message in messages if message["role"] in system]
    if len(said) == 1 and messages[0] is said[0]:
        return [_system(said[0]["content"], messages[0]), *messages[1:]]
    contents = [text for text in map(_flat, (message["content"] for message in said)) if text]
    first: dict[str, object] = {"role": "system", "content": "\n\n".join(contents)}
    return [first, *(message for message in messages if message["role"] not in system)]


def _system(content: object, message: dict[str, object]) -> dict[str, object]:
    others = {name: value for name, value in message.items() if name != "tools"}
    return {**others, "role": "system", "content": content}


def _flat(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(cast("dict[str, str]", part)["text"] for part in cast("list[object]", content))
    return cast("str", content)
