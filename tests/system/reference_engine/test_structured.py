"""Tests structured output: regular expressions, schemas, and the sequences that must match them."""

import json
import random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import validate

from reference_engine.grammar import Chars, Either, Expression, Literal, Repeat, Then, ends, first, rest
from reference_engine.sampling import Choice
from reference_engine.schemas import SchemaError, any_object, choices, from_schema
from reference_engine.sequence import Event, Limits, Sequence
from reference_engine.tokenizer import EOS

JSON = dict[str, object]
SCHEMA: JSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 5},
        "kind": {"enum": ["a", 'b"\\', None, 3]},
        "always": {"const": {"x": [1]}},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "none": {"type": "array", "items": {"type": "null"}, "maxItems": 0},
        "size": {"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "object", "properties": {}}]},
    },
    "required": ["name", "kind", "always", "tags", "none", "size"],
    "additionalProperties": False,
}


def written(expression: Expression, draw: random.Random, most: int = 2_000) -> str:
    """A text that the expression allows, drawn at random."""
    text = ""
    while len(text) < most:
        possible = sorted(first(expression))
        assert possible or ends(expression), "a dead end"
        if not possible or (ends(expression) and draw.random() < 0.3):
            return text
        text += draw.choice(possible)
        expression = rest(expression, text[-1])
    return text


def matches(expression: Expression, text: str) -> bool:
    for char in text:
        if char not in first(expression):
            return False
        expression = rest(expression, char)
    return ends(expression)


def nobody(event: Event) -> None:
    """Events are looked at directly here."""


@pytest.mark.parametrize(
    ("expression", "texts", "others"),
    [
        (Literal("ab"), ["ab"], ["", "a", "abc"]),
        (Chars(frozenset("ab")), ["a", "b"], ["", "c", "ab"]),
        (Then(Literal("a"), Literal("b")), ["ab"], ["a", "b", "ba"]),
        (Either((Literal("a"), Literal("ab"))), ["a", "ab"], ["", "b", "abb"]),
        (Repeat(Literal("ab"), 1, 2), ["ab", "abab"], ["", "a", "aba", "ababab"]),
        (Then(Repeat(Literal("a")), Literal("ab")), ["ab", "aab", "aaab"], ["a", "b", "aa"]),
        (Repeat(Literal("a"), 0, 0), [""], ["a"]),
    ],
)
def test_expressions_match_what_they_say(expression: Expression, texts: list[str], others: list[str]) -> None:
    assert all(matches(expression, text) for text in texts)
    assert not any(matches(expression, text) for text in others)


@given(st.randoms(use_true_random=False))
def test_whatever_a_schema_allows_is_valid(draw: random.Random) -> None:
    text = written(from_schema(SCHEMA), draw)

    validate(json.loads(text), SCHEMA)
    assert text == json.dumps(json.loads(text), separators=(",", ":")) or "." in text or '"size":-0' in text


@given(st.randoms(use_true_random=False))
def test_any_object_is_json(draw: random.Random) -> None:
    text = written(any_object(), draw, most=400)

    if len(text) < 400:
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "schema",
    [
        None,
        [],
        {},
        {"type": "king"},
        {"type": ["string", "null"]},
        {"type": "string", "pattern": "a+"},
        {"type": "string", "maxLength": 10**9},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array"},
        {"type": "object", "properties": [1]},
        {"type": "integer", "minimum": 0},
        {"enum": []},
        {"anyOf": "string"},
        {"$ref": "#/$defs/a"},
    ],
)
def test_what_is_not_understood_is_refused(schema: object) -> None:
    with pytest.raises(SchemaError):
        from_schema(schema)


def test_a_schema_that_would_cost_much_is_refused() -> None:
    deep: JSON = {"type": "null"}
    for _ in range(30):
        deep = {"type": "array", "items": deep}
    wide: JSON = {"type": "object", "properties": {str(number): {"type": "null"} for number in range(2_000)}}

    for schema in (deep, wide):
        with pytest.raises(SchemaError, match="levels"):
            from_schema(schema)


def test_alternatives_that_are_alike_do_not_multiply() -> None:
    """Without that, each item would double the ways to read the text."""
    text = {"type": "string"}
    expression = from_schema({"type": "array", "items": {"anyOf": [text, text, text]}})
    for char in "[" + '"a",' * 200:
        expression = rest(expression, char)

    assert len(repr(expression)) < 5_000


@pytest.mark.parametrize("texts", [[], [""], ["ä"], ["a\nb"]])
def test_choices_are_texts_that_can_be_generated(texts: list[str]) -> None:
    with pytest.raises(SchemaError):
        choices(texts)


def test_a_sequence_may_only_write_what_its_grammar_allows_and_ends_with_it() -> None:
    limits = Limits(20, min_tokens=5, ignore_eos=True, grammar=choices(["yes", "yessir"]))
    sequence = Sequence([1], 0, nobody, limits=limits)
    seen: list[frozenset[int] | None] = []
    for char in "yes":
        seen.append(sequence.allowed())
        sequence.append(Choice(ord(char), None, []))

    assert seen == [{ord("y")}, {ord("e")}, {ord("s")}]
    assert sequence.allowed() == {ord("s")}  # the end too, were there not more tokens to come
    for char in "sir":
        sequence.append(Choice(ord(char), None, []))
    assert sequence.allowed() == {EOS}  # there is nothing else: neither min_tokens nor ignore_eos can hold it up
    assert sequence.append(Choice(EOS, None, [])).finish == "stop"


def test_a_stop_token_ends_without_text_and_not_before_its_time() -> None:
    limits = Limits(20, min_tokens=2, stop_tokens=frozenset((ord("b"),)))
    sequence = Sequence([1], 0, nobody, limits=limits)
    allowed = cast("frozenset[int]", sequence.allowed())
    for char in "aa":
        sequence.append(Choice(ord(char), None, []))
    event = sequence.append(Choice(ord("b"), None, []))

    assert not allowed & {ord("b"), EOS}
    assert (event.text, event.finish, event.reason) == ("", "stop", ord("b"))


@pytest.mark.parametrize(("keep", "text"), [(False, "ab"), (True, "abEND")])
def test_what_stopped_an_answer_can_stay_in_it(keep: bool, text: str) -> None:
    sequence = Sequence([1], 0, nobody, limits=Limits(20, stop=("END",), keep_stop=keep))
    events = [sequence.append(Choice(ord(char), None, [])) for char in "abEND"]

    assert "".join(event.text for event in events) == text
    assert (events[-1].finish, events[-1].reason) == ("stop", "END")
