"""Tests which chat an engine makes of a request of `/v1/messages` or `/v1/responses`."""

import json
from typing import Any

import pytest

from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.tokenization.chat_conversion import as_chat
from kvparams_proxy.tokenization.errors import UnsupportedChatError

SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


def test_messages_with_tools_and_thinking() -> None:
    document: dict[str, Any] = {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}],
        "tools": [{"name": "t", "description": "d", "input_schema": {"properties": {}}}],
        "thinking": {"type": "disabled"},
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "one"},
                    {"type": "text", "text": "two"},
                    {"type": "tool_use", "id": "c", "name": "t", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "5"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    }
    call = {"id": "c", "type": "function", "function": {"name": "t", "arguments": json.dumps({"a": 1})}}
    assert as_chat("messages", document) == {
        "model": "m",
        "reasoning_effort": "none",
        "tools": [
            {
                "type": "function",
                "function": {"name": "t", "description": "d", "parameters": {"properties": {}, "type": "object"}},
            }
        ],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "reasoning": "hm",
                "tool_calls": [call],
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "5"},
            {"role": "user", "content": "And?"},
        ],
    }


def test_responses_with_items_of_one_turn() -> None:
    document: dict[str, Any] = {
        "model": "m",
        "instructions": "Be brief.",
        "reasoning": {"effort": "low"},
        "tools": [{"type": "function", "name": "t", "parameters": SCHEMA, "strict": True}],
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one"}]},
            {"type": "function_call", "call_id": "c", "name": "t", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
        ],
    }
    call = {"id": "c", "type": "function", "function": {"name": "t", "arguments": "{}"}}
    found = as_chat("responses", document)
    assert found["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning": "hm", "content": "one", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
    ]
    assert found["reasoning_effort"] == "low"
    function = {"name": "t", "description": None, "parameters": SCHEMA, "strict": True}
    assert found["tools"] == [{"type": "function", "function": function}]
    assert as_chat("responses", {"input": "Hi"}) == {"messages": [{"role": "user", "content": "Hi"}]}


def test_parts_of_text_have_the_name_that_they_have_in_a_chat() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    found = as_chat("responses", {"input": [{"type": "message", "role": "user", "content": parts}]})
    assert found["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]


def test_a_chat_is_one_already() -> None:
    document: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}]}
    assert as_chat("chat", document) is document


NOT_TEXT: list[tuple[EndpointKind, dict[str, Any]]] = [
    ("messages", {"messages": [{"role": "system", "content": "s"}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ("messages", {"messages": [{"role": "user", "content": 7}]}),
    ("messages", {"messages": ["Hi"]}),
    ("responses", {"input": [{"type": "item_reference", "id": "i"}]}),
    ("responses", {"input": [{"type": "reasoning", "encrypted_content": "x"}]}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}),
    ("responses", {"input": 7}),
]


@pytest.mark.parametrize(("kind", "document"), NOT_TEXT)
def test_what_is_not_text_is_not_guessed(kind: EndpointKind, document: dict[str, object]) -> None:
    with pytest.raises(UnsupportedChatError):
        as_chat(kind, document)
