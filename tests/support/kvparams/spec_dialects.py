"""Writes the dialects' tables and carriers as `spec/dialects/` has them, for readers who do not read Python.

    .venv/bin/python -m tests.support.kvparams.spec_dialects     writes both files anew

The files say only what the tables say. A form is JSON Schema 2020-12; `spells` beside it are the bounds of the integer
that a text spells.
"""

import json
from typing import Any

from kvparams.dialects.carriers import CARRIERS
from kvparams.dialects.registry import load_tables
from kvparams.dialects.table import LEGS, PHASES, DialectTable, NativeKey
from kvparams.dialects.value_types import (
    AnyType,
    BooleanType,
    DecimalTextType,
    EnumType,
    IntegerType,
    ListType,
    NumberType,
    ObjectType,
    TextType,
    UnionType,
    ValueType,
)
from kvparams.params import Phase
from tests.support.kvparams.spec_folder import DIALECTS

__all__ = ["CARRIERS_FILE", "FILE", "carriers_text", "dialects", "text"]

FILE = DIALECTS / "dialects.json"
CARRIERS_FILE = DIALECTS / "carriers.json"
Tree = dict[str, Any]


def _form(form: ValueType) -> Tree:
    match form:
        case IntegerType():
            return {"type": "integer", "minimum": form.low, "maximum": form.high}
        case BooleanType():
            return {"type": "boolean"}
        case NumberType():
            return {"type": "number", "minimum": form.low, "maximum": form.high}
        case TextType():
            bounds: Tree = {"type": "string", "minLength": form.least, "maxLength": form.most}
            return bounds if form.pattern is None else {**bounds, "pattern": f"^(?:{form.pattern})$"}
        case DecimalTextType():
            spelt = {"type": "string", "pattern": "^(?:0|-?[1-9][0-9]{0,18})$"}
            return {**spelt, "spells": {"minimum": form.low, "maximum": form.high}}
        case EnumType():
            return {"enum": list(form.choices)}
        case ListType():
            inner = _form(form.inner)
            items = {"anyOf": [inner, {"type": "null"}]} if form.null else inner
            return {"type": "array", "minItems": form.least, "maxItems": form.most, "items": items}
        case UnionType():
            return {"anyOf": [_form(one) for one in form.forms]}
        case ObjectType():
            return {"type": "object"}
        case AnyType():
            return {}
        case _:
            raise TypeError(f"a form that the spec has no words for: {form!r}")


def _phases(legs: str) -> list[Phase]:
    return [phase for phase, leg in LEGS.items() if leg in legs]


def _row(row: NativeKey) -> Tree:
    said: Tree = {"name": row.name, "phases": _phases(row.legs), "says": row.description, "form": _form(row.value_type)}
    if row.location != "home":
        said["in"] = row.location
    if row.parents:
        said["inside"] = list(row.parents)
    if row.required_legs:
        said["needed"] = _phases(row.required_legs)
    if row.marker_values:
        said["marks"] = {PHASES[leg]: value for leg, value in row.marker_values.items() if leg in PHASES}  # pyright: ignore[reportArgumentType]
    if row.member is not None:
        said["member"] = row.member
        said["member_in"] = [phase for phase, leg in LEGS.items() if row.is_member(leg)]
    for name in ("address", "since", "until"):
        if (value := getattr(row, name)) is not None:
            said[name] = value
    return said


def _table(table: DialectTable) -> Tree:
    said: Tree = {
        "title": table.title,
        "software": table.software,
        "source": table.source,
        "extension": table.extension,
        "mode": table.mode,
        "order": table.order,
        "mints": table.transfer_id_source,
        "home": {PHASES[leg]: list(table.home(leg)) for leg in table.container_paths},  # pyright: ignore[reportArgumentType]
    }
    for name in ("since", "until", "request_id"):
        if (value := getattr(table, name)) is not None:
            said[name] = value
    return {**said, "notes": list(table.notes), "keys": [_row(row) for row in table.native_keys]}


def dialects() -> Tree:
    """What the file says."""
    return {name: _table(table) for name, table in sorted(load_tables().items())}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def text() -> str:
    """The file, one key to a line."""
    blocks: list[str] = []
    for name, table in dialects().items():
        lines = [f"    {_json(member)}: {_json(value)}" for member, value in table.items()]
        keys = ",\n".join(f"      {_json(row)}" for row in table["keys"])
        lines[-1] = f'    "keys": [\n{keys}\n    ]' if table["keys"] else '    "keys": []'
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def carriers_text() -> str:
    """The other file, one carrier to a line."""
    said = [
        {"name": one.name, "place": one.place, "text": one.text, "says": one.description, "source": one.source}
        for one in CARRIERS
    ]
    return "[\n" + ",\n".join(f"  {_json(one)}" for one in said) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(text())
    CARRIERS_FILE.write_text(carriers_text())
