"""Makes conversations of agents for `/v1/messages` and `/v1/responses`, and reads the answers."""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

import httpx

__all__ = ["MAKERS", "AgentAnswer", "messages_body", "next_turn", "plain", "read_answer", "responses_body", "text"]

_WORDS: Final = ("key", "value", "cache", "page", "block", "store", "engine", "prefill", "decode", "prompt", "load")
_TOOL: Final = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
_FORM: Final = {"type": "json_schema", "schema": _TOOL}
_OWN: Final = ("id", "call_id", "item_id", "signature", "created_at", "usage", "cache_salt")
"""Members that differ between two answers."""


class AgentAnswer(NamedTuple):
    """An `AgentAnswer` is what an engine has answered, whole or as a stream."""

    told: Any
    """What is the same in two answers to one question: of a stream the order of its events, and its texts."""
    prompt_tokens: int
    cached_tokens: int
    items: list[dict[str, Any]]
    """The content blocks of a message, or the output items of a response, for the next turn."""

    @property
    def kinds(self) -> Counter[str]:
        """Counts the items by their type."""
        return Counter(str(each["type"]) for each in self.items)


def text(chance: random.Random, most: int = 200) -> str:
    """Returns words, fewer than `most`."""
    return " ".join(chance.choices(_WORDS, k=chance.randrange(40, most)))


def messages_body(chance: random.Random, number: int) -> dict[str, Any]:
    """Returns a request as agents send them: turns, tools and their results, thinking, forms."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    turns: list[dict[str, Any]] = [{"role": "user", "content": text(chance)}]
    if number % 3 == 1:
        thought = {"type": "thinking", "thinking": text(chance, 60), "signature": "s"}
        called = {"type": "tool_use", "id": "t1", "name": "forecast", "input": {"days": 2}}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": text(chance, 60)}]}
        turns += [
            {"role": "assistant", "content": [thought, {"type": "text", "text": "Let me see."}, called]},
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        ]
    if number % 4 == 1:
        body["system"] = [{"type": "text", "text": text(chance, 60), "cache_control": {"type": "ephemeral"}}]
    if number % 5 == 2:
        body["tools"] = [{"name": "forecast", "description": "of the weather", "input_schema": _TOOL}]
        body["tool_choice"] = {"type": chance.choice(("auto", "any", "none"))}
    elif number % 5 == 3:
        body["output_config"] = {"format": _FORM}
    elif number % 5 == 4:
        body |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1100, "stop_sequences": [" "]}
    return {**body, "messages": turns}


def responses_body(chance: random.Random, number: int) -> dict[str, Any]:
    """Returns such a request for the other API."""
    body: dict[str, Any] = {"model": "tiny", "max_output_tokens": 12, "temperature": 0, "input": text(chance)}
    if number % 3 == 1:
        body["input"] = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text(chance)}]},
            {"type": "function_call", "call_id": "c1", "name": "forecast", "arguments": '{"days":2}'},
            {"type": "function_call_output", "call_id": "c1", "output": text(chance, 60)},
            {"type": "message", "role": "user", "content": "And now?"},
        ]
    if number % 4 == 1:
        body["instructions"] = text(chance, 60)
    if number % 5 == 2:
        body["tools"] = [{"type": "function", "name": "forecast", "parameters": _TOOL}]
        body["tool_choice"] = chance.choice(("auto", "required", {"type": "function", "name": "forecast"}))
    elif number % 5 == 3:
        body["text"] = {"format": {**_FORM, "name": "forecast"}}
    elif number % 5 == 4:
        body["reasoning"] = {"effort": "low"}
    return body


MAKERS: Final[dict[str, Callable[[random.Random, int], dict[str, Any]]]] = {
    "/v1/messages": messages_body,
    "/v1/responses": responses_body,
}
"""What makes requests, by path."""


def plain(value: Any) -> Any:
    """Returns an answer without what differs between two of them."""
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {name: plain(each) for name, each in members.items() if name not in _OWN}
    return [plain(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


def read_answer(response: httpx.Response, *, stream: bool) -> AgentAnswer:
    """Reads an answer. Deltas of a stream are put together: engines send several tokens at once."""
    assert response.status_code == 200, response.text
    if stream:
        return _read_stream(response.text)
    document = response.json()
    items = document["content"] if document.get("type") == "message" else document["output"]
    return AgentAnswer(plain(document), *_prompt_counts(document["usage"]), items)


def _read_stream(said: str) -> AgentAnswer:
    texts: defaultdict[str, str] = defaultdict(str)
    order: list[str] = []
    usage: dict[str, Any] = {}
    items: list[dict[str, Any]] = []
    for block in said.strip().split("\n\n"):
        name, _, data = block.partition("\ndata: ")
        event: dict[str, Any] = json.loads(data)
        assert name == f"event: {event['type']}"
        delta: Any = event.get("delta")
        if isinstance(delta, str):
            texts[event["type"]] += delta
        elif event["type"] == "content_block_start":
            items.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            members = cast("dict[str, str]", delta)
            kind, added = next((kind, added) for kind, added in members.items() if kind != "type")
            items[-1][kind] = (items[-1].get(kind) or "") + added
            if kind != "signature":
                texts[f"{event['index']} {members['type']}"] += added
        if not order or order[-1] != event["type"]:
            order.append(event["type"])
        answer: dict[str, Any] = event.get("response") or {}
        usage = event.get("usage") or answer.get("usage") or usage
        items = answer.get("output") or items
    return AgentAnswer([order, dict(texts)], *_prompt_counts(usage), items)


def _prompt_counts(usage: dict[str, Any]) -> tuple[int, int]:
    """Returns the tokens of the prompt, and those that were cached."""
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    read, made = usage.get("cache_read_input_tokens") or 0, usage.get("cache_creation_input_tokens") or 0
    return usage["input_tokens"] + read + made, read


def next_turn(path: str, body: dict[str, Any], answer: AgentAnswer, question: str) -> dict[str, Any]:
    """Returns the next request of a conversation: the answer, the results of the tools in it, and a question."""
    if path == "/v1/responses":
        before = body["input"]
        turns = [{"type": "message", "role": "user", "content": before}] if isinstance(before, str) else before
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
            for item in answer.items
            if item["type"] == "function_call"
        ]
        asked = {"type": "message", "role": "user", "content": question}
        return {**body, "input": [*turns, *answer.items, *results, asked]}
    blocks = [block for each in answer.items if (block := _whole_block(each)) is not None]
    content: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "rain"}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    content.append({"type": "text", "text": question})
    turns = [{"role": "assistant", "content": blocks}] if blocks else []
    return {**body, "messages": [*body["messages"], *turns, {"role": "user", "content": content}]}


def _whole_block(block: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a content block as a client sends it back; None if it was cut off."""
    if "partial_json" not in block:
        return block
    members = {name: value for name, value in block.items() if name != "partial_json"}
    try:
        return {**members, "input": json.loads(block["partial_json"])}
    except ValueError:
        return None
