"""Tests that undeclared input is recognized, or the connector is asked for; it is never guessed."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvparams import InvalidParams, KVParamsError
from kvparams.dialects.carriers import CARRIERS, lift_message, lower_message
from kvparams.dialects.detection import (
    AmbiguousDialect,
    UnrecognizedDialect,
    detect_dialect,
    find_matches,
    select_native_keys,
)
from kvparams.dialects.message import DialectMessage, unpack_message
from kvparams.dialects.nixl import NIXL_TABLE
from kvparams.dialects.registry import load_tables
from kvparams.dialects.table import PHASES
from kvparams.dialects.translation import decode_message, encode_message
from tests.support.kvparams.dialect_messages import JSON, NAMES
from tests.support.kvparams.spec_folder import DIALECTS, VECTORS

FILES = sorted([*(VECTORS / "dialects").glob("*.json"), *(DIALECTS / "vectors").glob("*.json")])
TABLES = load_tables()
SIX = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


SPEC = {"req_id": "1", "receiver_host": "h", "receiver_init_port": [1], "receiver_alloc_port": [2]}


def native(**members: object) -> DialectMessage:
    return DialectMessage("7f3c", {"kv_transfer_params": members})


def vectors(valid: bool = True) -> list[tuple[str, dict[str, Any]]]:
    read = [json.loads(path.read_bytes()) for path in FILES]
    cases = [(one["dialect"], case) for one in read for case in one["cases"] if "engine" not in case]
    return [(name, case) for name, case in cases if case["valid"] is valid]


def message_of(case: dict[str, Any]) -> DialectMessage:
    told = case["message"]
    return lift_message(DialectMessage(told["request_id"], told["body"], told.get("headers", {})))[0]


def root(name: str) -> str:
    like = TABLES[name].indistinguishable_from
    return name if like is None else like.name


@pytest.mark.parametrize(("name", "case"), vectors(), ids=lambda one: one["name"] if isinstance(one, dict) else None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType]
def test_what_engines_write_is_recognised_or_among_the_candidates(name: str, case: dict[str, Any]) -> None:
    message = message_of(case)
    names = {name, root(name)}
    candidates = find_matches(message, TABLES.values())
    if not candidates:
        assert not message.body.get("kv_transfer_params"), "only what says nothing at all is not recognised"
        return
    assert names & {one.table.name for one in candidates}
    with suppress(AmbiguousDialect):
        found = detect_dialect(message, TABLES.values())
        assert found.table.name in names
        assert case["phase"] in found.phases


def test_a_wrong_value_makes_no_message_one_of_another_dialect() -> None:
    """Keys come before values: who has fewest of its keys foreign is asked, and nobody else."""
    seen = 0
    for name, case in vectors(valid=False):
        with suppress(AmbiguousDialect, UnrecognizedDialect):
            found = detect_dialect(message_of(case), TABLES.values())
            pulling = name == "nixl-push" and found.table.name == "nixl"  # by its own keys, a message of the other
            assert found.table.name == name or pulling, f"{name}: {case['name']} is {found}"
            continue
        seen += 1
    assert seen > 100


def test_what_is_refused_names_the_nearest_dialects_and_what_to_type() -> None:
    """With what is wrong there; none only where nobody has these keys."""
    seen = 0
    for name, case in vectors(valid=False):
        found: UnrecognizedDialect | None = None
        try:
            detect_dialect(message_of(case), TABLES.values())
        except UnrecognizedDialect as error:
            found = error
        except AmbiguousDialect:
            continue
        nearest = () if found is None else found.nearest
        assert len(nearest) <= 3
        for near in nearest:
            with pytest.raises(InvalidParams) as refused:
                decode_message(TABLES[near.dialect], message_of(case), near.phase)
            assert refused.value.problems == near.problems
            assert f"--dialect {near.dialect} --phase {near.phase} ({near.problems[0]})" in str(found)
        seen += root(name) in {root(near.dialect) for near in nearest}
    assert seen > 130
    with pytest.raises(UnrecognizedDialect) as nothing:
        detect_dialect(native(foo=1), TABLES.values())
    assert nothing.value.nearest == ()


def test_who_writes_the_same_is_said() -> None:
    own = {"remote_engine_id": "e", "remote_host": "h", "remote_port": 1, "remote_request_id": "r", "tp_size": 1}
    answer = native(do_remote_decode=False, do_remote_prefill=True, remote_block_ids=[1], transfer_mode="pull", **own)
    found = detect_dialect(answer, TABLES.values(), "prefill_result")
    assert str(found) == "nixl (aibrix and neuron write the same)"
    assert str(detect_dialect(native(prefix_prompt_ids=[1]), TABLES.values())) == "trio"


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (native(**SIX, transfer_mode="pull"), "nixl"),
        (native(prefix_prompt_ids=[1], kvcache_store_keys=["k"]), "trio"),
        (native(do_remote_prefill=True, transfer_id="t", remote_engine_id="e", remote_bootstrap_addr="http://h"),
         "mooncake"),
        (native(remote_decoder={"kv_request_id": "k"}), "offload-p2p"),
        (native(ret_first_tok=True, disagg_spec=SPEC), "lmcache-pd"),
        (DialectMessage("r", {"bootstrap_room": 1, "bootstrap_host": "h"}), "sglang"),
        (
            DialectMessage("r", {"disaggregated_params": {"request_type": "context_only", "schedule_style": 0}}),
            "trtllm",
        ),
        (DialectMessage("r", {}, {"x-prefiller-host-port": "h:1"}), "llm-d"),
        (DialectMessage("___prefill_addr_h:1___decode_addr_h:2_" + "0" * 32), "p2p-nccl"),
    ],
)  # fmt: skip
def test_keys_that_only_one_dialect_has_name_it(message: DialectMessage, name: str) -> None:
    assert detect_dialect(message, TABLES.values()).table.name == name


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (native(**SIX), {"nixl", "nixl-push"}),
        (native(do_remote_decode=True, do_remote_prefill=False, transfer_id="t"), {"mooncake", "moriio-read"}),
    ],
)
def test_keys_that_several_have_are_asked_about(message: DialectMessage, names: set[str]) -> None:
    with pytest.raises(AmbiguousDialect) as asked:
        detect_dialect(message, TABLES.values())
    assert names <= set(asked.value.candidates)


@pytest.mark.parametrize(
    ("members", "phases"),
    [
        ({"kvcache_load_keys": ["k"]}, ("decode",)),
        ({"kvcache_load_keys": ["k"], "kvcache_store_keys": []}, ("decode",)),
        ({"kvcache_load_keys": ["k"], "kvcache_store_keys": ["k"]}, ("prefill",)),
        ({"kvcache_load_keys": None, "kvcache_store_keys": ["k"]}, ("prefill",)),
        ({"prefix_prompt_ids": [1]}, ("prefill", "decode")),
    ],
)
def test_the_leg_of_a_trio_is_told_by_its_keys(members: dict[str, object], phases: tuple[str, ...]) -> None:
    """As 1.0#9.5 has it."""
    assert detect_dialect(native(**members), TABLES.values()).phases == phases


@pytest.mark.parametrize(
    "message", [native(), DialectMessage("r"), native(foo=1), native(remote_port=0), native(do_remote_decode=1)]
)
def test_what_nobody_says_is_not_recognised(message: DialectMessage) -> None:
    with pytest.raises(UnrecognizedDialect):
        detect_dialect(message, TABLES.values())


def test_what_is_not_the_dialects_is_left_aside() -> None:
    body = {"model": "m", "kv_transfer_params": SIX, "cache_salt": "s"}
    message = DialectMessage("r", body, {"accept": "*/*", "x-data-parallel-rank": "0"})
    assert select_native_keys(NIXL_TABLE, message) == DialectMessage(
        "r", {"kv_transfer_params": SIX, "cache_salt": "s"}, {"x-data-parallel-rank": "0"}
    )
    assert find_matches(message, [NIXL_TABLE])[0].phases == ("prefill",)


KEYS = st.sampled_from(sorted({row.name for table in TABLES.values() for row in table.native_keys}))
HOMES = st.sampled_from(
    ["kv_transfer_params", "disaggregated_params", "disagg_prefill_resp", "choices", "bootstrap_info"]
)


@st.composite
def carried(draw: st.DrawFn) -> dict[str, Any]:
    """A body with native keys in the place of a carrier, or with what does not belong there."""
    carrier = draw(st.sampled_from(CARRIERS))
    value: Any = draw(st.dictionaries(KEYS, JSON, max_size=4) | JSON)
    if carrier.text and draw(st.booleans()):
        value = json.dumps(value)
    for name in reversed(carrier.path):
        value = {name: value}
    return value


MESSAGES = st.builds(
    DialectMessage,
    st.text(max_size=5) | st.just("7f3c"),
    st.dictionaries(KEYS | HOMES | NAMES, JSON | st.dictionaries(KEYS | HOMES, JSON, max_size=4), max_size=4)
    | carried(),
    st.dictionaries(KEYS, st.text(max_size=3), max_size=2),
)


def test_a_carrier_that_holds_the_keys_as_text_says_the_same() -> None:
    """Also integers that no double holds."""
    seen = 0
    for name, case in vectors():
        told = case["message"]
        carrier = told["body"].get("kv_transfer_params")
        if not isinstance(carrier, dict):
            continue
        plain = DialectMessage(told["request_id"], told["body"], told.get("headers", {}))
        packed = DialectMessage(
            plain.request_id, {**plain.body, "kv_transfer_params": json.dumps(carrier)}, plain.headers
        )
        assert unpack_message(packed) == plain
        assert decode_message(TABLES[name], packed, case["phase"]) == decode_message(TABLES[name], plain, case["phase"])
        with suppress(AmbiguousDialect, UnrecognizedDialect):
            assert detect_dialect(packed, TABLES.values()) == detect_dialect(plain, TABLES.values())
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"a":1,"a":2}', '"{}"', "NaN", '{"a":1e999}'])
def test_text_that_is_no_object_is_no_message(text: str) -> None:
    message = DialectMessage("r", {"kv_transfer_params": text})
    assert unpack_message(message) is message
    with pytest.raises(UnrecognizedDialect):
        detect_dialect(message, TABLES.values())
    with pytest.raises(InvalidParams) as caught:
        decode_message(NIXL_TABLE, message, "prefill")
    assert [(one.path, one.kind) for one in caught.value.problems] == [(("kv_transfer_params",), "type")]


def is_judged(message: DialectMessage) -> None:
    moved, carrier = lift_message(message)
    assert lift_message(lower_message(moved, carrier)) == (moved, carrier)
    with suppress(KVParamsError):
        found = detect_dialect(message, TABLES.values())
        assert found.known_keys > 0
    for table in TABLES.values():
        for phase in PHASES.values():
            with suppress(InvalidParams):
                params = decode_message(table, message, phase)
                assert encode_message(table, params) == unpack_message(message)


@settings(max_examples=20)
@given(MESSAGES)
def test_whatever_comes_is_judged_and_nothing_else_goes_wrong(message: DialectMessage) -> None:
    is_judged(message)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_whatever_comes_at_length(
    effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    count = effort(150, 12_000)
    settings(max_examples=count)(given(MESSAGES)(is_judged))()
    record({"messages": count, "dialects": len(TABLES)})
