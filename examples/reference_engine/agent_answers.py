"""The answers of `/v1/messages` and `/v1/responses`, whole or as streams of named events.

Sources: Anthropic's and OpenAI's API references; vLLM 0.32.0 anthropic/serving.py and openai/responses/serving.py.
"""

import json
from typing import cast
from uuid import uuid4

from reference_engine.answers import JSON, Answer, Grown
from reference_engine.ask import Ask, RequestError
from reference_engine.sequence import Event
from reference_engine.stored_responses import StoredResponses
from reference_engine.tokenizer import Message

__all__ = ["MessagesAnswer", "ResponsesAnswer", "anthropic_error"]


def anthropic_error(error: RequestError) -> JSON:
    """An error as Anthropic's API writes it."""
    return {"type": "error", "error": {"type": error.kind, "message": error.message}}


def _named(name: str, **members: object) -> bytes:
    document = json.dumps({"type": name, **members}, separators=(",", ":"))
    return f"event: {name}\ndata: {document}\n\n".encode()


class _AgentAnswer(Answer):
    """An answer without choices: there is one sequence."""

    kind = chunk_kind = ""

    def whole_choice(self, index: int, grown: Grown) -> JSON:
        """See `Answer.whole_choice`. There are none."""
        raise NotImplementedError

    def chunk_choice(self, event: Event, grown: Grown) -> JSON | None:
        """See `Answer.chunk_choice`. There are none."""
        raise NotImplementedError

    @property
    def _call(self) -> tuple[str, JSON] | None:
        """The tool that is called, with its arguments as far as they are complete; None without one."""
        if self.ask.tool_use is None:
            return None
        name, brace, rest = self.grown[0].text.partition("{")
        try:
            return name, cast("JSON", json.loads(brace + rest))
        except ValueError:
            return name, {}


class MessagesAnswer(_AgentAnswer):
    """`/v1/messages`."""

    def __init__(self, ask: Ask, request_id: str, model: str) -> None:
        super().__init__(ask, {"id": f"msg_{request_id}"}, model)
        self.head.pop("created")
        self._began = False

    def whole(self, counted: JSON, kv_transfer_params: JSON | None) -> JSON:
        """See `Answer.whole`."""
        params = {} if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params}
        called = self._call
        block: JSON = {"type": "text", "text": self.grown[0].text}
        if called is not None:
            block = {"type": "tool_use", "id": f"toolu_{self.head['id']}", "name": called[0], "input": called[1]}
        return {**self._message([block], _messages_usage(counted)), **self._stop(), **params}

    def opening(self) -> bytes:
        """See `Answer.opening`."""
        usage: JSON = {"input_tokens": len(self.prompt_of(0)), "output_tokens": 0}
        return _named("message_start", message=self._message([], usage))

    def chunk(self, event: Event) -> bytes:
        """See `Answer.chunk`. A call of a tool is one event at the end."""
        grown = self.take(event)
        called = self.ask.tool_use is not None
        if not event.text and not (called and event.finish is not None):
            return b""
        if called and event.finish is None:
            return b""
        text = b"" if self._began else self._begin()
        delta: JSON = {"type": "text_delta", "text": event.text}
        if called:
            _, brace, rest = grown.text.partition("{")
            delta = {"type": "input_json_delta", "partial_json": brace + rest}
        return text + _named("content_block_delta", index=0, delta=delta)

    def closing(self, counted: JSON | None) -> bytes:
        """See `Answer.closing`."""
        end = b"" if not self._began else _named("content_block_stop", index=0)
        usage = _messages_usage(counted or {})
        return end + _named("message_delta", delta=self._stop(), usage=usage) + _named("message_stop")

    def _begin(self) -> bytes:
        self._began = True
        block: JSON = {"type": "text", "text": ""}
        if (called := self._call) is not None:
            block = {"type": "tool_use", "id": f"toolu_{self.head['id']}", "name": called[0], "input": {}}
        return _named("content_block_start", index=0, content_block=block)

    def _message(self, content: list[JSON], usage: JSON) -> JSON:
        head = {**self.head, "type": "message", "role": "assistant"}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _stop(self) -> JSON:
        grown = self.grown[0]
        if grown.finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self.ask.tool_use is not None:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(grown.reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": grown.reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}


class ResponsesAnswer(_AgentAnswer):
    """`/v1/responses`."""

    def __init__(self, ask: Ask, request_id: str, model: str, stored: StoredResponses) -> None:
        super().__init__(ask, {"id": ask.response_id or f"resp_{uuid4().hex}"}, model)
        self.head["created_at"] = self.head.pop("created")
        self._stored = stored
        self._item_id = f"msg_{request_id}"
        self._number = 0

    def whole(self, counted: JSON, kv_transfer_params: JSON | None) -> JSON:
        """See `Answer.whole`. A response that is to be stored is stored here."""
        ended = "incomplete" if self.grown[0].finish == "length" else "completed"
        made = self._response(ended, [self._item("completed")], _responses_usage(counted))
        if self.ask.conversation is not None:
            self._stored.keep([*self.ask.conversation, Message("assistant", self.grown[0].text)], made)
        return {**made, "kv_transfer_params": kv_transfer_params}

    def opening(self) -> bytes:
        """See `Answer.opening`."""
        begun = {**self._response("in_progress", [], None), "kv_transfer_params": None}
        item: JSON = {**self._item("in_progress"), "content": []}
        part: JSON = {"type": "output_text", "text": "", "annotations": []}
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **where, part=part)
        )

    def chunk(self, event: Event) -> bytes:
        """See `Answer.chunk`."""
        self.take(event)
        if not event.text:
            return b""
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event("response.output_text.delta", **where, delta=event.text, logprobs=[])

    def closing(self, counted: JSON | None) -> bytes:
        """See `Answer.closing`."""
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        done = self.whole(counted or {}, None)
        item = self._item("completed")
        return (
            self._event("response.output_text.done", **where, text=self.grown[0].text, logprobs=[])
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event("response.completed", response=done)
        )

    def _event(self, name: str, **members: object) -> bytes:
        self._number += 1
        return _named(name, sequence_number=self._number - 1, **members)

    def _response(self, status: str, output: list[JSON], usage: JSON | None) -> JSON:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        head = {**self.head, "object": "response", "status": status, "error": None, "incomplete_details": incomplete}
        return {
            **head,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }

    def _item(self, status: str) -> JSON:
        called = self._call
        if called is not None:
            arguments = json.dumps(called[1])
            call: JSON = {"type": "function_call", "id": f"fc_{self._item_id}", "call_id": f"call_{self._item_id}"}
            return {**call, "name": called[0], "arguments": arguments, "status": status}
        part: JSON = {"type": "output_text", "text": self.grown[0].text, "annotations": []}
        return {"type": "message", "id": self._item_id, "role": "assistant", "status": status, "content": [part]}


def _messages_usage(counted: JSON) -> JSON:
    total, cached = _prompt(counted)
    output = counted.get("completion_tokens", 0)
    return {"input_tokens": total - cached, "output_tokens": output, "cache_read_input_tokens": cached}


def _responses_usage(counted: JSON) -> JSON:
    total, cached = _prompt(counted)
    return {
        "input_tokens": total,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": counted.get("completion_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted.get("total_tokens", total),
    }


def _prompt(counted: JSON) -> tuple[int, int]:
    details = cast("dict[str, int]", counted.get("prompt_tokens_details") or {})
    return cast("int", counted.get("prompt_tokens", 0)), details.get("cached_tokens", 0)
