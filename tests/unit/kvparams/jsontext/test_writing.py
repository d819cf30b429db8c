"""Tests that JSON is written alike with native code and without."""

import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic_core import PydanticSerializationError

from kvparams.jsontext import writing
from kvparams.jsontext.writing import fill_line, write_json
from kvparams.native import NATIVE
from tests.unit.kvparams.jsontext.test_json_document import OBJECTS, plain

NUMBERS = st.floats(0, 1e18, allow_nan=False) | st.integers(0, 10**7).map(lambda number: number / 20)
VALUES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8) | NUMBERS
PIECES = (b'{"a":', b',"b":', b"}\n")


@example({"a": [1, -2, {"b": None}], "c": True, "d": "\u00fc/", "e": {}, "f": []})
@example({"a": -(2**63), "b": 2**63 - 1, "c": 2**63, "d": 0})
@given(OBJECTS.filter(plain))
def test_an_object_is_written_as_it_was(value: dict[str, Any]) -> None:
    raw = write_json(value)
    assert json.loads(raw) == value
    with patch.object(writing, "NATIVE", None):
        assert write_json(value) == raw


@pytest.mark.parametrize("value", ["\ud800", object()])
def test_what_is_no_json_is_an_error(value: object) -> None:
    with pytest.raises(PydanticSerializationError):
        write_json({"a": value})


@example("\x7f", 0.05)
@example("a\n", 1e15)
@given(VALUES, VALUES | st.lists(st.text(max_size=5), max_size=3))
def test_a_line_holds_its_values(first: Any, second: Any) -> None:
    line = fill_line(PIECES, (first, second))
    assert line.isascii()
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    found = json.loads(line)
    for value, read in zip((first, second), found.values(), strict=True):
        assert read == (pytest.approx(value, abs=0.05001) if isinstance(value, float) else value)
    with patch.object(writing, "NATIVE", None):
        assert fill_line(PIECES, (first, second)) == line


def test_bytes_are_json_already() -> None:
    for native in {NATIVE, None}:
        with patch.object(writing, "NATIVE", native):
            assert fill_line(PIECES, (b"[1.55]", 12.34)) == b'{"a":[1.55],"b":12.3}\n'
            assert fill_line(PIECES, (-1.0, float("inf"))) == b'{"a":-1.0,"b":inf}\n'


@pytest.mark.skipif(NATIVE is None, reason="asked to do without native code, or there is no compiler")
def test_what_native_code_writes() -> None:
    assert NATIVE is not None
    for value in ({"a": 1.5}, {"a": "\n"}, {"a": '"'}, {"a": "\\"}, {1: 2}, {"a": (1,)}, {"a": 2**63}, [1]):
        assert NATIVE.write_object(value, False) is None  # pyright: ignore[reportArgumentType]
    assert NATIVE.write_object({"b": {"d": 1, "c": 2}, "a": [{"\ue000": 0, "\U00010000": 1}]}, True) == (
        '{"a":[{"\ue000":0,"\U00010000":1}],"b":{"c":2,"d":1}}'.encode()
    )
    nested: Any = 1
    for _ in range(17):
        nested = [nested]
    assert NATIVE.write_object({"a": nested[0]}, True) is not None
    assert NATIVE.write_object({"a": nested}, True) is None
    for value in ("\u00fc", "\x7f", -1.0, 1e15, float("nan"), (1,)):
        assert NATIVE.fill_line((b"", b""), (value,)) is None
    for arguments in (((b"",), (1,)), ((b"", ""), (1,)), ([b"", b""], (1,)), ((b"", b""), [1]), ((b"", b""),)):
        with pytest.raises(TypeError):
            NATIVE.fill_line(*arguments)  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(NATIVE is None, reason="asked to do without native code, or there is no compiler")
@given(st.lists(st.integers(-(2**65), 2**65) | st.booleans(), max_size=5), st.integers(), st.integers())
def test_numbers_within_bounds(values: list[object], low: int, high: int) -> None:
    assert NATIVE is not None
    fits = all(type(each) is int and low <= each <= high and -(2**63) <= each < 2**63 for each in values)
    assert NATIVE.are_within(values, low, high) is fits
    with pytest.raises(TypeError):
        NATIVE.are_within(tuple(values), low, high)  # pyright: ignore[reportArgumentType]
