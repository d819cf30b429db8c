"""Defines structured output as small expressions, each with the expression that is left after a character.

An expression is a value. The allowed next characters are a function of the text so far and of nothing else, so any
engine that has the text has the state.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = ["DIGITS", "EMPTY", "Chars", "Either", "Expression", "Literal", "Repeat", "Then", "ends", "first", "rest"]

DIGITS: Final = frozenset("0123456789")


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """A `Chars` accepts one of these characters."""

    chars: frozenset[str]


@dataclass(frozen=True, slots=True)
class Then:
    """A `Then` accepts one expression behind another."""

    one: "Expression"
    other: "Expression"


@dataclass(frozen=True, slots=True)
class Either:
    """An `Either` accepts one of several expressions."""

    options: "tuple[Expression, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same again and again, from `least` to `most` times; None: without end."""

    one: "Expression"
    least: int = 0
    most: int | None = None


Expression: TypeAlias = Literal | Chars | Then | Either | Repeat

EMPTY: Final = Literal("")


def ends(expression: Expression) -> bool:
    """Returns True if the text may end here."""
    match expression:
        case Literal(text):
            return not text
        case Chars():
            return False
        case Then(one, other):
            return ends(one) and ends(other)
        case Either(options):
            return any(map(ends, options))
        case Repeat(one, least, _):
            return least == 0 or ends(one)


def first(expression: Expression) -> frozenset[str]:
    """The characters that may come next."""
    match expression:
        case Literal(text):
            return frozenset(text[:1])
        case Chars(chars):
            return chars
        case Then(one, other):
            return first(one) | first(other) if ends(one) else first(one)
        case Either(options):
            return frozenset[str]().union(*map(first, options))
        case Repeat(one, _, most):
            return first(one) if most != 0 else frozenset()


def rest(expression: Expression, char: str) -> Expression:
    """Returns the expression that is left behind `char`, which must be one of `first(expression)`."""
    match expression:
        case Literal(text):
            return Literal(text[1:])
        case Chars():
            return EMPTY
        case Then(one, other):
            ways = [_then(rest(one, char), other)] if char in first(one) else []
            if ends(one) and char in first(other):
                ways.append(rest(other, char))
            return _either(ways)
        case Either(options):
            return _either([rest(option, char) for option in options if char in first(option)])
        case Repeat(one, least, most):
            again = Repeat(one, max(least - 1, 0), None if most is None else most - 1)
            return _then(rest(one, char), again)


def _then(one: Expression, other: Expression) -> Expression:
    return other if one == EMPTY else Then(one, other)


def _either(ways: list[Expression]) -> Expression:
    if len(ways) > 1:  # equal ways are one: else they would double with each item of a list
        ways = list(dict.fromkeys(ways))
    return ways[0] if len(ways) == 1 else Either(tuple(ways))
