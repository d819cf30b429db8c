"""Tests that the schema and the model agree on documents that Hypothesis generates."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvparams import InvalidParams, KVTransferParams, Phase, parse
from kvparams.params import KNOWN_PATHS

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
IDENTIFIERS = st.sampled_from(["a", "A.b_c~d-9", "", "a b", "é", "a\n", "x" * 128, "x" * 129, "x" * 257]) | TEXT
COUNTS = st.sampled_from([-1, 0, 1, 2, 65_535, 65_536, 86_400_000, 86_400_001, 2_097_153, 2**63 - 1, 2**63])
ODD = st.none() | st.booleans() | st.sampled_from([1.5, [], {}, "1", [None], {"a": 1}])
UNKNOWN = st.recursive(
    ODD | COUNTS | TEXT | st.integers(-(2**64), 2**65),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
KEYS = st.lists(IDENTIFIERS | ODD, max_size=3)
IDS = st.lists(st.integers(-1, 2**32) | ODD, max_size=4)


def part(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object that mostly has its members, mostly right."""
    known = st.fixed_dictionaries({}, optional={name: value | value | ODD for name, value in members.items()})
    more = st.dictionaries(st.sampled_from(["x", "y", "n" * 256, "n" * 257]), UNKNOWN, max_size=1)
    return st.tuples(more, known).map(merged)


def merged(parts: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    return {**parts[0], **parts[1]}


def spelled(ids: list[Any]) -> Any:
    return {"count": len(ids), "ids": ids}


ADDRESSES = st.sampled_from(
    ["h:1", "[::1]:65535", "a.b-c_d:080", "h", "h:", ":1", "h:123456", "http://h:1", "[g]:1", "h:1\n", "", "é:1"]
)
ENDPOINT = part(id=IDENTIFIERS, incarnation=IDENTIFIERS, address=ADDRESSES)
DIGESTS = st.sampled_from(["sha256:" + "0" * 64, "sha256:" + "A" * 64, "sha256:" + "0" * 64 + "\n", ""])
PREFIX: st.SearchStrategy[Any] = (
    IDS
    | part(count=COUNTS, digest=DIGESTS)
    | IDS.map(spelled)
    | st.sampled_from(
        [
            {"count": 1, "packed": "AQAAAA=="},
            {"count": 2, "packed": "AQAAAAIAAAA="},
            {"count": 1, "packed": "AQAAAA"},
            {"count": 1, "packed": "AQAAAB=="},
            {"count": 1, "packed": None, "ids": [7]},
            {"count": 1, "packed": "AQAAAA==", "ids": [1]},
            {"count": 0, "packed": ""},
            {"count": 1},
        ]
    )
)
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "prefix": PREFIX,
    "store_keys": KEYS,
    "load_keys": KEYS,
    "producer": ENDPOINT,
    "consumer": ENDPOINT,
    "lease": part(ttl_ms=COUNTS),
    "on_load_failure": st.sampled_from(["recompute", "fail", "Fail", ""]),
    "isolation": part(cache_salt=IDENTIFIERS, lora=IDENTIFIERS),
    "usage": part(prompt_tokens=COUNTS, loaded_bytes=COUNTS, saved_tokens=COUNTS),
    "must_understand": st.lists(st.sampled_from([*sorted(KNOWN_PATHS), "foo", "lease.x", ""]), max_size=3),
    "extensions": st.dictionaries(st.sampled_from(["com.example", "a-1.b", "A.b", "a", "a."]), part(), max_size=2),
}
RIGHT: dict[str, Any] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill",
    "mode": "store",
}
REQUIRED: dict[str, st.SearchStrategy[Any]] = {
    "version": st.sampled_from(["1.0", "1.1", "2.0", "1", "1.01", "1.0\n"]),
    "request_id": IDENTIFIERS,
    "transfer": part(id=IDENTIFIERS, attempt=COUNTS),
    "phase": st.sampled_from(["decode", "cancel", "Prefill"]),
    "mode": st.sampled_from(["pull", "rendezvous", "peer"]),
}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Right documents with up to three members replaced, removed or added."""
    made = dict(RIGHT)
    for name in draw(st.lists(st.sampled_from([*REQUIRED, *OPTIONAL, "foo"]), unique=True, max_size=3)):
        choices = {**REQUIRED, **OPTIONAL, "foo": UNKNOWN}[name]
        made[name] = draw(choices | choices | ODD)
    for name in draw(st.lists(st.sampled_from([*REQUIRED]), unique=True, max_size=1)):
        if draw(st.integers(0, 7)) == 0:
            del made[name]
    return made


def model_accepts(document: dict[str, Any]) -> bool:
    try:
        parse(document)
    except InvalidParams:
        return False
    return True


@settings(max_examples=4 * settings().max_examples, suppress_health_check=[HealthCheck.too_slow])
@given(document=documents())
def test_schema_and_model_judge_alike(document: dict[str, Any], schema_accepts: Callable[[object], bool]) -> None:
    """Spec-mandated: what only the model can say (1.0#3.5, 1.0#8.3, 32 levels) is not in these documents."""
    assert schema_accepts(document) is model_accepts(document)


def test_the_made_up_documents_are_of_both_kinds() -> None:
    """Guards the test above: a judge that always agrees with itself shows nothing."""
    seen: set[bool] = set()

    @settings(max_examples=200, database=None, derandomize=True)
    @given(documents())
    def look(document: dict[str, Any]) -> None:
        seen.add(model_accepts(document))

    look()
    assert seen == {True, False}


def test_schema_and_model_name_the_same_members(schema: dict[str, Any]) -> None:
    """Ours: every member of every part stands in both, and is required in both or in neither."""

    def compare(part: Any, name: str) -> None:
        definition = schema["$defs"][name]
        assert set(definition["properties"]) == set(part.model_fields)
        required = {member for member, field in part.model_fields.items() if field.is_required()}
        assert set(definition.get("required", ())) == required

    compare(KVTransferParams, "document")
    for member, name in {
        "transfer": "transfer",
        "prefix": "prefix",
        "producer": "endpoint",
        "lease": "lease",
        "isolation": "isolation",
        "usage": "usage",
        "signature": "signature",
    }.items():
        annotation: Any = KVTransferParams.model_fields[member].annotation
        compare(next(one for one in getattr(annotation, "__args__", (annotation,)) if one is not type(None)), name)


def test_schema_and_model_know_the_same_paths_and_phases(schema: dict[str, Any]) -> None:
    assert set(schema["$defs"]["must_understand"]["items"]["enum"]) == KNOWN_PATHS
    assert tuple(schema["$defs"]["document"]["properties"]["phase"]["enum"]) == Phase.__args__
