"""Minor versions of the protocol: what both sides speak, and documents said in the words of another one.

What each minor version has added stands in `ADDED_MEMBERS`, what shall go one day in `DEPRECATED_MEMBERS`, and both in
`spec/1.0/versions.json` too; section 6 of the spec says what follows. A member is dropped only because the reader's
version does not have it, and never if it must be understood.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Final, cast

from kvparams.codec import dump, parse
from kvparams.errors import KVParamsError, Problem, UnsupportedVersion
from kvparams.params import PROTOCOL_VERSION, VERSION_FORM, KVTransferParams

__all__ = [
    "ADDED_MEMBERS",
    "DEPRECATED_MEMBERS",
    "LOWEST_VERSION",
    "SUPPORTED_VERSIONS",
    "Deprecation",
    "LossyDowngrade",
    "NoCommonVersion",
    "downgrade",
    "downgrade_for_reader",
    "find_deprecated",
    "negotiate",
    "negotiate_with_engine",
    "upgrade",
]

SUPPORTED_VERSIONS: Final = (PROTOCOL_VERSION,)
"""The highest version of each major version that is spoken here; whoever speaks it speaks all before it."""
LOWEST_VERSION: Final = "1.0"
"""What is written to who does not say what it speaks."""
ADDED_MEMBERS: Final[Mapping[str, frozenset[str]]] = {}
"""Members by the minor version that has added them, named as in `must_understand`, and values, named `mode=broadcast`;
all others are of 1.0."""

_FORM: Final = re.compile(r"(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})")


def _a_year_after(day: date) -> date:
    leap = (day.month, day.day) == (2, 29)
    return date(day.year + 1, 3, 1) if leap else day.replace(year=day.year + 1)


@dataclass(frozen=True, slots=True)
class Deprecation:
    """A member that goes with the next major version, and not before a year is over.

    Raises:
        ValueError: the year would be shorter.
    """

    member: str
    """Named as in `must_understand`."""
    since: str
    """The minor version that deprecates it."""
    day: date
    """On which that version was released."""
    until: date
    """It stays at least so long."""
    instead: str | None = None
    """The member that says it now."""

    def __post_init__(self) -> None:
        if self.until < _a_year_after(self.day):
            raise ValueError(f"{self.member} is deprecated for less than twelve months")

    def __str__(self) -> str:
        instead = "" if self.instead is None else f"; {self.instead} says it now"
        return f"{self.member}: deprecated since {self.since}, goes with 2.0, not before {self.until}{instead}"


DEPRECATED_MEMBERS: Final[tuple[Deprecation, ...]] = ()
"""What every 1.y still reads and nobody should write any more."""


class NoCommonVersion(KVParamsError):
    """Two sides speak no version that the other one speaks too."""

    def __init__(self, ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:
        super().__init__(ours, theirs)
        self.ours, self.theirs = ours, theirs

    def __str__(self) -> str:
        theirs = ", ".join(self.theirs) or "nothing that can be read"
        return f"no version of the protocol is spoken by both: here {', '.join(self.ours)}, there {theirs}"


class LossyDowngrade(KVParamsError):
    """The reader's version does not have members that must be understood, or values that are there."""

    def __init__(self, version: str, members: tuple[str, ...]) -> None:
        super().__init__(version, members)
        self.version, self.members = version, members

    def __str__(self) -> str:
        return f"version {self.version} of the protocol cannot say what must be understood: {', '.join(self.members)}"


def negotiate(ours: Iterable[str], theirs: Iterable[object]) -> str:
    """The highest version that both sides speak.

    Args:
        ours: of each major version the highest, for example `SUPPORTED_VERSIONS`.
        theirs: the same, as the other side has said it. What is no version (`"1.01"`, `"1.1-rc"`, 1.1) is passed over:
            who says it may mean anything by it.

    Raises:
        NoCommonVersion: there is none.
    """
    mine, others = _highest(ours), _highest(theirs)
    both = mine.keys() & others.keys()
    if not both:
        raise NoCommonVersion(_written(mine), _written(others))
    major = max(both)
    return f"{major}.{min(mine[major], others[major])}"


def negotiate_with_engine(models: Mapping[str, object]) -> str:
    """The highest version that is spoken here and by an engine, by its answer to `GET /v1/models`.

    Raises:
        NoCommonVersion: there is none.
    """
    said = models.get("kvparams_versions")
    return negotiate(SUPPORTED_VERSIONS, cast("list[object]", said) if isinstance(said, list) else [LOWEST_VERSION])


def upgrade(document: Mapping[str, object], to: str) -> dict[str, object]:
    """The document as one of a later minor version; nothing else changes, as minor versions only add.

    Raises:
        UnsupportedVersion: of the document or `to`.
        ValueError: `to` is not later.
    """
    if _minor(to) < _minor(document.get("version")):
        raise ValueError(f"{to} is not later than {document['version']}")
    return {**document, "version": to}


def downgrade(
    document: Mapping[str, object], to: str, added: Mapping[str, frozenset[str]] = ADDED_MEMBERS
) -> dict[str, object]:
    """Returns the document as one of an earlier minor version, without the members that came after it.

    Members that no version here knows stay.

    Args:
        document: the JSON object. Never modified; what stays is shared with the result.
        to: the version wanted.
        added: which version has added what.

    Raises:
        LossyDowngrade: some of these members must be understood, or are there with a value that has come after it.
        UnsupportedVersion: of the document or `to`.
        ValueError: `to` is not earlier.
    """
    if _minor(to) > _minor(document.get("version")):
        raise ValueError(f"{to} is not earlier than {document['version']}")
    later = {path for version, paths in added.items() if _minor(version) > _minor(to) for path in paths}
    critical = cast("Iterable[str] | None", document.get("must_understand")) or ()
    values = {entry for entry in later if "=" in entry}
    lost = (*(path for path in critical if path in later), *sorted(one for one in values if _says(document, one)))
    if lost:
        raise LossyDowngrade(to, lost)
    kept = dict(document)
    for path in later - values:
        kept = _without(kept, path.split("."))
    return {**kept, "version": to}


def downgrade_for_reader(params: KVTransferParams, theirs: str) -> KVTransferParams:
    """A document of ours for one who speaks `theirs`: in the highest version that both speak.

    Raises:
        LossyDowngrade: see `downgrade`.
        NoCommonVersion: `theirs` is another major version.
    """
    if params.version == theirs:  # nearly always
        return params
    version = negotiate((params.version,), (theirs,))
    return params if version == params.version else parse(downgrade(dump(params), version))


def find_deprecated(
    document: Mapping[str, object], deprecated: Iterable[Deprecation] = DEPRECATED_MEMBERS
) -> tuple[Deprecation, ...]:
    """Returns the members of a document that should no longer be written."""
    return tuple(one for one in deprecated if _has(document, one.member.split(".")))


def _highest(versions: Iterable[object]) -> dict[int, int]:
    found: dict[int, int] = {}
    for text in versions:
        match = _FORM.fullmatch(text) if isinstance(text, str) else None
        if match is not None:
            major, minor = int(match[1]), int(match[2])
            found[major] = max(minor, found.get(major, 0))
    return found


def _written(highest: Mapping[int, int]) -> tuple[str, ...]:
    return tuple(f"{major}.{minor}" for major, minor in sorted(highest.items()))


def _minor(version: object) -> int:
    if not isinstance(version, str) or re.fullmatch(VERSION_FORM, version) is None:
        raise UnsupportedVersion((Problem(("version",), "version", "this version is not spoken here; 1.y is"),))
    return int(version.removeprefix("1."))


def _without(value: Mapping[str, object], path: list[str]) -> dict[str, object]:
    first, *rest = path
    inner = value.get(first)
    if not rest:
        return {name: member for name, member in value.items() if name != first}
    if not isinstance(inner, Mapping):
        return dict(value)
    return {**value, first: _without(cast("Mapping[str, object]", inner), rest)}


def _says(document: Mapping[str, object], entry: str) -> bool:
    name, _, value = entry.partition("=")
    return document.get(name) == value


def _has(value: object, path: list[str]) -> bool:
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = cast("Mapping[str, object]", value)[name]
    return True
