"""Tests plans of legs, without any I/O."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams import parse
from kvparams.codec import DocumentTemplate
from kvparams.dialects.interface import Dialect, HandoffMissing, ReleaseRequest
from kvparams.dialects.nixl import NIXL
from kvparams.dialects.store import STORE, STORE_DROP, STORE_MEET
from kvparams.errors import InvalidParams
from kvparams.instances import RequestFacts, Role
from kvparams.params import KNOWN_PATHS, KVTransferParams, Lease, Usage
from kvparams.peer_reads import peer_source
from kvparams.routing.managers.concurrent_legs import ConcurrentLegs
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import AcquireInstance, Leg, LegFailed, LegResult, Plan, StreamProgress
from kvparams.tokens import TokenPrefix
from tests.support.kvparams.planning import Table, fleet_of

HANDOFF: dict[str, object] = {
    "remote_engine_id": "e",
    "remote_block_ids": [[1, 2]],
    "remote_host": "h",
    "remote_port": 5600,
    "remote_blocks_expiry_time": None,
    "future_key": {"kept": [2**62]},
}
RESULT: dict[str, object] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill_result",
    "mode": "store",
    "load_keys": ["k"],
}


def facts(**changes: Any) -> RequestFacts:
    return RequestFacts("req", "tra", "m", 1, 1, None, None)._replace(**changes)


def run(dialect: Dialect, answer: Mapping[str, object], request: RequestFacts) -> Any:
    table = Table(dialect)
    plan = PrefillThenDecode().legs(request, table)
    first, second = table.run(plan, lambda leg: LegResult({} if leg.answers_client else answer))
    assert not first.answers_client
    assert second.answers_client
    assert table.chosen == ["prefill-0", "decode-0"]
    assert [lease.transfer_id for lease in table.leases] == ["tra"]
    return first, second


def params(leg: Any) -> dict[str, Any]:
    return json.loads(leg.changes["kv_transfer_params"])


def test_nixls_dictionary_goes_to_decode_as_it_came() -> None:
    first, second = run(NIXL, HANDOFF | {"kvparams": RESULT}, facts())
    assert params(first)["do_remote_decode"] is True
    told = params(second)
    document = parse(told.pop("kvparams"))
    assert told == HANDOFF
    assert document.load_keys == ("k",)
    assert set(second.changes) == {"kv_transfer_params"}
    assert first.changes["max_tokens"] == b"1"


@pytest.mark.parametrize("manager", [PrefillThenDecode(), ConcurrentLegs()])
@pytest.mark.parametrize("speech", [STORE, STORE_MEET])
def test_the_prefill_leg_alone_is_told_whose_memory_to_read(
    manager: PrefillThenDecode | ConcurrentLegs, speech: Dialect
) -> None:
    table, answer = Table(speech), {"kvparams": RESULT}
    table.sources["prefill-0"] = "10.0.0.5:7400"
    legs = table.run(manager.legs(facts(), table), lambda leg: LegResult({} if leg.answers_client else answer))
    said = {leg.instance.role: parse(params(leg)["kvparams"]) for leg in legs}
    assert peer_source(said[Role.PREFILL]) == "10.0.0.5:7400"
    assert said[Role.DECODE].extensions is None


@pytest.mark.parametrize(
    ("dialect", "answer", "error"),
    [
        (NIXL, {}, HandoffMissing),
        (NIXL, HANDOFF | {"remote_host": None}, HandoffMissing),
        (STORE, HANDOFF, HandoffMissing),
        (STORE, {"kvparams": 5}, InvalidParams),
        (STORE, {"kvparams": RESULT | {"version": "2.0"}}, InvalidParams),
    ],
)
def test_an_answer_that_cannot_be_handed_on_stops_the_plan(
    dialect: Dialect, answer: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run(dialect, answer, facts())


def test_what_a_connector_cannot_carry_one_decode_engine_answers_alone() -> None:
    for request in (facts(prompts=2), facts(choices=2)):
        table = Table(NIXL)
        (only,) = table.run(PrefillThenDecode().legs(request, table), lambda _: LegResult({}))
        assert (only.instance.id, only.answers_client, only.changes) == ("decode-0", True, {})
        assert table.leases == []
        assert table.given_back == ["prefill-0"]
        run(STORE, {"kvparams": RESULT}, request)


FAILED = LegFailed("broken", another=True)
UNSEEN = LegFailed("refused", another=True, claimed=False)
BAD_REQUEST = LegFailed("bad", another=False)
MIDWAY = LegFailed("broken", another=True, begun=True, sent=StreamProgress([1, 2], [3]))
LOST = LegFailed("broken", another=True, begun=True)


def tried(
    dialect: Dialect, ends: list[LegFailed | None], *, retries: int = 2, waits_s: float = 0.0, **changes: Any
) -> tuple[Table, list[str]]:
    """Legs end as said, in order, on two engines of each role; who ran them."""
    table = Table(dialect, fleet_of(2, 2), retries)
    table.waits_s = waits_s
    left = list(ends)

    def answer(leg: Leg) -> LegResult | LegFailed:
        ended = left.pop(0)
        return ended or LegResult({} if leg.answers_client else HANDOFF | {"kvparams": RESULT})

    table.run(PrefillThenDecode().legs(facts(**changes), table), answer)
    assert left == []
    return table, [leg.instance.id for leg in table.legs]


@pytest.mark.parametrize(
    ("dialect", "ends", "route"),
    [
        (STORE, [FAILED, None, None], ["prefill-0", "prefill-1", "decode-0"]),
        (STORE, [None, FAILED, None], ["prefill-0", "decode-0", "decode-1"]),  # the same pages, by another
        (NIXL, [None, UNSEEN, None], ["prefill-0", "decode-0", "decode-1"]),  # the same blocks: nobody came for them
        (NIXL, [None, FAILED, None, None], ["prefill-0", "decode-0", "prefill-1", "decode-1"]),  # they may be bad
        (STORE, [None, MIDWAY, None, None], ["prefill-0", "decode-0", "prefill-0", "decode-1"]),
    ],
)
def test_another_engine_takes_over(dialect: Dialect, ends: list[LegFailed | None], route: list[str]) -> None:
    table, ran = tried(dialect, ends)
    assert ran == route
    told = [parse(params(leg)["kvparams"]).transfer for leg in table.legs]
    claims = [
        transfer
        for transfer, leg, ended in zip(told, table.legs, ends, strict=True)
        if leg.answers_client and ended is not UNSEEN
    ]
    assert len({transfer.id for transfer in claims}) == len(claims)  # a claimed transfer is never repeated
    assert [transfer.attempt for transfer in told] == sorted(transfer.attempt for transfer in told)


@pytest.mark.parametrize(
    ("ends", "retries"),
    [
        ([BAD_REQUEST], 2),
        ([None, BAD_REQUEST], 2),
        ([FAILED], 0),
        ([None, FAILED], 0),
        ([FAILED, FAILED, FAILED], 2),
        ([None, LOST], 2),  # nobody knows from where to go on
    ],
)
def test_what_cannot_be_helped_is_told(ends: list[LegFailed | None], retries: int) -> None:
    with pytest.raises(LegFailed):
        tried(STORE, ends, retries=retries)


def test_a_stream_is_continued_from_its_token_ids() -> None:
    table, _ = tried(STORE, [None, MIDWAY, None, None])
    assert [leg.resume_from for leg in table.legs] == [None, None, MIDWAY.progress, MIDWAY.progress]
    prefix = parse(params(table.legs[2])["kvparams"]).prefix
    assert prefix == TokenPrefix.by_digest([1, 2, 3])


def test_kv_whose_lease_has_run_out_is_computed_again() -> None:
    lease = {"kvparams": RESULT | {"lease": {"ttl_ms": 1000}}}
    for waits_s, prefills in ((0.9, 1), (1.1, 3)):
        table = Table(STORE, fleet_of(), retries=2)
        table.waits_s = waits_s
        plan = PrefillThenDecode().legs(facts(), table)
        try:
            table.run(plan, lambda leg: LegResult({} if leg.answers_client else lease))
        except LegFailed as failure:
            assert "before a decode engine had room" in str(failure)  # noqa: PT017  not raised in the first round
        assert len([leg for leg in table.legs if not leg.answers_client]) == prefills
        assert len(table.given_back) == (0 if prefills == 1 else 3)


@pytest.mark.parametrize(("waits_s", "left_ms"), [(0.0, 1000), (0.25, 750), (0.9996, 1)])
def test_decode_is_told_what_is_left_of_the_lease(waits_s: float, left_ms: int) -> None:
    """Spec-mandated, 1.0#3.9: counted by our own clock from when it came; what else stands in it stays."""
    for beside in ({}, {"unknown": 1}):
        table = Table(STORE)
        table.waits_s = waits_s
        lease = {"kvparams": RESULT | {"lease": {"ttl_ms": 1000, **beside}}}
        table.run(PrefillThenDecode().legs(facts(), table), lambda _, lease=lease: LegResult(lease))
        assert params(table.legs[1])["kvparams"]["lease"] == {"ttl_ms": left_ms, **beside}


@pytest.mark.parametrize(
    "wrong",
    [
        {"phase": "decode"},
        {"phase": "decode_result"},
        {"mode": "pull"},
        {"request_id": "another"},
        {"transfer": {"id": "another", "attempt": 1}},
        {"transfer": {"id": "tra", "attempt": 2}},
    ],
)
def test_the_document_of_something_else_in_an_answer_is_not_used(wrong: dict[str, object]) -> None:
    """Spec-mandated, 1.0#4.6."""
    right: dict[str, object] = {**RESULT, "request_id": "req", "transfer": {"id": "tra", "attempt": 1}}
    for result, told in ((right, 2), (right | wrong, 1)):
        table = Table(STORE)
        table.echoes = False
        plan = PrefillThenDecode().legs(facts(), table)
        if told == 2:
            table.run(plan, lambda _, result=result: LegResult({"kvparams": result}))
        else:
            with pytest.raises(HandoffMissing, match="prefill engine answered with"):
                table.run(plan, lambda _, result=result: LegResult({"kvparams": result}))
        assert len(table.legs) == told
        assert len(table.leases) == 1  # and so it is given back


def members(document: Mapping[str, Any], before: str = "") -> set[str]:
    """The paths of a document's members, as `must_understand` names them."""
    found = {before + name for name in document}
    for name, one in document.items():
        if isinstance(one, dict):
            found |= members(cast("dict[str, Any]", one), f"{before}{name}.")
    return found


def test_no_document_that_is_made_here_has_a_member_of_its_own() -> None:
    """Spec-mandated, 1.0#5.8: only what prefill's answer has stays (1.0#5.2)."""
    table = Table(STORE)
    lease = {"kvparams": RESULT | {"lease": {"ttl_ms": 1000, "unknown": 1}, "producer": {"id": "p"}}}
    table.run(PrefillThenDecode().legs(facts(token_ids=[1], cache_salt="s"), table), lambda _: LegResult(lease))
    prefill, decode = (members(params(leg)["kvparams"]) for leg in table.legs)
    assert prefill - KNOWN_PATHS == set()
    assert decode - KNOWN_PATHS == {"lease.unknown"}
    assert not any("." in name for part in (KVTransferParams, Lease, Usage) for name in part.model_fields)


def test_kv_that_is_given_up_while_decode_is_waited_for_is_computed_again() -> None:
    given_up = LegFailed("the KV expired", another=False)
    for retries in (0, 1):
        table = Table(STORE, fleet_of(), retries=retries)
        plan = PrefillThenDecode().legs(facts(), table)
        next(plan)
        plan.send(table.fleet[0])
        result = RESULT | {"request_id": "req", "transfer": {"id": "tra", "attempt": 1}}
        plan.send(LegResult({"kvparams": result}))  # it waits for a decode engine
        if retries == 0:
            with pytest.raises(LegFailed, match="the KV expired"):
                plan.throw(given_up)
        else:
            assert plan.throw(given_up) == AcquireInstance(Role.PREFILL, [], Role.DECODE)
            again = plan.send(table.fleet[0])
            assert params(again)["kvparams"]["transfer"] == {"id": "transfer-1", "attempt": 2}


@pytest.mark.parametrize(("dialect", "drops"), [(STORE_DROP, True), (STORE, False), (NIXL, False)])
def test_what_a_broken_prefill_has_left_behind_is_dropped_where_that_is_the_policy(
    dialect: Dialect, drops: bool
) -> None:
    def leases(end: Callable[[Plan], object]) -> list[tuple[str, ReleaseRequest | None]]:
        table = Table(dialect, fleet_of())
        plan = PrefillThenDecode().legs(facts(), table)
        next(plan)
        plan.send(table.fleet[0])
        end(plan)
        return [(lease.transfer_id, lease.release_request) for lease in table.leases]

    def fail(plan: Plan, *, claimed: bool) -> None:
        with pytest.raises(LegFailed):
            plan.throw(LegFailed("broke", another=True, claimed=claimed))

    wanted = [("tra", ReleaseRequest(Role.PREFILL, b"{}", leg=False))] if drops else []
    assert leases(partial(fail, claimed=True)) == wanted
    assert leases(lambda plan: plan.close()) == wanted  # the client has left
    assert leases(partial(fail, claimed=False)) == []  # the engine cannot have seen it


IDS = st.from_regex(r"[A-Za-z0-9._~-]{1,128}", fullmatch=True)


@given(IDS, IDS, st.none() | st.text(min_size=1, max_size=256))
def test_a_template_writes_what_the_document_itself_would(request_id: str, transfer_id: str, salt: str | None) -> None:
    document = parse(RESULT)
    changed = RESULT | {"request_id": request_id, "transfer": {"id": transfer_id, "attempt": 1}}
    if salt is not None:
        changed["isolation"] = {"cache_salt": salt}
    filled = DocumentTemplate(document).fill(request_id, transfer_id, salt)
    assert json.loads(filled) == changed
    assert parse(filled) == parse(changed)


@pytest.mark.parametrize("salt", ["", "x" * 257, "\ud800"])
def test_a_template_refuses_the_salts_that_a_document_does(salt: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        DocumentTemplate(parse(RESULT)).fill("r", "t", salt)
    assert refused.value.problems[0].path == ("isolation", "cache_salt")
    with pytest.raises(InvalidParams):
        parse(RESULT | {"isolation": {"cache_salt": salt}})


def test_a_template_has_no_isolation_of_its_own() -> None:
    with pytest.raises(ValueError, match="isolation"):
        DocumentTemplate(parse(RESULT | {"isolation": {"lora": "a"}}))


@pytest.mark.parametrize("bad", ["", "a b", 'a"b', "a\\b", "x" * 129, "é", "a\n"])
def test_a_template_takes_identifiers_only(bad: str) -> None:
    template = DocumentTemplate(parse(RESULT))
    for ids in ((bad, "t"), ("r", bad)):
        with pytest.raises(InvalidParams):
            template.fill(*ids)
