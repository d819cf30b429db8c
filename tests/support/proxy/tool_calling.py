"""Provides engines that call a tool once and then answer with its result, in each API that agents speak."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final, cast

from tests.system.proxy.test_legs import NIXL

__all__ = ["ANSWER", "CITY", "RESULT", "ToolCallingEngine"]

CITY: Final = "Paris"
RESULT: Final = "heavy rain"
"""What the tool of `weather_agent` returns."""
ANSWER: Final = f"Expect {RESULT} in {CITY}."
_ARGUMENTS: Final = json.dumps({"city": CITY})
_CACHED: Final = {"prefill": 16, "decode": 39}
"""Cached tokens of the prompt's 40, as each role counts them."""


class ToolCallingEngine:
    """Answers the legs of one role.

    A decode leg that names no KV of a prefill is answered with status 500. What is told of caches differs between the
    roles, so that a client sees who has counted.
    """

    def __init__(self, role: str) -> None:
        self.role: Final = role
        self.legs: list[str] = []
        """The API of each leg, and whether it is a stream."""

    async def __call__(self, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """See `tests.support.proxy.fixtures.Script`."""
        asked: dict[str, Any] = json.loads(body)
        params: dict[str, Any] = asked.get("kv_transfer_params") or {}
        status, kind = b"200 OK", b"application/json"
        api = _api_of(asked)
        self.legs.append(f"{api} stream" if asked.get("stream") else api)
        if self.role == "decode" and params.get("remote_engine_id") != NIXL["remote_engine_id"]:
            status, answer = b"500 Internal Server Error", b"{}"
        elif asked.get("stream"):
            kind, answer = b"text/event-stream", b"".join(_EVENTS[api](self._whole(api, asked)))
        else:
            whole = self._whole(api, asked)
            answer = json.dumps(whole | ({"kv_transfer_params": NIXL} if self.role == "prefill" else {})).encode()
        head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % (status, kind, len(answer)) + answer)

    def _whole(self, api: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Returns a whole answer: the call of the tool, or the text once its result is in the prompt."""
        calls = RESULT not in json.dumps(asked)
        cached = _CACHED[self.role]
        if api == "messages":
            block: dict[str, Any] = {"type": "text", "text": ANSWER}
            if calls:
                block = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": CITY}}
            usage = {"input_tokens": 40 - cached, "cache_read_input_tokens": cached, "output_tokens": 5}
            head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "stub", "stop_sequence": None}
            return {**head, "content": [block], "stop_reason": "tool_use" if calls else "end_turn", "usage": usage}
        if api == "responses":
            part: dict[str, Any] = {"type": "output_text", "text": ANSWER, "annotations": []}
            item: dict[str, Any] = {"type": "message", "id": "m1", "role": "assistant", "content": [part]}
            if calls:
                item = {"type": "function_call", "id": "f1", "call_id": "c1", "name": "weather"}
                item["arguments"] = _ARGUMENTS
            details = {"input_tokens_details": {"cached_tokens": cached}, "output_tokens_details": {}}
            usage = {"input_tokens": 40, **details, "output_tokens": 5, "total_tokens": 45}
            head = {"id": "resp_1", "object": "response", "created_at": 1, "model": "stub", "status": "completed"}
            more: dict[str, Any] = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
            return {**head, **more, "output": [{**item, "status": "completed"}], "usage": usage}
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": _ARGUMENTS}}
        said = {"content": None, "tool_calls": [call]} if calls else {"content": ANSWER}
        choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", **said}}
        choice["finish_reason"] = "tool_calls" if calls else "stop"
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        usage = {"prompt_tokens": 40, "completion_tokens": 5, "total_tokens": 45, **details}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "stub"}
        return {**head, "choices": [choice], "usage": usage}


def _api_of(asked: dict[str, Any]) -> str:
    """Returns the API of a request: a tool of Anthropic's has an `input_schema`."""
    if "input" in asked:
        return "responses"
    return "messages" if "input_schema" in asked["tools"][0] else "chat"


def _named(event: str, **members: Any) -> bytes:
    return f"event: {event}\ndata: {json.dumps({'type': event, **members})}\n\n".encode()


def _messages_events(whole: dict[str, Any]) -> Iterator[bytes]:
    block: dict[str, Any] = whole["content"][0]
    empty: dict[str, Any] = {"text": ""} if block["type"] == "text" else {"input": {}}
    delta = {"type": "text_delta", "text": ANSWER}
    if block["type"] == "tool_use":
        delta = {"type": "input_json_delta", "partial_json": _ARGUMENTS}
    begun: dict[str, Any] = {
        **whole,
        "content": [],
        "stop_reason": None,
        "usage": {"input_tokens": 40, "output_tokens": 0},
    }
    yield _named("message_start", message=begun)
    yield _named("content_block_start", index=0, content_block={**block, **empty})
    yield _named("content_block_delta", index=0, delta=delta)
    yield _named("content_block_stop", index=0)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _named("message_delta", delta=ended, usage=whole["usage"])
    yield _named("message_stop")


def _responses_events(whole: dict[str, Any]) -> Iterator[bytes]:
    item: dict[str, Any] = whole["output"][0]
    begun: dict[str, Any] = {**whole, "status": "in_progress", "output": [], "usage": None}
    where = {"item_id": item["id"], "output_index": 0}
    events: list[tuple[str, dict[str, Any]]] = [("response.created", {"response": begun})]
    if item["type"] == "message":
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        where["content_index"] = 0
        events += [
            ("response.output_item.added", {"output_index": 0, "item": {**item, "content": []}}),
            ("response.content_part.added", {**where, "part": part}),
            ("response.output_text.delta", {**where, "delta": ANSWER, "logprobs": []}),
            ("response.output_text.done", {**where, "text": ANSWER, "logprobs": []}),
            ("response.content_part.done", {**where, "part": {**part, "text": ANSWER}}),
        ]
    else:
        events += [
            ("response.output_item.added", {"output_index": 0, "item": {**item, "arguments": ""}}),
            ("response.function_call_arguments.delta", {**where, "delta": _ARGUMENTS}),
            ("response.function_call_arguments.done", {**where, "arguments": _ARGUMENTS, "name": item["name"]}),
        ]
    events += [
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": whole}),
    ]
    for number, (name, members) in enumerate(events):
        yield _named(name, sequence_number=number, **members)


def _chat_events(whole: dict[str, Any]) -> Iterator[bytes]:
    choice: dict[str, Any] = whole["choices"][0]
    head = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    message = cast("dict[str, Any]", choice["message"])
    if message.get("tool_calls"):
        message = {**message, "tool_calls": [{"index": 0, **message["tool_calls"][0]}]}
    for delta, finish in ((message, None), ({}, choice["finish_reason"])):
        chunk = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        yield b"data: %b\n\n" % json.dumps(chunk).encode()
    yield b"data: %b\n\n" % json.dumps({**head, "choices": [], "usage": whole["usage"]}).encode()
    yield b"data: [DONE]\n\n"


_EVENTS: Final = {"messages": _messages_events, "responses": _responses_events, "chat": _chat_events}
