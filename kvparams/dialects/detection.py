"""Detects the dialect of a message that does not name one.

Detection never guesses. Many dialects share keys (a prefill request of NIXL is one of NixlPush as well); where more
than one fits, the error asks for the connector that the engine is declared with.
"""

import re
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Final, NamedTuple, cast

from kvparams.dialects.message import ABSENT, DialectMessage, get_at, unpack_message
from kvparams.dialects.table import LEGS, PHASES, DialectTable, LegCode, validate_message
from kvparams.errors import KVParamsError, Problem
from kvparams.params import Phase

__all__ = [
    "AmbiguousDialect",
    "DialectMatch",
    "NearMiss",
    "UnrecognizedDialect",
    "detect_dialect",
    "find_matches",
    "nearest_phase",
    "select_native_keys",
]

_MOST_NEAR: Final = 3


class NearMiss(NamedTuple):
    """A dialect that has these keys, and what is wrong with their values."""

    dialect: str
    phase: Phase
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        return f"--dialect {self.dialect} --phase {self.phase} ({self.problems[0]})"


class UnrecognizedDialect(KVParamsError, ValueError):
    """No registered dialect has these keys, or none accepts their values.

    `nearest_phase` names up to three that have most of them.
    """

    def __init__(self, nearest: tuple[NearMiss, ...] = ()) -> None:
        super().__init__(nearest)
        self.nearest = nearest

    def __str__(self) -> str:
        if not self.nearest:
            return "no registered dialect has these keys"
        said = "; or ".join(map(str, self.nearest))
        return f"no registered dialect has these keys with such values; name the dialect (translate: --from): {said}"


class AmbiguousDialect(KVParamsError, ValueError):
    """Several dialects say it with the same keys. `candidates` names them."""

    def __init__(self, candidates: tuple[str, ...]) -> None:
        super().__init__(candidates)
        self.candidates = candidates

    def __str__(self) -> str:
        names = ", ".join(self.candidates)
        return f"this can be any of {names}; say which the engine is declared with: --dialect (translate: --from)"


class DialectMatch(NamedTuple):
    """A dialect in which the message is valid."""

    table: DialectTable
    phases: tuple[Phase, ...]
    """On which legs."""
    known_keys: int
    """Keys that it knows on one of them."""
    foreign_keys: int
    """Keys beside them that it does not."""
    indistinguishable_from: tuple[str, ...] = ()
    """Other dialects whose messages nobody can tell from its own."""

    def __str__(self) -> str:
        if not self.indistinguishable_from:
            return self.table.name
        others = self.indistinguishable_from
        return f"{self.table.name} ({' and '.join(others)} {'write' if len(others) > 1 else 'writes'} the same)"


class _ScoredLeg(NamedTuple):
    table: DialectTable
    leg: LegCode
    known: int
    foreign: int


def detect_dialect(message: DialectMessage, tables: Iterable[DialectTable], phase: Phase | None = None) -> DialectMatch:
    """The one dialect that the message is in.

    Args:
        message: with the members of a dialect, and nothing of the client's own request (see `select_native_keys`).
        tables: the dialects that there are.
        phase: which leg it is, where that is known.

    Raises:
        UnrecognizedDialect: none has these keys, or with these values.
        AmbiguousDialect: several have.
    """
    message = unpack_message(message)
    closest = _closest(message, tables, phase)
    found = [one for one in _valid(message, closest) if not _borrowed(one, message, closest)]
    if not found:
        raise UnrecognizedDialect(_near(message, closest))
    names = {one.table for one in found}
    apart = [one for one in found if one.table.indistinguishable_from not in names]
    if len(apart) > 1:
        raise AmbiguousDialect(tuple(one.table.name for one in apart))
    best = apart[0]
    others = tuple(one.table.name for one in found if one.table.indistinguishable_from is best.table)
    return best._replace(indistinguishable_from=others)


def find_matches(
    message: DialectMessage, tables: Iterable[DialectTable], phase: Phase | None = None
) -> list[DialectMatch]:
    """The dialects that know most of its keys, of those the ones in which it is valid; none that knows none of them."""
    return _valid(message, _closest(message, tables, phase))


def nearest_phase(message: DialectMessage, table: DialectTable, *, answers: bool = False) -> Phase:
    """Returns the leg of that dialect that the message claims to be, or else the one with the fewest faults.

    Faults are problems, and keys that mean nothing on that leg.

    Args:
        message: as for `detect_dialect`.
        table: the dialect.
        answers: whether it looks like an answer, which decides between legs that are as near.
    """

    tree = {"body": message.body, "headers": message.headers}

    def wrong(leg: LegCode) -> tuple[bool, int, int, bool]:
        known, foreign = _count(table, message, leg)
        said = any(
            get_at(tree, table.path(row, leg)) == row.marker_values[leg]
            for row in table.native_keys
            if leg in row.marker_values
        )
        problems = len(validate_message(table, message, leg))
        return not said, problems + foreign, -known, PHASES[leg].endswith("_result") is not answers

    return PHASES[min(_legs(table), key=wrong)]


def _closest(message: DialectMessage, tables: Iterable[DialectTable], phase: Phase | None) -> list[_ScoredLeg]:
    """Returns the dialects with the fewest foreign keys, by leg.

    Keys come before values: one value out of bounds makes no message one of another dialect, to which half of its keys
    are foreign.
    """
    scored: list[_ScoredLeg] = []
    for table in tables:
        legs: list[LegCode] = [leg for leg in _legs(table) if phase in (None, PHASES[leg])]
        scored += [_ScoredLeg(table, leg, *_count(table, message, leg)) for leg in legs]
    scored = [one for one in scored if one.known]
    least = min((one.foreign for one in scored), default=0)
    closest = {one.table for one in scored if one.foreign == least}
    return [one for one in scored if one.table in closest]


def _valid(message: DialectMessage, closest: Iterable[_ScoredLeg]) -> list[DialectMatch]:
    legs: dict[DialectTable, list[_ScoredLeg]] = {}
    for one in closest:
        if not validate_message(one.table, message, one.leg):
            legs.setdefault(one.table, []).append(one)
    found: list[DialectMatch] = []
    for table, valid in legs.items():
        least = min(one.foreign for one in valid)
        phases: tuple[Phase, ...] = tuple(PHASES[one.leg] for one in valid if one.foreign == least)
        phases = _told(table, message, phases) or phases
        found.append(DialectMatch(table, phases, max(one.known for one in valid), least))
    least = min((one.foreign_keys for one in found), default=0)
    return [one for one in found if one.foreign_keys == least]


def _borrowed(match: DialectMatch, message: DialectMessage, closest: Iterable[_ScoredLeg]) -> bool:
    """Returns True if the message is rather a faulty message of another leg of `like`.

    A leg without marks accepts any message.
    """
    near = _near(message, (one for one in closest if one.table is match.table.indistinguishable_from))
    return bool(near and near[0].problems) and near[0].phase not in match.phases


def _near(message: DialectMessage, closest: Iterable[_ScoredLeg]) -> tuple[NearMiss, ...]:
    """Returns for each dialect its leg with the fewest faults, and one of those that cannot be told apart."""
    found: dict[DialectTable, tuple[int, NearMiss]] = {}
    for one in closest:
        problems = tuple(validate_message(one.table, message, one.leg))
        wrong = one.foreign + len(problems)
        if one.table not in found or wrong < found[one.table][0]:
            found[one.table] = wrong, NearMiss(one.table.name, PHASES[one.leg], problems)
    ranked = sorted(
        (each for table, each in found.items() if table.indistinguishable_from not in found), key=itemgetter(0)
    )
    return tuple(near for _, near in ranked[:_MOST_NEAR])


def _told(table: DialectTable, message: DialectMessage, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The first of these legs that a value tells."""
    tree = {"body": message.body, "headers": message.headers}
    for phase in phases:
        leg = LEGS[phase]
        if any(
            leg in row.implied_leg and get_at(tree, table.path(row, leg)) not in (ABSENT, None, [])
            for row in table.native_keys
        ):
            return (phase,)
    return ()


def select_native_keys(table: DialectTable, message: DialectMessage) -> DialectMessage:
    """Selects from a whole request or answer the members that belong to the dialect on any leg."""
    roots = {path[1] for path in _all_paths(table) if path[0] == "body"}
    names = {path[1] for path in _all_paths(table) if path[0] == "headers"}
    return DialectMessage(
        message.request_id,
        {name: value for name, value in message.body.items() if name in roots},
        {name: value for name, value in message.headers.items() if name in names},
    )


def _all_paths(table: DialectTable) -> set[tuple[str | int, ...]]:
    homes = {("body", *table.home(leg)) for leg in _legs(table) if table.home(leg)}
    return homes | {table.path(row, leg) for row in table.native_keys for leg in _legs(table)}


def _legs(table: DialectTable) -> list[LegCode]:
    return [leg for leg in PHASES if leg in table.container_paths]


def _object(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def _count(table: DialectTable, message: DialectMessage, leg: LegCode) -> tuple[int, int]:
    """Keys that the dialect knows on this leg, and those that it does not."""
    tree = {"body": message.body, "headers": message.headers}
    known: set[tuple[str | int, ...]] = set()
    if table.request_id is not None and re.fullmatch(table.request_id, message.request_id):
        known.add(("request_id",))
    for row in table.native_keys:
        path = table.path(row, leg)
        if leg not in row.legs:
            continue
        if row.name.endswith("*"):
            names = [name for name in _object(get_at(tree, path[:-1])) if name.startswith(row.name[:-1])]
            known |= {(*path[:-1], name) for name in names}
        elif get_at(tree, path) is not ABSENT:
            known.add(path)
    ways = {path[:length] for path in known for length in range(1, len(path))}
    return len(known), _foreign(tree, (), known, ways)


def _foreign(value: object, path: tuple[str | int, ...], known: set[tuple[str | int, ...]], ways: object) -> int:
    """Members that are neither known nor on the way to one that is."""
    if path in known:
        return 0
    if path and path not in cast("set[tuple[str | int, ...]]", ways):
        return _leaves(value)
    if isinstance(value, list):
        entries = cast("list[object]", value)
        return sum(_foreign(inner, (*path, index), known, ways) for index, inner in enumerate(entries))
    return sum(_foreign(inner, (*path, name), known, ways) for name, inner in _object(value).items())


def _leaves(value: object) -> int:
    """An object counts as many keys as it has, anything else as one."""
    if isinstance(value, Mapping) and value:
        return sum(_leaves(inner) for inner in _object(cast("object", value)).values())
    return 0 if isinstance(value, Mapping) else 1
