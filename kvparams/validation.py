"""Converts the findings of the JSON reader and of pydantic into `Problem`s.

A finding is mapped by its type, never by its message, and no message repeats a value of the document.
"""

from collections.abc import Mapping
from typing import Final, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvparams.errors import InvalidParams, Problem, ProblemKind
from kvparams.jsontext.document import loads

__all__ = ["parse_json_object", "to_invalid_params"]

_KINDS: Final[dict[str, ProblemKind]] = {
    "missing": "missing",
    "bool_type": "type",
    "dict_type": "type",
    "float_type": "type",
    "int_type": "type",
    "list_type": "type",
    "finite_number": "range",
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
    "too_short": "length",
    "conflict": "conflict",
    "critical": "critical",
    "value_error": "value",
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
_FORMS: Final = {
    r"^[!-~]*$": "visible ASCII characters",
    r"^[A-Za-z0-9._~-]*$": "of A-Z a-z 0-9 . _ ~ -",
    r"^[a-z0-9-]*$": "of a-z 0-9 -",
    r"^(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}$": "host:port, an IPv6 address in brackets",
    r"^[a-z0-9-]+(?:\.[a-z0-9-]+)+$": "a domain name backwards, such as com.example.tiers",
    r"^sha256:[0-9a-f]{64}$": "sha256: and 64 lower-case hexadecimal digits",
    r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$": "canonical base64",
    r"^1\.(?:0|[1-9][0-9]{0,3})$": "1.0, 1.1 and so on",
}
"""By the pattern of a member its form in words."""


def to_invalid_params(error: ValidationError) -> InvalidParams:
    """Converts all of pydantic's findings, in the order of the document's definition."""
    return InvalidParams(tuple(_problem(found) for found in error.errors(include_url=False)))


def parse_json_object(text: str | bytes) -> Mapping[str, object]:
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
    message = _MESSAGES.get(found["type"], found["msg"])
    form = _FORMS.get(found.get("ctx", {}).get("pattern", ""))
    return Problem(path, kind, message if form is None else f"{message}: {form}")
