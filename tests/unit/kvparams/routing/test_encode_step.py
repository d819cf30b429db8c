"""Tests the plan step before prefill, and that it never fails a request."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.dialects.nixl import NIXL
from kvparams.dialects.registry import load_tables
from kvparams.dialects.store import STORE, STORE_MEET
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.handoff_verifier import HandoffRefused, HandoffVerifier
from kvparams.routing.managers.aggregated import Aggregated
from kvparams.routing.managers.concurrent_legs import ConcurrentLegs
from kvparams.routing.managers.conditional import Conditional
from kvparams.routing.managers.interface import DisaggregatedRequestManager
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import AcquireInstance, Leg, LegFailed, LegResult
from tests.support.kvparams.planning import Table, fleet_of

HASH = "4d7721c50a37c90758c55ef5441692a3c3e0fd2ed36247bb0381d3fba3c0864d"
FROM_ENCODER = {
    HASH: {
        "item_indices": [0],
        "metadata": {"image_grid_thw": [[1, 4, 4]]},
        "peer_host": "h",
        "peer_port": 5601,
        "size_bytes": 16_384,
        "shape": [16, 256],
    }
}
HANDED_ON = {HASH: {name: value for name, value in FROM_ENCODER[HASH].items() if name != "metadata"}}
FROM_PREFILL = {
    "remote_engine_id": "e",
    "remote_block_ids": [[1, 2]],
    "remote_host": "h",
    "remote_port": 5600,
    "kvparams": {
        "version": "1.0",
        "request_id": "r",
        "transfer": {"id": "t", "attempt": 1},
        "phase": "prefill_result",
        "mode": "store",
        "load_keys": ["k"],
    },
}
NO_DOCUMENT = {name: value for name, value in FROM_PREFILL.items() if name != "kvparams"}
PINS = HandoffVerifier(load_tables().values())
MEDIA = RequestFacts("req", "tra", "m", 1, 1, None, None, media="a1b2")


def answered(leg: Leg) -> LegResult:
    if leg.instance.role is Role.ENCODE:
        return LegResult({}, FROM_ENCODER)
    return LegResult({} if leg.answers_client else FROM_PREFILL)


def told(leg: Leg) -> Any:
    text = leg.changes.get("ec_transfer_params")
    return None if text is None else json.loads(text)


def roles(legs: list[Leg]) -> list[Role]:
    return [leg.instance.role for leg in legs]


@pytest.mark.parametrize(
    ("manager", "dialect"),
    [
        (PrefillThenDecode(), NIXL),
        (PrefillThenDecode(decode_first=True), NIXL),
        (PrefillThenDecode(), STORE_MEET),
        (ConcurrentLegs(), STORE_MEET),
        (ConcurrentLegs(), STORE),
        (Conditional(), STORE),
    ],
)
def test_the_encode_leg_comes_first_and_prefill_alone_is_told(
    manager: DisaggregatedRequestManager, dialect: Any
) -> None:
    table = Table(dialect, fleet_of(encode=2))
    legs = table.run(manager.legs(MEDIA._replace(prompt_tokens=1000), table), answered)
    assert roles(legs) == [Role.ENCODE, Role.PREFILL, Role.DECODE]
    assert [told(leg) for leg in legs] == [None, HANDED_ON, None]
    assert dict(legs[0].changes) == {"max_tokens": b"1", "tools": None}
    assert not legs[0].answers_client
    assert table.encodings == [None]


def test_an_aggregated_engine_is_told_and_a_decode_engine_alone_is_not() -> None:
    table = Table(NIXL, fleet_of(aggregated=1, encode=1))
    legs = table.run(Aggregated().legs(MEDIA, table), answered)
    assert roles(legs) == [Role.ENCODE, Role.AGGREGATED]
    assert told(legs[1]) == HANDED_ON
    table = Table(NIXL, fleet_of(encode=1))
    assert roles(table.run(Aggregated(role=Role.DECODE).legs(MEDIA, table), answered)) == [Role.DECODE]


SPLIT = (PrefillThenDecode(), ConcurrentLegs())
ALL = (*SPLIT, Aggregated())


@pytest.mark.parametrize(
    ("manager", "request_", "encode"),
    [
        *((manager, MEDIA._replace(media=""), 2) for manager in ALL),
        *((manager, MEDIA, 0) for manager in ALL),
        *((manager, MEDIA._replace(prompt_scored=True), 2) for manager in SPLIT),
    ],
)
def test_otherwise_everything_is_as_without_encode_engines(
    manager: DisaggregatedRequestManager, request_: RequestFacts, encode: int
) -> None:
    fleets = [fleet_of(aggregated=1, encode=number) for number in (encode, 0)]
    seen: list[Any] = []
    for fleet in fleets:
        table = Table(STORE_MEET, fleet)
        legs = table.run(manager.legs(request_, table), answered)
        seen.append([(leg.instance.id, dict(leg.changes), leg.answers_client) for leg in legs])
        assert table.encodings == []
    assert seen[0] == seen[1]


def test_an_engine_that_says_nothing_is_believed_to_have_encoded() -> None:
    """Connectors whose consumers find encodings by the hash answer without parameters."""
    table = Table(NIXL, fleet_of(encode=1))
    legs = table.run(
        PrefillThenDecode().legs(MEDIA, table), lambda leg: LegResult({} if leg.answers_client else FROM_PREFILL)
    )
    assert roles(legs) == [Role.ENCODE, Role.PREFILL, Role.DECODE]
    assert "ec_transfer_params" not in legs[1].changes
    assert table.encodings == [None]


@given(
    engines=st.integers(1, 4),
    ends=st.lists(st.sampled_from(["ok", "fails", "refuses", "strays", "garbage"]), min_size=4, max_size=4),
    stranded=st.integers(0, 3),
)
def test_the_encode_step_never_fails_a_request(engines: int, ends: list[str], stranded: int) -> None:
    """The law: at most two encode legs, of two engines; all that was taken is given back; the request is answered."""
    table = Table(NIXL, fleet_of(encode=engines))
    table.pins = PINS
    plan = PrefillThenDecode().legs(MEDIA, table)
    held: list[Instance] = []
    legs: list[Leg] = []
    outcomes = iter(ends)
    last = ""
    step: Any = next(plan)
    try:
        while True:
            if isinstance(step, AcquireInstance):
                if step.role is Role.ENCODE and len(legs) == stranded:
                    step = plan.throw(LegFailed("no room", another=True, claimed=False))
                    continue
                able = [each for each in table.fleet if each.role is step.role]
                held.append(next((each for each in able if each.id not in step.avoid), able[0]))
                step = plan.send(held[-1])
                continue
            assert isinstance(step, Leg)
            legs.append(step)
            held.remove(step.instance)
            if step.instance.role is Role.ENCODE:
                last = next(outcomes)
                if last in ("fails", "refuses"):
                    step = plan.throw(LegFailed("it did not", another=last == "fails"))
                    continue
                stray: dict[str, Any] = {HASH: {**FROM_ENCODER[HASH], "peer_host": "169.254.169.254"}}
                said: Any = {"ok": FROM_ENCODER, "strays": stray, "garbage": {HASH: [1]}}[last]
                step = plan.send(LegResult({}, said))
            else:
                step = plan.send(LegResult({} if step.answers_client else NO_DOCUMENT))
    except StopIteration:
        pass
    encoding = [leg for leg in legs if leg.instance.role is Role.ENCODE]
    assert len(encoding) <= 2
    assert len({leg.instance.id for leg in encoding}) == len(encoding)
    assert roles(legs)[-2:] == [Role.PREFILL, Role.DECODE]
    assert len(legs) == len(encoding) + 2
    assert sorted(each.id for each in held) == sorted(table.given_back)
    is_encoded = bool(encoding) and last == "ok"
    assert told(legs[-2]) == (HANDED_ON if is_encoded else None)
    assert [problem is None for problem in table.encodings] == [is_encoded]


def test_an_address_that_is_not_the_encode_engines_reaches_nobody() -> None:
    """The control: without the verification it would go to prefill."""
    stray: dict[str, Any] = {HASH: {**FROM_ENCODER[HASH], "peer_host": "169.254.169.254"}}
    seen: list[Any] = []
    for pins in (PINS, None):
        table = Table(NIXL, fleet_of(encode=1))
        table.pins = pins

        def answer(leg: Leg) -> LegResult:
            if leg.instance.role is Role.ENCODE:
                return LegResult({}, stray)
            return LegResult({} if leg.answers_client else NO_DOCUMENT)

        legs = table.run(PrefillThenDecode().legs(MEDIA, table), answer)
        seen.append(told(next(leg for leg in legs if leg.instance.role is Role.PREFILL)))
        if pins is not None:
            assert "169.254.169.254" in str(table.encodings), "the operator is told"
    assert seen == [None, {HASH: {**HANDED_ON[HASH], "peer_host": "169.254.169.254"}}]


@pytest.mark.parametrize(
    "inside",
    [
        {"peer_host": "10.0.0.8"},
        {"peer_host": "h", "peer_port": 0},
        {"peer_host": ["h", "10.0.0.8"]},
        {"metadata": {"peer_host": "10.0.0.8"}},
        {"metadata": {"remote_host": "10.0.0.8"}},
        {"later": {"remote_bootstrap_addr": "http://10.0.0.8:1"}},
    ],
)
def test_addresses_are_looked_for_at_any_depth(inside: dict[str, Any]) -> None:
    engine = fleet_of(encode=1)[-1]
    PINS.verify(engine, FROM_ENCODER)
    with pytest.raises(HandoffRefused, match="the encode engine's answer"):
        PINS.verify(engine, {HASH: {**FROM_ENCODER[HASH], **inside}})


def test_encodings_are_told_to_a_second_prefill_engine_too() -> None:
    table = Table(NIXL, fleet_of(prefill=2, encode=1), retries=1)
    failed: list[str] = []

    def answer(leg: Leg) -> LegResult | LegFailed:
        if leg.instance.role is Role.PREFILL and not failed:
            failed.append(leg.instance.id)
            return LegFailed("it is gone", another=True)
        return answered(leg)

    legs = table.run(PrefillThenDecode().legs(MEDIA, table), answer)
    assert roles(legs) == [Role.ENCODE, Role.PREFILL, Role.PREFILL, Role.DECODE]
    assert [told(leg) for leg in legs[1:3]] == [HANDED_ON, HANDED_ON]
    assert len({leg.instance.id for leg in legs[1:3]}) == 2


@pytest.mark.parametrize("manager", SPLIT)
def test_a_request_that_cannot_be_split_is_not_encoded(manager: DisaggregatedRequestManager) -> None:
    """Decode engines are told of no encodings."""
    table = Table(NIXL, fleet_of(encode=1))
    legs = table.run(manager.legs(MEDIA._replace(choices=2), table), answered)
    assert roles(legs) == [Role.DECODE]
    assert table.encodings == []


@pytest.mark.parametrize(("left_s", "limit_s"), [(None, 60.0), (1000.0, 60.0), (40.0, 10.0), (1.0, 0.25)])
def test_all_encode_legs_together_leave_most_of_the_time_to_prefill_and_decode(
    left_s: float | None, limit_s: float
) -> None:
    table = Table(NIXL, fleet_of(encode=3))
    table.clock_s = 0.0
    table.ends_at_s = left_s
    spent_s = [0.6 * limit_s, 0.4 * limit_s]

    def answer(leg: Leg) -> LegResult | LegFailed:
        if leg.instance.role is Role.ENCODE:
            table.clock_s += spent_s.pop(0)
            return LegFailed("it was silent", another=True)
        return answered(leg)

    legs = table.run(PrefillThenDecode().legs(MEDIA, table), answer)
    assert roles(legs) == [Role.ENCODE, Role.ENCODE, Role.PREFILL, Role.DECODE]
    assert [leg.limit_s for leg in legs][:2] == pytest.approx([0.6 * limit_s, 0.4 * limit_s])
    assert [leg.limit_s for leg in legs][2:] == [None, None]


@pytest.mark.parametrize("left_s", [0.0, -1.0, 40.0])
def test_an_encode_engine_is_not_asked_when_the_time_is_over(left_s: float) -> None:
    table = Table(NIXL, fleet_of(encode=2))
    table.ends_at_s = table.clock_s + left_s

    def answer(leg: Leg) -> LegResult | LegFailed:
        if leg.instance.role is Role.ENCODE:
            table.clock_s += left_s
            return LegFailed("it was silent", another=True)
        return answered(leg)

    legs = table.run(PrefillThenDecode().legs(MEDIA, table), answer)
    assert roles(legs) == [Role.ENCODE] * (left_s > 0) + [Role.PREFILL, Role.DECODE]
    assert [problem is None for problem in table.encodings] == [False]


def test_the_operator_is_told_nothing_that_an_engine_has_said() -> None:
    table = Table(NIXL, fleet_of(encode=1))

    def answer(leg: Leg) -> LegResult | LegFailed:
        if leg.instance.role is not Role.ENCODE:
            return answered(leg)
        failure = LegFailed("the client's own words", another=False)
        failure.evidence = "a leg was answered 400"
        return failure

    table.run(PrefillThenDecode().legs(MEDIA, table), answer)
    assert table.encodings == ["a leg was answered 400"]
