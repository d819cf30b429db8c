"""Tests the canonical form: one sequence of bytes for a document, and none where no exact one exists."""

import json
import struct
import sys
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvparams import TokenPrefix, dump, parse
from kvparams.errors import InvalidParams
from kvparams.signing import canonical_json as module
from kvparams.signing.canonical_json import (
    NotCanonical,
    canonical_document,
    canonical_json,
    canonical_members,
    native_members,
    sha256_digest,
)
from kvparams.signing.document_outline import encode_member, encode_member_verbatim, encode_prefix_digest

SMALL: dict[str, Any] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill",
    "mode": "store",
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | TEXT,
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def plain(value: object) -> bytes:
    """Another writer: Python's own, which sorts and escapes as the specification says."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@given(VALUES)
def test_every_value_is_written_as_the_specification_says(value: object) -> None:
    assert canonical_json(value) == plain(value)
    assert json.loads(canonical_json(value)) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_fraction_stands_by_its_bits_where_it_may_stand_at_all(value: float) -> None:
    """Spec-mandated, 1.0#13.1."""
    text = canonical_json({"a": [value, 4]}, fractions=[]).decode()
    assert text == f'{{"a":[d{struct.pack(">d", value).hex()},4]}}'
    assert struct.unpack(">d", bytes.fromhex(text[7:23]))[0].hex() == value.hex()
    assert canonical_json(4.0, fractions=[]) == b"d4010000000000000"
    with pytest.raises(NotCanonical):
        canonical_json({"a": [value, 4]})


@given(st.lists(INTEGERS | st.lists(INTEGERS, max_size=9), max_size=40))
def test_lists_of_block_ids_take_the_short_way_to_the_same_text(value: list[object]) -> None:
    assert canonical_json(value) == plain(value)
    assert canonical_json(tuple(value)) == plain(value)


@given(st.dictionaries(TEXT, VALUES, max_size=6), st.randoms())
def test_the_order_of_members_does_not_matter(value: dict[str, object], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical_json(dict(items)) == canonical_json(value)


def test_all_of_unicode_has_one_escaping() -> None:
    """Ours: what JSON.stringify escapes, and nothing else; names sort by code points, not by UTF-16."""
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]))
    written = canonical_json(text).decode()
    escaped = {chr(c): f"\\u{c:04x}" for c in range(0x20)}
    escaped |= {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
    assert written == f'"{"".join(escaped.get(character, character) for character in text)}"'
    assert canonical_json({"\U0001f600": 1, "\uff5e": 2}).decode() == '{"\uff5e":2,"\U0001f600":1}'


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (1.0, ()),
        (-0.0, ()),
        (float("nan"), ()),
        (2**64, ()),
        (-(2**63) - 1, ()),
        ({"a": [1, 2, {"b": 0.5}]}, ("a", 2, "b")),
        ([[1] * 20, [1] * 20 + [2**64]], (1, 20)),
        ([1] * 20 + [True, 1.5], (21,)),
        ([[1, 2], [3, 4.0]], (1, 1)),
        ({"a": "\ud800"}, ()),
        ({"\udfff": 1}, ()),
        ({1: 2}, ()),
        ([b"x"], (0,)),
        ({"a": {1, 2}}, ("a",)),
        ([1, float("inf")], (1,)),
    ],
)
def test_what_has_no_exact_form_is_refused_by_its_place(value: object, path: tuple[str | int, ...]) -> None:
    """Spec-mandated, 1.0#13.2."""
    with pytest.raises(NotCanonical) as caught:
        canonical_json(value)
    assert caught.value.path == path
    assert "0.5" not in str(caught.value)


def test_a_value_that_is_nested_too_deep_is_refused_and_not_followed() -> None:
    value: object = 1
    for _ in range(64):
        value = [value]
    assert canonical_json(value) == plain(value)
    for _ in range(100_000):
        value = {"a": value}
    with pytest.raises(NotCanonical):
        canonical_json(value)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_every_form_of_a_prefix_has_one_canonical_form(ids: list[int]) -> None:
    """Spec-mandated, 1.0#13.3."""
    forms = [TokenPrefix.pack(ids), TokenPrefix.by_digest(ids), TokenPrefix.listed(ids)]
    listed = parse({**SMALL, "prefix": {"count": len(ids), "ids": ids}})
    texts = {canonical_document({**SMALL, "prefix": dump(form)}) for form in forms[:2]} | {canonical_document(listed)}
    texts |= {
        canonical_document({**SMALL, "prefix": ids}),
        canonical_document({**SMALL, "prefix": dump(forms[0]) | {"digest": None}}),
    }
    assert len(texts) == 1
    assert encode_prefix_digest(ids) == encode_member("prefix", forms[0]) == encode_member_verbatim("prefix", forms[1])
    assert forms[1].digest_text().encode() in texts.pop()


def test_absent_null_and_unknown_members_are_told_apart() -> None:
    documents: list[dict[str, Any]] = [
        SMALL,
        {**SMALL, "prefix": None},
        {**SMALL, "lease": None},
        {**SMALL, "x": None},
        {**SMALL, "x": {}},
        {**SMALL, "transfer": {**SMALL["transfer"], "x": 1}},
        {**SMALL, "prefix": {"count": 0, "packed": "", "x": 1}},
        {**SMALL, "prefix": {"count": 0, "packed": ""}},
        {**SMALL, "version": "1.1"},
    ]
    assert len({canonical_document(document) for document in documents}) == len(documents)
    for document in documents:
        assert canonical_document(document) == canonical_document(parse(document))
        assert json.loads(canonical_document(document)).keys() == document.keys()


def test_a_signatures_value_is_not_covered_and_all_else_of_it_is() -> None:
    signature = {
        "alg": "hmac-sha256",
        "kid": "k",
        "aud": "pool",
        "iat": 1,
        "exp": 2,
        "nonce": "n",
        "native": "sha256:" + "0" * 64,
        "value": "v",
    }
    text = canonical_document({**SMALL, "signature": signature})
    assert text == canonical_document({**SMALL, "signature": {**signature, "value": "w"}})
    for name, other in {"kid": "l", "iat": 0, "x": 1, "aud": "q"}.items():
        assert canonical_document({**SMALL, "signature": {**signature, name: other}}) != text
    assert json.loads(text)["signature"].keys() == signature.keys() - {"value"}


def test_a_document_with_a_float_cannot_be_signed_and_one_that_is_none_is_judged() -> None:
    document = {**SMALL, "extensions": {"com.example": {"bandwidth": 1.5e9}}}
    with pytest.raises(NotCanonical, match=r"extensions.com.example.bandwidth: .* cannot be signed"):
        canonical_document(document)
    with pytest.raises(InvalidParams):
        canonical_document({**SMALL, "version": 1})


@settings(max_examples=30)
@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_pieces_joined_in_order_are_the_whole(extra: dict[str, object]) -> None:
    params = parse({**SMALL, "extensions": {"com.example": extra}})
    pieces = canonical_members(params)
    assert b"{%b}" % b",".join(pieces[name] for name in sorted(pieces)) == canonical_document(params)


def test_native_keys_are_all_but_the_document_and_the_prompt() -> None:
    assert native_members({"kvparams": 1, "prompt_token_ids": [1], "remote_host": "h"}) == {"remote_host": "h"}
    assert sha256_digest(b"{}") == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_native_code_is_asked_once_for_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every level of what is nested it would walk all that is below."""
    native = Mock(write_object=Mock(return_value=None))
    monkeypatch.setattr(module, "NATIVE", native)
    assert canonical_json({"a": {"b": {"c": 'x"'}, "d": [{"e": 1}]}}) == b'{"a":{"b":{"c":"x\\""},"d":[{"e":1}]}}'
    assert native.write_object.call_count == 1
