"""Removes from a body what only a proxy may say to an engine: see `forbidden_fields.py`."""

from collections.abc import Generator, Mapping
from typing import NamedTuple

from kvparams.jsontext.document import MemberSpan, find_members
from kvparams.jsontext.editing import find_removals, remove_ranges, shift_spans
from kvparams.jsontext.receivers import AbridgedObjectReceiver
from kvparams_proxy.requests.forbidden_fields import FORBIDDEN_MEMBERS, NESTED_CARRIERS, forbidden_nvext_members

__all__ = ["ParsedBody", "StrippedBody", "strip_in_steps"]


class ParsedBody(NamedTuple):
    """A body that is JSON."""

    document: Mapping[str, object]
    spans: Mapping[str, MemberSpan]
    receiver: AbridgedObjectReceiver | None = None
    """What has received it, where it is long."""


class StrippedBody(NamedTuple):
    """A body without what only the proxy may say."""

    body: bytes
    spans: Mapping[str, MemberSpan]
    sampling: Mapping[str, MemberSpan] | None
    """Where the members of a long `sampling_params` stand in its text."""
    features: Mapping[str, MemberSpan] | None
    """The same of long `features`."""


def strip_in_steps(parsed: ParsedBody, body: bytes) -> Generator[None, None, StrippedBody]:
    """Strips a body, in steps: each of them may copy it, or pass through all of its members."""
    document, spans, receiver = parsed
    gone = [name for name in FORBIDDEN_MEMBERS if name in document]
    cuts: list[tuple[int, int]] = []
    for name, path in NESTED_CARRIERS.items():
        inner = document.get(name)
        if isinstance(inner, str | list):  # an object to no engine that is known; text of one, perhaps, to another
            gone.append(name)
        elif isinstance(inner, dict):
            cuts += _cuts_inside(body, spans[name], path, _long_object(receiver, name), hints=name == "nvext")
            yield
    cuts += find_removals(body, spans, gone)
    cuts.sort()
    after, places = body, spans
    if cuts:
        after = remove_ranges(body, cuts)
        yield
        places = shift_spans(spans, cuts)
        yield
    inside: list[Mapping[str, MemberSpan] | None] = []
    for name in ("sampling_params", "features"):
        long = _long_object(receiver, name)
        inside.append(None if long is None else shift_spans(long.fields, cuts, places[name].value))
        yield
    return StrippedBody(after, places, *inside)


def _cuts_inside(
    body: bytes, place: MemberSpan, path: tuple[str, ...], long: AbridgedObjectReceiver | None, *, hints: bool = False
) -> list[tuple[int, int]]:
    """Returns the cuts in the object at `place`, and in the object in it that `path` leads to.

    `long`: what has received it, if it is long; `hints`: it is `nvext`.
    """
    if long is not None:
        spans = long.fields
    else:
        inside = find_members(body[place.value : place.end])
        spans = {name: MemberSpan(*(place.value + at for at in field)) for name, field in inside.items()}
    gone = [name for name in spans if name in FORBIDDEN_MEMBERS]
    if hints:
        gone += forbidden_nvext_members(spans)
    cuts: list[tuple[int, int]] = []
    if path and (inner := spans.get(path[0])) is not None:
        first = body[inner.value]
        if first == 0x7B:
            cuts = _cuts_inside(body, inner, path[1:], _long_object(long, path[0]))
        elif first in b'"[':
            gone.append(path[0])
    return cuts + find_removals(body, spans, gone)


def _long_object(receiver: AbridgedObjectReceiver | None, name: str) -> AbridgedObjectReceiver | None:
    """Returns what has received this member, if it is a long object."""
    long = None if receiver is None else receiver.long.get(name)
    return long if isinstance(long, AbridgedObjectReceiver) else None
