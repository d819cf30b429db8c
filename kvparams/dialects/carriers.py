"""Other places in which the members of `kv_transfer_params` travel: their dialect stays the same.

The one rule: a carrier says where the object stands and how it is spelt, and nothing about what is in it.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Final, cast

from pydantic_core import to_json

from kvparams.dialects.message import ABSENT, Message, Path, Tree, look, place, put, take
from kvparams.errors import Problem
from kvparams.jsontext import loads

__all__ = ["CARRIERS", "USUAL", "Carrier", "lifted", "lowered", "root", "rooted"]

USUAL: Final = "kv_transfer_params"
"""Where most have it: a member of the body."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """A place for the object."""

    name: str
    place: str
    """In the body, dotted."""
    says: str
    """Who reads it there."""
    source: str
    """File and version."""
    text: bool = False
    """Whether it is JSON text there."""

    @property
    def path(self) -> Path:
        """The same as a path."""
        return place(self.place)


CARRIERS: Final = (
    Carrier(
        "extra_args",
        "sampling_params.extra_args.kv_transfer_params",
        "requests to vLLM's /inference/v1/generate; 0.14 to 0.26 read it nowhere else there",
        "vLLM 0.14.0 entrypoints/serve/disagg/serving.py, 0.26.0 and 0.32.0 entrypoints/scale_out/token_in_token_out/"
        "serving.py; llm-d-router ebab687 pkg/coordinator/steps/utils.go",
    ),
    Carrier(
        "grpc",
        "kv_transfer_params_json",
        "requests and answers of vLLM over gRPC, as smg speaks to it",
        "smg 1ca10c2 crates/grpc_client/proto/vllm_engine.proto (GenerateRequest, GenerateComplete)",
        text=True,
    ),
)


def lifted(message: Message, carriers: Sequence[Carrier] = CARRIERS) -> tuple[Message, Carrier | None]:
    """The same message with the object in its usual place, and where it stood; None where it stands there already, or
    where there is none. What stands in the usual place goes before all others, as in vLLM."""
    if USUAL in message.body:
        return message, None
    for carrier in carriers:
        value = _spelled(look(message.body, carrier.path), carrier)
        if isinstance(value, dict):
            body = deepcopy(dict(message.body))
            take(body, carrier.path)
            return Message(message.request_id, {**body, USUAL: cast("Tree", value)}, message.headers), carrier
    return message, None


def lowered(message: Message, carrier: Carrier | None) -> Message:
    """The other way: the object put where that carrier has it, text written without spaces."""
    if carrier is None or message.body.get(USUAL) is None:
        return message
    body = deepcopy(dict(message.body))
    value = body.pop(USUAL)
    put(body, carrier.path, to_json(value).decode() if carrier.text else value)
    return Message(message.request_id, body, message.headers)


def root(path: Path, carrier: Carrier | None) -> Path:
    """Where something stands in the message that came, by its path in the lifted one."""
    if carrier is None or path[:1] != (USUAL,):
        return path
    return (*carrier.path, *path[1:])


def rooted(problem: Problem, carrier: Carrier | None) -> Problem:
    """A problem of a lifted message, with the path that it has in the message that came."""
    return replace(problem, path=root(problem.path, carrier))


def _spelled(value: object, carrier: Carrier) -> object:
    if not carrier.text:
        return value
    try:
        return loads(value.encode()) if isinstance(value, str) else ABSENT
    except ValueError:  # no JSON of ours: it stays what it is
        return ABSENT
