"""From what a client asks for (choices, any JSON object, a JSON schema) to an expression of `grammar`.

A part of JSON Schema that is not supported is refused with an error. The output is compact JSON: no blanks outside of
strings, members in the schema's order, all of them, and strings of printable ASCII without escapes.
"""

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Final, cast

from reference_engine.grammar import DIGITS, EMPTY, Chars, Either, Expression, Literal, Repeat, Then

__all__ = ["SchemaError", "any_object", "choices", "from_schema", "sequence"]

_PLAIN: Final = Chars(frozenset(map(chr, range(0x20, 0x7F))) - frozenset('"\\'))
_MAX_DEPTH: Final = 16
_MAX_PARTS: Final = 1_000
_MAX_COUNT: Final = 1_024
"""The largest `maxItems`, `minLength` and so on."""
_ANY_DEPTH: Final = 2
"""Levels of objects and lists inside `any_object`."""
_REMARKS: Final = frozenset(
    ("title", "description", "default", "examples", "$schema", "$id", "required", "additionalProperties")
)
_MEMBERS: Final = {
    "object": frozenset(("properties",)),
    "array": frozenset(("items", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength")),
    "integer": frozenset[str](),
    "number": frozenset[str](),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}


class SchemaError(ValueError):
    """The schema is wrong, or asks for what is not understood here."""


def sequence(*parts: Expression) -> Expression:
    """All of them, one behind the other."""
    return reduce(Then, parts) if parts else EMPTY


def choices(texts: Sequence[str]) -> Expression:
    """Returns an expression that accepts one of these texts, printable ASCII each.

    Raises:
        SchemaError: there is none, one is empty, or one has other characters.
    """
    if not texts or not all(text and text.isascii() and text.isprintable() for text in texts):
        raise SchemaError("choices are texts of printable ASCII, not empty")
    return Either(tuple(map(Literal, dict.fromkeys(texts))))


def any_object() -> Expression:
    """Any JSON object, up to a depth."""
    value: Expression = _scalar()
    for _ in range(_ANY_DEPTH):
        value = Either((_scalar(), _list(value, 0, None), _object_of(value)))
    return _object_of(value)


def from_schema(schema: object) -> Expression:
    """JSON as a schema describes it: objects, lists, strings, numbers, `enum`, `const`, `anyOf`.

    Raises:
        SchemaError: see the class; also where the schema is too large.
    """
    return _Reader().read(schema, 0)


class _Reader:
    """Counts the parts of one schema, so that a small text cannot cost much."""

    def __init__(self) -> None:
        self._parts = 0

    def read(self, schema: object, depth: int) -> Expression:
        self._parts += 1
        if depth > _MAX_DEPTH or self._parts > _MAX_PARTS:
            raise SchemaError(f"the schema has more than {_MAX_DEPTH} levels or {_MAX_PARTS} parts")
        if not isinstance(schema, dict):
            raise SchemaError("a schema is an object")
        members = cast("dict[str, object]", schema)
        for name in ("enum", "const", "anyOf"):
            if name in members:
                return self._chosen(name, members, depth)
        kind = members.get("type")
        if not isinstance(kind, str) or kind not in _MEMBERS:
            raise SchemaError(f"`type` is one of {', '.join(_MEMBERS)}")
        unknown = members.keys() - _REMARKS - _MEMBERS[kind] - {"type"}
        if unknown:
            raise SchemaError(f"{', '.join(sorted(unknown))} is not understood in a schema of the type {kind}")
        match kind:
            case "object":
                return self._object(members.get("properties"), depth)
            case "array":
                items = self.read(members.get("items"), depth + 1)
                return _list(items, *_bounds(members, "minItems", "maxItems"))
            case "string":
                return _string(*_bounds(members, "minLength", "maxLength"))
            case "integer":
                return _integer()
            case "number":
                return _number()
            case "boolean":
                return Either((Literal("true"), Literal("false")))
            case _:
                return Literal("null")

    def _chosen(self, name: str, members: Mapping[str, object], depth: int) -> Expression:
        found = [members[name]] if name == "const" else members[name]
        if not isinstance(found, list) or not found or len(cast("list[object]", found)) > _MAX_PARTS:
            raise SchemaError(f"`{name}` is a list of 1 to {_MAX_PARTS}")
        if name == "anyOf":
            return Either(tuple(self.read(one, depth + 1) for one in cast("list[object]", found)))
        return Either(tuple(Literal(_compact(one)) for one in cast("list[object]", found)))

    def _object(self, properties: object, depth: int) -> Expression:
        if not isinstance(properties, dict):
            if properties is not None:
                raise SchemaError("`properties` is an object")
            return any_object()
        parts: list[Expression] = []
        for name, schema in cast("dict[str, object]", properties).items():
            parts += [Literal(("," if parts else "") + _compact(name) + ":"), self.read(schema, depth + 1)]
        return sequence(Literal("{"), *parts, Literal("}"))


def _bounds(members: Mapping[str, object], least: str, most: str) -> tuple[int, int | None]:
    low, high = members.get(least, 0), members.get(most)
    for name, value in ((least, low), (most, 0 if high is None else high)):
        if type(value) is not int or not 0 <= value <= _MAX_COUNT:
            raise SchemaError(f"`{name}` is a whole number from 0 to {_MAX_COUNT}")
    lowest, highest = cast("int", low), cast("int | None", high)
    if highest is not None and lowest > highest:
        raise SchemaError(f"`{least}` is more than `{most}`")
    return lowest, highest


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))  # ASCII alone


def _scalar() -> Expression:
    return Either((_string(0, None), _number(), Literal("true"), Literal("false"), Literal("null")))


def _string(least: int, most: int | None) -> Expression:
    return sequence(Literal('"'), Repeat(_PLAIN, least, most), Literal('"'))


def _integer() -> Expression:
    whole = Either((Literal("0"), Then(Chars(DIGITS - {"0"}), Repeat(Chars(DIGITS), 0, 8))))
    return Then(Repeat(Literal("-"), 0, 1), whole)


def _number() -> Expression:
    return Then(_integer(), Repeat(Then(Literal("."), Repeat(Chars(DIGITS), 1, 6)), 0, 1))


def _list(items: Expression, least: int, most: int | None) -> Expression:
    more = Repeat(Then(Literal(","), items), max(least - 1, 0), None if most is None else max(most - 1, 0))
    filled = Then(items, more)
    inside = EMPTY if most == 0 else filled if least else Either((EMPTY, filled))
    return sequence(Literal("["), inside, Literal("]"))


def _object_of(value: Expression) -> Expression:
    member = sequence(_string(1, None), Literal(":"), value)
    inside = Either((EMPTY, Then(member, Repeat(Then(Literal(","), member)))))
    return sequence(Literal("{"), inside, Literal("}"))
