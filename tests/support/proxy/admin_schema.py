"""Checks answers of the admin API against its OpenAPI document, as it is served."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator

import kvparams_proxy.server

__all__ = ["admin_document", "check_answer"]


@cache
def admin_document() -> dict[str, Any]:
    """Returns the document."""
    folder = Path(kvparams_proxy.server.__path__[0])
    return json.loads((folder / "admin_openapi.json").read_text("utf-8"))


def check_answer(method: str, path: str, answer: httpx.Response) -> None:
    """Checks that the document has this route and this status, and that the answer is what it says.

    Raises:
        AssertionError: it is not.
    """
    document = admin_document()
    plain = path.partition("?")[0]
    found = [one for one in document["paths"] if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", one), plain)]
    assert found, f"the document has no path {plain}"
    operation = next(
        (document["paths"][one][method.lower()] for one in found if method.lower() in document["paths"][one]), None
    )
    if operation is None:
        assert answer.status_code == 405, f"the document has no {method} {plain}"
        return
    said = operation["responses"].get(str(answer.status_code))
    assert said is not None, f"the document has no status {answer.status_code} for {method} {plain}: {answer.text}"
    schema = said["content"]["application/json"]["schema"] | {"components": document["components"]}
    check: Any = Draft202012Validator(schema)
    faults = [f"{error.json_path}: {error.message}" for error in check.iter_errors(answer.json())]
    assert not faults, f"{method} {plain}: {faults}"
