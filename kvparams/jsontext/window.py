"""Short JSON values that stand one after another, read by the standard library's parser: it says where each one ends.

What it takes beside JSON is refused: doubled keys, NaN, infinities, halves of surrogate pairs.
"""

import re
from json import JSONDecoder
from typing import Final

from pydantic_core import PydanticSerializationError, to_json

from kvparams.errors import JSONTextError
from kvparams.jsontext.scanner import duplicate_key_error, infinite_number_error, not_json_error

__all__ = ["DecodedWindow"]

_NEXT: Final = re.compile(r"[ \t\r\n]*+,[ \t\r\n]*+")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


class DecodedWindow:
    """A part of the text, decoded, in which short values are read one after another."""

    __slots__ = ("_ascii", "_decode", "_index", "_place", "_raw", "_text", "at", "end")

    def __init__(self, raw: bytes, at: int, most_bytes: int, *, strict: bool = True) -> None:
        """`strict`: whether doubled keys and infinities are refused."""
        self._decode = (_STRICT if strict else _LENIENT).raw_decode
        self._raw = raw
        self.at = self._place = at
        end = min(at + most_bytes, len(raw))
        while end < len(raw) and end > at and raw[end] & 0xC0 == 0x80:  # not within a character
            end -= 1
        text = raw[at:end]
        try:
            self._text = text.decode()
        except UnicodeDecodeError as error:
            self._text = text[: error.start].decode()
        self.end = end
        self._ascii = len(self._text) == end - at
        self._index = 0
        """Of the character at `_place`, a byte of the text."""

    def values(self, at: int, most: int) -> tuple[list[object], int]:
        """Returns at most `most` consecutive values from `at` on, and the end of the last one.

        It stops at text that is no JSON, and at a value that may continue behind the window.
        """
        text = self._text
        if self._ascii:
            begin = at - self.at
        else:
            begin = self._index = self._index + len(self._raw[self._place : at].decode())
            self._place = at
        values: list[object] = []
        decode, comma = self._decode, _NEXT.match
        end = next_ = begin
        try:
            while len(values) < most:
                value, after = decode(text, next_)
                found = comma(text, after)
                if found is None and type(value) not in _CLOSED:  # a number may go on behind the window
                    break
                values.append(value)
                end = after
                if found is None:
                    break
                next_ = found.end()
        except JSONTextError:
            raise
        except (ValueError, RecursionError):
            pass
        if self._ascii:
            return values, self.at + end
        self._place += len(text[begin:end].encode())
        self._index = end
        return values, self._place

    def check_pairs(self, values: list[object], at: int, end: int) -> None:
        """Refuse half a surrogate pair in one of these values, which stand in `raw[at:end]`: the parser takes them.

        Raises:
            JSONTextError: there is one.
        """
        raw = self._raw
        if raw.find(b"\\u", at, end) >= 0 and _SURROGATE.search(raw, at, end) is not None:
            try:
                to_json(values)
            except PydanticSerializationError as error:
                raise not_json_error("half a surrogate pair", at) from error


def _object(members: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(members)
    if len(found) != len(members):
        seen: set[str] = set()
        raise duplicate_key_error(next(name for name, _ in members if name in seen or seen.add(name)))
    return found


def _float(text: str) -> float:
    found = float(text)
    if found - found != 0:
        raise infinite_number_error()
    return found


def _constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


_CLOSED: Final = frozenset((str, list, dict))
"""What shows in the text where it ends."""
_STRICT: Final = JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
_LENIENT: Final = JSONDecoder(parse_constant=_constant)
