"""Judges bodies by the OpenAPI fragment of the spec."""

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from tests.support.kvparams.spec_folder import SPEC

__all__ = ["API", "faults", "reading"]

API: Final[dict[str, Any]] = json.loads((SPEC / "openapi.json").read_bytes())
_FOLDER: Final = "file:///spec/"
"""What relative references begin with; nothing is fetched."""


def _registry() -> Any:
    schema = json.loads((SPEC / "schema.json").read_bytes())
    documents = {"openapi.json": API, "schema.json": schema}
    resources = [
        (_FOLDER + name, cast("Any", DRAFT202012).create_resource(content)) for name, content in documents.items()
    ]
    return cast("Any", Registry)().with_resources(resources)


_REGISTRY: Final = _registry()


def faults(part: str, value: object) -> list[str]:
    """What is wrong with `value`, by the part of the fragment to which this JSON pointer leads."""
    judge = cast("Any", Draft202012Validator)({"$ref": f"{_FOLDER}openapi.json#{part}"}, registry=_REGISTRY)
    return [f"{error.json_path}: {error.message[:200]}" for error in judge.iter_errors(value)]


def reading(path: str, method: str, status: str | None = None, media: str = "application/json") -> str:
    """The pointer to the schema of an operation's body: of the request, or of the answer with this status."""
    operation: Mapping[str, Any] = API["paths"][path][method]
    start = f"/paths/{path.replace('/', '~1')}/{method}"
    if status is None:
        return f"{start}/requestBody/content/{media.replace('/', '~1')}/schema"
    if "$ref" in (response := operation["responses"][status]):
        return f"{response['$ref'][1:]}/content/{media.replace('/', '~1')}/schema"
    return f"{start}/responses/{status}/content/{media.replace('/', '~1')}/schema"
