"""Tests the vectors of messages that engines write: each is judged, translated, and written back unchanged.

Each vector cites its source.
"""

import json
from functools import cache
from typing import Any

import pytest

from kvparams import InvalidParams, dump
from kvparams.dialects.message import DialectMessage
from kvparams.dialects.registry import load_tables
from kvparams.dialects.table import LEGS
from kvparams.dialects.translation import decode_message, encode_message
from kvparams.dialects.value_types import DecimalTextType, IntegerType, ListType, UnionType, ValueType
from tests.support.kvparams.dialect_messages import same
from tests.support.kvparams.spec_folder import DIALECTS
from tests.support.kvparams.spec_folder import VECTORS as RELEASED

VECTORS = RELEASED / "dialects"
Case = dict[str, Any]


@cache
def files() -> dict[str, Case]:
    """Those of the release, and of dialects that have come since."""
    later = [path for path in (DIALECTS / "vectors").glob("*.json") if not (VECTORS / path.name).exists()]
    read = [json.loads(path.read_bytes()) for path in sorted([*VECTORS.glob("*.json"), *later])]
    return {content["dialect"]: content for content in read}


def cases() -> list[tuple[str, Case]]:
    return [(name, case) for name, content in files().items() for case in content["cases"]]


def name_of(value: object) -> str | None:
    return value["name"] if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType]


def test_every_dialect_has_vectors_of_every_leg_and_of_what_is_wrong() -> None:
    registered = load_tables()
    assert files().keys() == registered.keys()
    for name, content in files().items():
        assert (content["kind"], content["extension"], content["mode"]) == (
            "dialect",
            registered[name].extension,
            registered[name].mode,
        )
        valid = {case["phase"] for case in content["cases"] if case["valid"]}
        assert valid >= {"prefill", "prefill_result", "decode"}, name
        assert any(not case["valid"] for case in content["cases"]), name
        assert all(any(digit.isdigit() for digit in case["source"]) for case in content["cases"]), "file and version"


@pytest.mark.parametrize(("name", "case"), cases(), ids=name_of)
def test_the_sdk_translates_every_message_as_the_vector_says(name: str, case: Case) -> None:
    """Spec-mandated, 1.0#15.1, 1.0#15.2: a native key that has become a member is nowhere else in the document."""
    table, engine = load_tables()[name], case.get("engine")
    told = case["message"]
    message = DialectMessage(told["request_id"], told["body"], told.get("headers", {}))
    if not case["valid"]:
        with pytest.raises(InvalidParams) as refused:
            decode_message(table, message, case["phase"], engine)
        found = [{"path": list(problem.path), "kind": problem.kind} for problem in refused.value.problems]
        assert sorted(found, key=json.dumps) == sorted(case["problems"], key=json.dumps)
        return
    params = decode_message(table, message, case["phase"], engine)
    assert same(dump(params), case["document"])
    assert same(encode_message(table, params, engine).to_json(), told)


def integral(form: ValueType) -> bool:
    """Whether integers stand in it."""
    if isinstance(form, UnionType):
        return any(map(integral, form.forms))
    return integral(form.inner) if isinstance(form, ListType) else isinstance(form, IntegerType | DecimalTextType)


def test_every_integer_of_every_dialect_has_a_vector_beyond_its_bound() -> None:
    """Engines bound none of them: a number of ranks or of blocks is work that somebody else is made to do."""
    seen = 0
    for name, table in load_tables().items():
        later = DIALECTS / "vectors" / f"{name}.json"
        cases = [*files()[name]["cases"], *(json.loads(later.read_bytes())["cases"] if later.exists() else ())]
        refused = {
            tuple(problem["path"])
            for case in cases
            for problem in case.get("problems", ())
            if problem["kind"] == "range"
        }
        for row in table.native_keys:
            paths = {table.path(row, leg) for leg in LEGS.values() if leg in row.legs and leg in table.container_paths}
            shown = {path[1:] if path[0] == "body" else path for path in paths}
            if integral(row.value_type):
                seen += 1
                assert any(path[: len(one)] == one for path in refused for one in shown), (name, row.name)
    assert seen > 100
