"""Finds a member of a request's body in steps of bounded work, and validates nothing else of the body.

The rest is for vLLM to judge, which reads a body with Python's `json`: that takes NaN and half of a surrogate pair, and
says itself what is wrong with text that is no JSON. Of all text that `json` takes, this module finds what `json` finds.
"""

import json
import re
from collections.abc import Generator
from typing import Final, NamedTuple

from kvparams.errors import JSONTextError
from kvparams.jsontext.scanner import LONGEST_TOKEN, JSONLimits

__all__ = ["SEARCH_BYTES", "STEP_BYTES", "ValueSpan", "find_values", "may_have_member"]

STEP_BYTES: Final = 64 << 10
"""Text that is passed in one step."""
_STEP_TURNS: Final = 256
"""Members, brackets and strings that are looked at in one step."""
SEARCH_BYTES: Final = 256 << 10
"""Text that is searched for a name in one step."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_GAP: Final = re.compile(rb"[ \t\r\n,]*+")
_SCALAR: Final = re.compile(rb'[^,}\]"\[{]*+')
_NAME: Final = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"[ \t\r\n]*+:', re.DOTALL)
_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_NO_BRACKET: Final = re.compile(rb'(?:[^"{}\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_ESCAPED_NAME: Final = re.compile(rb"\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])")
"""The escape of a small letter or `_`. No other escape stands for a part of a member's name, and encoders do not write
these: Python's escapes `é` as `\\u00e9`."""

_QUOTE, _CLOSE = 0x22, 0x7D


class ValueSpan(NamedTuple):
    """A `ValueSpan` is the position of a member's value in the text."""

    start: int
    end: int


def may_have_member(text: bytes | bytearray, name: bytes) -> Generator[None, None, bool]:
    """Returns False where no member of this name, of small letters and `_`, can stand in the text, however written."""
    for at in range(0, len(text), SEARCH_BYTES):
        stop = at + SEARCH_BYTES + len(name)  # it may begin in this stretch and end in the next one
        if text.find(name, at, stop) >= 0 or _ESCAPED_NAME.search(text, at, stop):
            return True
        yield
    return False


def find_values(text: bytes | bytearray, name: bytes, limits: JSONLimits) -> Generator[None, None, list[ValueSpan]]:
    """Returns the positions of the values of all members of this name of the object, in the order of the text.

    There are none where the text is no JSON object.

    Raises:
        JSONTextError: it has more members or containers than `limits` allow, or a very long name.
    """
    walk = _Walk(text, limits)
    found: list[ValueSpan] = []
    if not (yield from walk.open()):
        return []
    while (is_wanted := (yield from walk.name(name))) is not None:
        start = walk.at
        if not (yield from walk.value()):
            return []
        if is_wanted:
            found.append(ValueSpan(start, walk.at))
    return found if walk.is_closed() else []


class _Walk:
    """Passes the members of an object one after the other. Its generators yield where a step ends."""

    def __init__(self, text: bytes | bytearray, limits: JSONLimits) -> None:
        self._text, self._limits = text, limits
        self._turns = self._since = self._members = self._containers = 0
        self.at = len(_BYTE_ORDER_MARK) if text.startswith(_BYTE_ORDER_MARK) else 0
        """The next place to read."""

    def _is_due(self) -> bool:
        """Returns whether a step ends here."""
        self._turns += 1
        if self._turns < _STEP_TURNS and self.at - self._since < STEP_BYTES:
            return False
        self._turns, self._since = 0, self.at
        return True

    def _byte(self) -> int:
        return self._text[self.at] if self.at < len(self._text) else -1

    def is_closed(self) -> bool:
        """Returns whether the object ends here."""
        return self._byte() == _CLOSE

    def open(self) -> Generator[None, None, bool]:
        """Goes to the first member; returns False where there is no object."""
        yield from self._pass(_SPACE)
        is_object = self._byte() == 0x7B
        self.at += 1
        return is_object

    def name(self, wanted: bytes) -> Generator[None, None, bool | None]:
        """Goes to the value of the next member. Returns whether it is a wanted one; None where there is no member."""
        yield from self._pass(_GAP)
        found = _NAME.match(self._text, self.at, self.at + LONGEST_TOKEN)
        if found is None:
            if self._byte() == _QUOTE and len(self._text) - self.at > LONGEST_TOKEN:
                raise JSONTextError(f"a name of more than {LONGEST_TOKEN} bytes, at byte {self.at}")
            return None
        self._members += 1
        if self._members > self._limits.max_members:
            raise JSONTextError(f"more than {self._limits.max_members} members")
        self.at = found.end()
        yield from self._pass(_SPACE)
        return found[1] == wanted or _spells(found[1], wanted)

    def value(self) -> Generator[None, None, bool]:
        """Passes a value; returns False where it does not end."""
        byte = self._byte()
        if byte == _QUOTE:
            return (yield from self._string())
        if byte >= 0 and byte in b"{[":
            return (yield from self._container())
        yield from self._pass(_SCALAR)
        return True

    def _pass(self, pattern: re.Pattern[bytes]) -> Generator[None]:
        while (end := _end(pattern, self._text, self.at)) > self.at:
            self.at = end
            if self._is_due():
                yield

    def _string(self) -> Generator[None, None, bool]:
        self.at += 1
        while True:
            at, self.at = self.at, _end(_STRING, self._text, self.at)
            if self._is_due():
                yield
            if self._byte() == _QUOTE:
                self.at += 1
                return True
            if self.at == at:
                return False

    def _container(self) -> Generator[None, None, bool]:
        depth = 0
        while True:
            byte = self._byte()
            if byte == _QUOTE:  # it does not end within a step
                if not (yield from self._string()):
                    return False
            elif byte >= 0 and byte in b"{[":
                depth += 1
                self._containers += 1
                if self._containers > self._limits.max_containers:
                    raise JSONTextError(f"more than {self._limits.max_containers} objects and lists")
                self.at += 1
            elif byte >= 0 and byte in b"}]":
                depth -= 1
                self.at += 1
                if not depth:
                    return True
            at, self.at = self.at, _end(_NO_BRACKET, self._text, self.at)
            if self._is_due():
                yield
            if self.at == at == len(self._text):
                return False


def _end(pattern: re.Pattern[bytes], text: bytes | bytearray, at: int) -> int:
    """Returns the end of the match of a pattern that always matches, within a step."""
    found = pattern.match(text, at, at + STEP_BYTES)
    return at if found is None else found.end()


def _spells(name: bytes | bytearray, wanted: bytes) -> bool:
    """Returns whether a name with escapes in it is the wanted one."""
    if b"\\" not in name or len(name) > len(wanted) * len("\\u0000"):
        return False
    try:
        return json.loads(b'"%b"' % name) == wanted.decode()
    except ValueError:  # vLLM says so
        return False
