"""The bodies of the endpoints, read and bounded: completions, chat, token-in / token-out, embeddings, `/tokenize`.

Each reader says how its endpoint differs from the others, and nothing else.
"""

import json
from dataclasses import replace
from typing import Annotated, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from reference_engine.ask import Ask, RequestError, ToolUse
from reference_engine.bodies import (
    Body,
    ResponseFormat,
    SamplingBody,
    ask_of,
    grammar_of,
    load,
    one_of,
    tokens_of,
)
from reference_engine.grammar import Either, Expression, Then
from reference_engine.grammar import Literal as Exactly
from reference_engine.schemas import SchemaError, from_schema
from reference_engine.tokenizer import ROLES, Message, encode, encode_chat

__all__ = [
    "FunctionBody",
    "Tool",
    "answer_room",
    "call_grammar",
    "chat_prompt",
    "read_chat",
    "read_completion",
    "read_control",
    "read_embeddings",
    "read_generate",
    "read_tokenize",
]

_DEFAULT_TOKENS: Final = 256
"""Of an answer without a limit; this engine reserves memory for the longest possible answer."""
_MAX_TOOLS: Final = 64
_MAX_INPUTS: Final = 256


class _Completion(Body, SamplingBody):
    prompt: object
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[object] | None = None

    def text(self) -> str:
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        return text + (json.dumps(self.tool_calls) if self.tool_calls else "")


class FunctionBody(BaseModel):
    """A `FunctionBody` describes a function."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, object] | None = None


class Tool(BaseModel):
    """A `Tool` is a tool that a chat may call."""

    type: Literal["function"] = "function"
    function: FunctionBody


class _Named(BaseModel):
    name: str


class _NamedTool(BaseModel):
    type: Literal["function"]
    function: _Named


class _Chat(Body, SamplingBody):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None


class _GenerateSampling(SamplingBody):
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class _Generate(Body):
    token_ids: list[object]
    sampling_params: _GenerateSampling


class _Embeddings(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str | None = None
    input: object
    encoding_format: Literal["float", "base64"] | None = None


class _Tokenize(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[_Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class _Control(BaseModel):
    kv_transfer_params: dict[str, object]


def read_completion(raw: bytes, model: str, max_model_len: int) -> Ask:
    """Read the body of `/v1/completions`.

    Raises:
        RequestError: it is not JSON, has a wrong member, names another model, contradicts itself, or is too long.
    """
    body = load(raw, _Completion, model)
    if body.echo and body.logprobs is not None:
        raise RequestError("`echo` with `logprobs` is not supported: the prompt's are not computed", param="echo")
    prompts = _prompts(body.prompt, "prompt")
    unlimited = body.max_tokens is None and "max_tokens" in body.model_fields_set  # null is not the same as nothing
    ask = ask_of(
        body,
        body,
        prompts,
        max_tokens=answer_room(max(map(len, prompts)), max_model_len) if unlimited else body.max_tokens or 16,
        logprobs=body.logprobs,
        max_model_len=max_model_len,
        grammar=grammar_of(body.structured_outputs, body.response_format),
    )
    return replace(ask, echo=bool(body.echo), return_token_ids=bool(body.return_token_ids))


def read_chat(raw: bytes, model: str, max_model_len: int) -> Ask:
    """Read the body of `/v1/chat/completions`; errors as for `read_completion`.

    The tools stand in the prompt, as in the templates of most models. Which one a required call takes the grammar
    leaves to the model; with `auto` this model never calls one.
    """
    body = load(raw, _Chat, model)
    tools = body.tools or []
    prompt = chat_prompt(_messages(body.messages), tools if body.tool_choice != "none" else [])
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs need logprobs: true", param="top_logprobs")
    form = grammar_of(body.structured_outputs, body.response_format)
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, _NamedTool) else None
    called = call_grammar(tools, named, any_tool=choice == "required")
    ask = ask_of(
        body,
        body,
        [prompt],
        max_tokens=body.max_completion_tokens or body.max_tokens or answer_room(len(prompt), max_model_len),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_model_len=max_model_len,
        grammar=one_of([one for one in (form, called) if one is not None]),
    )
    use = None if called is None else ToolUse(required=body.tool_choice == "required")
    return replace(ask, return_token_ids=bool(body.return_token_ids), tool_use=use)


def read_generate(raw: bytes, model: str, max_model_len: int) -> Ask:
    """Read the body of `/inference/v1/generate`, tokens in and tokens out; errors as for `read_completion`."""
    body = load(raw, _Generate, model)
    sampled = body.sampling_params
    prompt = tokens_of(body.token_ids, "token_ids")
    if not prompt:
        raise RequestError("the prompt is empty", param="token_ids")
    return ask_of(
        body,
        sampled,
        [prompt],
        max_tokens=sampled.max_tokens or answer_room(len(prompt), max_model_len),
        logprobs=sampled.logprobs,
        max_model_len=max_model_len,
        grammar=grammar_of(sampled.structured_outputs),
    )


def read_embeddings(raw: bytes, model: str, max_model_len: int) -> tuple[list[list[int]], bool]:
    """Read the body of `/v1/embeddings`: the inputs, and whether the vectors are wanted in base64.

    Raises:
        RequestError: as for `read_completion`; also for more than 256 inputs.
    """
    body = load(raw, _Embeddings, model)
    inputs = _prompts(body.input, "input")
    if len(inputs) > _MAX_INPUTS:
        raise RequestError(f"at most {_MAX_INPUTS} inputs in one request", param="input")
    longest = max(map(len, inputs))
    if longest > max_model_len:
        raise RequestError(f"This model's maximum context length is {max_model_len} tokens, not {longest}.")
    return inputs, body.encoding_format == "base64"


def read_tokenize(raw: bytes, model: str) -> list[int]:
    """Read the body of `/tokenize`, and tokenize what it holds; errors as for `read_completion`."""
    body = load(raw, _Tokenize, model)
    if body.messages is not None:
        return encode_chat(_messages(body.messages), add_generation_prompt=body.add_generation_prompt)
    if body.prompt is None:
        raise RequestError("`prompt` or `messages` is required")
    return encode(body.prompt, bos=body.add_special_tokens)


def read_control(raw: bytes, model: str) -> dict[str, object]:
    """Read the body of `/v1/kvparams`: its `kv_transfer_params`; errors as for `read_completion`."""
    return load(raw, _Control, model).kv_transfer_params


def answer_room(prompt_tokens: int, max_model_len: int) -> int:
    """Returns the longest answer without a limit of its own."""
    return max(1, min(_DEFAULT_TOKENS, max_model_len - prompt_tokens))


def call_grammar(tools: list[Tool], named: str | None, *, any_tool: bool) -> Expression | None:
    """Returns the grammar of a tool call: the name, and right behind it the arguments as a JSON object.

    None where neither one tool is named nor any has to be called.
    """
    if named is None and not any_tool:
        return None
    found = [tool.function for tool in tools if named in (None, tool.function.name)]
    if not found:
        raise RequestError("tool_choice asks for a tool that `tools` does not have", param="tool_choice")
    try:
        calls = [Then(Exactly(one.name), from_schema(_arguments(one))) for one in found]
    except SchemaError as error:
        raise RequestError(f"parameters of a tool: {error}", param="tools") from error
    return Either(tuple(calls))


def _arguments(function: FunctionBody) -> dict[str, object]:
    schema = function.parameters or {"type": "object", "properties": {}}
    if schema.get("type") != "object":
        raise SchemaError("they must be an object")
    return schema


def _prompts(prompt: object, name: str) -> list[list[int]]:
    batch = cast("list[object]", prompt) if isinstance(prompt, list) else [prompt]
    if batch and all(type(one) is int for one in batch):
        batch = [batch]
    prompts = [_prompt(one, name) for one in batch]
    if not prompts or not all(prompts):
        raise RequestError("the prompt is empty", param=name)
    return prompts


def _prompt(prompt: object, name: str) -> list[int]:
    if isinstance(prompt, str):
        return encode(prompt) if prompt else []
    if not isinstance(prompt, list):
        raise RequestError("the prompt must be a text, a list of texts, token ids or a list of these", param=name)
    return tokens_of(cast("list[object]", prompt), name)


def chat_prompt(messages: list[Message], tools: list[Tool]) -> list[int]:
    """Returns the prompt of a chat, which begins with the tools."""
    described = [Message("system", json.dumps([tool.model_dump(exclude_none=True) for tool in tools]))] if tools else []
    return encode_chat([*described, *messages])


def _messages(messages: list[_Message]) -> list[Message]:
    unknown = next((message.role for message in messages if message.role not in ROLES), None)
    if unknown is not None:
        raise RequestError(f"unknown role {unknown!r}; known: {', '.join(ROLES)}", param="messages")
    return [Message(message.role, message.text()) for message in messages]
