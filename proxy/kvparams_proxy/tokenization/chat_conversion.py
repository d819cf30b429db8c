"""Requests of `/v1/messages` and `/v1/responses` as the chat requests that an engine makes of them.

As vLLM 0.32.0 does (anthropic/serving.py, `to_chat_completion_request`; openai/responses/utils.py,
`construct_input_messages`), but only for text. The result finds token ids for routing and is sent to no engine. What
depends on the engine's settings, or is not text, is rejected instead of guessed.
"""

import json
from collections.abc import Callable, Mapping
from typing import Final, cast

from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.tokenization.errors import UnsupportedChatError

__all__ = ["as_chat"]

_Object = Mapping[str, object]

_BILLING: Final = "x-anthropic-billing-header"
"""The beginning of system text that vLLM leaves out."""
_UNFINISHED: Final = ("in_progress", "incomplete")
_TEXTS: Final = ("text", "input_text", "output_text")
_CALLS: Final = ("function_call_output", "custom_tool_call_output")


def as_chat(kind: EndpointKind, document: _Object) -> _Object:
    """Returns the chat request that an engine makes of a request of this kind. A chat request is returned unchanged.

    Raises:
        UnsupportedChatError: it cannot be said as text here.
    """
    convert = _CONVERTERS.get(kind)
    return document if convert is None else convert(document)


def _chat_of_messages(document: _Object) -> _Object:
    messages: list[dict[str, object]] = []
    system = _system_text(document.get("system"))
    if system:
        messages.append({"role": "system", "content": system})
    for message in _objects(document.get("messages")):
        _add_message(message, messages)
    chat = _kept(document)
    chat["messages"] = messages
    tools = document.get("tools")
    if tools is not None:
        chat["tools"] = [_function(tool, "input_schema") for tool in _objects(tools)]
    effort = _object(document.get("output_config")).get("effort")
    if _object(document.get("thinking")).get("type") == "disabled":
        effort = "none"
    if effort is not None:
        chat["reasoning_effort"] = effort
    return chat


def _system_text(system: object) -> str:
    if isinstance(system, str) or system is None:
        return system or ""
    texts = (_text(block) for block in _objects(system) if block.get("type") == "text")
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _add_message(message: _Object, messages: list[dict[str, object]]) -> None:
    """Adds a message, and the results of tools that it holds in front of it."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise UnsupportedChatError("where a system message goes depends on the engine's template")
    made: dict[str, object] = {"role": role}
    if isinstance(content, str):
        made["content"] = content
    else:
        texts: list[str] = []
        calls: list[object] = []
        reasoning: list[str] = []
        for block in _objects(content):
            kind = block.get("type")
            if kind == "text":
                texts += filter(None, (_text(block),))
            elif kind == "thinking":
                reasoning.append(_string(block.get("thinking")))
            elif kind == "tool_use":
                calls.append(_call(block.get("id"), block.get("name"), json.dumps(block.get("input") or {})))
            elif kind == "tool_result" and role == "user":
                result = {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": _result(block)}
                messages.append(result)
            elif kind != "redacted_thinking":
                raise UnsupportedChatError("a block that is not text")
        if reasoning:
            made["reasoning"] = "".join(reasoning)
        if calls:
            made["tool_calls"] = calls
        if texts:
            made["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    if role == "assistant" or "content" in made:
        messages.append(made)


def _result(block: _Object) -> str:
    content = block.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    parts = _objects(content)
    if any(part.get("type") != "text" for part in parts):
        raise UnsupportedChatError("a result that is not text")
    return "\n".join(map(_text, parts))


def _chat_of_responses(document: _Object) -> _Object:
    messages: list[dict[str, object]] = []
    instructions = document.get("instructions")
    if instructions:
        messages.append({"role": "system", "content": _string(instructions)})
    given = document.get("input")
    chat = _kept(document)
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        items = _objects(given)
        for item in items:
            _add_item(item, messages)
        if items and items[-1].get("type", "message") == "message" and items[-1].get("status") in _UNFINISHED:
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
    chat["messages"] = messages
    tools = [tool for tool in _objects(document.get("tools") or []) if tool.get("type") == "function"]
    if tools:
        chat["tools"] = [_function(tool, "parameters") for tool in tools]
    effort = _object(document.get("reasoning")).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    return chat


def _add_item(item: _Object, messages: list[dict[str, object]]) -> None:
    """Adds an item to the messages. Reasoning, text and calls of one turn are one message."""
    kind, before = item.get("type"), messages[-1] if messages else {}
    said: dict[str, object]
    if kind == "function_call":
        call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
        if before.get("role") == "assistant":
            cast("list[object]", before.setdefault("tool_calls", [])).append(call)
            return
        said = {"tool_calls": [call]}
    elif kind == "reasoning":
        if item.get("encrypted_content"):
            raise UnsupportedChatError("reasoning that is encrypted")
        said = {"reasoning": _first_text(item.get("content") or item.get("summary") or [])}
    elif kind in _CALLS:
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        return
    elif item.get("role") == "assistant":
        content = item.get("content")
        said = {"content": content if isinstance(content, str) else _first_text(content)}
    elif isinstance(item.get("role"), str):
        said = {name: value for name, value in item.items() if name in ("role", "name")}
        content = item.get("content")
        messages.append(
            {**said, "content": _text_parts(cast("list[object]", content)) if isinstance(content, list) else content}
        )
        return
    else:
        raise UnsupportedChatError("an item that is not text")
    (name,) = said
    if name != "tool_calls" and before.get("role") == "assistant" and before.get(name) is None:
        before[name] = said[name]
    else:
        messages.append({"role": "assistant", **said})


_CONVERTERS: Final[Mapping[EndpointKind, Callable[[_Object], _Object]]] = {
    "messages": _chat_of_messages,
    "responses": _chat_of_responses,
}


def _kept(document: _Object) -> dict[str, object]:
    """Returns the members that are the same in both requests."""
    return {name: document[name] for name in ("model", "chat_template_kwargs") if name in document}


def _function(tool: _Object, parameters: str) -> dict[str, object]:
    """Returns a tool as a chat has it. `parameters`: the name of the member that holds their schema."""
    schema = tool.get(parameters)
    if parameters == "input_schema" and "type" not in _object(schema):
        schema = {**_object(schema), "type": "object"}
    function: dict[str, object] = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema,
    }
    further = {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, **further}}


def _call(id: object, name: object, arguments: object) -> dict[str, object]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text_parts(parts: object) -> list[dict[str, object]]:
    """Returns parts of text under the name that they have in a chat: `/tokenize` refuses that of responses."""
    found = _objects(parts)
    if any(part.get("type") not in _TEXTS for part in found):
        raise UnsupportedChatError("a part that is not text")
    return [{"type": "text", "text": _text(part)} for part in found]


def _first_text(parts: object) -> str:
    found = _objects(parts)
    return _text(found[0]) if found else ""


def _text(part: _Object) -> str:
    return _string(part.get("text"))


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise UnsupportedChatError("text that is no string")
    return value


def _object(value: object) -> _Object:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _objects(value: object) -> list[_Object]:
    items = cast("list[object]", value) if isinstance(value, list) else None
    if items is None or not all(isinstance(item, dict) for item in items):
        raise UnsupportedChatError("not a list of objects")
    return cast("list[_Object]", items)
