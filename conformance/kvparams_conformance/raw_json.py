"""Splits the text of a JSON object into its members, each with the exact text that stands for it."""

import json
from typing import Final, NamedTuple, cast

__all__ = ["RawMember", "dump", "replace_members", "split_members"]

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


def replace_members(body: bytes, **values: object) -> bytes:
    """Returns an object with some members replaced or added, and the others as they are written."""
    kept = [member.text for member in split_members(body) if member.name not in values]
    return (
        "{" + ",".join([*kept, *(f"{json.dumps(name)}:{json.dumps(values[name])}" for name in values)]) + "}"
    ).encode()


def dump(value: object) -> bytes:
    """Returns compact JSON text."""
    return json.dumps(value, separators=(",", ":")).encode()
