"""What stands in a file that somebody hands to a tool: our document, a message, a whole request, or native keys alone.

The one rule: what was taken for what is said, and can be said by the caller instead.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast

from kvparams.codec import DOCUMENT_KEY
from kvparams.dialects.message import Message, unpacked
from kvparams.dialects.table import LEGS, PHASES, Table
from kvparams.errors import InvalidParams, KVParamsError
from kvparams.params import Phase
from kvparams.problems import json_object
from kvparams.sniffing import matches, pick, sniff

__all__ = ["OURS", "Given", "Unreadable", "document_in", "load", "message_of", "recognise"]

OURS: Final = "kvparams"
"""The name of our own document, where a dialect is asked for."""
_REQUEST_ID: Final = "unknown"
_CARRIERS: Final = frozenset(
    {"kv_transfer_params", "disaggregated_params", "disagg_prefill_resp", "prefill_result", "bootstrap_info"}
)
_BODY: Final = frozenset({"model", "prompt", "messages", "choices", "input", "bootstrap_room", "bootstrap_host"})
_ANSWER: Final = frozenset({"choices", "usage", "object"})
_MOST_BYTES: Final = 16 << 20


class Unreadable(KVParamsError, ValueError):
    """The file cannot be read, or holds nothing that a tool could work with."""


class Given(NamedTuple):
    """A message, and what was found out about it."""

    message: Message
    table: Table
    phase: Phase
    guessed: tuple[str, ...]
    """What nobody had said, in words."""


def load(file: str) -> Mapping[str, object]:
    """The JSON object in the file; `-` is standard input.

    Raises:
        Unreadable: there is none; the message says why.
    """
    try:
        if file == "-":
            text = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with Path(file).open("rb") as opened:
                text = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Unreadable(f"{file}: {error.strerror}") from error
    try:
        return json_object(text)  # which refuses what is longer
    except InvalidParams as error:
        raise Unreadable(f"{file}: {error}") from error


def document_in(found: Mapping[str, object]) -> Mapping[str, object] | None:
    """Our document, where the object is one or carries one; None where not.

    Raises:
        Unreadable: what it carries is no object.
    """
    if "version" in found and "transfer" in found:
        return found
    bodies = (found, _object(found.get("body")) or {})
    carried = [unpacked(Message("", body)).body.get("kv_transfer_params") for body in bodies]
    for holder in (*carried, found):
        if isinstance(holder, Mapping) and DOCUMENT_KEY in holder:
            document = cast("Mapping[str, object]", holder)[DOCUMENT_KEY]
            if not isinstance(document, Mapping):
                raise Unreadable(f"{DOCUMENT_KEY}: Input should be an object")
            return cast("Mapping[str, object]", document)
    return None


def message_of(found: Mapping[str, object], request_id: str | None = None) -> Message:
    """The object as a message: one with `body` (and `headers`, `request_id`), a whole body, or native keys alone."""
    body, headers = _object(found.get("body")), _object(found.get("headers"))
    if body is None and headers is None:
        if not (_CARRIERS | _BODY).isdisjoint(found):
            return unpacked(Message(request_id or _REQUEST_ID, dict(found)))
        return Message(request_id or _REQUEST_ID, {"kv_transfer_params": dict(found)})
    said = found.get("request_id")
    texts = {name.lower(): value for name, value in (headers or {}).items()}
    own = texts.pop("x-request-id", said)
    known = request_id or (own if isinstance(own, str) else _REQUEST_ID)
    # Where a header is no text, that is told.
    return unpacked(Message(known, dict(body or {}), cast("dict[str, str]", texts)))


def _object(value: object) -> Mapping[str, object] | None:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else None


def recognise(
    message: Message, tables: Iterable[Table], table: Table | None, phase: Phase | None, found: Mapping[str, object]
) -> Given:
    """In which dialect a message is, and on which leg, as far as the caller has not said.

    Args:
        message: `message_of(found)`.
        tables: every dialect that there is.
        table: the dialect, where it is known.
        phase: the leg, where it is known.
        found: what stood in the file.

    Raises:
        Unrecognised, Ambiguous: see `kvparams.sniffing.sniff`.
        Unreadable: the leg cannot be told.
    """
    guessed: list[str] = []
    phases: tuple[Phase, ...]
    told: Phase | None = phase or next((one for one in LEGS if one == found.get("phase")), None)
    if table is None:
        match = sniff(message, tables, told)
        table, phases = match.table, match.phases
        guessed.append(f"the dialect is {table.name}: no other has these keys")
    else:
        phases = tuple(one for match in matches(pick(table, message), [table], told) for one in match.phases)
    if told is None:
        if not phases:
            legs = ", ".join(PHASES[leg] for leg in PHASES if leg in table.carried)
            raise Unreadable(f"this is no valid message of {table.name}; say which leg it is with --phase: {legs}")
        answer = not _ANSWER.isdisjoint(_object(found.get("body")) or found)
        fitting: list[Phase] = [one for one in phases if one.endswith("_result") is answer]
        told = (fitting or list(phases))[0]
        others = " or ".join(one for one in phases if one != told)
        guessed.append(f"the phase is {told}" + (f", though it could be {others}" if others else ""))
    return Given(pick(table, message), table, told, tuple(guessed))
