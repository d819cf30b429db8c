"""JSON text as it comes from strangers: refused when it is not plain, and editable without being re-encoded.

`loads` reads any document, `load_object` reads an object and says where its members stand in the raw bytes, `edit`
replaces, removes and adds members in place. The one rule: bytes that nobody asked to change leave as they came.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

from pydantic_core import from_json

from kvparams.errors import JSONTextError

__all__ = ["DEFAULT_LIMITS", "Field", "JSONLimits", "edit", "fields", "load_object", "loads", "locate"]


@dataclass(frozen=True, slots=True)
class JSONLimits:
    """How much text is read at all."""

    max_bytes: int = 16 << 20
    """Longer text is refused before it is parsed."""
    max_depth: int = 64
    """Objects and lists inside each other; the parser itself stops at about 200."""
    max_containers: int = 20_000
    """Objects and lists in all. Each costs time and memory far beyond its two bytes."""
    max_strings: int = 200_000
    """Strings in all, keys included."""


DEFAULT_LIMITS: Final = JSONLimits()

_SPACE: Final = b" \t\r\n"
_MEMBER: Final = re.compile(rb'[ \t\r\n,]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t\r\n]*:[ \t\r\n]*(["{\[]|[^,}\]\s]+)')
"""One member up to the first byte of a string or container, or to the end of any other value."""
_GAP: Final = re.compile(rb"[ \t\r\n]*")
_BRACKET: Final = re.compile(rb"[\[\]{}]")
_NUMBER: Final = re.compile(rb"-?[0-9][0-9.eE+-]*")
_ROOMY: Final = 64 << 10
"""Shorter text cannot hold enough to matter, and is not counted."""
_PARSED_DEPTH: Final = 256
"""More than the parser lets through."""
_DOUBLE_DIGITS: Final = 300
"""A number without an exponent needs more digits than this to overflow a double."""


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
    document = _parse(raw, limits)
    start = _skip(raw, 0)
    if raw[start] in b"{[":
        _check_container(raw, start, limits.max_depth)
    elif raw[start] != 0x22:
        _check_numbers(raw, 0, len(raw))
    return document


def load_object(raw: bytes, limits: JSONLimits = DEFAULT_LIMITS) -> tuple[dict[str, object], dict[str, Field]]:
    """Read one JSON object as `loads` does, and say where its members stand, in one walk.

    Raises:
        JSONTextError: as for `loads`, and when the document is not an object.
    """
    document = _parse(raw, limits)
    if not isinstance(document, dict):
        raise JSONTextError(f"the document must be a JSON object, not {_kind(document)}")
    members = cast("dict[str, object]", document)
    spans = _walk(raw, limits.max_depth)
    if len(spans) != len(members):
        _named(raw, spans)
        raise JSONTextError("the members of the object could not be told apart")  # a guard: parser and walker disagree
    return members, dict(zip(members, spans, strict=True))  # both in the order of the text


def fields(raw: bytes) -> dict[str, Field]:
    """Where the members of the object `raw` stand. `raw` must be JSON already: this walks, it does not validate."""
    return _named(raw, _walk(raw, _PARSED_DEPTH))


def locate(raw: bytes, document: Mapping[str, object], name: str) -> Field:
    """Where the member `name` of the object `raw` stands, mostly without walking all of it.

    `document` is what `raw` parses to, and has that member.

    Raises:
        JSONTextError: it had to walk after all, and `raw` is not plain (see `loads`).
    """
    needle = b'"%b"' % name.encode()
    start = raw.rfind(needle)  # what is looked for tends to stand at the end
    if start > 0 and raw[start - 1] != 0x5C and raw.find(needle, 0, start) < 0 and b"\\u00" not in raw:
        member = _MEMBER.match(raw, start)
        if member is not None and (end := _end_of(raw, member.start(2), document[name])):
            return Field(start, member.start(2), end)
    return fields(raw)[name]  # also where the name may be written with escapes, and what was found another object's


def _end_of(raw: bytes, at: int, value: object) -> int:
    """Where the value that starts at `at` and parses to `value` ends, or 0 where that is not plain to see."""
    if value is None:
        return at + 4 if raw.startswith(b"null", at) else 0
    if not isinstance(value, dict):
        return 0
    end = at
    for _ in range(8):  # closing braces to try: the first one closes an object without objects in it
        end = raw.find(b"}", end) + 1
        try:
            if end and from_json(raw[at:end]) == value:
                return end
        except ValueError:
            continue
    return 0


def edit(raw: bytes, spans: Mapping[str, Field], changes: Mapping[str, bytes | None]) -> bytes:
    """The object `raw` with some top-level members changed; all other bytes stay as they are.

    Args:
        raw: the text of a JSON object.
        spans: where its members stand (`load_object`, `fields`).
        changes: by member name the new value as JSON text, or None to remove the member. A name that is not there is
            added at the end. Names must not need escaping.
    """
    cuts: list[tuple[int, int, bytes]] = []
    added: list[bytes] = []
    removed = not spans
    for name, value in changes.items():
        field = spans.get(name)
        if field is None:
            if value is not None:
                added.append(b'"%b":%b' % (name.encode(), value))
        elif value is not None:
            cuts.append((field.value, field.end, value))
        else:
            removed = True
            cuts.append((field.start, _behind_comma(raw, field.end), b""))
    if not cuts and spans:  # nothing but additions, to an object with members
        return b"%b,%b}" % (raw[: raw.rindex(b"}")], b",".join(added)) if added else raw
    if len(cuts) > 1:
        cuts.sort()
    pieces: list[bytes] = []
    at = 0
    for start, end, value in cuts:
        pieces.append(raw[at:start])
        pieces.append(value)
        at = end
    pieces.append(raw[at : raw.rindex(b"}")])
    if not removed:  # what is added follows some other member
        if added:
            pieces.append(b",")
            pieces.append(b",".join(added))
        pieces.append(b"}")
        return b"".join(pieces)
    _trim(pieces)
    if added:
        if pieces[-1].rstrip(_SPACE)[-1:] != b"{":
            pieces.append(b",")
        pieces.append(b",".join(added))
    pieces.append(b"}")
    return b"".join(pieces)


def _trim(pieces: list[bytes]) -> None:
    """Take away the comma that is left at the end where the last member was removed."""
    while len(pieces) > 1 and not pieces[-1].strip(_SPACE):
        pieces.pop()
    last = pieces[-1].rstrip(_SPACE)
    pieces[-1] = last[:-1] if last.endswith(b",") else last


def _parse(raw: bytes, limits: JSONLimits) -> object:
    if len(raw) > limits.max_bytes:
        raise JSONTextError(f"the text is {len(raw)} bytes long; at most {limits.max_bytes} are accepted")
    if len(raw) > _ROOMY:
        _check_crowd(raw, limits)
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise JSONTextError(f"not valid JSON: {_encoding(raw) or error}") from error


def _encoding(raw: bytes) -> str | None:
    """Where the text is not in UTF-8 as JSON wants it: what it is in instead."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in raw[:2]:
        return "it is UTF-16 or UTF-32; only UTF-8 is accepted"
    return "it begins with a byte order mark (EF BB BF); none is accepted" if raw.startswith(b"\xef\xbb\xbf") else None


def _check_crowd(raw: bytes, limits: JSONLimits) -> None:
    """Refuse text with very many parts before it is parsed."""
    if raw.count(b'"') - raw.count(b'\\"') > 2 * limits.max_strings:
        raise JSONTextError(f"more than {limits.max_strings} strings")
    if raw.count(b"{") + raw.count(b"[") <= limits.max_containers:
        return
    containers = at = 0
    while at < len(raw):  # brackets in strings do not count
        quote = raw.find(b'"', at)
        stop = len(raw) if quote < 0 else quote
        containers += raw.count(b"{", at, stop) + raw.count(b"[", at, stop)
        if containers > limits.max_containers:
            raise JSONTextError(f"more than {limits.max_containers} objects and lists")
        at = stop if quote < 0 else _string_end(raw, quote)


def _walk(raw: bytes, max_depth: int) -> list[Field]:
    """The members of the object `raw`; doubled keys inside them, overflowing numbers and too much depth are refused."""
    found: list[Field] = []
    at = raw.index(b"{") + 1
    match = _MEMBER.match
    while (member := match(raw, at)) is not None:
        _, (start, _), (value, at) = member.regs
        first = raw[value]
        if first == 0x22:
            at = _string_end(raw, value)
        elif first == 0x7B or first == 0x5B:
            at = _flat_list_end(raw, value) or _check_container(raw, value, max_depth - 1)
        elif at - value > 3 and first not in b"tfn":
            _check_numbers(raw, value, at)
        # a third of the cost of Field(...)
        found.append(tuple.__new__(Field, (start - 1, value, at)))  # pyright: ignore[reportUnknownMemberType]
    return found


def _named(raw: bytes, spans: Iterable[Field]) -> dict[str, Field]:
    """By the names of the members; doubled ones are refused."""
    found: dict[str, Field] = {}
    for span in spans:
        key = _key(raw, span.start, _string_end(raw, span.start))
        if key in found:
            raise JSONTextError(f"the key {key[:64]!r} stands twice in one object")
        found[key] = span
    return found


def _check_container(raw: bytes, at: int, max_depth: int) -> int:
    """Walk the container that opens at `at` and return the position behind it; refuse as `loads` says."""
    keys: list[set[str] | None] = []  # one per open container: the keys of an object, None for a list
    size = len(raw)
    while at < size:
        quote = raw.find(b'"', at)
        stop = size if quote < 0 else quote
        if stop - at > 3:
            _check_numbers(raw, at, stop)
        for found in _BRACKET.finditer(raw, at, stop):
            position = found.start()
            bracket = raw[position]
            if bracket == 0x7B:
                keys.append(set())
            elif bracket == 0x5B:
                keys.append(None)
            else:
                keys.pop()
                if not keys:
                    return position + 1
            if len(keys) > max_depth:
                raise JSONTextError(f"nested deeper than {max_depth} levels")
        at = size if quote < 0 else _string_end(raw, quote)
        if keys and (seen := keys[-1]) is not None and raw[_skip(raw, at)] == 0x3A:
            key = _key(raw, quote, at)
            if key in seen:
                raise JSONTextError(f"the key {key[:64]!r} stands twice in one object")
            seen.add(key)
    raise JSONTextError("walked text that is not JSON")


def _flat_list_end(raw: bytes, at: int) -> int:
    """The end of a list without strings or containers in it (token ids are such), or 0. At the speed of memchr."""
    if raw[at] != 0x5B:
        return 0
    end = raw.find(b"]", at)
    if raw.find(b'"', at, end) >= 0 or raw.find(b"{", at, end) >= 0 or raw.find(b"[", at + 1, end) >= 0:
        return 0
    _check_numbers(raw, at, end)
    return end + 1


def _check_numbers(raw: bytes, start: int, end: int) -> None:
    """Refuse numbers in `raw[start:end]`, which holds no string, that a double can only hold as infinity."""
    exponent = raw.find(b"e", start, end) >= 0 or raw.find(b"E", start, end) >= 0
    if not exponent and (end - start < _DOUBLE_DIGITS or raw.find(b".", start, end) < 0):
        return
    for found in _NUMBER.finditer(raw, start, end):
        if from_json(found.group()) in (float("inf"), float("-inf")):
            raise JSONTextError("a number is too large for a double; infinities are not JSON")


def _skip(raw: bytes, at: int) -> int:
    if raw[at] > 0x20:  # the usual case: no white space here
        return at
    found = _GAP.match(raw, at)
    return found.end() if found else at


def _behind_comma(raw: bytes, at: int) -> int:
    after = _skip(raw, at)
    return _skip(raw, after + 1) if raw[after] == 0x2C else at


def _string_end(raw: bytes, at: int) -> int:
    """The position behind the closing quote of the string that opens at `at`. At the speed of memchr."""
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


def _kind(document: object) -> str:
    if document is None:
        return "null"
    return "a list" if isinstance(document, list) else f"a {type(document).__name__}"
