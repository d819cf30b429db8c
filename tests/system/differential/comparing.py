"""Converts an answer, as a client saw it, into a form that can be compared.

Only ids and times are made equal. Text, token ids, log probabilities, finish reasons, usage and the set of members stay
as they came.

Events are compared choice by choice: the events of one choice, with where each begins and ends, follow from its tokens
and from nothing else, so these sequences must be equal. The interleaving of several choices only shows which of them an
engine happened to compute first; for one choice that is the order of the whole stream.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import cast

import httpx

from tests.system.differential.generator import JSON, Case

__all__ = ["Seen", "difference", "seen", "taken_in"]

_IDS = frozenset(("id", "request_id"))
_TIMES = frozenset(("created",))
_ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer."""

    status: int
    kind: str
    """The content type without its parameters."""
    document: object
    """Of an answer in one piece."""
    events: Mapping[int | None, tuple[object, ...]]
    """Of a stream: by choice; those without a choice under None."""
    ending: tuple[str, ...]
    """What came behind the last event that is JSON."""


async def seen(client: httpx.AsyncClient, url: str, case: Case) -> Seen:
    """Send a request, and take the answer in."""
    response = await client.post(url + case.path, json=case.body)
    return taken_in(response.status_code, response.headers["content-type"], response.text)


def taken_in(status: int, content_type: str, text: str) -> Seen:
    """An answer as it came."""
    kind = content_type.partition(";")[0]
    if kind != "text/event-stream":
        return Seen(status, kind, _same(json.loads(text)) if kind == "application/json" else text, {}, ())
    parts = text.split("\n\n")
    events: dict[int | None, tuple[object, ...]] = {}
    ending: list[str] = []
    for part in parts:
        data = part.removeprefix("data: ")
        if not data.startswith("{"):
            ending.append(part)
            continue
        assert not ending, f"an event follows {ending}"
        event = cast("JSON", _same(json.loads(data)))
        choices = cast("list[JSON]", event.get("choices") or [])
        assert len(choices) <= 1
        index = cast("int", choices[0]["index"]) if choices else None
        assert index is None or None not in events, "an event of a choice follows the usage"
        events[index] = (*events.get(index, ()), event)
    return Seen(status, kind, None, events, tuple(ending))


def difference(case: Case, one: Seen, other: Seen) -> str | None:
    """Where two answers to a request differ, in words; None: nowhere."""
    if case.expected == "early":  # each refuses it in its own words
        same = one.status == other.status and one.kind == other.kind and _is_error(one) and _is_error(other)
        return None if same else f"{one} is not {other}"
    if (one.status == 200) is not (case.expected == "answer"):
        return f"{case.expected} was expected: {one}"
    names = ("status", "kind", "document", "ending")
    pairs: dict[str, tuple[object, object]] = {name: (getattr(one, name), getattr(other, name)) for name in names}
    for index in one.events.keys() | other.events.keys():
        pairs[f"choice {index}"] = (one.events.get(index, ()), other.events.get(index, ()))
    return next((words for name, pair in pairs.items() if (words := _first(name, *pair)) is not None), None)


def _first(path: str, one: object, other: object) -> str | None:
    """The first place where two values differ, and what stands there."""
    if isinstance(one, dict) and isinstance(other, dict):
        ours, theirs = cast("JSON", one), cast("JSON", other)
        both = [(f"{path}.{name}", ours.get(name, _ABSENT), theirs.get(name, _ABSENT)) for name in {**ours, **theirs}]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        first, second = cast("list[object]", one), cast("list[object]", other)
        pairs = zip_longest(first, second, fillvalue=_ABSENT)
        both = [(f"{path}[{at}]", *pair) for at, pair in enumerate(pairs)]
    else:
        return None if one == other else f"{path}: {one!r} is not {other!r}"
    return next((words for inner in both if (words := _first(*inner)) is not None), None)


def _same(value: object, name: str = "") -> object:
    """The value without ids and times."""
    if isinstance(value, dict):
        return {key: _same(inner, key) for key, inner in cast("JSON", value).items()}
    if isinstance(value, list):
        return [_same(inner) for inner in cast("list[object]", value)]
    if name in _IDS and isinstance(value, str):
        return "an id"
    return 0 if name in _TIMES else value


def _is_error(answer: Seen) -> bool:
    document = answer.document
    error = cast("JSON", document).get("error") if isinstance(document, dict) else None
    return isinstance(error, dict) and {"message", "type", "param", "code"} == cast("JSON", error).keys()
