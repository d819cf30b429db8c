"""Engines' responses as parsed JSON objects, and the errors that stand in them."""

from collections.abc import Mapping
from typing import cast

from pydantic_core import from_json

from kvparams.errors import JSONTextError

__all__ = ["embedded_error", "load_response"]


def load_response(raw: bytes) -> dict[str, object]:
    """Parses an engine's answer to an object at the parser's speed: duplicate keys are not detected.

    Raises:
        JSONTextError: it is not a JSON object.
    """
    try:
        document: object = from_json(raw, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise JSONTextError(f"not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise JSONTextError("not a JSON object")
    return cast("dict[str, object]", document)


def embedded_error(document: Mapping[str, object]) -> Mapping[str, object] | None:
    """Returns the error object of a response, whatever its status, or None where it is an answer.

    Source: vLLM 0.32.0 and SGLang 0.5.23 write `{"error": {...}}` into a stream that fails; older ones
    `{"object": "error", ...}`. In streams of `/v1/responses` it is `{"type": "error", ...}`.
    """
    inner = document.get("error")
    if inner:
        return cast("dict[str, object]", inner) if isinstance(inner, dict) else {"message": inner}
    return document if document.get("object") == "error" or document.get("type") == "error" else None
