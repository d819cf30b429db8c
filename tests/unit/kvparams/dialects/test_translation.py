"""Tests the two laws of every dialect, over messages and documents that are generated from its table."""

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvparams import InvalidParams, dump, parse
from kvparams.dialects.message import DialectMessage
from kvparams.dialects.nixl import NIXL, NIXL_TABLE
from kvparams.dialects.registry import load_tables
from kvparams.dialects.table import PHASES, DialectTable, LegCode, NativeKey, is_older_release, validate_message
from kvparams.dialects.translation import (
    LossyTranslation,
    adapt_to_release,
    customary_members,
    decode_message,
    encode_as_routed,
    encode_lossy,
    encode_message,
    translate_params,
)
from kvparams.dialects.value_types import ID, PORT
from tests.support.kvparams.dialect_messages import documents, messages, same

TABLES = load_tables()
LEGS: list[tuple[DialectTable, LegCode]] = [
    (table, leg) for table in TABLES.values() for leg in PHASES if leg in table.container_paths
]
EVERYWHERE = st.sampled_from(LEGS)
SLOWNESS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
ANSWER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[812, 813]],
    "remote_engine_id": "5b5f",
    "remote_request_id": "cmpl-7f3c-0",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 4,
}


def message(**changes: object) -> DialectMessage:
    return DialectMessage("7f3c", {"kv_transfer_params": {**ANSWER, **changes}})


def keeps_what_it_reads(table: DialectTable, leg: LegCode, given_message: DialectMessage) -> None:
    assert not validate_message(table, given_message, leg)
    params = decode_message(table, given_message, PHASES[leg])
    assert params.phase == PHASES[leg]
    assert same(encode_message(table, params).to_json(), given_message.to_json())
    assert parse(dump(params)) == params, "a document like any other"


def says_or_names(table: DialectTable, params_leg: LegCode, draw: st.DataObject) -> None:
    params = draw.draw(documents(table, params_leg))
    try:
        written = encode_lossy(table, params)
    except InvalidParams:  # it says less than the dialect needs, or other things of the dialect's than are valid
        assume(False)
        return
    again = decode_message(table, written.message, params.phase)
    if written.lost:
        assert not same(dump(again), dump(params))
        with pytest.raises(LossyTranslation) as refused:
            encode_message(table, params)
        assert refused.value.fields == written.lost
    else:
        assert same(dump(again), dump(params))
        assert encode_message(table, params) == written.message


@settings(max_examples=25, suppress_health_check=SLOWNESS)
@given(EVERYWHERE.flatmap(lambda one: st.tuples(st.just(one), messages(*one))))
def test_what_was_read_is_written_back_as_it_was(drawn: tuple[tuple[DialectTable, LegCode], DialectMessage]) -> None:
    """Spec-mandated, 1.0#15.1 and 1.0#15.2."""
    keeps_what_it_reads(*drawn[0], drawn[1])


def test_a_native_key_that_looks_like_a_place_is_kept_under_its_own_name() -> None:
    """Spec-mandated, 1.0#15.2: keys with an at sign have another in front, so `@body` is what stands elsewhere."""
    strange = {"@body": {"seed": 1}, "@headers": {"a": "b"}, "@@x": 1, "@": 2}
    told = replace(message(), body={**message().body, "kv_transfer_params": {"do_remote_decode": True, **strange}})
    params = decode_message(NIXL_TABLE, told, "prefill")
    assert params.extensions is not None
    kept = params.extensions[NIXL_TABLE.extension]
    assert {name: kept[f"@{name}"] for name in strange} == strange
    assert encode_message(NIXL_TABLE, params).body == told.body


@settings(max_examples=25, suppress_health_check=SLOWNESS)
@given(EVERYWHERE, st.data())
def test_a_document_is_said_in_full_or_what_is_lost_is_named(
    one: tuple[DialectTable, LegCode], data: st.DataObject
) -> None:
    """Spec-mandated, 1.0#15.4."""
    says_or_names(*one, data)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_laws_of_each_dialect_at_length(name: str, effort: Callable[[int, int], int]) -> None:
    table = TABLES[name]
    legs: list[LegCode] = [leg for leg in PHASES if leg in table.container_paths]
    long = settings(max_examples=effort(40, 2000), suppress_health_check=SLOWNESS)

    @long
    @given(st.sampled_from(legs), st.data())
    def first(leg: LegCode, data: st.DataObject) -> None:
        keeps_what_it_reads(table, leg, data.draw(messages(table, leg)))

    @long
    @given(st.sampled_from(legs), st.data())
    def second(leg: LegCode, data: st.DataObject) -> None:
        says_or_names(table, leg, data)

    first()
    second()


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"transfer": {"id": "other", "attempt": 1}}, ("transfer.id",)),
        ({"transfer": {"id": "7f3c", "attempt": 2}}, ("transfer.attempt",)),
        ({"mode": "store"}, ("mode",)),
        ({"producer": {"id": "5b5f", "incarnation": "r1"}}, ("producer.incarnation",)),
        ({"consumer": {"id": "d-1"}}, ("consumer.id",)),
        ({"lease": {"ttl_ms": 30000}}, ("lease.ttl_ms",)),
        ({"usage": {"cached_tokens": 1, "saved_tokens": 2}}, ("usage.saved_tokens",)),
        ({"on_load_failure": None}, ("on_load_failure",)),
        ({"prefix": [1, 2]}, ("prefix",)),
        ({"version": "1.1", "new": 1}, ("version", "new")),
    ],
)
def test_what_nixl_cannot_say_is_named(changes: dict[str, object], lost: tuple[str, ...]) -> None:
    document = dump(decode_message(NIXL_TABLE, message(), "decode"))
    with pytest.raises(LossyTranslation, match="nixl cannot say") as refused:
        encode_message(NIXL_TABLE, parse(document | changes))
    assert refused.value.fields == lost
    assert encode_message(NIXL_TABLE, parse(document)) == message()


def test_another_extension_is_named() -> None:
    document = dump(decode_message(NIXL_TABLE, message(), "decode"))
    document["extensions"] = {**document["extensions"], "com.example.tiers": {}}  # pyright: ignore[reportGeneralTypeIssues]
    assert encode_lossy(NIXL_TABLE, parse(document)).lost == ("extensions.com.example.tiers",)


@pytest.mark.parametrize("phase", ["release", "cancel"])
def test_no_dialect_has_words_for_what_is_no_leg(phase: str) -> None:
    document = dump(decode_message(NIXL_TABLE, message(), "decode"))
    for table in TABLES.values():
        with pytest.raises(LossyTranslation) as refused:
            encode_message(table, parse(document | {"phase": phase}))
        assert refused.value.fields == ("phase",)


def test_what_the_dialect_needs_and_the_document_does_not_say_is_named() -> None:
    document = dump(decode_message(NIXL_TABLE, message(), "decode"))
    del document["producer"]
    with pytest.raises(InvalidParams) as refused:
        encode_message(NIXL_TABLE, parse(document))
    assert [(problem.path, problem.kind) for problem in refused.value.problems] == [
        (("kv_transfer_params", "remote_engine_id"), "missing")
    ]


def test_the_transfer_is_the_same_on_every_leg_where_nobody_names_it() -> None:
    """Spec-mandated, 1.0#15.3."""
    digests = {name: f"sha256-{sha256(name.encode()).hexdigest()[:32]}" for name in ("a/b", "x" * 129, "x" * 256)}
    for request_id, expected in {"7f3c": "7f3c", "x" * 128: "x" * 128, **digests}.items():
        asked = DialectMessage(request_id, {"kv_transfer_params": {"do_remote_decode": True}})
        told = replace(message(), request_id=request_id)
        transfers = [
            decode_message(NIXL_TABLE, asked, "prefill").transfer,
            decode_message(NIXL_TABLE, told, "prefill_result").transfer,
            decode_message(NIXL_TABLE, told, "decode").transfer,
        ]
        assert [(transfer.id, transfer.attempt) for transfer in transfers] == [(expected, 1)] * 3


def test_block_ids_are_put_into_the_form_that_a_release_knows() -> None:
    nested = decode_message(NIXL_TABLE, message(), "decode")
    flat = adapt_to_release(NIXL_TABLE, nested, "0.14.0")
    told = encode_message(NIXL_TABLE, flat, "0.14.0").body["kv_transfer_params"]
    assert isinstance(told, dict)
    assert told["remote_block_ids"] == [812, 813]
    assert adapt_to_release(NIXL_TABLE, flat, "0.32.0") == nested
    two = decode_message(NIXL_TABLE, message(remote_block_ids=[[1], [2]]), "decode")
    with pytest.raises(LossyTranslation, match="remote_block_ids"):
        adapt_to_release(NIXL_TABLE, two, "0.14.0")
    with pytest.raises(InvalidParams):
        decode_message(NIXL_TABLE, message(), "decode", "0.14.0")


def test_what_is_kept_without_being_understood_has_bounds() -> None:
    deep: object = 1
    for _ in range(40):
        deep = [deep]
    for wrong in (deep, "x" * (1 << 20) + "x", 2**64, [0] * 65_537, {str(number): 0 for number in range(257)}):
        with pytest.raises(InvalidParams) as refused:
            decode_message(NIXL_TABLE, message(new=wrong), "decode")
        assert refused.value.problems[0].path[:2] == ("kv_transfer_params", "new")
        with pytest.raises(InvalidParams):
            decode_message(NIXL_TABLE, message(kv_hint={"a": wrong}), "decode")
    ids = list(range(100_000))
    params = decode_message(NIXL_TABLE, message(prompt_token_ids=ids), "decode")
    assert params.prefix is not None
    assert params.prefix.count == len(ids), "a list that is understood may be longer"
    assert encode_message(NIXL_TABLE, params) == message(prompt_token_ids=ids)


def test_releases_are_compared_as_numbers() -> None:
    assert is_older_release("0.9.2.post2", "0.14")
    assert not is_older_release("0.14.0", "0.14")
    with pytest.raises(InvalidParams, match="not a version"):
        is_older_release("latest", "0.14")


@pytest.mark.parametrize("target", sorted(TABLES))
def test_intent_goes_to_every_dialect_and_places_do_not(target: str) -> None:
    """A prefill request of NIXL, told to every other engine: valid there where that engine needs no more."""
    asked = decode_message(
        NIXL_TABLE, DialectMessage("7f3c", {"kv_transfer_params": {"do_remote_decode": True}}), "prefill"
    )
    table = TABLES[target]
    if target in ("lmcache-pd", "p2p-nccl"):  # they want to know addresses, and these are not NIXL's to tell
        with pytest.raises(InvalidParams):
            translate_params(NIXL_TABLE, table, asked)
        return
    told = translate_params(NIXL_TABLE, table, asked)
    assert not validate_message(table, told.message, "P")
    assert told.params.mode == table.mode
    assert set(told.lost) <= {"transfer.id"}
    assert told.lost == () or target in ("sglang", "trtllm", "dynamo-sglang", "dynamo-trtllm")
    there = (
        translate_params(NIXL_TABLE, table, decode_message(NIXL_TABLE, message(), "prefill_result"))
        if target == "sglang"
        else None
    )
    if there is not None:
        assert not there.message.body
        assert "extensions.ai.vllm.nixl.remote_host" in there.lost


def test_engines_that_meet_by_an_id_are_told_one() -> None:
    asked = parse(
        {"version": "1.0", "request_id": "7", "transfer": {"id": "7", "attempt": 1}, "phase": "decode", "mode": "store"}
    )
    assert encode_as_routed(TABLES["sglang"], asked).message.body == {"bootstrap_room": 7}
    assert encode_as_routed(TABLES["sglang"], asked).lost == ()
    named = parse(dump(asked) | {"transfer": {"id": "t-1", "attempt": 1}})
    rooms = [encode_as_routed(TABLES["sglang"], named).message.body["bootstrap_room"] for _ in range(2)]
    assert rooms[0] == rooms[1]
    assert encode_as_routed(TABLES["sglang"], named).lost == ("transfer.id",)


def test_within_a_family_native_keys_go_as_they_are() -> None:
    said = decode_message(NIXL_TABLE, message(), "decode")
    wrapped = translate_params(NIXL_TABLE, TABLES["neuron"], said)
    assert wrapped.lost == ()
    assert wrapped.message.body == {"disagg_prefill_resp": {"kv_transfer_params": ANSWER}}
    back = translate_params(TABLES["neuron"], NIXL_TABLE, wrapped.params)
    assert back.message == message()


def test_what_routers_say_is_what_the_proxy_says() -> None:
    """One table behind both."""
    assert customary_members(NIXL_TABLE, "prefill") == {
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert NIXL.prefill_keys("t") == (
        b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
        b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
    )
    assert TABLES["nixl"] is NIXL.table


def test_a_dialect_is_one_small_table() -> None:
    """What a third party writes."""
    theirs = DialectTable(
        name="theirs",
        title="A connector of theirs",
        extension="com.example.theirs",
        mode="push",
        order="together",
        container_paths={"P": "kv_transfer_params", "D": "deep.list.0.kv"},
        transfer_id_source="the router",
        software="their engine",
        source="nowhere",
        native_keys=(
            NativeKey("who", ID, "PD", "the id", "PD", member="transfer.id"),
            NativeKey("port", PORT, "D", "the port"),
        ),
    )
    told = DialectMessage("7f3c", {"deep": {"list": [{"kv": {"who": "t-1", "port": 5, "more": None}}, 3]}})
    params = decode_message(theirs, told, "decode")
    assert params.transfer.id == "t-1"
    assert params.extensions == {"com.example.theirs": {"port": 5, "more": None, "@body": {"deep": {"list": [{}, 3]}}}}
    assert encode_message(theirs, params) == told
    with pytest.raises(InvalidParams, match="no message for this phase"):
        decode_message(theirs, told, "prefill_result")


def test_nothing_of_a_message_is_shared_with_the_document() -> None:
    given_message = message()
    params = decode_message(NIXL_TABLE, given_message, "decode")
    again = encode_message(NIXL_TABLE, params)
    inner = again.body["kv_transfer_params"]
    assert isinstance(inner, dict)
    inner["remote_block_ids"].append([1])  # pyright: ignore[reportUnknownMemberType]
    assert encode_message(NIXL_TABLE, params) == given_message == message()


@pytest.mark.parametrize("name", ["neuron", "dynamo-vllm"])
def test_prefill_that_is_told_nothing_is_told_nothing_by_custom_either(name: str) -> None:
    assert not customary_members(TABLES[name], "prefill")
    assert customary_members(NIXL_TABLE, "prefill")
