"""Reads a file given to a tool: a KV parameters document, a message, a whole request, or native keys alone.

The result names the form that was recognized, and a caller can name the form itself.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast

from kvparams.codec import DOCUMENT_KEY
from kvparams.dialects.carriers import CARRIERS, MessageCarrier, lift_message
from kvparams.dialects.detection import (
    AmbiguousDialect,
    detect_dialect,
    find_matches,
    nearest_phase,
    select_native_keys,
)
from kvparams.dialects.message import DialectMessage, unpack_message
from kvparams.dialects.table import LEGS, DialectTable
from kvparams.errors import InvalidParams, KVParamsError, Problem
from kvparams.params import Phase
from kvparams.validation import parse_json_object

__all__ = [
    "OUR_FORMAT",
    "RecognizedMessage",
    "UnreadableInput",
    "describe_unexamined",
    "find_document",
    "load_json_file",
    "recognize_message",
    "to_message",
]

OUR_FORMAT: Final = "kvparams"
"""The name of our own document, where a dialect is asked for."""
_REQUEST_ID: Final = "unknown"
_CARRIERS: Final = frozenset(
    {"kv_transfer_params", "disaggregated_params", "disagg_prefill_resp", "prefill_result", "bootstrap_info"}
    | {carrier.path[0] for carrier in CARRIERS}
)
_BODY: Final = frozenset(
    {"model", "prompt", "messages", "choices", "input", "input_ids", "token_ids", "bootstrap_room", "bootstrap_host"}
)
_DOCUMENT: Final = frozenset({"version", "request_id", "transfer", "phase", "mode"})
_ANSWER: Final = frozenset({"choices", "usage", "object"})
_MOST_BYTES: Final = 16 << 20
_MOST_NAMED: Final = 8
_MOST_COMMON: Final = "nixl"
"""The dialect of vLLM's default connector for disaggregated prefill."""


class UnreadableInput(KVParamsError, ValueError):
    """The file cannot be read, or what it holds cannot be told."""


class RecognizedMessage(NamedTuple):
    """A message, and what was found out about it."""

    message: DialectMessage
    table: DialectTable
    phase: Phase
    guessed: tuple[str, ...]
    """What nobody had said, in words."""
    carrier: MessageCarrier | None = None
    """Where its `kv_transfer_params` stood, if not in their usual place."""


def load_json_file(file: str) -> Mapping[str, object]:
    """The JSON object in the file; `-` is standard input.

    Raises:
        UnreadableInput: the file cannot be read.
        InvalidParams: what it holds is no JSON object, or JSON that the protocol refuses.
    """
    try:
        if file == "-":
            if sys.stdin.isatty():
                sys.stderr.write("reading a JSON object from standard input, up to Ctrl-D\n")
            text = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with Path(file).open("rb") as opened:
                text = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UnreadableInput(f"{file}: {error.strerror}") from error
    if len(text) > _MOST_BYTES:
        raise InvalidParams((Problem((), "json", f"the text is longer than {_MOST_BYTES} bytes"),))
    return parse_json_object(text)


def find_document(found: Mapping[str, object]) -> Mapping[str, object] | None:
    """Our document, where the object is one (two of its members tell) or carries one; None where not.

    Raises:
        InvalidParams: what it carries is no object.
    """
    if _is_document(found):
        return found
    holder = _holder(found)
    if holder is None:
        return None
    document = holder[DOCUMENT_KEY]
    if not isinstance(document, Mapping):
        raise InvalidParams((Problem((DOCUMENT_KEY,), "type", "Input should be an object"),))
    return cast("Mapping[str, object]", document)


def describe_unexamined(found: Mapping[str, object], option: str) -> str | None:
    """In words, the native keys beside our document, which nobody looks at unless `option` names their dialect."""
    holder = None if _is_document(found) else _holder(found)
    if holder is None or (holder is found and _is_whole(found)):
        return None
    names = [name if name.isprintable() else json.dumps(name) for name in holder if name != DOCUMENT_KEY]
    if not names:
        return None
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"native keys beside the document were not checked; to check them, add {option} NAME: " + (
        ", ".join(names[:_MOST_NAMED]) + more
    )


def _is_document(found: Mapping[str, object]) -> bool:
    if "version" in found and "transfer" in found:
        return True
    return len(_DOCUMENT & found.keys()) > 1 and DOCUMENT_KEY not in found and not _is_whole(found)


def _is_whole(found: Mapping[str, object]) -> bool:
    """Returns True for a message or a whole request body, and False for native keys alone."""
    return not (_CARRIERS | _BODY | {"body", "headers"}).isdisjoint(found)


def _holder(found: Mapping[str, object]) -> Mapping[str, object] | None:
    """The object that has our document under its key."""
    bodies = (found, _object(found.get("body")) or {})
    carried = [
        _object(unpack_message(lift_message(DialectMessage("", body))[0]).body.get("kv_transfer_params"))
        for body in bodies
    ]
    return next((one for one in (*carried, found) if one is not None and DOCUMENT_KEY in one), None)


def to_message(found: Mapping[str, object], request_id: str | None = None) -> DialectMessage:
    """The object as a message: one with `body` (and `headers`, `request_id`), a whole body, or native keys alone."""
    body, headers = _object(found.get("body")), _object(found.get("headers"))
    if body is None and headers is None:
        if not (_CARRIERS | _BODY).isdisjoint(found):
            return unpack_message(DialectMessage(request_id or _REQUEST_ID, dict(found)))
        return DialectMessage(request_id or _REQUEST_ID, {"kv_transfer_params": dict(found)})
    said = found.get("request_id")
    texts = {name.lower(): value for name, value in (headers or {}).items()}
    own = texts.pop("x-request-id", said)
    known = request_id or (own if isinstance(own, str) else _REQUEST_ID)
    # Where a header is no text, that is told.
    return unpack_message(DialectMessage(known, dict(body or {}), cast("dict[str, str]", texts)))


def _object(value: object) -> Mapping[str, object] | None:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else None


def recognize_message(
    message: DialectMessage,
    tables: Iterable[DialectTable],
    table: DialectTable | None,
    phase: Phase | None,
    found: Mapping[str, object],
    *,
    may_guess: bool = False,
) -> RecognizedMessage:
    """In which dialect a message is, and on which leg, as far as the caller has not said.

    Args:
        message: `to_message(found)`.
        tables: every dialect that there is.
        table: the dialect, where it is known.
        phase: the leg, where it is known.
        found: what stood in the file.
        may_guess: whether to take the most common dialect if the keys fit it and others.

    Raises:
        UnrecognizedDialect, AmbiguousDialect: see `kvparams.dialects.detection.detect_dialect`.
    """
    guessed: list[str] = []
    message, carrier = lift_message(message)
    if carrier is not None:
        guessed.append(f"the native keys are in {carrier.place}")
    phases: tuple[Phase, ...]
    told: Phase | None = phase or next((one for one in LEGS if one == found.get("phase")), None)
    if table is None:
        tables = list(tables)
        try:
            match = detect_dialect(message, tables, told)
            table, phases = match.table, match.phases
            guessed.append(f"the dialect is {match}")
        except AmbiguousDialect as error:
            table = next((one for one in tables if one.name == _MOST_COMMON), None)
            if not may_guess or table is None or table.name not in error.candidates:
                raise
            phases = _phases_in(table, message, told)
            others = ", ".join(name for name in error.candidates if name != table.name)
            guessed.append(
                f"the dialect is probably {table.name}, the most common one; the keys also fit {others}; set another "
                "one with --dialect"
            )
    else:
        phases = _phases_in(table, message, told)
    if told is None:
        answer = not _ANSWER.isdisjoint(_object(found.get("body")) or found)
        if not phases:
            told = nearest_phase(select_native_keys(table, message), table, answers=answer)
            guessed.append(f"the phase is probably {told}, which has the fewest problems; set another one with --phase")
        else:
            fitting: list[Phase] = [one for one in phases if one.endswith("_result") is answer]
            told = (fitting or list(phases))[0]
            others = " or ".join(one for one in phases if one != told)
            guessed.append(f"the phase is {told}" + (f", but it could also be {others}" if others else ""))
    return RecognizedMessage(select_native_keys(table, message), table, told, tuple(guessed), carrier)


def _phases_in(table: DialectTable, message: DialectMessage, told: Phase | None) -> tuple[Phase, ...]:
    """Returns the legs on which a message is valid in a dialect."""
    matches = find_matches(select_native_keys(table, message), [table], told)
    return tuple(phase for match in matches for phase in match.phases)
