"""Tests the negotiation of versions, and documents of another minor version: laws, and what must not be lost."""

import json
from copy import deepcopy
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvparams import dump, parse
from kvparams.dialects.store import STORE
from kvparams.errors import InvalidParams, UnsupportedVersion
from kvparams.instances import RequestFacts
from kvparams.params import KNOWN_PATHS, PROTOCOL_VERSION
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import LegResult
from kvparams.versions import (
    ADDED_MEMBERS,
    DEPRECATED_MEMBERS,
    SUPPORTED_VERSIONS,
    Deprecation,
    LossyDowngrade,
    NoCommonVersion,
    downgrade,
    downgrade_for_reader,
    find_deprecated,
    negotiate,
    upgrade,
)
from tests.support.kvparams.next_minor import NEXT, NEXT_ADDED, NEXT_DEPRECATED
from tests.support.kvparams.planning import Table, fleet_of

TABLE = json.loads((Path(__file__).parents[4] / "spec" / "1.0" / "versions.json").read_bytes())
REQUIRED: dict[str, Any] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill_result",
    "mode": "store",
}
UNKNOWN = st.dictionaries(
    st.sampled_from(["x", "priority2", "onces"]), st.none() | st.integers(0, 9) | st.just({"lease": [1]}), max_size=2
)
VERSIONS = st.integers(0, 9999).map("1.{}".format)


@st.composite
def documents(draw: st.DrawFn, version: str = "1.0", *, later: bool = False) -> dict[str, Any]:
    """Valid documents with members that nobody knows; `later`: those of the next minor version too."""
    lease: dict[str, Any] = {"ttl_ms": draw(st.integers(1, 9)), **draw(UNKNOWN)}
    made: dict[str, Any] = {**REQUIRED, "version": version, **draw(UNKNOWN)}
    if later and draw(st.booleans()):
        lease["renewable"] = draw(st.none() | st.booleans())
    if later and draw(st.booleans()):
        made["priority"] = draw(st.none() | st.integers(0, 9))
    if draw(st.booleans()):
        made["lease"] = draw(st.just(lease) | st.none())
    if draw(st.booleans()):
        made["must_understand"] = draw(st.lists(st.sampled_from(["lease", "lease.ttl_ms", "mode"])) | st.none())
    return made


# negotiation


@given(VERSIONS, VERSIONS)
def test_both_speak_the_lower_of_two_minor_versions_whoever_asks(one: str, other: str) -> None:
    """Spec-mandated, 1.0#6.6: as numbers, not as text."""
    found = negotiate([one], [other])
    assert found == negotiate([other], [one]) == f"1.{min(int(one[2:]), int(other[2:]))}"
    assert found in (one, other)
    assert negotiate([one, other], [found]) == found


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (["1.0"], ["1.0"], "1.0"),
        (["1.10"], ["1.9"], "1.9"),
        (["1.2", "2.0"], ["1.4"], "1.2"),
        (["1.2", "2.5"], ["2.1", "1.9"], "2.1"),
        (["1.2", "3.0"], ["2.1", "1.1"], "1.1"),
        (["1.2"], ["9.9", "1.01", "1.1-rc1", "v1.2", "", None, 1.1, ["1.2"], "1.0"], "1.0"),
    ],
)
def test_what_both_speak(ours: list[str], theirs: list[object], expected: str) -> None:
    """Spec-mandated, 1.0#6.6: what is no version is passed over."""
    assert negotiate(ours, theirs) == expected


@pytest.mark.parametrize(
    "theirs", [[], ["2.0"], ["0.9"], ["1.01"], ["1.10000"], ["\uff11.0"], ["1.0\n"], [1.0], [{}], "1.0"]
)
def test_where_no_version_is_common_that_is_an_error_of_ours(theirs: Any) -> None:
    """Spec-mandated, 1.0#6.6."""
    with pytest.raises(NoCommonVersion, match="no version of the protocol is spoken by both"):
        negotiate(["1.0"], theirs)


# upgrade and downgrade


@given(documents(), VERSIONS)
def test_upgrade_then_downgrade_changes_nothing(document: dict[str, Any], to: str) -> None:
    before = deepcopy(document)
    there = upgrade(document, to)
    assert (document, there) == (before, {**before, "version": to})
    assert downgrade(there, "1.0", NEXT_ADDED) == before
    assert document == before


@given(documents(NEXT, later=True))
def test_downgrade_takes_away_what_has_been_added_and_nothing_else(document: dict[str, Any]) -> None:
    """Spec-mandated, 1.0#6.7."""
    before = deepcopy(document)
    found = downgrade(document, "1.0", NEXT_ADDED)
    assert document == before
    before["version"] = "1.0"
    before.pop("priority", None)
    if before.get("lease") is not None:
        before["lease"].pop("renewable", None)
    assert found == before
    assert dump(parse(found)) == found
    assert downgrade(found, "1.0", NEXT_ADDED) == found


@given(documents(NEXT, later=True))
def test_within_its_own_version_a_document_stays_as_it_is(document: dict[str, Any]) -> None:
    assert upgrade(document, NEXT) == document == downgrade(document, NEXT, NEXT_ADDED)


@given(documents(NEXT, later=True), st.booleans())
def test_what_must_be_understood_is_never_dropped(document: dict[str, Any], there: bool) -> None:
    """Spec-mandated, 1.0#6.8: named, and not there at all, it is as critical."""
    if there:
        assume(document.get("lease"))
        document["lease"]["once"] = True
    document["must_understand"] = [*(document.get("must_understand") or ()), "lease.once", "priority"]
    with pytest.raises(LossyDowngrade, match=r"lease\.once, priority") as caught:
        downgrade(document, "1.0", NEXT_ADDED)
    assert (caught.value.version, caught.value.members) == ("1.0", ("lease.once", "priority"))
    assert downgrade(document, NEXT, NEXT_ADDED) == document
    with pytest.raises(InvalidParams) as old:  # and who speaks 1.0 refuses it too, should it get there
        parse(document)
    assert {problem.kind for problem in old.value.problems} == {"critical"}


@pytest.mark.parametrize("wrong", ["2.0", "1.01", "1.10000", "", None, 1.0])
def test_only_versions_that_are_spoken_are_gone_to(wrong: Any) -> None:
    for move in (upgrade, downgrade):
        with pytest.raises(UnsupportedVersion):
            move(REQUIRED, wrong)
        with pytest.raises(UnsupportedVersion):
            move({**REQUIRED, "version": wrong}, "1.0")


def test_there_is_no_upgrade_to_an_earlier_version_and_no_downgrade_to_a_later_one() -> None:
    with pytest.raises(ValueError, match=r"1\.0 is not later than 1\.1"):
        upgrade({**REQUIRED, "version": NEXT}, "1.0")
    with pytest.raises(ValueError, match=r"1\.1 is not earlier than 1\.0"):
        downgrade(REQUIRED, NEXT)


def test_a_reader_is_given_what_both_speak() -> None:
    ours = parse({**REQUIRED, "version": "1.7", "new": 1})
    assert downgrade_for_reader(ours, "1.7") is downgrade_for_reader(ours, "1.9") is ours
    assert dump(downgrade_for_reader(ours, "1.2")) == {**REQUIRED, "version": "1.2", "new": 1}
    with pytest.raises(NoCommonVersion):
        downgrade_for_reader(ours, "2.0")


@given(documents(), VERSIONS)
def test_a_member_that_is_known_is_judged_in_a_document_of_any_version(document: dict[str, Any], version: str) -> None:
    """Spec-mandated, 1.0#6.4."""
    document["version"] = version
    assert dump(parse(document)) == document
    document["lease"] = {"ttl_ms": 0}
    with pytest.raises(InvalidParams) as caught:
        parse(document)
    assert [(problem.path, problem.kind) for problem in caught.value.problems] == [(("lease", "ttl_ms"), "range")]


# what a proxy does with it


def planned(result: dict[str, Any], prefill: str, decode: str) -> list[dict[str, Any]]:
    """The documents of both legs, between engines that speak these versions."""
    fleet = [replace(one, version=prefill if one.role == "prefill" else decode) for one in fleet_of()]
    table = Table(STORE, fleet)
    plan = PrefillThenDecode().legs(RequestFacts("r", "t", "m", 1, 1, None, None), table)
    legs = table.run(plan, lambda leg: LegResult({} if leg.answers_client else {"kvparams": result}))
    return [json.loads(leg.changes["kv_transfer_params"] or b"{}")["kvparams"] for leg in legs]


def test_the_names_of_what_must_be_understood_go_with_the_members_that_are_handed_on() -> None:
    """Spec-mandated, 1.0#6.9, 1.0#6.5: `usage` is not handed on, and its name is not."""
    lease = {"ttl_ms": 7, "unknown": 1}
    named = ["lease.ttl_ms", "usage.saved_bytes", "lease", "load_keys"]
    result = {**REQUIRED, "lease": lease, "load_keys": [], "usage": {}, "must_understand": named}
    prefill, decode = planned(result, "1.0", "1.0")
    assert (prefill["version"], decode["version"]) == ("1.0", "1.0")
    assert decode["lease"] == lease
    assert decode["must_understand"] == ["lease.ttl_ms", "lease", "load_keys"]
    assert "must_understand" not in planned({**result, "must_understand": ["usage"]}, "1.0", "1.0")[1]
    assert "must_understand" not in planned({**result, "must_understand": None}, "1.0", "1.0")[1]


# the tables


def faults(added: Any, deprecated: Any, known: frozenset[str], spoken: str) -> list[str]:
    """What does not fit together."""
    later = [path for paths in added.values() for path in paths]
    found = [path for path in later if path.partition("=")[0] not in known or later.count(path) > 1]
    found += [version for version in added if negotiate([version], [spoken]) != version or version == "1.0"]
    found += [one.member for one in deprecated if one.member not in known or one.member in added.get(one.since, ())]
    return found + [one.since for one in deprecated if negotiate([one.since], [spoken]) != one.since]


def test_the_tables_fit_what_is_known_here() -> None:
    """Ours, 1.0#6.10: a deprecated member is still read."""
    assert faults(ADDED_MEMBERS, DEPRECATED_MEMBERS, KNOWN_PATHS, PROTOCOL_VERSION) == []
    known = KNOWN_PATHS | NEXT_ADDED[NEXT]
    assert faults(NEXT_ADDED, NEXT_DEPRECATED, known, NEXT) == []
    assert faults(NEXT_ADDED, NEXT_DEPRECATED, KNOWN_PATHS, NEXT) != []
    assert faults(NEXT_ADDED, NEXT_DEPRECATED, known, "1.0") != []
    assert faults(NEXT_ADDED, NEXT_DEPRECATED, known - {"store_keys"}, NEXT) == ["store_keys"]
    assert faults({**NEXT_ADDED, "1.2": {"priority"}}, (), known, "1.2") == ["priority", "priority"]


def test_the_spec_has_the_same_tables(schema: dict[str, Any]) -> None:
    """Spec-mandated: strangers read `versions.json`."""
    assert TABLE["version"] == PROTOCOL_VERSION == SUPPORTED_VERSIONS[0]
    assert TABLE["added"] == {version: sorted(paths) for version, paths in ADDED_MEMBERS.items()}
    assert TABLE["deprecated"] == [
        {"member": d.member, "since": d.since, "day": str(d.day), "until": str(d.until), "instead": d.instead}
        for d in DEPRECATED_MEMBERS
    ]
    marked = {path for path in KNOWN_PATHS if definition(schema, path).get("deprecated")}
    assert marked == {one.member for one in DEPRECATED_MEMBERS}


def definition(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Where the schema speaks of a member."""
    found: dict[str, Any] = {"$ref": "#/$defs/document"}
    for name in path.split("."):
        for choice in [found, *found.get("anyOf", ())]:
            target = schema["$defs"].get(choice.get("$ref", "").removeprefix("#/$defs/"), choice)
            if name in target.get("properties", {}):
                found = target["properties"][name]
                break
        else:
            raise AssertionError(path)
    return found


@pytest.mark.parametrize(
    ("day", "until", "enough"),
    [
        (date(2027, 1, 31), date(2028, 1, 31), True),
        (date(2027, 1, 31), date(2028, 1, 30), False),
        (date(2028, 2, 29), date(2029, 3, 1), True),
        (date(2028, 2, 29), date(2029, 2, 28), False),
        (date(2027, 1, 31), date(2026, 1, 31), False),
    ],
)
def test_what_is_deprecated_stays_for_twelve_months(day: date, until: date, enough: bool) -> None:
    """Spec-mandated, 1.0#6.10."""
    if enough:
        assert "not before " + str(until) in str(Deprecation("store_keys", NEXT, day, until))
    else:
        with pytest.raises(ValueError, match="store_keys is deprecated for less than twelve months"):
            Deprecation("store_keys", NEXT, day, until)


def test_what_is_deprecated_is_found_where_it_is_written() -> None:
    assert find_deprecated({**REQUIRED, "store_keys": None}, NEXT_DEPRECATED) == NEXT_DEPRECATED
    assert find_deprecated({**REQUIRED, "lease": {"store_keys": 1}}, NEXT_DEPRECATED) == ()
    assert find_deprecated(REQUIRED, NEXT_DEPRECATED) == ()
    inner = (replace(NEXT_DEPRECATED[0], member="lease.ttl_ms"),)
    assert find_deprecated({**REQUIRED, "lease": {"ttl_ms": 1}}, inner) == inner
    assert (
        find_deprecated({**REQUIRED, "lease": None}, inner) == find_deprecated({**REQUIRED, "lease": {}}, inner) == ()
    )
