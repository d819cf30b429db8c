"""Tests how an object in JSON is split into members, and what `dig` finds."""

import pytest

from kvparams_conformance.raw_json import dig, split_members


def test_members_keep_their_text_and_order() -> None:
    found = split_members(b' { "b" : 1E+2 ,"\\u0061":[ 1 ,2 ],"b":null} ')
    assert [(one.name, one.text, one.value) for one in found] == [
        ("b", '"b" : 1E+2', "1E+2"),
        ("a", '"\\u0061":[ 1 ,2 ]', "[ 1 ,2 ]"),
        ("b", '"b":null', "null"),
    ]
    assert split_members(b"{}") == []


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"a"}', b'{"a":1 "b":2}', b'{"a":1} x', b"{a:1}", b"\xff"])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        split_members(text)


def test_dig_finds_what_is_there_and_none_otherwise() -> None:
    value = {"a": [{"b": 0}], "c": None}
    assert dig(value, "a", 0, "b") == 0
    for path in (("a", 1), ("a", "b"), ("c", "d"), ("x",), ("a", 0, "b", "c")):
        assert dig(value, *path) is None
