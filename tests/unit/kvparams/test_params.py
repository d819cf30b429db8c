"""Tests the models: they are frozen, strict and bounded, and keep unknown members."""

import sys
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvparams import (
    PROTOCOL_VERSION,
    Endpoint,
    InvalidParams,
    KVTransferParams,
    TokenPrefix,
    Transfer,
    Usage,
    dump,
    parse,
)
from kvparams.field_types import MAX_ITEMS, MAX_KEYS, MAX_TEXT
from kvparams.params import KNOWN_PATHS
from kvparams.tokens import MAX_TOKENS, pack, token_digest, unpack

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=50)
REQUIRED: dict[str, object] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill",
    "mode": "store",
}


def made(**members: object) -> KVTransferParams:
    return KVTransferParams.model_validate({**REQUIRED, **members})


def kinds(error: ValidationError) -> set[str]:
    return {found["type"] for found in error.errors()}


def test_a_document_can_be_made_from_its_parts() -> None:
    params = KVTransferParams(
        version=PROTOCOL_VERSION,
        request_id="r",
        transfer=Transfer(id="t", attempt=1),
        phase="decode",
        mode="store",
        load_keys=("k",),
        producer=Endpoint(id="p0", incarnation="a"),
    )
    assert dump(params) == {
        **REQUIRED,
        "phase": "decode",
        "load_keys": ["k"],
        "producer": {"id": "p0", "incarnation": "a"},
    }


def test_parts_are_frozen() -> None:
    params = made(load_keys=["k"], transfer={"id": "t", "attempt": 1})
    with pytest.raises(ValidationError):
        params.request_id = "other"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError):
        params.transfer.attempt = 2  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(params.load_keys, tuple)


def test_absent_and_null_are_not_equal() -> None:
    """Spec-mandated, 1.0#5.1."""
    assert made() != made(lease=None)
    assert made(lease=None) == made(lease=None)
    assert made(producer={"id": "p"}) != made(producer={"id": "p", "incarnation": None})
    assert made().lease is None
    assert made(lease=None).lease is None


def test_equal_documents_hash_equal() -> None:
    assert hash(made(load_keys=["k"])) == hash(made(load_keys=["k"]))
    assert Endpoint(id="p", incarnation="1") != Endpoint(id="p", incarnation="2")


def test_two_endpoints_are_one_instance_only_with_the_same_incarnation() -> None:
    """Spec-mandated, 1.0#3.8."""
    assert {Endpoint(id="p", incarnation="1"), Endpoint(id="p", incarnation="1")} == {Endpoint(id="p", incarnation="1")}
    assert Endpoint(id="p", incarnation="1") != Endpoint(id="p", incarnation="2")
    assert Endpoint(id="p", incarnation="1") != Endpoint(id="q", incarnation="1")


def test_what_is_kept_is_a_copy() -> None:
    """Ours: engines change the dictionaries that they are given (vLLM 0.32.0 does); the model does not follow."""
    inner = {"a": [1]}
    params = made(foo=inner, extensions={"com.example": inner})
    inner["a"].append(2)
    assert dump(params)["foo"] == {"a": [1]}
    assert dump(params)["extensions"] == {"com.example": {"a": [1]}}


@pytest.mark.parametrize("value", [{1, 2}, b"x", object(), (1,), 1j, float("nan"), float("inf"), {1: 2}, "\ud800"])
def test_a_value_that_json_has_not_is_refused_wherever_it_stands(value: object) -> None:
    for members in ({"foo": value}, {"foo": [{"a": value}]}, {"extensions": {"com.example": {"a": value}}}):
        with pytest.raises(ValidationError):
            made(**members)


def test_an_object_that_holds_itself_is_refused() -> None:
    loop: dict[str, object] = {}
    loop["loop"] = loop
    with pytest.raises(ValidationError) as caught:
        made(foo=loop)
    assert kinds(caught.value) == {"length"}


@pytest.mark.parametrize(
    ("members", "fits"),
    [
        ({"load_keys": ["k"] * MAX_KEYS}, True),
        ({"load_keys": ["k"] * (MAX_KEYS + 1)}, False),
        ({"foo": [0] * MAX_ITEMS}, True),
        ({"foo": [0] * (MAX_ITEMS + 1)}, False),
        ({"foo": "x" * MAX_TEXT}, True),
        ({"foo": "x" * (MAX_TEXT + 1)}, False),
        ({"prefix": {"count": 1, "packed": "A" * (4 * -(-4 * MAX_TOKENS // 3) + 4)}}, False),
        ({"prefix": [0] * (MAX_TOKENS + 1)}, False),
    ],
    ids=[f"bound {number}" for number in range(8)],
)
def test_lists_and_text_are_bounded(members: dict[str, object], fits: bool) -> None:
    """Spec-mandated, 1.0#3.4, 1.0#5.6, 1.0#12.4: the bounds that are too large for vectors."""
    if fits:
        assert dump(made(**members)) == {**REQUIRED, **members}
        return
    with pytest.raises(ValidationError) as caught:
        made(**members)
    assert kinds(caught.value) <= {"too_long", "string_too_long", "length"}


@pytest.mark.parametrize(
    ("members", "path"),
    [
        ({"load_keys": [5] * (MAX_KEYS + 1)}, ("load_keys",)),
        ({"store_keys": [""] * (MAX_KEYS + 1)}, ("store_keys",)),
        ({"must_understand": ["unknown"] * 65}, ("must_understand",)),
        ({"extensions": {f"wrong-{number}": 5 for number in range(65)}}, ("extensions",)),
        ({"prefix": {"count": 1, "ids": [-1] * (MAX_TOKENS + 1)}}, ("prefix", "ids")),
    ],
    ids=["load_keys", "store_keys", "must_understand", "extensions", "ids"],
)
def test_of_what_is_larger_than_its_bound_nothing_is_judged(members: dict[str, object], path: tuple[str, ...]) -> None:
    """Spec-mandated, 1.0#12.4, 1.0#7.1: each entry is wrong, and none is looked at."""
    with pytest.raises(InvalidParams) as caught:
        parse({**REQUIRED, **members})
    assert [(problem.path, problem.kind) for problem in caught.value.problems] == [(path, "length")]


SIGNATURE = {
    "alg": "hmac-sha256",
    "kid": "k",
    "aud": "a",
    "iat": 1,
    "exp": 2,
    "nonce": "n",
    "native": f"sha256:{'0' * 64}",
    "value": "v",
}


@pytest.mark.parametrize(
    ("member", "limit"),
    [
        ("request_id", 256),
        ("transfer.id", 128),
        ("producer.id", 256),
        ("producer.incarnation", 128),
        ("consumer.address", 262),
        ("signature.alg", 64),
        ("signature.kid", 128),
        ("signature.aud", 256),
        ("signature.nonce", 128),
        ("signature.value", 1024),
    ],
)
def test_text_that_is_too_long_is_that_alone_whatever_is_in_it(member: str, limit: int) -> None:
    """Spec-mandated, 1.0#7.5: of every member with a form and a bound; the control has the form's fault alone."""
    path = tuple(member.split("."))
    parts = {"transfer": REQUIRED["transfer"], "producer": {"id": "p"}, "consumer": {"id": "c"}, "signature": SIGNATURE}
    for length, kind in ((limit + 1, "length"), (limit, "value")):
        text = " " * length
        changed = {path[0]: text if len(path) == 1 else {**cast("dict[str, object]", parts[path[0]]), path[1]: text}}
        with pytest.raises(InvalidParams) as caught:
            parse({**REQUIRED, **changed})
        assert [(problem.path, problem.kind) for problem in caught.value.problems] == [(path, kind)]


def test_the_bounds_are_those_of_the_spec() -> None:
    """Spec-mandated, 1.0#3.4, 1.0#5.6, 1.0#8.1, 1.0#12.4: the tests above take them from the code."""
    assert (MAX_KEYS, MAX_ITEMS, MAX_TEXT, MAX_TOKENS) == (65_536, 65_536, 1_048_576, 2_097_152)


def test_known_paths_name_every_member() -> None:
    assert {"version", "transfer", "transfer.attempt", "prefix.digest", "usage.saved_bytes"} <= KNOWN_PATHS
    assert "extensions.com.example" not in KNOWN_PATHS
    assert all(path.count(".") <= 1 for path in KNOWN_PATHS)


def test_usage_may_count_cached_tokens_without_prompt_tokens() -> None:
    assert Usage(cached_tokens=7).prompt_tokens is None


@given(IDS)
def test_packed_ids_come_back(ids: list[int]) -> None:
    prefix = TokenPrefix.pack(ids)
    assert list(prefix.token_ids() or ()) == ids
    assert prefix.count == len(ids)
    assert TokenPrefix.model_validate(prefix.model_dump(exclude_unset=True)) == prefix


@pytest.mark.parametrize("packed", ["AQAAAAIAAAADAA==", "AQAAAAIAAAADAAA=", "AQAAAAIAAAA=", "AQAAAAIAAAADAAAABAAAAA=="])
def test_packed_bytes_of_another_number_of_ids_are_a_conflict(packed: str) -> None:
    """Spec-mandated, 1.0#8.3: also where the text is as long as that of three ids."""
    assert made(prefix={"count": 3, "packed": "AQAAAAIAAAADAAAA"}).prefix == TokenPrefix.pack([1, 2, 3])
    with pytest.raises(ValidationError) as caught:
        made(prefix={"count": 3, "packed": packed})
    assert kinds(caught.value) == {"conflict"}


@given(IDS)
def test_every_form_of_a_prefix_has_the_same_digest(ids: list[int]) -> None:
    """Spec-mandated, 1.0#8.4."""
    spelled = TokenPrefix(count=len(ids), ids=tuple(ids))
    forms = (TokenPrefix.pack(ids), TokenPrefix.by_digest(ids), TokenPrefix.listed(ids), spelled)
    assert {form.digest_text() for form in forms} == {token_digest(pack(ids))}
    assert {form.count for form in forms} == {len(ids)}
    assert TokenPrefix.by_digest(ids).token_ids() is None
    assert all(list(form.token_ids() or ()) == ids for form in forms if form.digest is None)


@given(IDS, IDS, st.integers(0, 2**32 - 1))
def test_a_prefix_covers_the_prompts_that_begin_with_it(ids: list[int], more: list[int], other: int) -> None:
    for form in (TokenPrefix.pack(ids), TokenPrefix.by_digest(ids), TokenPrefix.listed(ids)):
        assert form.covers(ids + more)
        if ids:
            assert not form.covers(ids[:-1])
            assert form.covers([*ids[:-1], other]) is (other == ids[-1])


@pytest.mark.parametrize("make", [list[int], tuple[int, ...], partial(array, "I"), partial(array, "q")])
def test_ids_can_come_in_any_container(make: Callable[[list[int]], Iterable[int]]) -> None:
    assert pack(make([1, 2**32 - 1])) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert unpack(b"\x01\0\0\0\xff\xff\xff\xff").tolist() == [1, 2**32 - 1]


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_an_id_that_does_not_fit_is_not_packed(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        pack(ids)


def test_packed_bytes_are_little_endian_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours: the other branch swaps; seen from this machine, whichever it is, twice is the identity."""
    here = pack([1, 2])
    monkeypatch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    assert pack([1, 2]) == b"\0\0\0\x01\0\0\0\x02" or sys.byteorder == "little"
    assert unpack(pack([1, 2])).tolist() == [1, 2]
    assert pack([1, 2]) != here


def test_too_many_ids_are_not_packed() -> None:
    with pytest.raises(ValidationError):
        TokenPrefix.pack(array("I", bytes(4 * (MAX_TOKENS + 1))))


def test_the_largest_prefix_is_packed_and_read() -> None:
    prefix = TokenPrefix.pack(array("I", bytes(4 * MAX_TOKENS)))
    assert parse({**REQUIRED, "prefix": {"count": MAX_TOKENS, "packed": prefix.packed}}).prefix == prefix


def test_a_prefix_is_not_judged_twice() -> None:
    """Ours: what was made by hand is put into a document as it is."""
    prefix = TokenPrefix.by_digest([1])
    assert made(prefix=prefix).prefix is prefix
