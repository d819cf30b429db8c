"""The bodies of `/v1/messages` and `/v1/responses`, read as the chats that they are.

Each reader says how its endpoint differs from a chat, and nothing else. Content that is not text is refused.
"""

import json
from dataclasses import replace
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from reference_engine.ask import Ask, RequestError, ToolUse
from reference_engine.bodies import Body, ResponseFormat, SamplingBody, ask_of, grammar_of, load, one_of
from reference_engine.grammar import Expression
from reference_engine.requests import FunctionBody, Tool, answer_room, call_grammar, chat_prompt
from reference_engine.stored_responses import StoredResponses
from reference_engine.tokenizer import Message

__all__ = ["read_count", "read_messages", "read_responses"]

_LEAST_BUDGET: Final = 1024


class _Block(BaseModel):
    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    content: "str | list[_Block] | None" = None

    def said(self) -> str:
        """The text of this block in a prompt."""
        if self.type == "tool_use":
            return json.dumps({"name": self.name, "input": self.input or {}})
        if self.type == "tool_result":
            return self.content if isinstance(self.content, str) else _said(self.content or [])
        return self.text or self.thinking or ""


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _AnthropicTool(BaseModel):
    name: str
    description: str | None = None
    input_schema: dict[str, object]


class _ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class _Thinking(BaseModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=_LEAST_BUDGET)] | None = None


class _Form(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, object] | None = Field(default=None, alias="schema")


class _Output(BaseModel):
    format: _Form | None = None


class _Messages(Body):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)]
    system: str | list[_Block] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    tools: list[_AnthropicTool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _Output | None = None


class _Count(BaseModel):
    model: str | None = None
    messages: Annotated[list[_Message], Field(min_length=1)]
    system: str | list[_Block] | None = None
    tools: list[_AnthropicTool] | None = None


class _Item(BaseModel):
    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: str | None = None
    content: str | list[dict[str, object]] | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None

    def message(self) -> Message:
        """This item as a message of a chat."""
        if self.type == "function_call":
            return Message("assistant", json.dumps({"name": self.name, "arguments": self.arguments}))
        if self.type == "function_call_output":
            return Message("tool", self.output or "")
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(str(part.get("text", "")) for part in parts)
        return Message("assistant" if self.type == "reasoning" else self.role or "user", text)


class _NamedFunction(BaseModel):
    type: Literal["function"]
    name: str


class _ResponseTool(BaseModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None


class _Responses(Body):
    input: str | Annotated[list[_Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    ignore_eos: bool | None = None
    stop: list[str] | None = None
    tools: list[_ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedFunction | None = None
    text: _Output | None = None
    store: bool | None = None
    background: Literal[False] | None = None
    previous_response_id: str | None = None
    request_id: str | None = None


def read_messages(raw: bytes, model: str, max_model_len: int) -> Ask:
    """Read the body of `/v1/messages`; errors as for `read_completion`."""
    body = load(raw, _Messages, model)
    choice = body.tool_choice
    tools = _tools(body.tools or [])
    budget = body.thinking.budget_tokens if body.thinking is not None and body.thinking.type == "enabled" else None
    if budget is not None and budget >= body.max_tokens:
        raise RequestError("thinking.budget_tokens must be less than max_tokens", param="thinking")
    wanted = choice.name if choice is not None and choice.type == "tool" else None
    called = call_grammar(tools, wanted, any_tool=choice is not None and choice.type == "any")
    ask = _ask(
        body,
        SamplingBody(stop=body.stop_sequences, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
        chat_prompt(
            _conversation(body.system, body.messages), tools if choice is None or choice.type != "none" else []
        ),
        body.max_tokens,
        max_model_len,
        _form(body.output_config),
        called,
    )
    return replace(ask, tool_use=None if called is None else ToolUse(required=True))


def read_count(raw: bytes, model: str) -> int:
    """Read the body of `/v1/messages/count_tokens`, and count; errors as for `read_completion`."""
    body = load(raw, _Count, model)
    return len(chat_prompt(_conversation(body.system, body.messages), _tools(body.tools or [])))


def read_responses(raw: bytes, model: str, max_model_len: int, stored: StoredResponses) -> Ask:
    """Read the body of `/v1/responses`; errors as for `read_completion`.

    Raises:
        RequestError: also for a previous response that is not known.
    """
    body = load(raw, _Responses, model)
    items = [Message("user", body.input)] if isinstance(body.input, str) else [item.message() for item in body.input]
    before = [] if body.previous_response_id is None else stored.messages(body.previous_response_id)
    instructed = [Message("system", body.instructions)] if body.instructions else []
    choice = body.tool_choice
    tools = [Tool(function=FunctionBody.model_validate(tool.model_dump(exclude={"type"}))) for tool in body.tools or []]
    named = choice.name if isinstance(choice, _NamedFunction) else None
    called = call_grammar(tools, named, any_tool=choice == "required")
    prompt = chat_prompt([*instructed, *before, *items], tools if choice != "none" else [])
    ask = _ask(
        body,
        SamplingBody(stop=body.stop, temperature=body.temperature, top_p=body.top_p, ignore_eos=body.ignore_eos),
        prompt,
        body.max_output_tokens or answer_room(len(prompt), max_model_len),
        max_model_len,
        _form(body.text),
        called,
    )
    kept = None if body.store is False else [*before, *items]
    return replace(
        ask,
        tool_use=None if called is None else ToolUse(required=choice == "required"),
        response_id=body.request_id,
        conversation=kept,
    )


def _ask(
    body: Body,
    sampling: SamplingBody,
    prompt: list[int],
    max_tokens: int,
    max_model_len: int,
    form: ResponseFormat | None,
    called: Expression | None,
) -> Ask:
    wanted = [one for one in (grammar_of(None, form), called) if one is not None]
    ask = ask_of(
        body,
        sampling,
        [prompt],
        max_tokens=max_tokens,
        logprobs=None,
        max_model_len=max_model_len,
        grammar=one_of(wanted),
    )
    return replace(ask, include_usage=True)


def _form(output: _Output | None) -> ResponseFormat | None:
    if output is None or output.format is None:
        return None
    form = output.format
    return ResponseFormat.model_validate({"type": form.type, "json_schema": {"schema": form.json_schema}})


def _conversation(system: str | list[_Block] | None, messages: list[_Message]) -> list[Message]:
    said = [] if not system else [Message("system", system if isinstance(system, str) else _said(system))]
    for message in messages:
        said.append(
            Message(message.role, message.content if isinstance(message.content, str) else _said(message.content))
        )
    return said


def _said(blocks: list[_Block]) -> str:
    return "".join(block.said() for block in blocks)


def _tools(tools: list[_AnthropicTool]) -> list[Tool]:
    return [
        Tool(function=FunctionBody(name=tool.name, description=tool.description, parameters=tool.input_schema))
        for tool in tools
    ]
