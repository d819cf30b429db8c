"""Changes to the members of a JSON object in its text, without encoding it again.

Invariant: an edit changes only the bytes of the members that it names. So a member is never located in another object,
and names may be written with escapes.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from kvparams.jsontext.scanner import MemberSpan
from kvparams.native import NATIVE

__all__ = ["edit", "edit_pieces", "edit_with_spans", "find_removals", "remove_ranges", "shift_spans"]

_LONG: Final = 64 << 10
"""Bytes: pieces of a longer text are no copies."""
_NO_CUT: Final = (2**62, 2**62)


def edit(raw: bytes, spans: Mapping[str, MemberSpan], changes: Mapping[str, bytes | None]) -> bytes:
    """The object `raw` with some top-level members changed; all other bytes stay as they are.

    Args:
        raw: the text of a JSON object.
        spans: where its members stand (`load_object`, `find_members`).
        changes: by member name the new value as JSON text, or None to remove the member. A name that is not there is
            added at the end. Names must not need escaping.
    """
    if NATIVE is not None and (edited := NATIVE.edit_members(raw, spans, changes)) is not None:
        return edited
    pieces = edit_pieces(raw, spans, changes)
    return raw if pieces is None else b"".join(pieces)


def edit_pieces(
    raw: bytes, spans: Mapping[str, MemberSpan], changes: Mapping[str, bytes | None]
) -> list[bytes | memoryview] | None:
    """Returns the result of `edit` in pieces, or None if nothing changes; pieces of a long text are no copies."""
    cuts: list[tuple[int, int, bytes]] = []
    added: list[bytes] = []
    removed: list[str] = []
    for name, value in changes.items():
        field = spans.get(name)
        if field is None:
            if value is not None:
                added.append(b'"%b":%b' % (name.encode(), value))
        elif value is not None:
            cuts.append((field.value, field.end, value))
        else:
            removed.append(name)
    if removed:
        cuts += [(start, end, b"") for start, end in find_removals(raw, spans, removed)]
    elif not cuts and not added:
        return None
    if len(cuts) > 1:
        cuts.sort()
    text = memoryview(raw) if len(raw) > _LONG else raw
    pieces: list[bytes | memoryview] = []
    at = 0
    for start, end, value in cuts:
        pieces.append(text[at:start])
        pieces.append(value)
        at = end
    pieces.append(text[at : raw.rindex(b"}")])
    if added:
        if len(spans) > len(removed):
            pieces.append(b",")
        pieces.append(b",".join(added))
    pieces.append(b"}")
    return pieces


def edit_with_spans(
    raw: bytes, spans: Mapping[str, MemberSpan], changes: Mapping[str, bytes | None]
) -> tuple[bytes, dict[str, MemberSpan]]:
    """Returns the result of `edit` and the positions of its members, without walking the text again."""
    after: dict[str, MemberSpan] = {}
    moved = 0
    for name, (start, value, end) in spans.items():
        begin, at = start + moved, value + moved
        if name not in changes:
            after[name] = MemberSpan(begin, at, end + moved)
        elif (text := changes[name]) is not None:
            moved += len(text) - (end - value)
            after[name] = MemberSpan(begin, at, at + len(text))
        else:
            moved -= _next_member(raw, end) - start
    made = edit(raw, spans, changes)
    added = [(name, text) for name, text in changes.items() if text is not None and name not in spans]
    start = len(made) - 1 - sum(len(name.encode()) + len(text) + 4 for name, text in added) + bool(added)
    for name, text in added:
        value = start + len(name.encode()) + 3
        after[name] = MemberSpan(start, value, value + len(text))
        start = value + len(text) + 1
    return made, after


def find_removals(raw: bytes, spans: Mapping[str, MemberSpan], names: Iterable[str]) -> list[tuple[int, int]]:
    """Returns the ranges to cut out of `raw` to remove these members of an object, in the order of the text.

    Args:
        raw: the text.
        spans: where the members of the object stand in it.
        names: those to remove; one that is not there is no fault.
    """
    cuts: list[tuple[int, int]] = []
    ends = False
    for name in names:
        field = spans.get(name)
        if field is not None:
            end = _next_member(raw, field.end)
            ends = ends or end == field.end
            cuts.append((field.start, end))
    cuts.sort()
    if ends:  # with the last member goes the comma before, and with those in front of it as well
        start, end = cuts.pop()
        while cuts and cuts[-1][1] == start:
            start = cuts.pop()[0]
        comma = raw.rfind(b",", 0, start)
        cuts.append((start if comma < 0 or raw.rfind(b"{", comma, start) >= 0 else comma, end))
    return cuts


def _next_member(raw: bytes, end: int) -> int:
    """Returns the start of the member that follows the one ending at `end`, or `end` if there is none.

    Between them there is nothing but white space and a comma, however much of it: this finds them at the speed of
    memchr.
    """
    comma = raw.find(b",", end)
    if comma < 0 or raw.find(b"}", end, comma) >= 0:
        return end
    return raw.index(b'"', comma)


def remove_ranges(raw: bytes, cuts: Iterable[tuple[int, int]]) -> bytes:
    """`raw` without these parts, which are in order."""
    text = memoryview(raw)
    pieces: list[memoryview] = []
    at = 0
    for start, end in cuts:
        pieces.append(text[at:start])
        at = end
    pieces.append(text[at:])
    return b"".join(pieces)


def shift_spans(
    spans: Mapping[str, MemberSpan], cuts: Iterable[tuple[int, int]], origin: int = 0
) -> dict[str, MemberSpan]:
    """Returns the positions of members after these ranges, in order, were cut out, from `origin` of the new text.

    Members that were cut out have no position.
    """
    after: dict[str, MemberSpan] = {}
    coming = iter(cuts)
    start, end = next(coming, _NO_CUT)
    gone = origin

    def place(at: int) -> int:
        nonlocal start, end, gone
        while end <= at:
            gone += end - start
            start, end = next(coming, _NO_CUT)
        return at - gone

    for name, field in spans.items():
        begin = place(field.start)
        if not start <= field.start < end:
            after[name] = MemberSpan(begin, place(field.value), place(field.end))
    return after
