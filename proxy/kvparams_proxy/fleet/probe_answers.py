"""Reads the answers to probes: which models an engine serves, and which version of the protocol it speaks."""

from collections.abc import Generator, Mapping, Sequence
from typing import Final, NamedTuple, cast

from pydantic_core import from_json

from kvparams.errors import JSONTextError
from kvparams.jsontext.document import read_object
from kvparams.jsontext.receivers import AbridgedObjectReceiver, ListReceiver
from kvparams.jsontext.scanner import UNLIMITED
from kvparams.versions import NoCommonVersion, negotiate_with_engine
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.upstream.types import ResponseHead, UpstreamError

__all__ = ["ProbeResult", "interpret_answer", "parse_answer", "parse_long_answer"]

_MOST_MODELS: Final = 10_000
_UNAUTHORIZED: Final = (401, 403)


class ProbeResult(NamedTuple):
    """The result of a probe."""

    ready: bool
    why: str
    """The evidence, for the log."""
    models: frozenset[str] | None
    version: str | None = None
    """The version that both sides speak, where the engine says."""
    base: str | None = None
    """The first model that is no adapter."""
    answers: bool = False
    """Whether the engine answers as one should, and is given no work all the same."""
    adapters: Sequence[str] | None = None
    """The LoRA adapters among the models, in the engine's order; None where it did not say."""


def parse_answer(raw: bytes) -> Mapping[str, object] | None:
    """Parses a short response to an object, empty for another JSON value. Returns None where it is not JSON."""
    try:
        document: object = from_json(raw)
    except ValueError:
        return None
    return cast("dict[str, object]", document) if isinstance(document, dict) else {}


def parse_long_answer(raw: bytes) -> Generator[None, None, Mapping[str, object] | None]:
    """Parses a long response in steps, and keeps only the names of its models."""
    models = _ModelsReceiver()
    receiver = AbridgedObjectReceiver(special={"data": models})
    try:
        yield from read_object(raw, receiver, UNLIMITED, strict=False)
    except JSONTextError:
        return None
    return receiver.document


class _ModelsReceiver(ListReceiver):
    """Receives a long list of models."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.stand_in.clear()

    def on_values(self, values: list[object]) -> None:
        """See `Receiver.on_values`."""
        for value in values[: _MOST_MODELS - len(self.stand_in)]:
            if isinstance(value, dict):
                model = cast("dict[str, object]", value)
                self.stand_in.append({name: model.get(name) for name in ("id", "parent", "owned_by")})


def interpret_answer(
    head: ResponseHead, document: Mapping[str, object] | None, error: UpstreamError | None, member: Member, keyed: bool
) -> ProbeResult:
    """Interprets the response to a probe.

    `document` is None where it is not JSON. `keyed`: the proxy has a key for the engine, so a refusal means that the
    key is wrong; without one clients may bring their own.
    """
    known = member.models
    if error is not None:
        return ProbeResult(False, error.reason, known)
    if keyed and head.status in _UNAUTHORIZED:
        return ProbeResult(False, f"it refuses the proxy's API key ({head.status})", known, answers=True)
    if head.status >= 500:
        return ProbeResult(False, f"a probe was answered {head.status}", known)
    if head.status != 200:  # somebody is there, who does not say
        return ProbeResult(True, f"a probe was answered {head.status}", known)
    if document is None:
        return ProbeResult(False, "the answer to a probe is not JSON", known)
    models, base, adapters = _models(document.get("data"))
    try:
        version = negotiate_with_engine(document)
    except NoCommonVersion as none:
        return ProbeResult(False, str(none), known, answers=True)
    return ProbeResult(True, "it answers probes", models, version, base, adapters=adapters)


def _models(data: object) -> tuple[frozenset[str] | None, str | None, Sequence[str] | None]:
    """Returns what requests call the models, the first one that is no adapter, and the adapters.

    A request names an adapter of SGLang 0.5.23 by `base:adapter` (`entrypoints/openai/serving_base.py`); by the name
    that stands in its list of models SGLang would give it the base model.
    """
    if not isinstance(data, list):
        return None, None, None
    models: set[str] = set()
    adapters: list[str] = []
    base: str | None = None
    for entry in cast("list[object]", data)[:_MOST_MODELS]:
        if not isinstance(entry, dict):
            continue
        card = cast("dict[str, object]", entry)
        name, parent = card.get("id"), card.get("parent")
        if not isinstance(name, str):
            continue
        if isinstance(parent, str) and parent:
            name = f"{parent}:{name}" if card.get("owned_by") == "sglang" else name
            adapters.append(name)
        else:
            base = base or name
        models.add(name)
    return frozenset(models), base, adapters
