"""What the JSON reader and pydantic find, as `Problem`s of this project.

The one rule: a finding is mapped by its type, never by its message, and no message repeats a value of the document.
"""

from collections.abc import Mapping
from typing import Final, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvparams.errors import InvalidParams, Problem, ProblemKind
from kvparams.jsontext import loads

__all__ = ["invalid", "json_object"]

_KINDS: Final[dict[str, ProblemKind]] = {
    "missing": "missing",
    "dict_type": "type",
    "int_type": "type",
    "invalid_key": "type",
    "model_type": "type",
    "string_type": "type",
    "tuple_type": "type",
    "literal_error": "value",
    "string_pattern_mismatch": "value",
    "string_unicode": "value",
    "greater_than_equal": "range",
    "less_than_equal": "range",
    "string_too_long": "length",
    "string_too_short": "length",
    "too_long": "length",
    "conflict": "conflict",
    "critical": "critical",
    "length": "length",
    "range": "range",
    "type": "type",
    "value": "value",
}
_MESSAGES: Final = {
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
    "string_pattern_mismatch": "Input is not of the form that the protocol gives this member",
    "tuple_type": "Input should be a list",
}


def invalid(error: ValidationError) -> InvalidParams:
    """All of pydantic's findings, in the order of the document's definition."""
    return InvalidParams(tuple(_problem(found) for found in error.errors(include_url=False, include_context=False)))


def json_object(text: str | bytes) -> Mapping[str, object]:
    """The JSON object that `text` spells.

    Raises:
        InvalidParams: it is not JSON that we accept, or not an object.
    """
    try:
        document = loads(text.encode() if isinstance(text, str) else text)
    except ValueError as error:  # JSONTextError, and text that cannot be UTF-8
        raise InvalidParams((Problem((), "json", str(error)),)) from error
    if not isinstance(document, dict):
        raise InvalidParams((Problem((), "type", "Input should be an object"),))
    return cast("dict[str, object]", document)


def _problem(found: ErrorDetails) -> Problem:
    kind = _KINDS[found["type"]]
    if found["type"] == "literal_error" and not isinstance(cast("object", found["input"]), str):
        kind = "type"
    path = tuple(part for part in found["loc"] if part != "[key]")
    return Problem(path, kind, _MESSAGES.get(found["type"], found["msg"]))
