"""What a client may ask for: bodies of `/v1/completions`, `/v1/chat/completions` and `/tokenize`, read and bounded.

The one rule: what this engine cannot do is refused in words, never ignored.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvparams.errors import JSONTextError
from kvparams.jsontext import load_object
from reference_engine.sampling import Sampling
from reference_engine.tokenizer import ROLES, VOCABULARY, Message, encode, encode_chat

__all__ = ["Ask", "RequestError", "read_chat", "read_completion", "read_tokenize"]

_MAX_SEQUENCES: Final = 256
"""Choices of all prompts of one request together."""
_DEFAULT_CHAT_TOKENS: Final = 256
_HARMLESS: Final[dict[str, tuple[object, ...]]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "tools": ([],),
    "prompt_embeds": (),
    "use_beam_search": (False,),
}
"""Fields that are not supported, with the values that change nothing (null is always one)."""


class RequestError(Exception):
    """The request cannot be served as it is; answered as OpenAI's API does."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.message, self.status, self.kind, self.param = message, status, kind, param


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that can be served."""

    prompts: list[list[int]]
    choices: int
    sampling: Sampling
    """Its seed is that of the whole request; `seed_of` gives each sequence its own."""
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    cache_salt: str | None
    kv_transfer_params: dict[str, object] | str | None

    def seed_of(self, index: int) -> bytes:
        """The seed of the choice `index`: every prompt of a batch draws as it would alone."""
        return self.sampling.seed + b"/%d" % (index % self.choices)


_Count = Annotated[int, Field(ge=1, le=1 << 31)]


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str | None = None
    max_tokens: _Count | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_SEQUENCES)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, object] | str | None = None


class _Completion(_Body):
    prompt: object
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    role: str
    content: str | list[_Part] | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class _Chat(_Body):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class _Tokenize(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[_Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


_Any = TypeVar("_Any", bound=BaseModel)


def read_completion(raw: bytes, model: str, max_model_len: int) -> Ask:
    """Read the body of `/v1/completions`.

    Raises:
        RequestError: it is not JSON, has a wrong field, names another model, or is too long.
    """
    body = _read(raw, _Completion, model)
    return _ask(body, _prompts(body.prompt), body.max_tokens or 16, body.logprobs, max_model_len)


def read_chat(raw: bytes, model: str, max_model_len: int) -> Ask:
    """Read the body of `/v1/chat/completions`; errors as for `read_completion`.

    Without a limit the answer has at most 256 tokens: this engine reserves memory for the longest possible answer.
    """
    body = _read(raw, _Chat, model)
    prompt = encode_chat(_messages(body.messages))
    room = max(1, min(_DEFAULT_CHAT_TOKENS, max_model_len - len(prompt)))
    limit = body.max_completion_tokens or body.max_tokens or room
    return _ask(body, [prompt], limit, (body.top_logprobs or 0) if body.logprobs else None, max_model_len)


def read_tokenize(raw: bytes, model: str) -> list[int]:
    """Read the body of `/tokenize`, and tokenize what it holds; errors as for `read_completion`."""
    body = _read(raw, _Tokenize, model)
    if body.messages is not None:
        return encode_chat(_messages(body.messages), add_generation_prompt=body.add_generation_prompt)
    if body.prompt is None:
        raise RequestError("`prompt` or `messages` is required")
    return encode(body.prompt, bos=body.add_special_tokens)


def _read(raw: bytes, shape: type[_Any], model: str) -> _Any:
    try:
        document, _ = load_object(raw)
        body = shape.model_validate(document)
    except JSONTextError as error:
        raise RequestError(str(error)) from error
    except ValidationError as error:
        faults = [(".".join(str(step) for step in fault["loc"]), fault["msg"]) for fault in error.errors()]
        message = "; ".join(f"{where or 'body'}: {what}" for where, what in faults)
        raise RequestError(message, param=faults[0][0] or None) from error
    for name, harmless in _HARMLESS.items():
        value = document.get(name)
        if value is not None and not any(type(value) in (type(one), int, float) and value == one for one in harmless):
            raise RequestError(f"`{name}` is not supported by the reference engine", param=name)
    asked: str | None = getattr(body, "model", None)
    if asked is not None and asked != model:
        message = f"The model `{asked}` does not exist."
        raise RequestError(message, status=404, kind="NotFoundError", param="model")
    return body


def _ask(body: _Body, prompts: list[list[int]], max_tokens: int, logprobs: int | None, max_model_len: int) -> Ask:
    choices = body.n or 1
    if choices * len(prompts) > _MAX_SEQUENCES:
        raise RequestError(f"at most {_MAX_SEQUENCES} choices in one request", param="n")
    for prompt in prompts:
        if len(prompt) + max_tokens > max_model_len:
            raise RequestError(
                f"This model's maximum context length is {max_model_len} tokens. However, you requested "
                f"{len(prompt) + max_tokens} tokens ({len(prompt)} in the prompt, {max_tokens} for the answer)."
            )
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise RequestError(f"min_tokens ({body.min_tokens}) is more than max_tokens ({max_tokens})", param="min_tokens")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if not all(stop):
        raise RequestError("a stop string must not be empty", param="stop")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options need stream: true", param="stream_options")
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature == 0 and choices > 1:
        raise RequestError("n must be 1 when the temperature is 0: the choices would be the same", param="n")
    seed = os.urandom(16) if body.seed is None else b"%d" % body.seed
    return Ask(
        prompts=prompts,
        choices=choices,
        sampling=Sampling(temperature, body.top_p or 1.0, body.top_k or 0, seed, logprobs),
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=stop,
        ignore_eos=bool(body.ignore_eos),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        cache_salt=body.cache_salt,
        kv_transfer_params=body.kv_transfer_params,
    )


def _prompts(prompt: object) -> list[list[int]]:
    batch = cast("list[object]", prompt) if isinstance(prompt, list) else [prompt]
    if batch and all(type(one) is int for one in batch):
        batch = [batch]
    prompts = [_prompt(one) for one in batch]
    if not prompts or not all(prompts):
        raise RequestError("the prompt is empty", param="prompt")
    return prompts


def _prompt(prompt: object) -> list[int]:
    if isinstance(prompt, str):
        return encode(prompt) if prompt else []
    if not isinstance(prompt, list):
        raise RequestError("the prompt must be a text, a list of texts, token ids or a list of these", param="prompt")
    ids = [token for token in cast("list[object]", prompt) if type(token) is int and 0 <= token < VOCABULARY]
    if len(ids) != len(cast("list[object]", prompt)):
        raise RequestError(f"token ids are integers from 0 to {VOCABULARY - 1}", param="prompt")
    return ids


def _messages(messages: list[_Message]) -> list[Message]:
    unknown = next((message.role for message in messages if message.role not in ROLES), None)
    if unknown is not None:
        raise RequestError(f"unknown role {unknown!r}; known: {', '.join(ROLES)}", param="messages")
    return [Message(message.role, message.text()) for message in messages]
