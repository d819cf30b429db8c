"""JSON text as it comes from strangers: refused when it is not plain, and editable without being re-encoded.

`loads` reads, `fields` says where the top-level members of an object stand in the raw bytes, `edit` replaces, removes
and adds members in place. The one rule: bytes that nobody asked to change leave as they came.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from pydantic_core import from_json

from kvparams.errors import JSONTextError

__all__ = ["DEFAULT_LIMITS", "Field", "JSONLimits", "edit", "fields", "loads"]


@dataclass(frozen=True, slots=True)
class JSONLimits:
    """How much text is read at all."""

    max_bytes: int = 16 << 20
    """Longer text is refused before it is parsed."""
    max_depth: int = 64
    """Objects and lists inside each other; the parser itself stops at about 200."""


DEFAULT_LIMITS: Final = JSONLimits()

_SPACE: Final = b" \t\r\n"
_SCALAR: Final = re.compile(rb"[^,}\]\s]+")
_GAP: Final = re.compile(rb"[ \t\r\n]*")
_COLON: Final = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_BRACKET: Final = re.compile(rb"[\[\]{}]")
_HUGE: Final = re.compile(rb"[0-9][eE]\+?[0-9]{3,}|[0-9]{300,}")
"""Only such a number can overflow a double: the parser reads it as infinity, which is not JSON."""


class Field(NamedTuple):
    """Where one member of an object stands: `raw[start:end]` is `"name": value`, `raw[value:end]` the value alone."""

    start: int
    value: int
    end: int


def loads(raw: bytes, limits: JSONLimits = DEFAULT_LIMITS) -> object:
    """Read one JSON document.

    Integers of any size stay exact. Refused, beyond what is not JSON at all: duplicate keys at any depth, NaN and
    infinities (also `1e999`), a depth over `limits.max_depth`, more than `limits.max_bytes`.

    Raises:
        JSONTextError: with the reason in words.
    """
    if len(raw) > limits.max_bytes:
        raise JSONTextError(f"the text is {len(raw)} bytes long; at most {limits.max_bytes} are accepted")
    try:
        document: object = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise JSONTextError(f"not valid JSON: {error}") from error
    start = _skip(raw, 0)
    if raw[start] in b"{[":
        _check_container(raw, start, limits.max_depth)
    elif _HUGE.search(raw):
        _refuse_infinity(document)
    return document


def fields(raw: bytes) -> dict[str, Field]:
    """Where the top-level members of the object `raw` stand.

    `raw` must have passed `loads`: this walks, it does not check. Cost: a fraction of a microsecond for each member,
    however long its value is.
    """
    found: dict[str, Field] = {}
    at = _skip(raw, _skip(raw, 0) + 1)
    while raw[at] == 0x22:
        key_end = _string_end(raw, at)
        value = _after_colon(raw, key_end)
        end = _value_end(raw, value)
        found[_key(raw, at, key_end)] = Field(at, value, end)
        at = _skip(raw, end)
        if raw[at] == 0x2C:
            at = _skip(raw, at + 1)
    return found


def edit(raw: bytes, spans: Mapping[str, Field], changes: Mapping[str, bytes | None]) -> bytes:
    """The object `raw` with some top-level members changed; all other bytes stay as they are.

    Args:
        raw: the text of a JSON object.
        spans: what `fields(raw)` said.
        changes: by member name the new value as JSON text, or None to remove the member. A name that is not there is
            added at the end.
    """
    cuts: list[tuple[int, int, bytes]] = []
    added: list[bytes] = []
    for name, value in changes.items():
        field = spans.get(name)
        if field is None:
            if value is not None:
                added.append(b'"%b":%b' % (name.encode(), value))
        elif value is not None:
            cuts.append((field.value, field.end, value))
        else:
            cuts.append((*_with_comma(raw, field), b""))
    if len(cuts) > 1:
        cuts.sort()
    pieces: list[bytes] = []
    at = 0
    for start, end, value in cuts:
        if start < at:  # neighbours that are both removed share one comma
            start = at
        pieces.append(raw[at:start])
        pieces.append(value)
        at = end
    close = raw.rindex(b"}")
    if not added:
        pieces.append(raw[at:])
        return b"".join(pieces)
    body = b"".join((*pieces, raw[at:close])).rstrip(_SPACE)
    comma = b"" if body.endswith(b"{") or body.endswith(b",") else b","
    return b"%b%b%b}" % (body, comma, b",".join(added))


def _with_comma(raw: bytes, field: Field) -> tuple[int, int]:
    """The span to cut so that what is left is still an object: the member and the comma behind it, or before it."""
    after = _skip(raw, field.end)
    if raw[after] == 0x2C:
        return field.start, _skip(raw, after + 1)
    before = field.start
    while raw[before - 1] in _SPACE:
        before -= 1
    if raw[before - 1] == 0x2C:
        return before - 1, field.end
    return field.start, field.end


def _skip(raw: bytes, at: int) -> int:
    if raw[at] > 0x20:  # the usual case: no white space here
        return at
    found = _GAP.match(raw, at)
    return found.end() if found else at


def _after_colon(raw: bytes, at: int) -> int:
    found = _COLON.match(raw, at)
    if found is None:
        raise JSONTextError("walked text that is not JSON")
    return found.end()


def _string_end(raw: bytes, at: int) -> int:
    """The position behind the closing quote of the string that opens at `at`."""
    end = raw.find(b'"', at + 1)
    while end > 0 and raw[end - 1] == 0x5C:  # perhaps an escaped quote: an odd number of backslashes before it
        slashes = end - 1
        while raw[slashes - 1] == 0x5C:
            slashes -= 1
        if (end - slashes) % 2 == 0:
            break
        end = raw.find(b'"', end + 1)
    if end < 0:
        raise JSONTextError("walked text that is not JSON")
    return end + 1


def _key(raw: bytes, start: int, end: int) -> str:
    text = raw[start + 1 : end - 1]
    if b"\\" in text:
        return str(from_json(raw[start:end]))
    return text.decode()


def _value_end(raw: bytes, at: int) -> int:
    first = raw[at]
    if first == 0x22:
        return _string_end(raw, at)
    if first in b"{[":
        return _container_end(raw, at)
    found = _SCALAR.match(raw, at)
    if found is None:
        raise JSONTextError("walked text that is not JSON")
    return found.end()


def _container_end(raw: bytes, at: int) -> int:
    """The position behind the bracket that closes the one at `at`."""
    flat = _flat_list_end(raw, at)
    if flat:
        return flat
    depth = 0
    for position, bracket in _brackets(raw, at):
        depth += 1 if bracket in b"{[" else -1
        if depth == 0:
            return position + 1
    raise JSONTextError("walked text that is not JSON")


def _flat_list_end(raw: bytes, at: int) -> int:
    """The end of a list without strings or containers in it (token ids are such), or 0. At the speed of memchr."""
    if raw[at] != 0x5B:
        return 0
    end = raw.find(b"]", at)
    inside = (b'"', b"{", b"[")
    return 0 if any(raw.find(mark, at + 1, end) >= 0 for mark in inside) else end + 1


def _brackets(raw: bytes, at: int) -> Iterator[tuple[int, int]]:
    """Every bracket from `at` on that is not inside a string."""
    size = len(raw)
    while at < size:
        quote = raw.find(b'"', at)
        stop = size if quote < 0 else quote
        for found in _BRACKET.finditer(raw, at, stop):
            yield found.start(), raw[found.start()]
        at = size if quote < 0 else _string_end(raw, quote)


def _check_container(raw: bytes, at: int, max_depth: int) -> None:
    """Refuse duplicate keys, too much depth and numbers that overflow, in one walk over everything but string bodies."""
    keys: list[set[str] | None] = []  # one per open container: the keys of an object, None for a list
    size = len(raw)
    while at < size:
        quote = raw.find(b'"', at)
        stop = size if quote < 0 else quote
        if stop - at > 300 or raw.find(b"e", at, stop) >= 0 or raw.find(b"E", at, stop) >= 0:
            _check_numbers(raw, at, stop)
        if not (stop - at < 3 and raw[at] in b",:" and raw[stop - 1] in b" ,:"):  # between two strings of one container
            for found in _BRACKET.finditer(raw, at, stop):
                bracket = raw[found.start()]
                if bracket == 0x7B:
                    keys.append(set())
                elif bracket == 0x5B:
                    keys.append(None)
                else:
                    keys.pop()
                if len(keys) > max_depth:
                    raise JSONTextError(f"nested deeper than {max_depth} levels")
        if quote < 0:
            return
        at = _string_end(raw, quote)
        if keys and (seen := keys[-1]) is not None and raw[_skip(raw, at)] == 0x3A:
            key = _key(raw, quote, at)
            if key in seen:
                raise JSONTextError(f"the key {key[:64]!r} stands twice in one object")
            seen.add(key)


def _check_numbers(raw: bytes, start: int, end: int) -> None:
    for found in _HUGE.finditer(raw, start, end):
        left, right = found.start(), found.end()
        while left > start and raw[left - 1] in b"0123456789.+-eE":
            left -= 1
        while right < end and raw[right] in b"0123456789.+-eE":
            right += 1
        _refuse_infinity(from_json(raw[left:right]))


def _refuse_infinity(value: object) -> None:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        raise JSONTextError("a number is too large for a double; infinities are not JSON")
