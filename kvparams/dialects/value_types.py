"""The values that native keys may have: types and bounds, each with words for people.

Every value has a bound. Engines have none: a `tp_size` of a billion makes vLLM build a list of as many ranks (vLLM
issue #51137), so it is refused here.
"""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

from pydantic import TypeAdapter, ValidationError

from kvparams.dialects.message import MessagePath
from kvparams.errors import Problem, ProblemKind
from kvparams.field_types import JSONValue
from kvparams.tokens import MAX_TOKENS
from kvparams.validation import to_invalid_params

__all__ = [
    "ADDRESSES",
    "ANYTHING",
    "BLOCKS",
    "BLOCK_GROUPS",
    "FLAG",
    "HOST",
    "ID",
    "JSON",
    "NUMBER",
    "OBJECT",
    "PORT",
    "RANK",
    "SIZE",
    "TOKEN",
    "TOKENS",
    "URL",
    "WHOLE",
    "AnyType",
    "BooleanType",
    "DecimalTextType",
    "EnumType",
    "IntegerType",
    "ListType",
    "NumberType",
    "ObjectType",
    "TextType",
    "UnionType",
    "ValueType",
]


_ARRAYS: Final = {(0, 2**31 - 1): "Ii", (0, 2**32 - 1): "I"}
"""Of a range of integers, the codes of the arrays that take all of them and no other: an array of C integers is made
two to four times as fast as a minimum and a maximum are found."""


class ValueType(Protocol):
    """A `ValueType` says which values a native key may have."""

    @property
    def description(self) -> str:
        """For people: what it is."""
        ...

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """The first thing that is wrong with it."""
        ...


def _fault(path: MessagePath, kind: ProblemKind, words: str) -> Problem:
    return Problem(path, kind, f"Input should be {words}")


JSON: Final = TypeAdapter(JSONValue)
"""Judges JSON that nobody understands, by the bounds of the document."""


def _bounded(value: object, path: MessagePath) -> Problem | None:
    try:
        JSON.validate_python(value)
    except ValidationError as error:
        (found,) = to_invalid_params(error).problems
        return Problem((*path, *found.path), found.kind, found.message)
    return None


@dataclass(frozen=True, slots=True)
class IntegerType:
    """An integer."""

    low: int
    high: int

    @property
    def description(self) -> str:
        """Returns the bounds in words."""
        return f"an integer from {self.low} to {self.high}"

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the problem of a value that is no integer within the bounds."""
        if type(value) is not int:
            return _fault(path, "type", self.description)
        return None if self.low <= value <= self.high else _fault(path, "range", self.description)

    def has_all(self, values: list[object]) -> bool:
        """Returns True if every value is a valid integer, at the speed of C, since there are many block ids."""
        if list(map(type, values)).count(int) != len(values):
            return False
        numbers = cast("list[int]", values)
        codes = _ARRAYS.get((self.low, self.high))
        if codes is None:
            return not numbers or (self.low <= min(numbers) and max(numbers) <= self.high)
        try:
            for code in codes:
                array(code, numbers)
        except OverflowError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class BooleanType:
    """True or false."""

    description: str = "true or false"

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the problem of a value that is no boolean."""
        return None if type(value) is bool else _fault(path, "type", self.description)


@dataclass(frozen=True, slots=True)
class NumberType:
    """A number within the bounds of any that is kept unread; a point in time on somebody's clock, for instance."""

    low: int = -(2**63)
    high: int = 2**64 - 1

    @property
    def description(self) -> str:
        """Returns the bounds in words."""
        return f"a number from {self.low} to {self.high}"

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the problem of a value that is no number within the bounds."""
        if type(value) not in (int, float):
            return _fault(path, "type", self.description)
        return None if self.low <= cast("float", value) <= self.high else _fault(path, "range", self.description)


@dataclass(frozen=True, slots=True)
class TextType:
    """Text of a length; of a form, where there is one."""

    most: int = 256
    pattern: str | None = None
    what: str = "text"
    least: int = 1

    @property
    def description(self) -> str:
        """Returns the kind of text and its length bounds in words."""
        return f"{self.what} of {self.least} to {self.most} characters"

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the problem of a value that is no text, or has the wrong length or form."""
        if not isinstance(value, str):
            return _fault(path, "type", self.description)
        if not self.least <= len(value) <= self.most:
            return _fault(path, "length", self.description)
        if self.pattern is not None and re.fullmatch(self.pattern, value) is None:
            return _fault(path, "value", self.description)
        return None


@dataclass(frozen=True, slots=True)
class DecimalTextType:
    """An integer as a header carries it: as decimal text."""

    low: int
    high: int

    @property
    def description(self) -> str:
        """Returns the bounds in words."""
        return f"text that spells an integer from {self.low} to {self.high}"

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the problem of a value that does not spell an integer within the bounds."""
        if not isinstance(value, str):
            return _fault(path, "type", self.description)
        if re.fullmatch(r"0|-?[1-9][0-9]{0,18}", value) is None:
            return _fault(path, "value", self.description)
        return None if self.low <= int(value) <= self.high else _fault(path, "range", self.description)


@dataclass(frozen=True, slots=True)
class EnumType:
    """An `EnumType` accepts a few words or numbers."""

    choices: tuple[str | int, ...]

    @property
    def description(self) -> str:
        """Returns the choices in words."""
        return f"one of {', '.join(map(str, self.choices))}"

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the problem of a value that is none of the choices."""
        if type(value) not in {type(choice) for choice in self.choices}:
            return _fault(path, "type", self.description)
        return None if value in self.choices else _fault(path, "value", self.description)


@dataclass(frozen=True, slots=True)
class ListType:
    """A list."""

    inner: ValueType
    most: int
    least: int = 0
    null: bool = False
    """Whether an entry may be null."""

    @property
    def description(self) -> str:
        """Returns the length bound and the type of the elements in words."""
        return f"a list of at most {self.most}, each {self.inner.description}"

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the first problem of the list or of one of its elements."""
        if not isinstance(value, list):
            return _fault(path, "type", self.description)
        entries = cast("list[object]", value)
        if not self.least <= len(entries) <= self.most:
            return _fault(path, "length", self.description)
        if type(self.inner) is IntegerType and self.inner.has_all(entries):
            return None
        for index, entry in enumerate(entries):
            if entry is None and self.null:
                continue
            found = self.inner.find_problem(entry, (*path, index))
            if found is not None:
                return found
        return None


@dataclass(frozen=True, slots=True)
class UnionType:
    """A `UnionType` accepts values of several types."""

    forms: Sequence[ValueType]

    @property
    def description(self) -> str:
        """Returns the descriptions of all types."""
        return ", or ".join(form.description for form in self.forms)

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the problem of a value that fits none of the types, the most specific one."""
        faults = [form.find_problem(value, path) for form in self.forms]
        if None in faults:
            return None
        told = [fault for fault in faults if fault is not None and fault.kind != "type"]
        return told[0] if told else _fault(path, "type", self.description)


@dataclass(frozen=True, slots=True)
class ObjectType:
    """An object that only its engine understands."""

    description: str = "an object"

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the problem of a value that is no object of bounded size."""
        return (
            _bounded(cast("object", value), path) if isinstance(value, dict) else _fault(path, "type", self.description)
        )


@dataclass(frozen=True, slots=True)
class AnyType:
    """Any JSON; a key of which only the presence counts."""

    description: str = "any JSON"

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the problem of a value that is too large or too deep."""
        return _bounded(value, path)


_MOST_BLOCKS: Final = 65_536

ANYTHING: Final = AnyType()
FLAG: Final = BooleanType()
NUMBER: Final = NumberType()
OBJECT: Final = ObjectType()
WHOLE: Final = IntegerType(0, 2**63 - 1)
SIZE: Final = IntegerType(1, 4096)
"""How many ranks there are."""
RANK: Final = IntegerType(0, 4095)
PORT: Final = IntegerType(1, 65_535)
HOST: Final = TextType(255, r"[A-Za-z0-9._:%\[\]-]*", "a host name or address")
ID: Final = TextType(256, r"[!-~]*", "an id in visible ASCII")
TOKEN: Final = IntegerType(0, 2**32 - 1)
TOKENS: Final = ListType(TOKEN, MAX_TOKENS)
BLOCKS: Final = ListType(IntegerType(0, 2**31 - 1), _MOST_BLOCKS)
"""Block ids, of the one group there is."""
BLOCK_GROUPS: Final = ListType(BLOCKS, 64)
"""Block ids, a list for each group of KV caches."""
URL: Final = TextType(512, r"https?://[A-Za-z0-9._:%\[\]-]+(?:/[!-~]*)?", "a URL with its scheme")
ADDRESSES: Final = TextType(2048, r"[A-Za-z0-9._:%\[\],/-]*", "addresses as host:port")
