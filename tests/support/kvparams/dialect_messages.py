"""Generates messages and documents of a dialect with Hypothesis, from its table alone."""

import json
from typing import Any

from hypothesis import strategies as st

from kvparams import KVTransferParams, TokenPrefix, dump, parse
from kvparams.dialects import value_types
from kvparams.dialects.message import DialectMessage, JSONObject, set_at
from kvparams.dialects.table import PHASES, DialectTable, LegCode, NativeKey
from kvparams.dialects.translation import decode_message

__all__ = ["JSON", "documents", "messages", "same"]

FLOATS = st.floats(-(2.0**63), 2.0**63, allow_nan=False)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([2**63 - 1, 2**53 + 1, 0])
    | FLOATS
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
)
NAMES = st.sampled_from(["x", "@", "@body", "@@headers", "remote_host", "transfer_id", "0", ""]) | st.text(
    "ab.", max_size=3
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5
)
REQUEST_IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40) | st.just("7f3c")
ADDRESSED = "___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_93923d63113b4b338973f24d19d4bf11"


def same(one: object, other: object) -> bool:
    """Equal as JSON: 1, 1.0 and true differ."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def values(form: value_types.ValueType) -> st.SearchStrategy[Any]:
    """Values of the form; a form that is not known here fails."""
    match form:
        case value_types.IntegerType(low, high):
            return st.integers(low, high) | st.sampled_from([low, high])
        case value_types.BooleanType():
            return st.booleans()
        case value_types.NumberType(low, high):
            return st.integers(low, min(high, 2**63 - 1)) | st.floats(max(low, -(2.0**63)), min(high, 2.0**63))
        case value_types.TextType(most, pattern, _, least):
            if pattern is None:
                text = st.text(st.characters(exclude_categories=["Cs"]), min_size=least, max_size=8)
            else:
                text = st.from_regex(pattern, fullmatch=True)
            return text.filter(lambda one: least <= len(one) <= most)
        case value_types.DecimalTextType(low, high):
            return st.integers(low, high).map(str)
        case value_types.EnumType(choices):
            return st.sampled_from(choices)
        case value_types.ListType(inner, most, least, null):
            entry = values(inner) | st.none() if null else values(inner)
            return st.lists(entry, min_size=least, max_size=min(most, least + 3))
        case value_types.UnionType(several):
            return st.one_of([values(one) for one in several])
        case value_types.ObjectType():
            return st.dictionaries(NAMES, JSON, max_size=2)
        case value_types.AnyType():
            return JSON
        case _:
            raise AssertionError(form)


@st.composite
def messages(draw: st.DrawFn, table: DialectTable, leg: LegCode) -> DialectMessage:
    """A valid message of the dialect on this leg, with what else may stand in it."""
    tree: JSONObject = {"body": JSONObject(), "headers": JSONObject()}
    rows: dict[tuple[str | int, ...], list[NativeKey]] = {}
    for row in table.native_keys:
        rows.setdefault(table.path(row, leg), []).append(row)
    for path, several in rows.items():
        row = draw(st.sampled_from(several))
        if leg in row.marker_values:
            set_at(tree, path, row.marker_values[leg])
            continue
        needed = any(leg in one.required_legs for one in several)
        wanted = 2 if needed else draw(st.integers(0, 3))  # mostly there, sometimes null, sometimes not at all
        if row.name.endswith("*"):
            path = (*path[:-1], row.name[:-1] + draw(st.text("ab.", max_size=3)))
        if wanted and not (wanted == 1 and row.location == "headers"):
            set_at(tree, path, None if wanted == 1 else draw(values(row.value_type)))
    home = table.home(leg)
    for name, value in draw(st.dictionaries(NAMES, JSON, max_size=2)).items():
        set_at(tree, ("body", *home, f"new_{name}" if draw(st.booleans()) else f"@{name}"), value)
    if draw(st.booleans()):
        set_at(tree, ("body", "beside"), draw(JSON))
    if draw(st.booleans()):
        set_at(tree, ("headers", "x-beside"), "1")
    request_id = ADDRESSED if table.request_id else draw(REQUEST_IDS)
    return DialectMessage(request_id, tree["body"], tree["headers"])  # pyright: ignore[reportArgumentType]


PREFIXES = st.lists(st.integers(0, 2**32 - 1), max_size=3).flatmap(
    lambda ids: st.sampled_from([TokenPrefix.pack(ids), TokenPrefix.by_digest(ids), TokenPrefix.listed(ids)])
)
VISIBLE = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=5)
COUNTS = st.none() | st.integers(0, 2**63 - 1)


@st.composite
def documents(draw: st.DrawFn, table: DialectTable, leg: LegCode) -> KVTransferParams:
    """A document that the dialect may or may not be able to say: what a message said, and changed."""
    document = dump(decode_message(table, draw(messages(table, leg)), PHASES[leg]))
    changes: dict[str, st.SearchStrategy[Any]] = {
        "version": st.just("1.7"),
        "request_id": VISIBLE,
        "transfer": st.fixed_dictionaries({"id": st.sampled_from(["t-1", "42", "7f3c"]), "attempt": st.integers(1, 3)}),
        "mode": st.sampled_from(["store", "pull", "push", "rendezvous"]),
        "prefix": PREFIXES.map(lambda prefix: prefix.model_dump(mode="json", exclude_unset=True)) | st.none(),
        "load_keys": st.none() | st.lists(VISIBLE, max_size=2),
        "store_keys": st.none() | st.lists(VISIBLE, max_size=2),
        "producer": st.none() | st.fixed_dictionaries({"id": VISIBLE}, optional={"address": st.just("h:1")}),
        "consumer": st.fixed_dictionaries({"id": VISIBLE}),
        "lease": st.just({"ttl_ms": 30000}),
        "on_load_failure": st.sampled_from(["fail", None]),
        "isolation": st.fixed_dictionaries({}, optional={"cache_salt": VISIBLE | st.none(), "lora": VISIBLE}),
        "usage": st.fixed_dictionaries({}, optional={"cached_tokens": COUNTS, "saved_bytes": COUNTS}),
        "must_understand": st.just(["lease"]),
        "extensions": st.dictionaries(
            st.sampled_from([table.extension, "com.example.tiers"]),
            st.dictionaries(NAMES, JSON, max_size=2),
            max_size=2,
        ),
        "unknown": JSON,
    }
    for name in draw(st.lists(st.sampled_from(sorted(changes)), max_size=3, unique=True)):
        document[name] = draw(changes[name])
    return parse(document)
