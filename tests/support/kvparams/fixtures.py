"""Provides the schema as a judge, which several tests here share."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from jsonschema import Draft202012Validator, ValidationError, validators

from tests.support.kvparams.spec_folder import SPEC


def _pattern(_: object, pattern: str, instance: object, __: object) -> Iterator[ValidationError]:
    """A schema's patterns are ECMA-262, where `$` is the very end; in Python it also matches before a line feed."""
    if isinstance(instance, str) and not re.search(pattern.replace("$", r"\Z"), instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


@pytest.fixture(scope="session")
def schema() -> dict[str, Any]:
    """The schema, itself checked."""
    loaded: dict[str, Any] = json.loads((SPEC / "schema.json").read_bytes())
    cast("Any", Draft202012Validator).check_schema(loaded)
    return loaded


@pytest.fixture(scope="session")
def schema_accepts(schema: dict[str, Any]) -> Callable[[object], bool]:
    """Whether the schema accepts a document."""
    judge = cast("Any", validators).extend(Draft202012Validator, {"pattern": _pattern})(schema)
    return lambda document: bool(judge.is_valid(document))
