"""Builds the OpenAPI 3.1 document of the admin API. docs/_generate.py writes it to `admin_openapi.json`.

A running proxy serves that file and does not import this module, so that no request waits for schemas.
"""

from typing import Any, Final

from pydantic.json_schema import models_json_schema

from kvparams.version import __version__
from kvparams_proxy.config.spec_parsing import RemoteInstanceEntry
from kvparams_proxy.server.admin_answers import Answer, ErrorAnswer, InstanceAnswer, VersionAnswer
from kvparams_proxy.server.admin_operations import ADMIN_OPERATIONS, AdminOperation

__all__ = ["openapi_document"]

_REF: Final = "#/components/schemas/{model}"
_JSON: Final = "application/json"
_ERRORS: Final = {
    400: "the request is wrong; the message says what is",
    401: "the admin token is missing or wrong",
    404: "there is no such instance, group or model",
    409: "it belongs to another source, or exists already",
    413: "the body is too large",
    503: "no engine can be given such a request now",
}
_DESCRIPTION: Final = """
Shows and changes the engines of a running `kvparams proxy`. It is served if the proxy has an `--admin-token-file`.

A change holds at all workers and at all proxies of the site (`--share`), and is forgotten when the last of them ends.
No answer contains a secret.
""".strip()


def openapi_document() -> dict[str, Any]:
    """Returns the document, from the table of operations and the models of the answers."""
    models: set[type[Answer]] = {each.answer for each in ADMIN_OPERATIONS if each.answer is not None}
    wanted = sorted([*models, ErrorAnswer, VersionAnswer], key=lambda model: model.__name__)
    found = models_json_schema([(model, "serialization") for model in wanted], ref_template=_REF)[1]
    schemas: dict[str, Any] = dict(found["$defs"])
    for schema in schemas.values():
        if "enum" in schema:
            schema.pop("description", None)  # it is for readers of the code
    schemas |= _body_schemas(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for operation in ADMIN_OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    paths["/version"] = {
        "get": {
            "operationId": "get_version",
            "summary": "The version of the proxy; needs no token",
            "security": [],
            "responses": {"200": _response("the version", VersionAnswer)},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvparams proxy: admin API", "version": __version__, "description": _DESCRIPTION},
        "security": [{"admin_token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"admin_token": {"type": "http", "scheme": "bearer"}},
            "schemas": dict(sorted(schemas.items())),
        },
    }


def _operation(operation: AdminOperation) -> dict[str, Any]:
    said: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in ("id", "group")
        if f"{{{name}}}" in operation.path
    ]
    parameters += [
        {"name": name, "in": "query", "description": description, "schema": {"type": "string"}}
        for name, description in operation.query
    ]
    if parameters:
        said["parameters"] = parameters
    if operation.body is not None:
        schema = {"$ref": _REF.format(model=operation.body.schema)}
        said["requestBody"] = {
            "description": operation.body.description,
            "required": True,
            "content": {_JSON: {"schema": schema}},
        }
    said["responses"] = {str(operation.status): _response("done", operation.answer)}
    for status in sorted({401, *operation.errors, *(() if operation.body is None else (400, 413))}):
        said["responses"][str(status)] = _response(_ERRORS[status], ErrorAnswer)
    return said


def _response(description: str, model: type[Answer] | None) -> dict[str, Any]:
    schema = {"type": "object"} if model is None else {"$ref": _REF.format(model=model.__name__)}
    return {"description": description, "content": {_JSON: {"schema": schema}}}


def _body_schemas(schemas: dict[str, Any]) -> dict[str, Any]:
    """Returns the schemas of request bodies.

    The members of an instance have the descriptions of its entry in the fleet file and the types of the answer.
    """
    types = schemas[InstanceAnswer.__name__]["properties"] | {
        "drain": {"type": "boolean"},
        "ranks": {"type": ["integer", "string"]},
        "store": {"type": ["string", "boolean"]},
    }
    members: dict[str, Any] = {}
    for name, field in RemoteInstanceEntry.model_fields.items():
        members[name] = _without_null(types[name]) | {"description": field.description or ""}
    modes = {"type": "array", "items": {"type": "object", "required": ["use"]}, "minItems": 1}
    return {
        "NewInstance": _object(members, ["id", "url"], "An engine, as in the fleet file."),
        "InstanceChange": _object(members, [], "Members of an engine to change. `id` stays as it is."),
        "Modes": _object({"modes": modes}, ["modes"], "All modes, as in the fleet file."),
        "ClientRequest": {"type": "object", "description": "The body of a request to the proxy, such as a completion."},
    }


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a member that is left out where an answer has null."""
    kept = {key: value for key, value in schema.items() if key not in ("title", "anyOf")}
    (one,) = [one for one in schema.get("anyOf", [{}]) if one != {"type": "null"}]
    return kept | one


def _object(properties: dict[str, Any], required: list[str], description: str) -> dict[str, Any]:
    said = {"type": "object", "description": description, "properties": properties, "additionalProperties": False}
    return said | ({"required": required} if required else {})
