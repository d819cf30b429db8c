"""Finds the ends of the parts of JSON text at the speed of a search, without validation.

The cost of a search is linear in the text that it passes, whatever the text contains.
"""

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvparams.errors import JSONTextError

__all__ = [
    "DEFAULT_LIMITS",
    "LONGEST_TOKEN",
    "NEAR",
    "STEP_BYTES",
    "UNLIMITED",
    "JSONLimits",
    "MemberSpan",
    "begins_with_numbers",
    "duplicate_key_error",
    "flat_members",
    "infinite_number_error",
    "not_json_error",
    "piece_end",
    "plain_members",
    "plain_values",
    "scalar_end",
    "skip_space",
    "string_end",
    "token_too_long_error",
]


@dataclass(frozen=True, slots=True)
class JSONLimits:
    """A `JSONLimits` bounds the text that is read at all."""

    max_bytes: int = 16 << 20
    """Longer text is refused before it is parsed."""
    max_depth: int = 64
    """Objects and lists inside each other; the parser itself stops at about 200."""
    max_containers: int = 20_000
    """Objects and lists in all. Each costs time and memory far beyond its two bytes."""
    max_strings: int = 200_000
    """Strings in all, keys included."""
    max_members: int = 4_096
    """Members of an object whose members are told apart in the raw bytes: the outermost one."""


DEFAULT_LIMITS: Final = JSONLimits()
UNLIMITED: Final = JSONLimits(2**62, 2**62, 2**62, 2**62, 2**62)
"""For text that was read before, or whose length is bounded already."""


class MemberSpan(NamedTuple):
    """A `MemberSpan` is the position of an object's member.

    `raw[start:end]` is `"name": value`, `raw[value:end]` the value alone.
    """

    start: int
    value: int
    end: int


STEP_BYTES: Final = 32 << 10
"""Text that one step of a reader gives to the parser. The costliest, such as `1e1,1e1,...`, takes about 2 ms."""
LONGEST_TOKEN: Final = 64 << 10
"""Bytes of a name or a number in a long text, and of the white space that is passed in one step."""
NEAR: Final = 256
"""Bytes within which a list of numbers begins, and does not end, where a container is better read by parts."""
_RUN_PARTS: Final = 512
"""Strings or members that are parsed together."""
_FLAT_BYTES: Final = 256 << 10
"""The longest object without objects in it that `flat_members` takes."""
_FLAT_MEMBERS: Final = 64
_FLAT_ESCAPED_BYTES: Final = 64 << 10
"""The longest such object that may be full of escapes."""
_FLAT_ESCAPES_SHARE: Final = 16
"""A longer object may have one backslash in so many bytes: text has about one for each line."""
_FLAT_LIST_BYTES: Final = 64 << 10
"""The bytes that all lists of numbers in it may have together."""
_SHORT: Final = 64
"""Bytes: in a shorter text one regular expression finds a bracket sooner than three searches."""

_QUOTE: Final = 0x22
_COMMA: Final = 0x2C
_BACKSLASH: Final = 0x5C
_OPEN_LIST: Final = 0x5B
_OPEN_OBJECT: Final = 0x7B
_CLOSE_OBJECT: Final = 0x7D

_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_MEMBER: Final = re.compile(
    rb'[ \t\r\n,]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\r\n]*+:[ \t\r\n]*+(["{\[]|[^,}\]\s"{\[]++)', re.DOTALL
)
"""One member up to the first byte of a string or container, or to the end of any other value."""
_SCALAR: Final = re.compile(rb'[^\s,:\[\]{}"]*+')
_OPENING: Final = re.compile(rb"[\[{}]")
_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_CHARACTERS: Final = re.compile(
    rb'[^"\\]*+(?:\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    rb'|u(?![dD][89abAB])[0-9a-fA-F]{4}|[^u])[^"\\]*+)*+',
    re.DOTALL,
)
"""Characters of a string, up to its end or to an escape that is not complete; a surrogate pair is one escape."""
_EXPONENT: Final = re.compile(rb"[eE]")
_NOT_WHOLE: Final = (b'"', b"[", b"{", b".", b"E", b"e")
"""A list of whole numbers has none of these; a list with `true` or `false` in it has an `e`."""
_NUMBERS: Final = re.compile(rb"\[[ \t\r\n]*+[-0-9]")
LONGEST_ESCAPE: Final = 12
"""Bytes of a surrogate pair."""


def plain_members(raw: bytes, at: int, most_bytes: int) -> tuple[list[MemberSpan], int, int]:
    """Finds consecutive members from `at` on whose values are no containers, within `most_bytes`.

    Returns their positions, the end of the last one, and the number of strings in them.
    """
    stop = min(at + most_bytes, len(raw))
    fields: list[MemberSpan] = []
    strings = 0
    match = _MEMBER.match
    while len(fields) < _RUN_PARTS and (member := match(raw, at, stop)) is not None:
        _, (start, _), (value, end) = member.regs
        byte = raw[value]
        if byte == _QUOTE:
            end = string_end(raw, value, stop)
            if not end:
                break
            strings += 1
        elif byte in b"{[" or end == stop:  # the last one: it may go on
            break
        # a third of the cost of Field(...)
        fields.append(tuple.__new__(MemberSpan, (start, value, end)))  # pyright: ignore[reportUnknownMemberType]
        at = end
        if at == stop or raw[at] == _CLOSE_OBJECT:
            break
    return fields, at, strings + len(fields)


def flat_members(raw: bytes) -> list[MemberSpan] | None:
    """Returns the positions of the members of a long object that is quick to read, or None for any other text.

    Such an object has few members, with names that any reader takes, which are strings with few escapes, short scalars
    without an exponent, or lists of whole numbers.
    """
    found: list[MemberSpan] = []
    at, size = raw.find(b"{") + 1, len(raw)
    if not at or size > _FLAT_BYTES:
        return None
    if size > _FLAT_ESCAPED_BYTES and b"\\" in raw and raw.count(b"\\") > size // _FLAT_ESCAPES_SHARE:
        return None
    listed = 0
    match = _MEMBER.match
    while (member := match(raw, at)) is not None:
        _, (start, name_end), (value, at) = member.regs
        byte = raw[value]
        if byte == _QUOTE:
            at = string_end(raw, value, size)
            if not at:
                return None
        elif byte == _OPEN_LIST:
            at = _whole_numbers_end(raw, value)
            listed += at - value
            if not at or listed > _FLAT_LIST_BYTES:
                return None
        elif byte == _OPEN_OBJECT or at - value > _SHORT or (byte not in b"tfn" and _EXPONENT.search(raw, value, at)):
            return None
        if len(found) == _FLAT_MEMBERS or name_end - start > LONGEST_TOKEN:
            return None
        found.append(tuple.__new__(MemberSpan, (start, value, at)))  # pyright: ignore[reportUnknownMemberType]
    return found


def _whole_numbers_end(raw: bytes, at: int) -> int:
    """The position behind the list that opens at `at`, or 0 where it may hold more than whole numbers and literals."""
    end = raw.find(b"]", at)
    if end < 0 or any(raw.find(byte, at + 1, end) >= 0 for byte in _NOT_WHOLE):
        return 0
    return end + 1


def plain_values(raw: bytes, at: int, most_bytes: int) -> tuple[int, int]:
    """Finds consecutive elements of a list from `at` on that are no containers, within `most_bytes`.

    Returns the end of the last one, and the number of strings among them.
    """
    stop = min(at + most_bytes, len(raw))
    end, close, strings = at, -1, 0
    while strings < _RUN_PARTS:
        if close < end:
            close = raw.find(b"]", end, stop)
            if close < 0:
                close = stop
        quote = raw.find(b'"', end, close)
        edge = close if quote < 0 else quote
        if edge - end > 2 or raw[edge - 1] != _COMMA:
            opening = _opening(raw, end, edge)
            if opening >= 0:
                edge = opening
        if edge == quote:
            after = string_end(raw, quote, stop)
            if after:
                end = after
                strings += 1
                continue
        elif edge == close and edge < stop:
            return edge, strings
        return max(end, raw.rfind(b",", end, edge)), strings
    return end, strings


def _opening(raw: bytes, at: int, end: int) -> int:
    """The first place in `raw[at:end]` with a bracket other than `]`, or -1."""
    if end - at < _SHORT:
        found = _OPENING.search(raw, at, end)
        return -1 if found is None else found.start()
    first = end
    for bracket in (b"{", b"[", b"}"):
        place = raw.find(bracket, at, first)
        if place >= 0:
            first = place
    return first if first < end else -1


def string_end(raw: bytes, at: int, stop: int) -> int:
    """Returns the position behind the closing quote of the string that opens at `at`, or 0.

    It is 0 where the string does not end before `stop`. The cost is linear, whatever is escaped in it.
    """
    end = raw.find(b'"', at + 1, stop)
    if end > 0 and raw[end - 1] == _BACKSLASH:
        end = _end(_STRING, raw, at + 1, stop)
        if end >= min(stop, len(raw)) or raw[end] != _QUOTE:
            return 0
    return end + 1


def piece_end(raw: bytes, at: int, most_bytes: int) -> tuple[int, bool]:
    """Returns the end of a piece of the string that continues at `at`, and True if it is the last one.

    No piece ends within a character, an escape or a surrogate pair.
    """
    size = len(raw)
    stop = min(at + most_bytes, size)
    quote = raw.find(b'"', at, stop)
    if quote == at or (quote > at and raw[quote - 1] != _BACKSLASH):
        return quote, True
    end = stop
    if quote > at or raw.find(b"\\", max(at, stop - LONGEST_ESCAPE), stop) >= 0:
        end = _end(_CHARACTERS, raw, at, stop)
        if end < size and raw[end] == _QUOTE:
            return end, True
    if end == size:
        raise not_json_error("a string without an end", size)
    while end > at and raw[end] & 0xC0 == 0x80:
        end -= 1
    if end == at:
        raise not_json_error("a character or escape of no meaning in a string", at)
    return end, False


def skip_space(raw: bytes, at: int) -> int:
    """Returns the position behind the white space that stands at `at`, if any; of very much of it behind a part."""
    return _end(_SPACE, raw, at, at + LONGEST_TOKEN)


def _end(pattern: re.Pattern[bytes], raw: bytes, at: int, stop: int) -> int:
    """Returns the end of the match of a pattern that always matches."""
    found = pattern.match(raw, at, stop)
    return at if found is None else found.end()


def scalar_end(raw: bytes, at: int) -> int:
    """The position behind the number, `true`, `false` or `null` that stands at `at`.

    Raises:
        JSONTextError: it is too long.
    """
    end = _end(_SCALAR, raw, at, at + LONGEST_TOKEN)
    if end - at == LONGEST_TOKEN:
        raise token_too_long_error("a number", raw, at)
    return end


def infinite_number_error() -> JSONTextError:
    """The error for a number that is none as a double."""
    return JSONTextError("a number is too large for a double; infinities are not JSON")


def begins_with_numbers(raw: bytes, at: int) -> bool:
    """Returns True if the container at `at` begins with a long list of numbers, which is better read by parts."""
    if raw[at] == _OPEN_LIST:
        found = _NUMBERS.match(raw, at)
    else:
        closing = raw.find(b"}", at, at + NEAR)
        found = _NUMBERS.search(raw, at, at + NEAR if closing < 0 else closing)
    return found is not None and raw.find(b"]", found.end(), found.end() + NEAR) < 0


def duplicate_key_error(name: str) -> JSONTextError:
    """The error for a doubled key."""
    return JSONTextError(f"the key {name[:64]!r} stands twice in one object")


def not_json_error(why: str, at: int) -> JSONTextError:
    """The error for text that is no JSON."""
    return JSONTextError(f"not valid JSON: {why}, near byte {at}")


def token_too_long_error(what: str, raw: bytes, at: int) -> JSONTextError:
    """The error for a name or a number that does not end within `LONGEST_TOKEN` bytes, perhaps not at all."""
    if at + LONGEST_TOKEN > len(raw):
        return not_json_error(f"{what} without an end", at)
    return JSONTextError(f"{what} of more than {LONGEST_TOKEN} bytes, at byte {at}")
