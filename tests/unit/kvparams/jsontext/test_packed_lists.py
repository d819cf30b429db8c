"""Tests that an object with a long list of numbers is read as any other one, and when its numbers are packed."""

import json
import time
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.errors import JSONTextError
from kvparams.jsontext.document import AT_ONCE_BYTES, JSONLimits, load_object
from kvparams.jsontext.packed_lists import load_packed
from kvparams.native import NATIVE
from tests.support.processor import is_within

if NATIVE is None:
    pytest.skip("asked to do without native code, or there is no compiler", allow_module_level=True)

PAD = b'"pad":"' + b"x" * AT_ONCE_BYTES + b'"'
STEP_CPU_S = 0.004
IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20)
SPACES = st.sampled_from([b"", b" ", b"\r\n\t "])


def is_read_alike(raw: bytes) -> bool:
    """Checks what is read against the other reader; returns whether the numbers are packed."""
    found = load_packed(raw, "ids")
    if found is None:
        return False
    document, spans = load_object(raw)
    packed = found[0]["ids"]
    assert isinstance(packed, array)
    assert packed.typecode == "I"
    assert {**found[0], "ids": packed.tolist()} == document
    assert list(found[0]) == list(document)
    assert found[1] == spans
    return True


@given(IDS, SPACES, SPACES, st.permutations(["ids", "a", "b"]))
def test_ids_are_packed_wherever_they_stand(ids: list[int], space: bytes, other: bytes, order: list[str]) -> None:
    values = {
        "ids": space + b"[" + (other + b"," + space).join(b"%d" % each for each in ids) + other + b"]" + other,
        "a": b'{"x":[1,2],"y":"\\"ids\\":[3]"}',
        "b": b"1.5",
    }
    members = [b'"%b"%b:%b' % (name.encode(), other, values[name]) for name in order]
    assert is_read_alike(b"{" + b",".join([*members, PAD]) + b"}")
    assert is_read_alike(b"{" + b",".join([PAD, *members]) + b"}")


@pytest.mark.parametrize(
    "value",
    [
        *(b"[]", b"[-1]", b"[4294967296]", b"[01]", b"[1.0]", b"[1e3]", b"[true]", b"[null]", b'["1"]', b"[[1]]"),
        *(b"[1,]", b"[,1]", b"[1 2]", b"[1,,2]", b"[1", b"1", b'"[1]"', b"{}", b"[18446744073709551617]", b"[1\x0b]"),
        *(b"[00]", b"[1,-0]", b"[\xa01]"),
    ],
)
def test_any_other_value_is_left_to_the_other_reader(value: bytes) -> None:
    assert load_packed(b'{"ids":%b,%b}' % (value, PAD), "ids") is None
    assert load_packed(b'{%b,"ids":%b}' % (PAD, value), "ids") is None


@pytest.mark.parametrize(
    "start",
    [
        b'"a":{"ids":[1]},"ids":[2]',
        b'"ids":[1],"ids":[2]',
        b'"ids":[1],"i\\u0064s":[2]',
        b'"i\\u0064s":[1]',
        b'"x\\"ids":[1]',
        b'"ids":[1],"a":tru',
        b'"ids":[1],"a":NaN',
        b'"ids":[1],"a":"\xff"',
        b'"a":"x"ids":[1]',
        b'"ids":[1]],"a":[1',
    ],
)
def test_an_object_that_is_not_plain_is_left_to_the_other_reader(start: bytes) -> None:
    assert load_packed(b"{%b,%b}" % (start, PAD), "ids") is None


@given(st.binary(max_size=40), IDS, st.binary(max_size=40))
def test_no_text_is_read_that_the_other_reader_refuses(before: bytes, ids: list[int], behind: bytes) -> None:
    raw = b'{%b"ids":%b%b,%b}' % (before, json.dumps(ids).encode(), behind, PAD)
    found = load_packed(raw, "ids")
    try:
        document, _ = load_object(raw)
    except JSONTextError:
        assert found is None
    else:
        assert found is None or is_read_alike(raw)
        assert isinstance(document, dict)


def test_limits_hold() -> None:
    raw = b'{"ids":[1],%b}' % PAD
    assert is_read_alike(raw)
    assert load_packed(raw, "other") is None
    assert load_packed(b'{"ids":[1]}', "ids") is None, "a short text is read as it is"
    for limits in (JSONLimits(max_bytes=len(raw) - 1), JSONLimits(max_depth=1), JSONLimits(max_members=1)):
        assert load_packed(raw, "ids", limits) is None


def test_what_is_packed_takes_no_long() -> None:
    most: dict[str, Any] = {"ids": [7] * 250_000}
    raw, costs = json.dumps(most, separators=(",", ":")).encode(), list[float]()
    assert load_packed(raw, "ids") is not None
    assert load_packed(raw + b" " * 40_000, "ids") is None
    for _ in range(3):
        began = time.thread_time()
        load_packed(raw, "ids")
        costs.append(time.thread_time() - began)
    assert is_within(min(costs), STEP_CPU_S), costs
