"""Tests the types of native values where Python and JSON differ: True equals 1, and large integers are no floats."""

import pytest

from kvparams.dialects.value_types import (
    NUMBER,
    PORT,
    TOKENS,
    DecimalTextType,
    EnumType,
    IntegerType,
    ListType,
    NumberType,
    TextType,
    UnionType,
    ValueType,
)

LETTERS = TextType(4, "[a-z]*", "letters")


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (PORT, 65_535),
        (IntegerType(0, 2**64 - 1), 2**64 - 1),
        (NUMBER, -(2**63)),
        (NUMBER, 2**64 - 1),
        (NUMBER, 0.5),
        (NumberType(0, 1), 1.0),
        (EnumType(("a", 1)), 1),
        (EnumType(("a", 1)), "a"),
        (ListType(PORT, 3, null=True), [1, None]),
        (ListType(TOKENS, 2), [[], [1]]),
        (UnionType((PORT, LETTERS)), "abcd"),
        (DecimalTextType(-5, 5), "-5"),
    ],
)
def test_a_value_of_the_type_has_no_problem(form: ValueType, value: object) -> None:
    assert form.find_problem(value, ("key",)) is None


@pytest.mark.parametrize(
    ("form", "value", "where", "kind", "words"),
    [
        (PORT, True, (), "type", "an integer from 1 to 65535"),
        (PORT, 2**70, (), "range", "an integer from 1 to 65535"),
        (NUMBER, -(2**63) - 1, (), "range", "a number from"),
        (NUMBER, 2.0**64, (), "range", "a number from"),
        (NUMBER, float("nan"), (), "range", "a number from"),
        (NUMBER, True, (), "type", "a number from"),
        (NumberType(0, 1), 1.5, (), "range", "a number from 0 to 1"),
        (EnumType((0, 1)), True, (), "type", "one of 0, 1"),
        (EnumType((0, 1)), 2**64, (), "value", "one of 0, 1"),
        (EnumType(("pull",)), "push", (), "value", "one of pull"),
        (LETTERS, "a\n", (), "value", "letters of 1 to 4 characters"),
        (LETTERS, "abcde", (), "length", "letters of 1 to 4 characters"),
        (TextType(4), "\ud800", (), "value", "text of 1 to 4 characters"),
        (ListType(PORT, 3), [1, None], (1,), "type", "an integer from 1 to 65535"),
        (ListType(TOKENS, 2), [[1], [2, "a"]], (1, 1), "type", "an integer from 0"),
        (ListType(PORT, 3, 1), [], (), "length", "a list of at most 3"),
        (ListType(PORT, 3), (1,), (), "type", "a list of at most 3"),
        (UnionType((PORT, LETTERS)), 0, (), "range", "an integer from 1 to 65535"),
        (UnionType((PORT, LETTERS)), None, (), "type", "an integer from 1 to 65535, or letters"),
        (DecimalTextType(-5, 5), "6", (), "range", "text that spells an integer from -5 to 5"),
        (DecimalTextType(-5, 5), "05", (), "value", "text that spells an integer from -5 to 5"),
    ],
)
def test_the_problem_of_a_value_names_its_place_and_what_is_allowed(
    form: ValueType, value: object, where: tuple[int, ...], kind: str, words: str
) -> None:
    problem = form.find_problem(value, ("key",))
    assert problem is not None
    assert (problem.path, problem.kind) == (("key", *where), kind)
    assert problem.message.startswith(f"Input should be {words}")
