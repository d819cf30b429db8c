"""Tests the codec between JSON and the model: nothing is lost, and no input raises an error that is not ours."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvparams import (
    InvalidParams,
    KVTransferParams,
    Problem,
    dump,
    dump_json,
    legacy_params,
    parse,
    read_request,
    write,
)
from kvparams.errors import ProblemKind

REQUIRED: dict[str, object] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill",
    "mode": "store",
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(-1e18, 1e18)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)
ANYTHING = st.recursive(
    SCALARS | st.floats() | st.binary(max_size=4) | st.text(max_size=4) | st.builds(object),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        | st.sets(st.integers(), max_size=2)
        | st.tuples(inner)
    ),
    max_leaves=12,
)
MEMBERS = sorted(KVTransferParams.model_fields)


def same(one: object, other: object) -> bool:
    """Equal as JSON: 1, 1.0 and true differ."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def found(document: Any) -> list[tuple[tuple[str | int, ...], ProblemKind]]:
    with pytest.raises(InvalidParams) as caught:
        parse(document)
    return [(problem.path, problem.kind) for problem in caught.value.problems]


@given(st.dictionaries(NAMES.filter(lambda name: name not in MEMBERS), VALUES, max_size=6), VALUES)
@example({}, -0.0)
def test_unknown_members_come_back_as_they_were(unknown: dict[str, Any], inner: object) -> None:
    """Spec-mandated, 1.0#5.2: at every depth, whatever they are."""
    document = {
        **REQUIRED,
        "transfer": {"id": "t", "attempt": 1, "zz": inner},
        "prefix": {"count": 1, "ids": [1], "zz": inner},
        "lease": {"ttl_ms": 1, "zz": inner},
        "extensions": {"com.example": {"zz": inner}},
        **unknown,
    }
    assert same(dump(parse(document)), document)
    assert same(json.loads(dump_json(parse(document))), document)
    assert same(dump(parse(json.dumps(document))), document)


@given(st.dictionaries(st.sampled_from(MEMBERS) | st.text(max_size=4), ANYTHING, max_size=6))
def test_no_mapping_raises_anything_but_ours(document: dict[str, Any]) -> None:
    for candidate in (document, {**REQUIRED, **document}):
        try:
            params = parse(candidate)
        except InvalidParams:
            continue
        assert same(dump(params), candidate)


@given(st.binary(max_size=64) | st.text(max_size=64) | VALUES.map(json.dumps))
@example('{"version": "1.0"' + "," * 10)
@example("[" * 100_000)
@example('{"a":' * 100_000)
@example(b"\xff")
@example("\ud800")
def test_no_text_raises_anything_but_ours(text: str | bytes) -> None:
    with pytest.raises(InvalidParams):
        parse(text)


@pytest.mark.parametrize(
    "member", ["foo", "transfer", "prefix", "load_keys", "extensions", "must_understand", "version"]
)
def test_hostile_nesting_is_refused_in_every_member(member: str) -> None:
    """Spec-mandated, 1.0#12.4: deep, endless and self-containing values end in a problem, not in a crash."""
    deep: object = 0
    for _ in range(100_000):
        deep = [deep]
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    for value in (deep, loop, {"com.example": loop}, {"id": loop, "attempt": loop, "x": deep}):
        assert all(path[0] == member for path, _ in found({**REQUIRED, member: value}))


def test_a_mapping_that_is_not_a_dictionary_is_read() -> None:
    class Lazy(Mapping[str, object]):
        def __getitem__(self, name: str) -> object:
            return REQUIRED[name]

        def __iter__(self) -> Iterator[str]:
            return iter(REQUIRED)

        def __len__(self) -> int:
            return len(REQUIRED)

    assert parse(Lazy()) == parse(REQUIRED)


def test_parsing_leaves_the_document_alone() -> None:
    before = json.dumps({**REQUIRED, "prefix": [1], "load_keys": ["a"], "foo": {"a": []}})
    document = json.loads(before)
    written: Any = dump(parse(document))
    written["foo"]["a"].append(1)
    assert json.dumps(document) == before


def test_what_dump_gives_can_be_changed_without_changing_the_params() -> None:
    params = parse({**REQUIRED, "foo": {"a": []}, "load_keys": ["a"]})
    written: Any = dump(params)
    written["foo"]["a"].append(1)
    written["load_keys"].append("b")
    written["transfer"]["id"] = "other"
    assert dump(params) == {**REQUIRED, "foo": {"a": []}, "load_keys": ["a"]}


def test_json_text_is_compact_utf_8() -> None:
    assert (
        dump_json(parse({**REQUIRED, "isolation": {"cache_salt": "Ü"}}))
        == (
            '{"version":"1.0","request_id":"r","transfer":{"id":"t","attempt":1},"phase":"prefill","mode":"store",'
            '"isolation":{"cache_salt":"Ü"}}'
        ).encode()
    )


@pytest.mark.parametrize("twice", ['"last":1,"last":2', '"phase":"prefill"', '"last":{"a":[],"a":1}'])
@pytest.mark.parametrize("length", [1, 100_000])
def test_a_name_that_stands_twice_is_found_in_text_of_any_length(length: int, twice: str) -> None:
    """Spec-mandated, 1.0#3.1; the control has it once."""
    text = json.dumps({**REQUIRED, "filling": ["y" * length, {}]})[:-1]
    assert parse(f'{text},"last":1}}').phase == REQUIRED["phase"]
    with pytest.raises(InvalidParams) as caught:
        parse(f"{text},{twice}}}")
    assert [(problem.path, problem.kind) for problem in caught.value.problems] == [((), "json")]


def test_a_message_never_repeats_a_value_of_the_document() -> None:
    """Spec-mandated, 1.0#7.4: salts and keys are secrets."""
    secret = "s3cr3t" * 50
    with pytest.raises(InvalidParams) as caught:
        parse(
            {**REQUIRED, "isolation": {"cache_salt": secret}, "load_keys": [secret], "phase": secret, "mode": [secret]}
        )
    assert len(caught.value.problems) == 4
    assert "s3cr3t" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_document_with_too_many_members_is_refused_before_any_is_judged() -> None:
    """Spec-mandated, 1.0#5.7, 1.0#12.4."""
    crowd = {f"x{number}": float("nan") for number in range(100_000)}
    assert found({**REQUIRED, **crowd}) == [((), "length")]
    assert found({**REQUIRED, "lease": crowd, "usage": crowd}) == [(("lease",), "length"), (("usage",), "length")]


def test_a_request_without_params_has_no_document() -> None:
    """Spec-mandated, 1.0#2.3."""
    assert read_request(None) is None
    assert read_request({}) is None
    assert read_request("{}") is None
    assert read_request({"do_remote_decode": True, "remote_block_ids": None}) is None


@pytest.mark.parametrize("text", ["null", " \t\r\n null\n"])
def test_the_text_of_null_has_no_document(text: str) -> None:
    """Spec-mandated, 1.0#2.3: as where the field itself is null."""
    assert read_request(text) is None


@pytest.mark.parametrize("text", ["nul", "null null", "\u00a0null", "[null]", '"null"'])
def test_text_that_only_looks_like_null_is_refused(text: str) -> None:
    """Negative control of the above."""
    with pytest.raises(InvalidParams):
        read_request(text)


@pytest.mark.parametrize(
    "value", [5, True, 1.5, [], ["kvparams"], ("kvparams",), {"kvparams"}, b"{}", bytearray(b"{}")]
)
def test_what_is_neither_an_object_nor_text_carries_no_params(value: Any) -> None:
    """Spec-mandated, 1.0#2.5: one problem of the kind type, and never another exception."""
    for read in (read_request, legacy_params.read_legacy_params):
        with pytest.raises(InvalidParams) as caught:
            read(value)
        assert [(problem.path, problem.kind) for problem in caught.value.problems] == [((), "type")]


@pytest.mark.parametrize("value", [5, None, True, 1.5, [], ["version"], bytearray(b"{}"), "null", b"null"])
def test_what_is_neither_an_object_nor_its_text_is_no_document(value: object) -> None:
    assert found(value) == [((), "type")]


def test_longer_text_is_refused_before_it_is_read() -> None:
    """Spec-mandated, 1.0#3.12: the bound itself is still read."""
    text = json.dumps(REQUIRED)
    longest = text + " " * ((16 << 20) - len(text))
    assert parse(longest) == parse(REQUIRED)
    assert found(longest + " ") == [((), "json")]


def test_a_lone_surrogate_is_a_wrong_value_where_no_text_was_read() -> None:
    """Spec-mandated, 1.0#3.1: a reader that is handed an object by a laxer parser finds it too."""
    assert found({**REQUIRED, "x": "\ud800"}) == [(("x",), "value")]
    assert found({**REQUIRED, "isolation": {"cache_salt": "\ud800"}}) == [(("isolation", "cache_salt"), "value")]
    assert found(json.dumps({**REQUIRED, "x": "\ud800"})) == [((), "json")]


def test_the_document_is_read_from_an_object_or_its_text() -> None:
    wrapped = {"do_remote_decode": True, "kvparams": REQUIRED}
    assert read_request(wrapped) == read_request(json.dumps(wrapped)) == parse(REQUIRED)


@pytest.mark.parametrize("value", [None, 1, "{}", json.dumps(REQUIRED), [REQUIRED]])
def test_the_document_in_a_request_is_an_object(value: object) -> None:
    """Spec-mandated, 1.0#2.1."""
    with pytest.raises(InvalidParams) as caught:
        read_request({"kvparams": value})
    assert [(problem.path, problem.kind) for problem in caught.value.problems] == [(("kvparams",), "type")]


@pytest.mark.parametrize(("text", "kind"), [("{", "json"), ("[]", "type"), ('{"kvparams":{},"kvparams":{}}', "json")])
def test_text_that_is_no_object_is_refused(text: str, kind: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        read_request(text)
    assert [problem.kind for problem in caught.value.problems] == [kind]


def test_writing_leaves_the_native_keys_as_they_are() -> None:
    """Spec-mandated, 1.0#2.2."""
    native = {"do_remote_decode": True, "remote_block_ids": None, "room": 2**63 - 1, "kvparams": "an older one"}
    before = dict(native)
    params = parse(REQUIRED)
    assert write(params, native) == {**before, "kvparams": REQUIRED}
    assert native == before
    assert write(params) == {"kvparams": REQUIRED}


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_what_was_written_into_a_request_is_read_from_it(native: dict[str, object]) -> None:
    params = parse({**REQUIRED, "lease": None})
    assert read_request(write(params, native)) == params


def test_a_version_that_goes_through_is_kept() -> None:
    """Spec-mandated, 1.0#6.3."""
    assert dump(parse({**REQUIRED, "version": "1.7", "new": 1})) == {**REQUIRED, "version": "1.7", "new": 1}


def test_problems_compare_and_print() -> None:
    assert found({**REQUIRED, "transfer": {"id": "t"}}) == [(("transfer", "attempt"), "missing")]
    assert str(Problem(("transfer", "attempt"), "missing", "Field required")) == (
        "transfer.attempt: Field required [missing]"
    )
