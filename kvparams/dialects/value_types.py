"""The values that native keys may have: types and bounds, each with words for people.

Every value has a bound. Engines have none: a `tp_size` of a billion makes vLLM build a list of as many ranks (vLLM
issue #51137), so it is refused here.
"""

import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, nextafter
from typing import Final, Protocol, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import CoreSchema, SchemaValidator, core_schema

from kvparams.dialects.message import MessagePath
from kvparams.errors import Problem, ProblemKind
from kvparams.field_types import JSONValue
from kvparams.native import NATIVE
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


class ValueType(Protocol):
    """A `ValueType` says which values a native key may have."""

    @property
    def description(self) -> str:
        """For people: what it is."""
        ...

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """The first thing that is wrong with it."""
        ...


_ARRAYS: Final = {(0, 2**31 - 1): "Ii", (0, 2**32 - 1): "I"}
"""Of a range of integers, the codes of the arrays that take all of them and no other: an array of C integers is made
two to four times as fast as a minimum and a maximum are found."""
_MANY: Final = 32
"""Pydantic is faster for shorter lists of integers, and an array for longer ones."""
_PLAIN_FORM: Final = re.compile(r"(?!.*(?:--|~~))\[(?:[A-Za-z0-9._:%,/+=!~-]|\\[\[\]])+\]\*")
"""Any number of characters of one class, which all kinds of regular expressions read alike."""
JSON: Final = TypeAdapter(JSONValue)
"""Judges JSON that nobody understands, by the bounds of the document."""


@dataclass(frozen=True, slots=True)
class _SchemaType(ABC):
    """A type whose values pydantic checks. A subclass has the bounds, as its own fields."""

    validator: SchemaValidator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "validator", SchemaValidator(self.schema()))

    @abstractmethod
    def schema(self) -> CoreSchema:
        """Returns what pydantic checks."""

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the first problem of a value."""
        if self.validator.isinstance_python(value):
            return None
        try:
            self.validator.validate_python(value)
        except ValidationError as error:
            return self.describe_problem(value, path, to_invalid_params(error).problems)
        return None

    def describe_problem(self, value: object, path: MessagePath, found: Sequence[Problem]) -> Problem:
        """Returns the problem of a value in the words of this type.

        Args:
            value: one that pydantic refuses.
            path: where it stands.
            found: everything that pydantic has found.
        """
        return Problem(path, found[0].kind, f"Input should be {cast('ValueType', self).description}")


def _schema_of(form: ValueType) -> CoreSchema:
    """Returns the schema of a type; of one that others define, a function that asks it."""
    if isinstance(form, _SchemaType):
        return form.schema()

    def check(value: object) -> object:
        if (problem := form.find_problem(value, ())) is not None:
            raise ValueError(problem.message)
        return value

    return core_schema.no_info_plain_validator_function(check)


@dataclass(frozen=True, slots=True)
class IntegerType(_SchemaType):
    """An integer."""

    low: int
    high: int

    @property
    def description(self) -> str:
        """Returns the bounds in words."""
        return f"an integer from {self.low} to {self.high}"

    def schema(self) -> CoreSchema:
        """Returns what pydantic checks."""
        return core_schema.int_schema(strict=True, ge=self.low, le=self.high)

    def has_all(self, values: list[object]) -> bool:
        """Returns True if every value is certainly a valid integer, faster than pydantic for many block ids."""
        if NATIVE is not None:
            return NATIVE.are_within(values, self.low, self.high)
        if len(values) < _MANY:
            return False
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
class BooleanType(_SchemaType):
    """True or false."""

    description: str = "true or false"

    def schema(self) -> CoreSchema:
        """Returns what pydantic checks."""
        return core_schema.bool_schema(strict=True)


@dataclass(frozen=True, slots=True)
class NumberType(_SchemaType):
    """A number within the bounds of any that is kept unread; a point in time on somebody's clock, for instance."""

    low: int = -(2**63)
    high: int = 2**64 - 1

    @property
    def description(self) -> str:
        """Returns the bounds in words."""
        return f"a number from {self.low} to {self.high}"

    def schema(self) -> CoreSchema:
        """Returns what pydantic checks."""
        low, high = float(self.low), float(self.high)
        low = nextafter(low, inf) if low < self.low else low
        high = nextafter(high, -inf) if high > self.high else high
        return core_schema.tagged_union_schema(
            {
                "whole": core_schema.int_schema(strict=True, ge=self.low, le=self.high),
                "other": core_schema.float_schema(strict=True, ge=low, le=high, allow_inf_nan=False),
            },
            discriminator=lambda value: "whole" if type(value) is int else "other",
        )


@dataclass(frozen=True, slots=True)
class TextType(_SchemaType):
    """Text of a length; of a form, where there is one."""

    most: int = 256
    pattern: str | None = None
    """What the whole text matches, in the syntax of Rust's regular expressions (without look-around)."""
    what: str = "text"
    least: int = 1
    _match: Callable[[str], object] | None = field(init=False, repr=False, compare=False)
    """Tells texts of a form that is plain faster than pydantic."""

    def __post_init__(self) -> None:
        _SchemaType.__post_init__(self)
        plain = self.pattern is not None and _PLAIN_FORM.fullmatch(self.pattern) is not None
        object.__setattr__(self, "_match", re.compile(self.pattern or "").fullmatch if plain else None)

    @property
    def description(self) -> str:
        """Returns the kind of text and its length bounds in words."""
        return f"{self.what} of {self.least} to {self.most} characters"

    def schema(self) -> CoreSchema:
        """Returns what pydantic checks."""
        pattern = None if self.pattern is None else f"^(?:{self.pattern})$"
        return core_schema.str_schema(strict=True, min_length=self.least, max_length=self.most, pattern=pattern)

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the first problem of a text."""
        match = self._match
        if match is not None and type(value) is str and self.least <= len(value) <= self.most and match(value):
            return None
        return _SchemaType.find_problem(self, value, path)


@dataclass(frozen=True, slots=True)
class DecimalTextType(_SchemaType):
    """An integer as a header carries it: as decimal text."""

    low: int
    high: int

    @property
    def description(self) -> str:
        """Returns the bounds in words."""
        return f"text that spells an integer from {self.low} to {self.high}"

    def schema(self) -> CoreSchema:
        """Returns what pydantic checks."""
        text = core_schema.str_schema(strict=True, pattern=r"^(?:0|-?[1-9][0-9]{0,18})$")
        return core_schema.chain_schema([text, core_schema.int_schema(ge=self.low, le=self.high)])


@dataclass(frozen=True, slots=True)
class EnumType(_SchemaType):
    """An `EnumType` accepts a few words or numbers."""

    choices: tuple[str | int, ...]

    @property
    def description(self) -> str:
        """Returns the choices in words."""
        return f"one of {', '.join(map(str, self.choices))}"

    def schema(self) -> CoreSchema:
        """Returns what pydantic checks: a number is an integer first, because True equals 1."""
        words = [choice for choice in self.choices if isinstance(choice, str)]
        numbers = [choice for choice in self.choices if isinstance(choice, int)]
        forms: list[CoreSchema | tuple[CoreSchema, str]] = []
        if words:
            forms.append(core_schema.literal_schema(words))
        if numbers:
            whole = core_schema.int_schema(strict=True, ge=min(numbers), le=max(numbers))
            forms.append(core_schema.chain_schema([whole, core_schema.literal_schema(numbers)]))
        return core_schema.union_schema(forms, mode="left_to_right")

    def describe_problem(self, value: object, path: MessagePath, found: Sequence[Problem]) -> Problem:
        """Returns the problem of a value in the words of this type."""
        known = {type(choice) for choice in self.choices}
        kind: ProblemKind = "value" if type(value) in known else "type"
        return Problem(path, kind, f"Input should be {self.description}")


@dataclass(frozen=True, slots=True)
class ListType(_SchemaType):
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

    def schema(self) -> CoreSchema:
        """Returns what pydantic checks; it ends with the first entry that is wrong."""
        entry = _schema_of(self.inner)
        if self.null:
            entry = core_schema.nullable_schema(entry)
        return core_schema.list_schema(entry, strict=True, min_length=self.least, max_length=self.most, fail_fast=True)

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the first problem of the list or of one of its entries."""
        if isinstance(value, list) and self.least <= len(cast("list[object]", value)) <= self.most:
            entries = cast("list[object]", value)
            if type(self.inner) is IntegerType and self.inner.has_all(entries):
                return None
            if type(self.inner) is ListType and not self.null:
                faults = (self.inner.find_problem(entry, (*path, index)) for index, entry in enumerate(entries))
                return next((fault for fault in faults if fault is not None), None)
        return _SchemaType.find_problem(self, cast("object", value), path)

    def describe_problem(self, value: object, path: MessagePath, found: Sequence[Problem]) -> Problem:
        """Returns the problem of the list, or that of its first wrong entry in the words of the entry's type."""
        place = found[0].path
        if place and isinstance(index := place[0], int):
            problem = self.inner.find_problem(cast("list[object]", value)[index], (*path, index))
            if problem is not None:
                return problem
        return Problem(path, found[0].kind, f"Input should be {self.description}")


@dataclass(frozen=True, slots=True)
class UnionType(_SchemaType):
    """A `UnionType` accepts values of several types."""

    forms: Sequence[ValueType]

    @property
    def description(self) -> str:
        """Returns the descriptions of all types."""
        return ", or ".join(form.description for form in self.forms)

    def schema(self) -> CoreSchema:
        """Returns what pydantic checks."""
        return core_schema.union_schema([_schema_of(form) for form in self.forms], mode="left_to_right")

    def describe_problem(self, value: object, path: MessagePath, found: Sequence[Problem]) -> Problem:
        """Returns the problem of a value that fits none of the types, the most specific one."""
        faults = (form.find_problem(value, path) for form in self.forms)
        told = (fault for fault in faults if fault is not None and fault.kind != "type")
        return next(told, Problem(path, "type", f"Input should be {self.description}"))


@dataclass(frozen=True, slots=True)
class AnyType:
    """Any JSON; a key of which only the presence counts."""

    description: str = "any JSON"

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the problem of a value that is too large or too deep."""
        try:
            JSON.validate_python(value)
        except ValidationError as error:
            (found,) = to_invalid_params(error).problems
            return Problem((*path, *found.path), found.kind, found.message)
        return None


@dataclass(frozen=True, slots=True)
class ObjectType(AnyType):
    """An object that only its engine understands."""

    description: str = "an object"

    def find_problem(self, value: object, path: MessagePath) -> Problem | None:
        """Returns the problem of a value that is no object of bounded size."""
        if not isinstance(value, dict):
            return Problem(path, "type", f"Input should be {self.description}")
        return AnyType.find_problem(self, cast("object", value), path)


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
