"""Parses and checks the members that the bodies of all generating endpoints have in common.

A known member that this engine does not support is refused with an error, never ignored; an unknown member is ignored.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvparams.errors import JSONTextError
from kvparams.jsontext.document import load_object
from reference_engine.ask import Ask, RequestError
from reference_engine.grammar import Expression
from reference_engine.sampling import Sampling
from reference_engine.schemas import SchemaError, any_object, choices, from_schema
from reference_engine.sequence import Limits
from reference_engine.tokenizer import VOCABULARY

__all__ = [
    "Body",
    "ResponseFormat",
    "SamplingBody",
    "ask_of",
    "grammar_of",
    "load",
    "one_of",
    "tokens_of",
]

_MAX_SEQUENCES: Final = 256
"""Choices of all prompts of one request together."""
_HARMLESS: Final[dict[str, tuple[object, ...]]] = {
    "suffix": ("",),
    "best_of": (1,),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
}
"""Members that are not supported, with the values that change nothing (null is always one)."""


_Count = Annotated[int, Field(ge=1, le=1 << 31)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Token = Annotated[int, Field(ge=0, lt=VOCABULARY)]


class _StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _StructuredOutputs(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a constraint that is not understood must not be overlooked

    choice: list[str] | None = None
    json_schema: dict[str, object] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None


class _JSONSchema(BaseModel):
    name: str | None = None
    json_schema: dict[str, object] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JSONSchema | None = None


class SamplingBody(BaseModel):
    """A `SamplingBody` says how to choose tokens and when to stop.

    In OpenAI's bodies it stands at the top, in token-in / token-out one level down.
    """

    model_config = ConfigDict(strict=True, protected_namespaces=())

    max_tokens: _Count | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_SEQUENCES)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[_Token], Field(max_length=VOCABULARY)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=VOCABULARY)] | None = None
    structured_outputs: _StructuredOutputs | None = None


class Body(BaseModel):
    """A `Body` holds the top-level members of every generating body."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    kv_transfer_params: dict[str, object] | str | None = None


_Any = TypeVar("_Any", bound=BaseModel)


def load(raw: bytes, shape: type[_Any], model: str) -> _Any:
    """Read a body.

    Raises:
        RequestError: it is not JSON, has a wrong member or one that is not supported, or names another model.
    """
    try:
        document, _ = load_object(raw)
        body = shape.model_validate(document)
    except JSONTextError as error:
        raise RequestError(str(error)) from error
    except ValidationError as error:
        faults = [(".".join(str(step) for step in fault["loc"]), fault["msg"]) for fault in error.errors()]
        message = "; ".join(f"{where or 'body'}: {what}" for where, what in faults)
        raise RequestError(message, param=faults[0][0] or None) from error
    inside = document.get("sampling_params")
    for members in (document, cast("dict[str, object]", inside) if isinstance(inside, dict) else {}):
        _refuse_unsupported(members)
    asked: str | None = getattr(body, "model", None)
    if asked is not None and asked != model:
        message = f"The model `{asked}` does not exist."
        raise RequestError(message, status=404, kind="NotFoundError", param="model")
    return body


def ask_of(
    body: Body,
    sampled: SamplingBody,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    logprobs: int | None,
    max_model_len: int,
    grammar: Expression | None,
) -> Ask:
    """Check what depends on several members, and put the request together.

    Raises:
        RequestError: the members contradict each other, or it is too long.
    """
    count = sampled.n or 1
    if count * len(prompts) > _MAX_SEQUENCES:
        raise RequestError(f"at most {_MAX_SEQUENCES} choices in one request", param="n")
    for prompt in prompts:
        _check_length(len(prompt), max_tokens, max_model_len)
    min_tokens = sampled.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})", param="min_tokens")
    stop = (sampled.stop,) if isinstance(sampled.stop, str) else tuple(sampled.stop or ())
    if not all(stop):
        raise RequestError("a stop string must not be empty", param="stop")
    options = body.stream_options
    if options is not None and not body.stream:
        raise RequestError("stream_options need stream: true", param="stream_options")
    temperature = 1.0 if sampled.temperature is None else sampled.temperature
    if temperature == 0 and count > 1:
        raise RequestError("n must be 1 when the temperature is 0: the choices would be the same", param="n")
    return Ask(
        prompts=prompts,
        choices=count,
        sampling=Sampling(
            temperature=temperature,
            top_p=sampled.top_p or 1.0,
            top_k=sampled.top_k or 0,
            seed=os.urandom(16) if sampled.seed is None else b"%d" % sampled.seed,
            logprobs=logprobs,
            min_p=sampled.min_p or 0.0,
            presence=sampled.presence_penalty or 0.0,
            frequency=sampled.frequency_penalty or 0.0,
            repetition=sampled.repetition_penalty or 1.0,
            bias=_bias(sampled.logit_bias or {}),
        ),
        limits=Limits(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=stop,
            stop_tokens=frozenset(sampled.stop_token_ids or ()),
            keep_stop=bool(sampled.include_stop_str_in_output),
            ignore_eos=bool(sampled.ignore_eos),
            grammar=grammar,
        ),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        cache_salt=body.cache_salt,
        kv_transfer_params=body.kv_transfer_params,
    )


def grammar_of(outputs: _StructuredOutputs | None, form: ResponseFormat | None = None) -> Expression | None:
    """Returns the grammar that the answer must follow; None allows any text.

    Raises:
        RequestError: more than one thing is asked for, or one that is not understood.
    """
    wanted: list[Expression] = []
    try:
        if outputs is not None:
            if outputs.choice is not None:
                wanted.append(choices(outputs.choice))
            if outputs.json_schema is not None:
                wanted.append(from_schema(_schema(outputs.json_schema)))
            if outputs.json_object:
                wanted.append(any_object())
        if form is not None and form.type == "json_object":
            wanted.append(any_object())
        if form is not None and form.type == "json_schema":
            wanted.append(from_schema(form.json_schema and form.json_schema.json_schema))
    except SchemaError as error:
        raise RequestError(f"structured output: {error}", param="structured_outputs") from error
    return one_of(wanted)


def one_of(wanted: list[Expression]) -> Expression | None:
    """The one of them; None where there is none.

    Raises:
        RequestError: there are several.
    """
    if len(wanted) > 1:
        raise RequestError("only one form can be asked of an answer", param="structured_outputs")
    return wanted[0] if wanted else None


def tokens_of(value: object, name: str) -> list[int]:
    """A list of token ids that this model has.

    Raises:
        RequestError: it is something else.
    """
    found = cast("list[object]", value) if isinstance(value, list) else []
    ids = [token for token in found if type(token) is int and 0 <= token < VOCABULARY]
    if not isinstance(value, list) or len(ids) != len(found):
        raise RequestError(f"token ids are integers from 0 to {VOCABULARY - 1}", param=name)
    return ids


def _refuse_unsupported(members: Mapping[str, object]) -> None:
    for name, harmless in _HARMLESS.items():
        value = members.get(name)
        if value is not None and not any(type(value) in (type(one), int, float) and value == one for one in harmless):
            raise RequestError(f"`{name}` is not supported by the reference engine", param=name)


def _check_length(prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    if prompt_tokens >= max_model_len:  # whatever was asked of the answer: a prefill leg says the same as one engine
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
            f"{prompt_tokens} tokens."
        )
    if prompt_tokens + max_tokens > max_model_len:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} for the answer)."
        )


def _bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for name, bias in given.items():
        if not (name.isdecimal() and name.isascii() and int(name) < VOCABULARY and -100 <= bias <= 100):
            raise RequestError("logit_bias: token ids as text, each with a number from -100 to 100", param="logit_bias")
    return tuple((int(name), bias) for name, bias in given.items())


def _schema(given: dict[str, object] | str) -> object:
    if not isinstance(given, str):
        return given
    try:
        return load_object(given.encode())[0]
    except JSONTextError as error:
        raise SchemaError(str(error)) from error
