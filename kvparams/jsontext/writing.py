"""Writes JSON as compact text: whole objects, and lines of a fixed form."""

from collections.abc import Mapping
from json import dumps
from typing import Final, cast

from pydantic_core import to_json

from kvparams.native import NATIVE

__all__ = ["fill_line", "write_json"]

_MOST_DECIMAL: Final = 1e15


def write_json(members: Mapping[str, object]) -> bytes:
    """Returns the text of an object in UTF-8, without white space.

    Raises:
        PydanticSerializationError: it cannot be written as JSON.
    """
    if NATIVE is not None and (text := NATIVE.write_object(members, False)) is not None:
        return text
    return to_json(members)


def fill_line(pieces: tuple[bytes, ...], values: tuple[object, ...]) -> bytes:
    """Returns values as JSON between the pieces of a line.

    Args:
        pieces: what stands before, between and behind the values: one more than these.
        values: texts, written in ASCII; whole numbers; other numbers, written with one decimal; truth values; None;
            lists of these; bytes, which are JSON already.
    """
    if NATIVE is not None and (line := NATIVE.fill_line(pieces, values)) is not None:
        return line
    made = [pieces[0]]
    for value, piece in zip(values, pieces[1:], strict=True):
        made += (_encode(value), piece)
    return b"".join(made)


def _encode(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, float):
        return _decimal(value)
    if isinstance(value, list):
        return b"[%b]" % b",".join(map(_encode, cast("list[object]", value)))
    return dumps(value).encode()


def _decimal(value: float) -> bytes:
    if not 0 <= value < _MOST_DECIMAL:
        return b"%.1f" % value
    return b"%d.%d" % divmod(int(value * 10 + 0.5), 10)
