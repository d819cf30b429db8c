"""Tests hardened JSON reading and in-place editing."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvparams.errors import JSONTextError
from kvparams.jsontext.document import JSONLimits, find_member, find_members, load_object, loads
from kvparams.jsontext.editing import edit

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.text(max_size=8), VALUES, max_size=8)
INDENTS = st.sampled_from([None, 0, 1, 3])
ENCODINGS = st.booleans()


def text(value: object, indent: int | None, ascii_only: bool) -> bytes:
    return json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


def plain(value: Any) -> bool:
    """Whether the text of `value` is UTF-8 at all (a lone surrogate is not)."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@example('"0E', None, True)
@given(VALUES.filter(plain), INDENTS, ENCODINGS)
def test_every_plain_document_is_read_as_the_standard_library_reads_it(
    value: object, indent: int | None, ascii_only: bool
) -> None:
    """Ours: the hardened reader refuses nothing that is plain JSON."""
    raw = text(value, indent, ascii_only)
    assert loads(raw) == json.loads(raw)


@given(OBJECTS.filter(plain), INDENTS, ENCODINGS)
def test_fields_says_where_each_member_stands(
    document: dict[str, object], indent: int | None, ascii_only: bool
) -> None:
    raw = text(document, indent, ascii_only)
    read, found = load_object(raw)
    assert read == document
    assert found == find_members(raw)
    assert list(found) == list(document)
    for name, span in found.items():
        assert json.loads(raw[span.value : span.end]) == document[name]
        assert json.loads(b"{" + raw[span.start : span.end] + b"}") == {name: document[name]}


@given(OBJECTS.filter(plain), INDENTS, ENCODINGS, st.data())
def test_edit_changes_what_was_asked_and_nothing_else(
    document: dict[str, object], indent: int | None, ascii_only: bool, data: st.DataObject
) -> None:
    raw = text(document, indent, ascii_only)
    there = st.sampled_from(sorted(document)) if document else st.nothing()
    name = there | st.sampled_from(["max_tokens", "stream"])
    changes = data.draw(st.dictionaries(name, st.none() | st.integers() | st.just({"a": [1]}), max_size=6))
    edited = edit(
        raw, find_members(raw), {k: None if v is None else json.dumps(v).encode() for k, v in changes.items()}
    )
    expected = {k: v for k, v in document.items() if changes.get(k, v) is not None or k not in changes}
    expected |= {k: v for k, v in changes.items() if v is not None}
    assert loads(edited) == expected


def test_bytes_nobody_asked_to_change_leave_as_they_came() -> None:
    raw = b'{ "temperature" : 1.00 ,\n "max_tokens":16, "x\\u0061": [1 , 2.50, "\\/"] , "stream" : true}'
    edited = edit(raw, find_members(raw), {"max_tokens": b"1", "stream": None, "n": b"2"})
    assert edited == b'{ "temperature" : 1.00 ,\n "max_tokens":1, "x\\u0061": [1 , 2.50, "\\/"] ,"n":2}'


@pytest.mark.parametrize("keys", [["a"], ["a", "b"], ["b", "c"], ["a", "b", "c"], ["c", "b"]])
def test_removing_neighbours_leaves_an_object(keys: list[str]) -> None:
    raw = b'{"a":1, "b":2, "c":3}'
    edited = edit(raw, find_members(raw), dict.fromkeys(keys))
    assert loads(edited) == {k: v for k, v in {"a": 1, "b": 2, "c": 3}.items() if k not in keys}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":1,"a":2}',
        b'{"a":1,"\\u0061":2}',
        b'[{"x":[{"a":1, "b":2 , "a" :3}]}]',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b'{"a":"x","b":-1E+400}',
        b"1e999",
        b"[" + b"9" * 400 + b".5]",
        b'{"a":1} x',
        b'{"a":1,}',
        b"",
        b"  ",
        b"\xff",
        b'{"a":"\xed\xa0\x80"}',
        b"[" * 100_000,
        b'{"a":' * 70 + b"1" + b"}" * 70,
    ],
)
def test_what_is_not_plain_json_is_refused(raw: bytes) -> None:
    with pytest.raises(JSONTextError):
        loads(raw)
    with pytest.raises(JSONTextError):
        load_object(raw)


@given(VALUES.filter(plain), INDENTS)
def test_a_doubled_key_is_found_wherever_it_stands(value: object, indent: int | None) -> None:
    raw = text([value, {"deep": [value, {"k": value}]}], indent, True)
    loads(raw)  # the control: without the double it is accepted
    with pytest.raises(JSONTextError):
        loads(raw.replace(b'"k":', b'"k":0,"k":', 1) if raw.count(b'"k":') == 1 else b'{"k":0,"k":1}')


def test_limits_are_kept() -> None:
    limits = JSONLimits(max_bytes=20, max_depth=2)
    assert loads(b'{"a":[1]}', limits) == {"a": [1]}
    with pytest.raises(JSONTextError):
        loads(b'{"a":[[1]]}', limits)
    with pytest.raises(JSONTextError):
        loads(b'{"a":"12345678901234567890"}', limits)


@pytest.mark.parametrize("value", [b"null", b"{}", b'{"a":"}"}', b"7"])
def test_a_member_is_located_where_it_stands_and_not_in_another_object(value: bytes) -> None:
    for name in (b'"usage"', b'"us\\u0061ge"'):
        for inner in (b'"usage"', b'"u\\u0073age"', b'"x"'):
            raw = b'{"x":{%b:%b}, %b : %b,"y":{%b:%b}}' % (inner, value, name, value, inner, value)
            assert find_member(raw, load_object(raw)[0], "usage") == find_members(raw)["usage"]
    only = b'{"us\\u0061ge":%b,"y":{"usage":%b}}' % (value, value)
    assert find_member(only, load_object(only)[0], "usage") == find_members(only)["usage"]


def test_members_are_found_at_any_depth_that_was_accepted() -> None:
    """Limits are for what is read from strangers, once; what was read can be edited."""
    raw = b'{"a":' + b"[" * 150 + b"]" * 150 + b',"b":1}'
    read, found = load_object(raw, JSONLimits(max_depth=160))
    assert find_members(raw) == found
    assert loads(edit(raw, find_members(raw), {"b": None}), JSONLimits(max_depth=160)) == {"a": read["a"]}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":[%b]}' % b",".join([part] * count)
        for part, count in ((b"[]", 30_000), (b'{"":{}}', 15_000), (b'""', 300_000))
    ],
)
def test_text_that_is_nothing_but_parts_is_refused_before_it_is_parsed(raw: bytes) -> None:
    with pytest.raises(JSONTextError, match="more than"):
        load_object(raw)


@pytest.mark.parametrize("part", ["{[(", ":[{", '{"a": [1]}', "\\", "\n"])
def test_long_text_is_no_crowd_whatever_is_written_in_it(part: str) -> None:
    """The control: a long prompt full of brackets, code or JSON is one string."""
    document: dict[str, object] = {"model": "m", "prompt": part * 40_000}
    assert load_object(json.dumps(document).encode())[0] == document


def test_large_integers_stay_exact() -> None:
    assert loads(b"[9223372036854775807, 12345678901234567890123]") == [2**63 - 1, 12345678901234567890123]
    assert load_object(b'{"a":1.5e308}')[0] == {"a": 1.5e308}


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\ae1 \n', max_size=40).map(str.encode))
def test_garbage_is_refused_with_our_error_only(raw: bytes) -> None:
    try:
        document, found = load_object(raw)
    except JSONTextError:
        return
    assert document == json.loads(raw) == loads(raw)
    assert list(found) == list(document)
