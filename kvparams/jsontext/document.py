"""JSON text as it comes from strangers, refused when it is not plain.

`loads` reads any document. `load_object` reads an object and returns where its members stand in the raw bytes, for
`kvparams.jsontext.editing`. `read_object` reads an object of any size in steps of bounded work.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, cast

from pydantic_core import from_json

from kvparams.errors import JSONTextError
from kvparams.jsontext.finite_numbers import check_finite, may_overflow
from kvparams.jsontext.incremental_reader import IncrementalReader
from kvparams.jsontext.receivers import Receiver, TreeBuilder
from kvparams.jsontext.scanner import (
    DEFAULT_LIMITS,
    STEP_BYTES,
    UNLIMITED,
    JSONLimits,
    MemberSpan,
    flat_members,
    not_json_error,
    skip_space,
    string_end,
)
from kvparams.native import NATIVE

__all__ = [
    "AT_ONCE_BYTES",
    "DEFAULT_LIMITS",
    "JSONLimits",
    "MemberSpan",
    "find_member",
    "find_members",
    "load_object",
    "load_short_object",
    "loads",
    "read_object",
]

AT_ONCE_BYTES: Final = 4 << 10
"""`load_object` reads a text of this length within some 2 ms, whatever is in it: 600 members that are empty lists are
the costliest known. `read_object` is for longer ones."""

_MEMBER: Final = re.compile(rb'[ \t\r\n,]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t\r\n]*:[ \t\r\n]*(["{\[]|[^,}\]\s]+)')
"""One member up to the first byte of a string or container, or to the end of any other value."""
_GAP: Final = re.compile(rb"[ \t\r\n]*+")
_LONG: Final = 64 << 10
"""Bytes: longer text is read by pieces, so that it may not hold too many parts."""
_NATIVE_CONTAINERS: Final = 2_000
"""Objects and lists that the native code passes in one text."""
_FLAT_DEPTH: Final = 2
"""The depth of an object with lists of numbers in it."""
_KINDS: Final = {
    b"[": "a list",
    b'"': "a string",
    b"t": "true",
    b"f": "false",
    b"n": "null",
    **{b"%d" % digit: "a number" for digit in range(10)},
    b"-": "a number",
}
"""What a JSON document is that begins so, but for objects."""


def loads(raw: bytes, limits: JSONLimits = DEFAULT_LIMITS) -> object:
    """Read one JSON document.

    Integers of any size stay exact. Refused, beyond what is not JSON at all: duplicate keys at any depth, NaN and
    infinities (also `1e999`), a depth over `limits.max_depth`, more than `limits.max_bytes`.

    Raises:
        JSONTextError: with the reason in words.
    """
    start = len(raw)
    if len(raw) > _LONG:
        _check_size(raw, limits)
        start = _skip(raw, 0)
    if raw.startswith((b"{", b"["), start):
        built = TreeBuilder(raw[start])
        for _ in _read(raw, start, built, limits, True, STEP_BYTES):
            pass
        return built.value
    document = _parse(raw, limits)
    start = _skip(raw, 0)
    if raw[start] in b"{[":
        IncrementalReader(raw, start, limits).finish()
    elif raw[start] != 0x22:
        check_finite(raw, document)
    return document


def load_object(raw: bytes, limits: JSONLimits = DEFAULT_LIMITS) -> tuple[dict[str, object], dict[str, MemberSpan]]:
    """Read one JSON object as `loads` does, and say where its members stand, in one walk.

    Raises:
        JSONTextError: as for `loads`, and when the document is not an object.
    """
    if len(raw) > _LONG:
        built, stand = TreeBuilder(0x7B), dict[str, MemberSpan]()
        built.spans = stand
        for _ in read_object(raw, built, limits):
            pass
        return cast("dict[str, object]", built.value), stand
    return _told_apart(raw, _parse(raw, limits), None, limits)


def load_short_object(
    raw: bytes, limits: JSONLimits = DEFAULT_LIMITS
) -> tuple[dict[str, object], dict[str, MemberSpan]] | None:
    """Reads a JSON object as `load_object` does if that takes some 2 ms at most, and returns None otherwise.

    It reads texts of `AT_ONCE_BYTES` or less, and longer ones whose members are plainly cheap (`flat_members`) or that
    native code passes. `read_object` should read the others.

    Raises:
        JSONTextError: as for `load_object`.
    """
    if len(raw) <= AT_ONCE_BYTES:
        return load_object(raw, limits)
    if NATIVE is not None and len(raw) <= _LONG:
        document = _parse(raw, limits)
        if isinstance(document, dict):
            members = cast("dict[str, object]", document)
            if (found := _native_spans(raw, members, limits)) is not None:
                return members, found
    spans = flat_members(raw)
    if spans is None or limits.max_depth < _FLAT_DEPTH:
        return None
    return _told_apart(raw, _parse(raw, limits), spans, limits)


def _told_apart(
    raw: bytes, document: object, spans: list[MemberSpan] | None, limits: JSONLimits
) -> tuple[dict[str, object], dict[str, MemberSpan]]:
    """The members of `raw`, which parses to `document`, and where they stand; `spans` if that is known."""
    if not isinstance(document, dict):
        raise JSONTextError(f"the document must be a JSON object, not {_kind(document)}")
    members = cast("dict[str, object]", document)
    if spans is None:
        if NATIVE is not None and (found := _native_spans(raw, members, limits)) is not None:
            return members, found
        spans = _walk(raw, limits)
    if len(spans) != len(members):
        _named(raw, spans)
        raise JSONTextError("the members of the object could not be told apart")  # a guard: parser and walker disagree
    if len(spans) > limits.max_members:
        raise JSONTextError(f"more than {limits.max_members} members")
    return members, dict(zip(members, spans, strict=True))  # both in the order of the text


def _native_spans(raw: bytes, document: dict[str, object], limits: JSONLimits) -> dict[str, MemberSpan] | None:
    """Returns where the members stand, or None where the native code does not tell."""
    if NATIVE is None or len(document) > limits.max_members:
        return None
    if limits.max_containers <= _NATIVE_CONTAINERS or limits.max_strings < len(raw):
        return None
    return NATIVE.member_spans(raw, document, MemberSpan, limits.max_depth)


def read_object(
    raw: bytes,
    receiver: Receiver,
    limits: JSONLimits = DEFAULT_LIMITS,
    *,
    strict: bool = True,
    step_bytes: int = STEP_BYTES,
) -> Iterator[None]:
    """Reads a JSON object as `load_object` does, in steps of bounded work, and yields after each step.

    The parts that are wanted are passed to `receiver` on the way.

    Beyond what `load_object` refuses, a name or a number may not be longer than 64 KiB. Where it is not
    `strict`, doubled keys and infinities are not looked for, and containers and strings not counted.

    Raises:
        JSONTextError: as for `load_object`.
    """
    _check_size(raw, limits)
    start = 0
    while (end := skip_space(raw, start)) > start:
        start = end
        yield
    first = raw[start : start + 1]
    if first != b"{":
        kind = _KINDS.get(first)
        if kind is None:
            raise JSONTextError(f"not valid JSON: {_encoding(raw) or 'expected an object'}")
        raise JSONTextError(f"the document must be a JSON object, not {kind}")
    yield from _read(raw, start, receiver, limits, strict, step_bytes)


def _read(
    raw: bytes, start: int, receiver: Receiver, limits: JSONLimits, strict: bool, step_bytes: int
) -> Iterator[None]:
    """Read the container that opens at `start`, behind which there is nothing."""
    reader = IncrementalReader(raw, start, limits, receiver, strict=strict, step_bytes=step_bytes)
    yield from reader.steps()
    end = reader.at
    while (behind := skip_space(raw, end)) > end:
        end = behind
        yield
    if end < len(raw):
        raise not_json_error("something stands behind the document", end)


def find_members(raw: bytes) -> dict[str, MemberSpan]:
    """Returns the positions of the members of the object `raw`, which must be valid JSON: nothing is validated."""
    return _named(raw, _walk(raw, UNLIMITED))


def find_member(raw: bytes, document: Mapping[str, object], name: str) -> MemberSpan:
    """Returns the position of the member `name` of the object `raw`, mostly without walking all of it.

    `document` is what `raw` parses to, and has that member.

    Raises:
        JSONTextError: it had to walk after all, and `raw` is not plain (see `loads`).
    """
    if NATIVE is not None and (found := NATIVE.find_member(raw, name)) is not None:
        return MemberSpan(*found)
    needle = b'"%b"' % name.encode()
    start = raw.rfind(needle)  # what is looked for tends to stand at the end
    if start > 0 and raw[start - 1] != 0x5C and raw.find(needle, 0, start) < 0 and b"\\u00" not in raw:
        member = _MEMBER.match(raw, start)
        if member is not None and (end := _end_of(raw, member.start(2), document[name])):
            return MemberSpan(start, member.start(2), end)
    return find_members(raw)[
        name
    ]  # also where the name may be written with escapes, and what was found another object's


def _end_of(raw: bytes, at: int, value: object) -> int:
    """Returns the end of the value that starts at `at` and parses to `value`, or 0 if that is not plain to see."""
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


def _parse(raw: bytes, limits: JSONLimits) -> object:
    _check_size(raw, limits)
    try:
        return from_json(raw, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise JSONTextError(f"not valid JSON: {_encoding(raw) or error}") from error


def _check_size(raw: bytes, limits: JSONLimits) -> None:
    if len(raw) > limits.max_bytes:
        raise JSONTextError(f"the text is {len(raw)} bytes long; at most {limits.max_bytes} are accepted")


def _encoding(raw: bytes) -> str | None:
    """Returns a message about the encoding of text that is not the UTF-8 that JSON requires, or None."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in raw[:2]:
        return "it is UTF-16 or UTF-32; only UTF-8 is accepted"
    return "it begins with a byte order mark (EF BB BF); none is accepted" if raw.startswith(b"\xef\xbb\xbf") else None


def _walk(raw: bytes, limits: JSONLimits) -> list[MemberSpan]:
    """The members of the object `raw`; doubled keys inside them, overflowing numbers and too much depth are refused."""
    found: list[MemberSpan] = []
    at = raw.index(b"{") + 1
    match = _MEMBER.match
    while (member := match(raw, at)) is not None:
        _, (start, _), (value, at) = member.regs
        first = raw[value]
        if first == 0x22:
            at = _string_end(raw, value)
        elif first == 0x7B or first == 0x5B:
            flat = _flat_list_end(raw, value) if limits.max_depth > 1 else 0
            at = flat or IncrementalReader(raw, value, limits, depth=2).finish()
        elif at - value > 3 and first not in b"tfn":
            _check_numbers(raw, value, at)
        # a third of the cost of Field(...)
        found.append(tuple.__new__(MemberSpan, (start - 1, value, at)))  # pyright: ignore[reportUnknownMemberType]
    return found


def _named(raw: bytes, spans: Iterable[MemberSpan]) -> dict[str, MemberSpan]:
    """By the names of the members; doubled ones are refused."""
    found: dict[str, MemberSpan] = {}
    for span in spans:
        key = _key(raw, span.start, _string_end(raw, span.start))
        if key in found:
            raise JSONTextError(f"the key {key[:64]!r} stands twice in one object")
        found[key] = span
    return found


def _flat_list_end(raw: bytes, at: int) -> int:
    """The end of a list without strings or containers in it (token ids are such), or 0. At the speed of memchr."""
    if raw[at] != 0x5B:
        return 0
    end = raw.find(b"]", at)
    if raw.find(b'"', at, end) >= 0 or raw.find(b"{", at, end) >= 0 or raw.find(b"[", at + 1, end) >= 0:
        return 0
    _check_numbers(raw, at, end + 1)
    return end + 1


def _check_numbers(raw: bytes, start: int, end: int) -> None:
    """Refuse numbers in `raw[start:end]`, a number or a list of such, that a double can only hold as infinity."""
    if may_overflow(raw, start, end):
        text = raw[start:end]
        check_finite(text, from_json(text))


def _skip(raw: bytes, at: int) -> int:
    if raw[at] > 0x20:  # the usual case: no white space here
        return at
    found = _GAP.match(raw, at)
    return found.end() if found else at


def _string_end(raw: bytes, at: int) -> int:
    end = string_end(raw, at, len(raw))
    if not end:
        raise JSONTextError("walked text that is not JSON")
    return end


def _key(raw: bytes, start: int, end: int) -> str:
    text = raw[start + 1 : end - 1]
    try:
        return str(from_json(raw[start:end])) if b"\\" in text else text.decode()
    except ValueError as error:
        raise JSONTextError("a key is no text: half of a surrogate pair, or no UTF-8") from error


def _kind(document: object) -> str:
    if document is None:
        return "null"
    return "a list" if isinstance(document, list) else f"a {type(document).__name__}"
