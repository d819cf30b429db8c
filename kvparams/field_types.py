"""Defines the types of a document's values: every string, list and integer has a bound.

Validation converts no value: `"1"`, `1.0` and `true` are not the integer 1. A value that is kept without being
understood (an unknown member, an extension) is still bounded, and copied, so that nobody can change it afterwards.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Final, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, StringConstraints
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from kvparams.errors import ProblemKind

__all__ = [
    "MAX_DEPTH",
    "MAX_INTEGER",
    "MAX_ITEMS",
    "MAX_KEYS",
    "MAX_LABEL",
    "MAX_MEMBERS",
    "MAX_TEXT",
    "Address",
    "Count",
    "DocumentModel",
    "Identifier",
    "JSONValue",
    "Label",
    "Name",
    "StoreKey",
    "StoreKeys",
    "TokenId",
    "UnixSeconds",
    "VisibleText",
    "list_to_tuple",
]

MAX_INTEGER: Final = 2**63 - 1
"""The largest counter."""
MAX_KEYS: Final = 65_536
"""Store keys in one list."""
MAX_MEMBERS: Final = 256
"""Members of the document, and of each object that it defines; members of an unknown object too."""
MAX_DEPTH: Final = 32
"""Objects and lists inside one another in a value that is kept without being understood."""
MAX_ITEMS: Final = 65_536
"""Entries of a list in such a value."""
MAX_TEXT: Final = 1_048_576
"""Code points of a string in such a value."""
_MAX_NAME: Final = 256
_LOWEST: Final = -(2**63)
_HIGHEST: Final = 2**64 - 1


def list_to_tuple(most: int) -> BeforeValidator:
    """A JSON list as the tuple that a frozen model holds; anything else as it is, for the field to judge.

    A list or object of more than `most` entries is refused before one of them is looked at: each could be a problem.
    """

    def freeze(value: object) -> object:
        kind = type(value)
        if kind is not list and kind is not dict:
            return value
        entries = cast("Collection[object]", value)
        if len(entries) > most:
            raise PydanticCustomError("length", "{message}", {"message": f"has more than {most} entries"})
        return tuple(entries) if kind is list else value

    return BeforeValidator(freeze)


def _fault(kind: ProblemKind, message: str, path: tuple[str | int, ...], value: object) -> ValidationError:
    error = PydanticCustomError(kind, "{message}", {"message": message})
    return ValidationError.from_exception_data("value", [InitErrorDetails(type=error, loc=path, input=value)])


def _text(value: str, path: tuple[str | int, ...], limit: int) -> str:
    if len(value) > limit:
        raise _fault("length", f"a string or name here has at most {limit} characters", path, value)
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise _fault("value", "lone surrogates are not Unicode text", path, value)
    return value


def _copy(value: object, path: tuple[str | int, ...] = ()) -> object:
    """The JSON value, copied; its first fault is raised with the path to it."""
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind is str:
        return _text(cast("str", value), path, MAX_TEXT)
    if kind is int or kind is float:
        if not _LOWEST <= cast("float", value) <= _HIGHEST:  # NaN is not either
            raise _fault("range", f"a number lies between {_LOWEST} and {_HIGHEST}", path, value)
        return value
    if kind is not list and kind is not dict:
        raise _fault("type", f"{kind.__name__} is not a JSON value", path, value)
    if len(path) >= MAX_DEPTH:
        raise _fault("length", f"nested deeper than {MAX_DEPTH} levels", path, value)
    if kind is list:
        items = cast("list[object]", value)
        if len(items) > MAX_ITEMS:
            raise _fault("length", f"a list here has at most {MAX_ITEMS} entries", path, value)
        return [_copy(item, (*path, index)) for index, item in enumerate(items)]
    members = cast("dict[object, object]", value)
    if len(members) > MAX_MEMBERS:
        raise _fault("length", f"an object has at most {MAX_MEMBERS} members", path, value)
    return {(known := _name(name, path)): _copy(member, (*path, known)) for name, member in members.items()}


def _name(name: object, path: tuple[str | int, ...]) -> str:
    if type(name) is not str:
        raise _fault("type", "a member's name is a string", path, name)
    return _text(name, path, _MAX_NAME)


def _json(value: object) -> object:
    return _copy(value)


JSONValue = Annotated[object, PlainValidator(_json)]
"""Any JSON value within the bounds above; numbers from -2^63 to 2^64 - 1."""
Name = Annotated[str, StringConstraints(max_length=_MAX_NAME)]

MAX_LABEL: Final = 256
Label = Annotated[str, StringConstraints(min_length=1, max_length=MAX_LABEL)]
"""1 to 256 characters of Unicode."""
VisibleText = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[!-~]*$")]
"""1 to 256 visible ASCII characters: can stand in an HTTP header as it is."""
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._~-]*$")]
"""1 to 128 of the characters that need no escaping in a URL."""
Address = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=262, pattern=r"^(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}$"
    ),
]
"""`host:port`: a name, an IPv4 address, or an IPv6 address in brackets."""
StoreKey = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[!-~]*$")]
"""A store key: 1 to 128 visible ASCII characters."""
StoreKeys = Annotated[tuple[StoreKey, ...], Field(max_length=MAX_KEYS), list_to_tuple(MAX_KEYS)]
Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
UnixSeconds = Annotated[int, Field(ge=0, le=253_402_300_799)]
"""Whole seconds since 1970, up to the end of the year 9999."""
TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]


class DocumentModel(BaseModel, frozen=True):
    """An object of the document: frozen, strict, and keeping what it does not know.

    Two parts are equal when they are the same JSON: a member that is absent differs from one that is null.
    """

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    if not TYPE_CHECKING:  # for pydantic alone: type checkers would take it for a parameter of `__init__`
        __pydantic_extra__: dict[Name, JSONValue]

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.model_fields_set == cast("DocumentModel", other).model_fields_set
