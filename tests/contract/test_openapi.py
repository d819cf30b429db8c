"""Tests that the OpenAPI fragment is well formed and accepts the examples of the text and the vectors."""

import json
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
from jsonschema import Draft202012Validator

from tests.support.kvparams.openapi import API, faults, reading
from tests.support.kvparams.spec_folder import SPEC, VECTORS

TEXT = {"type": "string"}
REF = {"type": "object", "required": ["$ref"], "additionalProperties": False, "properties": {"$ref": TEXT}}
MEDIA = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "object", "required": ["schema"]}}


def closed(needed: str, /, **properties: Any) -> dict[str, Any]:
    """An object of these members and no other."""
    return {"type": "object", "required": needed.split(), "additionalProperties": False, "properties": properties}


def named(inner: dict[str, Any], names: str = "") -> dict[str, Any]:
    return {"type": "object", "propertyNames": {"pattern": names}, "additionalProperties": inner}


HEADER = {"anyOf": [REF, closed("schema", description=TEXT, schema={"type": "object"})]}
RESPONSE = {"anyOf": [REF, closed("description", description=TEXT, headers=named(HEADER), content=MEDIA)]}
PARAMETER = closed(
    "name in schema",
    name=TEXT,
    **{"in": {"enum": ["header", "query", "path", "cookie"]}},
    required={"type": "boolean"},
    description=TEXT,
    schema={"type": "object"},
)
OPERATION = closed(
    "operationId summary responses",
    operationId=TEXT,
    summary=TEXT,
    parameters={"type": "array", "items": {"anyOf": [REF, PARAMETER]}},
    requestBody=closed("content", required={"type": "boolean"}, description=TEXT, content=MEDIA),
    responses=named(RESPONSE, "^(?:[1-5][0-9][0-9]|[1-5]XX|default)$") | {"minProperties": 1},
)
STRUCTURE = closed(
    "openapi info paths",
    openapi={"type": "string", "pattern": r"^3\.1\.[0-9]+$"},
    info=closed("title version", title=TEXT, version=TEXT, description=TEXT),
    security={"type": "array"},
    paths=named(closed("", get=OPERATION, post=OPERATION), "^/"),
    components=closed(
        "",
        schemas=named({"type": "object"}),
        responses=named(RESPONSE),
        parameters=named(PARAMETER),
        headers=named(HEADER),
        securitySchemes=named({"type": "object", "required": ["type"]}),
    ),
)
"""OpenAPI 3.1's own rules, as far as this fragment needs them; nothing else may stand in it."""


def fences(name: str, kind: str) -> list[Any]:
    text = (SPEC / name).read_text()
    return [json.loads(found) for found in re.findall(rf"^```json {kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def parts(tree: object, name: str) -> Iterator[Any]:
    """What stands under this name, at any depth."""
    if isinstance(tree, dict):
        for key, value in cast("dict[str, object]", tree).items():
            if key == name:
                yield value
            yield from parts(value, name)
    elif isinstance(tree, list):
        for value in cast("list[object]", tree):
            yield from parts(value, name)


def test_the_fragment_is_openapi() -> None:
    judge = cast("Any", Draft202012Validator)(STRUCTURE)
    assert [error.json_path for error in judge.iter_errors(API)] == []
    for name, value in (("openapi", "3.0.0"), ("paths", {"v1": 1}), ("webhook", 1)):
        assert not judge.is_valid({**API, name: value})
    names = list(parts(API["paths"], "operationId"))
    assert len(names) == len(set(names)) > 3


def test_every_schema_in_it_is_json_schema() -> None:
    schemas = [*API["components"]["schemas"].values(), *parts(API["paths"], "schema")]
    assert len(schemas) > 15
    for schema in schemas:
        cast("Any", Draft202012Validator).check_schema(schema)


def test_every_reference_leads_somewhere() -> None:
    schema = json.loads((SPEC / "schema.json").read_bytes())
    referred: set[str] = set(parts(API, "$ref"))
    assert "schema.json" in referred
    for reference in referred:
        file, _, pointer = reference.partition("#")
        found = {"": API, "schema.json": schema}[file]
        for step in pointer.split("/")[1:]:
            found = found[step]
    for name in API["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in referred, name


EXAMPLES = [
    ("spec.md", "request", reading("/v1/completions", "post")),
    ("spec.md", "models", reading("/v1/models", "get", "200")),
    ("engine.md", "prefill", reading("/v1/completions", "post")),
    ("engine.md", "answer", reading("/v1/completions", "post", "200")),
    ("engine.md", "decode", reading("/v1/completions", "post")),
    ("engine.md", "release", reading("/v1/kvparams", "post")),
    ("engine.md", "error", reading("/v1/completions", "post", "400")),
    ("engine.md", "models", reading("/v1/models", "get", "200")),
]


@pytest.mark.parametrize(("name", "kind", "part"), EXAMPLES)
def test_the_bodies_in_the_text_are_what_it_says(name: str, kind: str, part: str) -> None:
    examples = fences(name, kind)
    assert examples
    for example in examples:
        assert faults(part, example) == []


def test_it_judges_documents_as_their_schema_does() -> None:
    """Negative control: a request with an invalid document is an invalid request, as far as a schema can say it."""
    cases = [case for case in json.loads((VECTORS / "document.json").read_bytes())["cases"] if "document" in case]
    for case in cases:
        body = {"model": "m", "prompt": "p", "kv_transfer_params": {"native": 1, "kvparams": case["document"]}}
        accepted = faults(reading("/v1/completions", "post"), body) == []
        assert accepted is (case["valid"] or case.get("beyond_schema", False)), case["name"]


def test_it_refuses_what_its_operations_do_not_have() -> None:
    """Negative control."""
    (release,) = fences("engine.md", "release")
    release["kv_transfer_params"]["kvparams"]["phase"] = "decode"
    assert faults(reading("/v1/kvparams", "post"), release)
    assert faults(reading("/v1/completions", "post"), {"model": "m"})
    assert faults(reading("/v1/completions", "post", "200"), {"object": "text_completion"})
    assert faults(reading("/v1/completions", "post", "400"), {"error": {"message": "m", "type": "t"}})
    assert faults(reading("/v1/models", "get", "200"), {"data": [], "kvparams_versions": [1.0]})
