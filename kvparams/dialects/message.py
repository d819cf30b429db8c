"""Defines the message that a dialect writes for one leg: body members at their paths, headers, and the request id.

A message is JSON and never modified in place. A member that was taken out of a copy can be put back where it was.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final, cast

from kvparams.jsontext.document import loads

__all__ = [
    "ABSENT",
    "DialectMessage",
    "JSONObject",
    "MessagePath",
    "get_at",
    "parse_path",
    "pop_at",
    "set_at",
    "unpack_message",
]

MessagePath = tuple[str | int, ...]
JSONObject = dict[str, object]


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()
"""Where JSON has nothing at all; null is something."""


@dataclass(frozen=True, slots=True)
class DialectMessage:
    """A `DialectMessage` is the part of a leg's request or answer that the dialect defines."""

    request_id: str
    """`X-Request-Id` of the request; of an answer, that of the request it answers."""
    body: Mapping[str, object] = field(default_factory=dict[str, object])
    """Members of the body, at their places."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other headers, names in lower case."""

    def to_json(self) -> JSONObject:
        """As a JSON object of its own; `headers` only where there are any."""
        said: JSONObject = {"request_id": self.request_id, "body": deepcopy(dict(self.body))}
        return {**said, "headers": dict(self.headers)} if self.headers else said


def unpack_message(message: DialectMessage) -> DialectMessage:
    """The same with `kv_transfer_params` as an object where some carrier has made text of it (spec, section 2)."""
    carrier = message.body.get("kv_transfer_params")
    if not isinstance(carrier, str):
        return message
    try:
        spelled = loads(carrier.encode())
    except ValueError:  # no JSON of ours: whoever judges the message says so
        return message
    if spelled is not None and not isinstance(spelled, dict):
        return message
    body: JSONObject = {**message.body, "kv_transfer_params": cast("JSONObject | None", spelled)}
    return DialectMessage(message.request_id, body, message.headers)


def parse_path(dotted: str) -> MessagePath:
    """`choices.0.disaggregated_params` as a path; empty for the body itself."""
    return tuple(int(part) if part.isdigit() else part for part in dotted.split(".")) if dotted else ()


def get_at(tree: object, path: Sequence[str | int]) -> object:
    """Returns the value at the path, or `ABSENT`."""
    for part in path:
        if isinstance(part, int):
            found = cast("list[object]", tree) if isinstance(tree, list) else []
            tree = found[part] if part < len(found) else ABSENT
        else:
            tree = cast("JSONObject", tree).get(part, ABSENT) if isinstance(tree, dict) else ABSENT
    return tree


def pop_at(tree: JSONObject, path: MessagePath) -> object:
    """Removes and returns the value at the path, and removes the containers that are empty without it.

    Containers are objects and lists of one.
    """
    taken = get_at(tree, path)
    if taken is ABSENT:
        return taken
    holder = get_at(tree, path[:-1])
    last = path[-1]
    if isinstance(last, int):
        cast("list[object]", holder).pop(last)
    else:
        del cast("JSONObject", holder)[last]
    _prune(tree, path[:-1])
    return taken


def set_at(tree: JSONObject, path: MessagePath, value: object) -> bool:
    """Puts it there, where nothing is, and makes the objects on the way; false where something else is in the way."""
    holder: object = tree
    for index, part in enumerate(path[:-1]):
        inner = get_at(holder, (part,))
        if inner is ABSENT:
            inner = list[object]() if isinstance(path[index + 1], int) else JSONObject()
            if not _set(holder, part, inner):
                return False
        holder = inner
    return get_at(holder, path[-1:]) is ABSENT and _set(holder, path[-1], value)


def _set(holder: object, part: str | int, value: object) -> bool:
    if isinstance(part, str) and isinstance(holder, dict):
        cast("JSONObject", holder)[part] = value
        return True
    if isinstance(part, int) and isinstance(holder, list) and len(cast("list[object]", holder)) == part:
        cast("list[object]", holder).append(value)
        return True
    return False


def _prune(tree: JSONObject, path: MessagePath) -> None:
    while path:
        holder = get_at(tree, path[:-1])
        if get_at(tree, path):  # it still holds something
            return
        last = path[-1]
        if isinstance(last, int):
            entries = cast("list[object]", holder)
            if len(entries) > 1:  # the others keep their numbers
                return
            entries.pop()
        else:
            del cast("JSONObject", holder)[last]
        path = path[:-1]
