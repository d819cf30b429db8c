"""Splits the text of a JSON object into its members, each with the exact text that stands for it."""

import json
from typing import Any, Final, NamedTuple, cast

__all__ = ["RawMember", "dig", "dump", "split_members"]

_DECODER: Final = json.JSONDecoder()
_SPACE: Final = " \t\r\n"


class RawMember(NamedTuple):
    """A member of an object."""

    name: str
    text: str
    """The member as it is written: name, colon and value, with the space between them."""
    value: str
    """The value as it is written."""


def split_members(body: bytes) -> list[RawMember]:
    """Returns the members of an object in their order.

    Raises:
        ValueError: the text is not one object in JSON.
    """
    text = body.decode()
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise ValueError("not an object")
    found: list[RawMember] = []
    at = _skip(text, at + 1)
    while text[at : at + 1] != "}":
        begin = at
        if text[at : at + 1] != '"':
            raise ValueError("a name is missing")
        name, at = cast("tuple[str, int]", _DECODER.raw_decode(text, at))
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("a colon is missing")
        value_at = _skip(text, at + 1)
        _, at = _DECODER.raw_decode(text, value_at)
        found.append(RawMember(name, text[begin:at], text[value_at:at]))
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "}":
            raise ValueError("a comma is missing")
    if _skip(text, at + 1) != len(text):
        raise ValueError("text behind the object")
    return found


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def dump(value: object) -> bytes:
    """Returns compact JSON text."""
    return json.dumps(value, separators=(",", ":")).encode()


def dig(value: object, *path: str | int) -> Any:
    """Returns what stands at a path in parsed JSON; None if there is nothing, or something else on the way."""
    found: Any = value
    for step in path:
        if isinstance(step, str):
            found = cast("dict[str, Any]", found).get(step) if isinstance(found, dict) else None
        else:
            items = cast("list[Any]", found) if isinstance(found, list) else []
            found = items[step] if step < len(items) else None
    return found
