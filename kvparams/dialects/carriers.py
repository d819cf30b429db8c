"""Other places in which the members of `kv_transfer_params` travel: their dialect stays the same.

A carrier says where the object stands and how it is spelled, and nothing about its contents.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Final, cast

from pydantic_core import to_json

from kvparams.dialects.message import (
    ABSENT,
    DialectMessage,
    JSONObject,
    MessagePath,
    get_at,
    parse_path,
    pop_at,
    set_at,
)
from kvparams.errors import Problem
from kvparams.jsontext.document import loads

__all__ = [
    "CARRIERS",
    "DEFAULT_CARRIER",
    "MessageCarrier",
    "lift_message",
    "lower_message",
    "original_path",
    "with_original_path",
]

DEFAULT_CARRIER: Final = "kv_transfer_params"
"""Where most have it: a member of the body."""


@dataclass(frozen=True, slots=True)
class MessageCarrier:
    """A place for the object."""

    name: str
    place: str
    """In the body, dotted."""
    description: str
    """Who reads it there."""
    source: str
    """File and version."""
    text: bool = False
    """Whether it is JSON text there."""

    @property
    def path(self) -> MessagePath:
        """The same as a path."""
        return parse_path(self.place)


CARRIERS: Final = (
    MessageCarrier(
        "extra_args",
        "sampling_params.extra_args.kv_transfer_params",
        "requests to vLLM's /inference/v1/generate; 0.14 to 0.26 read it nowhere else there",
        "vLLM 0.14.0 entrypoints/serve/disagg/serving.py, 0.26.0 and 0.32.0 entrypoints/scale_out/token_in_token_out/"
        "serving.py; llm-d-router ebab687 pkg/coordinator/steps/utils.go",
    ),
    MessageCarrier(
        "grpc",
        "kv_transfer_params_json",
        "requests and answers of vLLM over gRPC, as smg speaks to it",
        "smg 1ca10c2 crates/grpc_client/proto/vllm_engine.proto (GenerateRequest, GenerateComplete)",
        text=True,
    ),
)


def lift_message(
    message: DialectMessage, carriers: Sequence[MessageCarrier] = CARRIERS
) -> tuple[DialectMessage, MessageCarrier | None]:
    """Returns the message with the object in its default place, and the carrier that it came from.

    The carrier is None if the object is in its default place already, or if there is none. The object in the default
    place takes precedence over all others, as in vLLM.
    """
    if DEFAULT_CARRIER in message.body:
        return message, None
    for carrier in carriers:
        value = _spelled(get_at(message.body, carrier.path), carrier)
        if isinstance(value, dict):
            body = deepcopy(dict(message.body))
            pop_at(body, carrier.path)
            return DialectMessage(
                message.request_id, {**body, DEFAULT_CARRIER: cast("JSONObject", value)}, message.headers
            ), carrier
    return message, None


def lower_message(message: DialectMessage, carrier: MessageCarrier | None) -> DialectMessage:
    """The other way: the object put where that carrier has it, text written without spaces."""
    if carrier is None or message.body.get(DEFAULT_CARRIER) is None:
        return message
    body = deepcopy(dict(message.body))
    value = body.pop(DEFAULT_CARRIER)
    set_at(body, carrier.path, to_json(value).decode() if carrier.text else value)
    return DialectMessage(message.request_id, body, message.headers)


def original_path(path: MessagePath, carrier: MessageCarrier | None) -> MessagePath:
    """Translates a path in the lifted message into the path in the message as it came."""
    if carrier is None or path[:1] != (DEFAULT_CARRIER,):
        return path
    return (*carrier.path, *path[1:])


def with_original_path(problem: Problem, carrier: MessageCarrier | None) -> Problem:
    """A problem of a lifted message, with the path that it has in the message that came."""
    return replace(problem, path=original_path(problem.path, carrier))


def _spelled(value: object, carrier: MessageCarrier) -> object:
    if not carrier.text:
        return value
    try:
        return loads(value.encode()) if isinstance(value, str) else ABSENT
    except ValueError:  # no JSON of ours: it stays what it is
        return ABSENT
