"""A dialect as data: which native keys there are, where they stand, on which legs, and what they are in our document.

A dialect is a `DialectTable` of `NativeKey`s, and each row reads like the engine's own documentation. A native key is
either one member of the document, or kept under the table's name in `extensions`; never both.

Legs are letters: P the prefill request, R its answer, D the decode request, A its answer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, cast, get_args

from pydantic import ValidationError

from kvparams.dialects.message import ABSENT, DialectMessage, MessagePath, get_at, parse_path
from kvparams.dialects.value_types import FLAG, JSON, ValueType
from kvparams.errors import InvalidParams, Problem
from kvparams.params import KNOWN_PATHS, Mode, Phase
from kvparams.validation import to_invalid_params

__all__ = [
    "LEGS",
    "PHASES",
    "AddressKind",
    "DialectTable",
    "LegCode",
    "LegOrder",
    "NativeKey",
    "is_older_release",
    "is_required",
    "validate_message",
]

LegCode = Literal["P", "R", "D", "A"]
AddressKind = Literal["host", "port", "url"]
"""Which part of an address a key is: a name or an IP address; a port; both, as `host:port` or in a URL. Each may be a
list. An object that is a `url` holds URLs somewhere inside."""
LegOrder = Literal["prefill first", "together", "either"]
"""In which order the legs run: decode after prefill has answered; both at once; as the deployment likes."""

LEGS: Final[Mapping[Phase, LegCode]] = {"prefill": "P", "prefill_result": "R", "decode": "D", "decode_result": "A"}
PHASES: Final[Mapping[LegCode, Phase]] = {leg: phase for phase, leg in LEGS.items()}
_VERSION: Final = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6}){0,3}")
_HEADER: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,128}")
_VISIBLE: Final = re.compile(r"[!-~]{1,256}")
_EXTENSION: Final = re.compile(r"(?=.{1,128}\Z)[a-z0-9-]+(?:\.[a-z0-9-]+)+")  # as the protocol's ExtensionName
_MOST_HEADERS: Final = 64
_OWN: Final = ("version", "request_id", "phase", "mode", "must_understand", "signature", "extensions")
_MEMBERS: Final = {path for path in KNOWN_PATHS if path.partition(".")[0] not in _OWN} - {"transfer.attempt"}
"""What a row can be: the others are the protocol's, the message's or the table's."""


def _accept(where: str, name: str, value: object, good: bool) -> None:
    if not good:
        raise ValueError(f"{where}: {name} cannot be {value!r}")


def _releases(where: str, since: str | None, until: str | None) -> None:
    for name, release in (("since", since), ("until", until)):
        _accept(where, name, release, release is None or _VERSION.match(release) is not None)


def is_older_release(version: str, than: str) -> bool:
    """Returns True if release `version` came before `than`; both are written as `0.32.0`.

    Further words (`.post1`) are not counted.
    """
    return _numbers(version) < _numbers(than)


def _numbers(version: str) -> tuple[int, ...]:
    found = _VERSION.match(version)
    if found is None:
        raise InvalidParams((Problem(("engine",), "value", "is not a version such as 0.32.0"),))
    numbers = [int(part) for part in found[0].split(".")]
    return tuple(numbers + [0] * (4 - len(numbers)))


@dataclass(frozen=True, slots=True)
class NativeKey:
    """A `NativeKey` is one row of a dialect's table."""

    name: str
    """As it is written; `lmcache.tag.*` stands for every key that begins like this."""
    value_type: ValueType
    legs: str = "PRD"
    """Where engines or routers write it."""
    description: str = ""
    """In words: what it means."""
    required_legs: str = ""
    """The legs that are worth nothing without it."""
    marker_values: Mapping[str, object] = field(default_factory=dict[str, object])
    """By leg: the value by which it says which leg it is."""
    implied_leg: str = ""
    """The leg that it is, where this has a value and nothing else decides."""
    member: str | None = None
    """Which member of our document it is, dotted; None where it has a meaning for the engine alone."""
    member_legs: str | None = None
    """The legs on which it is that member; all of `legs` if not said."""
    default_values: Mapping[str, object] = field(default_factory=dict[str, object])
    """By leg: what routers write where they have nothing to say."""
    parents: tuple[str | int, ...] = ()
    """Objects on the way to it."""
    location: Literal["home", "body", "headers"] = "home"
    """Inside what `DialectTable.container_paths` says, in the body itself, or a header."""
    address: AddressKind | None = None
    """That engines connect to what it says: `kvparams.routing.handoff_verifier` holds it against the instance that said
    it."""
    rank_suffix: str | None = None
    """The end of the value of an engine with data-parallel ranks, before the number of the rank: the verifier
    holds the number against the rank that was asked."""
    since: str | None = None
    """The release of the engine that brought it, in this form."""
    until: str | None = None
    """The release from which on it is no longer there, or no longer in this form."""

    def fits(self, engine: str | None) -> bool:
        """Returns True if an engine of this release knows the key; None stands for any release."""
        if engine is None:
            return True
        return not (self.since and is_older_release(engine, self.since)) and not (
            self.until and not is_older_release(engine, self.until)
        )

    def check(self, where: str) -> None:
        """Refuse a field that says what it cannot; `where` begins the error's message.

        Raises:
            ValueError: one does.
        """
        _accept(where, "name", self.name, bool(self.name))
        _accept(where, "legs", self.legs, set(self.legs) <= set(PHASES))
        of = () if self.member_legs is None else self.member_legs
        legs = {
            "required_legs": self.required_legs,
            "marker_values": self.marker_values,
            "implied_leg": self.implied_leg,
            "member_legs": of,
            "default_values": self.default_values,
        }
        for field_name, said in legs.items():
            _accept(where, field_name, said, set(said) <= set(self.legs))
        _accept(where, "member", self.member, self.member is None or self.member in _MEMBERS)
        _accept(where, "location", self.location, self.location in ("home", "body", "headers"))
        _accept(where, "address", self.address, self.address is None or self.address in get_args(AddressKind))
        _releases(where, self.since, self.until)

    def is_member(self, leg: LegCode) -> bool:
        """Returns True if the key is a member of the document on this leg."""
        return self.member is not None and leg in (self.legs if self.member_legs is None else self.member_legs)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DialectTable:
    """A dialect."""

    name: str
    """As it is registered, in the entry-point group `kvparams.dialects`."""
    title: str
    extension: str
    """A domain name backwards, under which `extensions` keeps what only this dialect knows."""
    mode: Mode
    order: LegOrder
    container_paths: Mapping[str, str]
    """For each leg that exists the object that holds the native keys, dotted; empty for the body itself."""
    transfer_id_source: str
    """Who makes the id by which both sides know the transfer, and which it is."""
    software: str
    """What speaks it; `since` and `until` are releases of this."""
    source: str
    """File and version."""
    native_keys: Sequence[NativeKey] = ()
    since: str | None = None
    """The first release that speaks it."""
    until: str | None = None
    """The first release that does not any more."""
    request_id: str | None = None
    """The form of the request id, where it carries more than an id."""
    notes: Sequence[str] = ()
    """What one has to know besides."""
    family: str | None = None
    """What the native keys of several dialects have in common: from one to the other they go as they are."""
    indistinguishable_from: "DialectTable | None" = None
    """Whose messages these are as well: nobody can tell the two apart."""

    def __post_init__(self) -> None:
        """Refuse what would only go wrong when a message comes.

        Raises:
            ValueError: a field of the table or of one of its rows says what it cannot; the message names both.
        """
        _accept(self.name, "extension", self.extension, _EXTENSION.fullmatch(self.extension) is not None)
        _accept(self.name, "mode", self.mode, self.mode in get_args(Mode))
        _accept(self.name, "order", self.order, self.order in get_args(LegOrder))
        _accept(
            self.name,
            "container_paths",
            list(self.container_paths),
            bool(self.container_paths) and set(self.container_paths) <= set(PHASES),
        )
        _releases(self.name, self.since, self.until)
        for row in self.native_keys:
            row.check(f"{self.name}, row {row.name!r}")

    def __repr__(self) -> str:
        return f"DialectTable({self.name!r})"

    @property
    def fits(self) -> str:
        """Returns the releases that speak the dialect, in words."""
        words = [f"from {self.since}" if self.since else "", f"before {self.until}" if self.until else ""]
        return " ".join([self.software, *filter(None, words)])

    def home(self, leg: LegCode) -> MessagePath:
        """The path to the object that holds the native keys."""
        return parse_path(self.container_paths[leg])

    def path(self, row: NativeKey, leg: LegCode) -> MessagePath:
        """Returns the path of the row's key, which begins with `body` or `headers`."""
        if row.location == "headers":
            return ("headers", row.name)
        before = self.home(leg) if row.location == "home" else ()
        return ("body", *before, *row.parents, row.name)

    def known(self, engine: str | None = None) -> Iterator[NativeKey]:
        """The rows of that release."""
        return (row for row in self.native_keys if row.fits(engine))


def validate_message(
    table: DialectTable, message: DialectMessage, leg: LegCode, engine: str | None = None
) -> list[Problem]:
    """Returns every problem of a message on this leg.

    Paths begin with `request_id` or `headers`, or are paths in the body.
    """
    problems = _outline(table, message, leg)
    if engine is not None and not NativeKey("", FLAG, since=table.since, until=table.until).fits(engine):
        problems.append(Problem(("engine",), "value", f"speaks no {table.name}: that is {table.fits}"))
    if problems:
        return problems
    tree = {"body": message.body, "headers": message.headers}
    blocked = _blocked(table, tree, leg)
    problems += blocked.values()
    found: dict[MessagePath, list[NativeKey]] = {}
    for row in table.known(engine):
        for path in _paths(table, row, tree, leg):
            found.setdefault(path, []).append(row)
    for path, rows in found.items():
        value = get_at(tree, path)
        shown = path[1:] if path[0] == "body" else path
        if any(shown[:length] in blocked for length in range(1, len(shown))):
            continue
        if value is ABSENT or value is None:
            if any(is_required(row, leg, engine) for row in rows):
                problems.append(Problem(shown, "missing", "Field required"))
        else:
            fault = _find_fault(rows, value, shown)
            if fault is not None:
                problems.append(fault)
            elif any(leg in row.marker_values and row.marker_values[leg] != value for row in rows):
                problems.append(Problem(shown, "value", "is of another leg"))
    return problems


def _find_fault(rows: Sequence[NativeKey], value: object, path: MessagePath) -> Problem | None:
    """Returns what is wrong with a value in its latest form; None if it has one of the forms."""
    latest: Problem | None = None
    for row in reversed(rows):
        fault = row.value_type.find_problem(value, path)
        if fault is None:
            return None
        latest = latest or fault
    return latest


def is_required(row: NativeKey, leg: LegCode, engine: str | None) -> bool:
    """Returns True if the key is required on this leg.

    A key that came with some release is required only of an engine that is known to have that release.
    """
    if leg in row.marker_values:
        return True
    return leg in row.required_legs and (row.since is None or engine is not None)


def _outline(table: DialectTable, message: DialectMessage, leg: LegCode) -> list[Problem]:
    problems: list[Problem] = []
    if _VISIBLE.fullmatch(message.request_id) is None:
        problems.append(Problem(("request_id",), "value", "is not 1 to 256 visible ASCII characters"))
    elif table.request_id is not None and re.fullmatch(table.request_id, message.request_id) is None:
        problems.append(Problem(("request_id",), "value", "is not of the form that this dialect gives it"))
    if len(message.headers) > _MOST_HEADERS:
        problems.append(Problem(("headers",), "length", f"at most {_MOST_HEADERS} headers"))
    for name, value in message.headers.items():
        if _HEADER.fullmatch(name) is None or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            problems.append(Problem(("headers", name), "value", "a header has a name in lower case, and text"))
    try:
        JSON.validate_python(_unknown(table, message.body, leg))
    except ValidationError as error:
        problems += to_invalid_params(error).problems
    return problems


def _unknown(table: DialectTable, body: Mapping[str, object], leg: LegCode) -> dict[str, object]:
    """The body without what the rows judge: a list of token ids may be longer than one that nobody understands."""
    rest = dict(body)
    for row in table.native_keys:
        path = table.path(row, leg)
        if path[0] != "body":
            continue
        holder: object = rest
        for part in path[1:-1]:
            inner = get_at(holder, (part,))
            if isinstance(inner, dict):
                inner = dict(cast("Mapping[str, object]", inner))
            elif isinstance(inner, list):
                inner = list(cast("list[object]", inner))
            else:
                break
            cast("dict[str | int, object]", holder)[part] = inner
            holder = inner
        else:
            if isinstance(holder, dict):
                cast("dict[object, object]", holder).pop(path[-1], None)
    return rest


def _blocked(table: DialectTable, tree: Mapping[str, object], leg: LegCode) -> dict[MessagePath, Problem]:
    """Objects on the way to native keys that are no objects. Null is the same as nothing there."""
    problems: dict[MessagePath, Problem] = {}
    ways = {table.home(leg), *(table.path(row, leg)[1:-1] for row in table.native_keys if row.location != "headers")}
    for way in ways:
        for length in range(1, len(way) + 1):
            value = get_at(tree, ("body", *way[:length]))
            if value is ABSENT or value is None:
                break
            listed = length < len(way) and isinstance(way[length], int)
            if not isinstance(value, list if listed else dict):
                words = "a list" if listed else "an object"
                problems[way[:length]] = Problem(way[:length], "type", f"Input should be {words}")
                break
    return problems


def _paths(table: DialectTable, row: NativeKey, tree: Mapping[str, object], leg: LegCode) -> list[MessagePath]:
    path = table.path(row, leg)
    if not row.name.endswith("*"):
        return [path]
    holder = get_at(tree, path[:-1])
    names: Mapping[str, object] = cast("Mapping[str, object]", holder) if isinstance(holder, dict) else {}
    return [(*path[:-1], name) for name in names if name.startswith(row.name[:-1])]
