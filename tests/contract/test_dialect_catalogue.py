"""Tests that `spec/dialects/` agrees with today's tables and only adds to what 1.0 froze.

Every vector of a release still holds.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvparams import InvalidParams, dump
from kvparams.dialects.carriers import CARRIERS, lift_message, lower_message, with_original_path
from kvparams.dialects.message import DialectMessage
from kvparams.dialects.registry import load_tables
from kvparams.dialects.translation import decode_message, encode_message
from tests.contract.test_javascript import check
from tests.support.kvparams.dialect_messages import same
from tests.support.kvparams.spec_dialects import CARRIERS_FILE, FILE, carriers_text, text
from tests.support.kvparams.spec_folder import DIALECTS, SPEC, VECTORS

Case = dict[str, Any]
TABLES = load_tables()
LEGS = ("prefill", "prefill_result", "decode")
WORDS = re.compile(r"[0-9]")
UNDATED = {"ec": "were not read", "neuron": "not known here", "trio": "No release"}
"""Dialects without a first release, and what their notes say of it."""


def load(path: Path) -> Any:
    return json.loads(path.read_bytes())


@cache
def cases() -> dict[str, list[Case]]:
    """By dialect what this folder has."""
    return {path.stem: load(path)["cases"] for path in sorted((DIALECTS / "vectors").glob("*.json"))}


@cache
def named() -> dict[tuple[str, str], Case]:
    """By dialect and name: here, and in what was released."""
    paths = [*(VECTORS / "dialects").glob("*.json"), *(DIALECTS / "vectors").glob("*.json")]
    found: dict[tuple[str, str], Case] = {}
    for path in paths:
        for case in load(path)["cases"]:
            assert (path.stem, case["name"]) not in found, "a name stands once"
            found[path.stem, case["name"]] = case
    return found


def told(case: Case) -> DialectMessage:
    message = case["message"]
    return DialectMessage(message["request_id"], message["body"], message.get("headers", {}))


def every() -> list[tuple[str, Case]]:
    return [(name, case) for name, each in cases().items() for case in each]


def name_of(value: object) -> str | None:
    return value["name"] if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType]


@pytest.mark.parametrize(("name", "case"), every(), ids=name_of)
def test_every_message_is_what_its_vector_says(name: str, case: Case) -> None:
    message, carrier = lift_message(told(case))
    assert (None if carrier is None else carrier.name) == case.get("carrier")
    table, engine = TABLES[name], case.get("engine")
    assert WORDS.search(case["source"]), "file and version"
    if not case["valid"]:
        with pytest.raises(InvalidParams) as refused:
            decode_message(table, message, case["phase"], engine)
        problems = [with_original_path(problem, carrier) for problem in refused.value.problems]
        assert [{"path": list(one.path), "kind": one.kind} for one in problems] == case["problems"]
        return
    params = decode_message(table, message, case["phase"], engine)
    assert same(dump(params), case["document"])
    again = lower_message(encode_message(table, params, engine), carrier).to_json()
    assert same(_spelt(again), _spelt(case["message"])), "text may be spelt otherwise"


def _spelt(message: Case) -> Case:
    texts = {carrier.place for carrier in CARRIERS if carrier.text}
    body = {name: json.loads(value) if name in texts else value for name, value in message["body"].items()}
    return {**message, "body": body}


def test_every_file_says_which_dialect_it_is_of() -> None:
    for name in cases():
        content, table = load(DIALECTS / "vectors" / f"{name}.json"), TABLES[name]
        assert (content["kind"], content["dialect"], content["extension"], content["mode"]) == (
            "dialect",
            name,
            table.extension,
            table.mode,
        )


def test_every_connector_has_a_message_of_each_kind_or_a_reason_why_not() -> None:
    rows = load(DIALECTS / "messages.json")
    assert len({row["who"] for row in rows}) == len(rows) > 50
    assert {row["dialect"] for row in rows} == TABLES.keys()
    used: set[str] = set()
    for row in rows:
        for leg in LEGS:
            said: str | dict[str, str] = row[leg]
            if isinstance(said, dict):
                assert len(said["none"]) > 10, "a reason"
                continue
            case = named()[row["dialect"], said]
            assert case["valid"], (row["who"], said)
            assert case["phase"] == leg, (row["who"], said)
            used |= {case["connector"]} if "connector" in case else set()
    in_none = {case["connector"] for _, case in every() if case["valid"]} - used
    assert in_none == {"SGLang /v1/completions", "vLLM OffloadingConnector, P2P tier"}, "more of what 1.0 has"


def test_the_tables_are_those_of_the_code() -> None:
    """Ours: so that strangers can speak them too."""
    assert (FILE.read_text(), CARRIERS_FILE.read_text()) == (text(), carriers_text()), (
        "run  .venv/bin/python -m tests.support.kvparams.spec_dialects"
    )


def test_what_was_released_of_a_dialect_is_still_there() -> None:
    """Each key in its place, with its member and its marks; what is new beside it has come later."""
    now, then = load(FILE), load(SPEC / "dialects.json")
    assert then.keys() <= now.keys()

    def places(table: Case) -> set[str]:
        told = ("name", "in", "inside", "marks", "member", "member_in", "address")
        return {json.dumps({name: key.get(name) for name in told}, sort_keys=True) for key in table["keys"]}

    for name, table in then.items():
        assert places(table) <= places(now[name]), name
        fixed = ("extension", "mode", "order", "home")
        assert [table[one] for one in fixed] == [now[name][one] for one in fixed]


def test_every_dialect_says_which_releases_it_fits() -> None:
    undated = {name: " ".join(table.notes) for name, table in TABLES.items() if table.since is None}
    assert undated.keys() == UNDATED.keys()
    assert all(words in undated[name] for name, words in UNDATED.items())
    page = (DIALECTS / "README.md").read_text()
    for name, table in TABLES.items():
        rows = [release for row in table.native_keys for release in (row.since, row.until)]
        for release in filter(None, (table.since, table.until, *rows)):
            assert re.search(rf"\b{re.escape(release)}(?:\.0|\.2\.post2)?\b", page), (name, release, "was it read")


def test_javascript_reads_this_folder_with_the_schema_of_the_release() -> None:
    ran = check(SPEC, DIALECTS)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    counted = dict(re.findall(r"^(\S+): (\d+ of \d+) dialect$", ran.stdout, re.MULTILINE))
    for name, each in cases().items():
        assert counted[f"{name}.json"] == f"{len(each)} of {len(each)}"
    assert len(counted) == len(cases())


def test_javascript_names_what_was_changed(tmp_path: Path) -> None:
    """Negative control: a document, a place, and a problem."""
    for path in DIALECTS.rglob("*.json"):
        (tmp_path / path.relative_to(DIALECTS)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path.relative_to(DIALECTS)).write_bytes(path.read_bytes())
    path = tmp_path / "vectors" / "sglang.json"
    content = load(path)
    content["cases"][0]["document"]["prefix"]["count"] += 1
    path.write_text(json.dumps(content))
    carriers = load(tmp_path / "carriers.json")
    carriers[0]["place"] = "sampling_params.kv_transfer_params"
    (tmp_path / "carriers.json").write_text(json.dumps(carriers))
    ran = check(SPEC, tmp_path)
    assert ran.returncode == 1
    said = re.findall("^DISAGREES (.+)", ran.stdout, re.MULTILINE)
    assert any(line.startswith("sglang.json: /generate with token ids: prefill request") for line in said)
    assert any(line.startswith("nixl.json: /inference/v1/generate: decode request") for line in said)
    assert not any("gRPC" in line for line in said)


@pytest.mark.parametrize(
    "body",
    [
        {"kv_transfer_params": None, "kv_transfer_params_json": "{}"},
        {"kv_transfer_params_json": "[]"},
        {"kv_transfer_params_json": "{"},
        {"kv_transfer_params_json": '{"a":1,"a":2}'},
        {"sampling_params": {"extra_args": {"kv_transfer_params": "{}"}}},
        {"sampling_params": []},
        {"vllm_xargs": {"kv_transfer_params": {"do_remote_decode": True}}},
        {},
    ],
)
def test_what_is_no_carrier_stays_where_it_is(body: dict[str, object]) -> None:
    message = DialectMessage("r", body)
    assert lift_message(message) == (message, None)
    assert lower_message(message, CARRIERS[0]) == message


def test_a_carrier_hands_over_and_takes_back() -> None:
    nested = DialectMessage(
        "r", {"sampling_params": {"n": 1, "extra_args": {"kv_transfer_params": {"x": 2**63}}}, "stream": False}
    )
    inner, carrier = lift_message(nested)
    assert inner.body == {"sampling_params": {"n": 1}, "stream": False, "kv_transfer_params": {"x": 2**63}}
    assert lower_message(inner, carrier) == nested
    assert "extra_args" in nested.body["sampling_params"], "what came is left as it was"  # pyright: ignore[reportOperatorIssue]
