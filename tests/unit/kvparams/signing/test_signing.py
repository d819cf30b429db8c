"""Tests signatures: one is accepted once, by its audience, in its time; anything else is refused with a message."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from kvparams import InvalidParams, TokenPrefix, dump, parse, read_request
from kvparams.dialects.interface import Dialect, HandoffMissing
from kvparams.dialects.mooncake import MOONCAKE
from kvparams.dialects.nixl import NIXL
from kvparams.dialects.store import STORE
from kvparams.instances import RequestFacts
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import Leg, LegFailed, LegResult
from kvparams.signing.canonical_json import NotCanonical, canonical_document, canonical_json, native_members
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.replay_window import ReplayWindow
from kvparams.signing.signer import MAX_LIFETIME_S, NoSigningKey, Signer
from kvparams.signing.verification import UNTRUSTED_REASONS, UntrustedParams, verify_params
from tests.support.kvparams.planning import Table, fleet_of

VECTORS = Path(__file__).parents[4] / "spec" / "1.0" / "vectors" / "signatures.json"
CASES: list[dict[str, Any]] = json.loads(VECTORS.read_bytes())["cases"]
NOW = 1_767_225_600
KEY = SigningKey("k", bytes(32), NOW - 10)
RING = SigningKeyring([KEY])
NATIVE: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_block_ids": [list(range(100, 120)), [2**40]],
    "remote_host": "10.0.0.7",
    "remote_blocks_expiry_time": None,
}
SMALL: dict[str, Any] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "decode",
    "mode": "pull",
}


def clock() -> float:
    return float(NOW)


def signer(**changes: Any) -> Signer:
    given: dict[str, Any] = {"keyring": RING, "audience": "pool", "now": clock}
    return Signer(**given | changes)


def check(carrier: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {"keyring": RING, "audience": "pool", "now": NOW, "replay": ReplayWindow(NOW - 100)}
    return verify_params(carrier, **given | changes)


def refused(carrier: Any, **changes: Any) -> str:
    with pytest.raises(UntrustedParams) as caught:
        check(carrier, **changes)
    assert f"[{caught.value.reason}]" in str(caught.value)
    return caught.value.reason


# the vectors


def ring_of(case: dict[str, Any]) -> SigningKeyring:
    keys = (
        SigningKey(key["kid"], bytes.fromhex(key["secret"]), key["not_before"], key["not_after"])
        for key in case["keys"]
    )
    return SigningKeyring(keys)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_vector_is_judged_as_it_says(case: dict[str, Any]) -> None:
    """Spec-mandated, 1.0#13.1 to 1.0#13.14: the vectors were made from the words of the spec, by other code."""
    carrier = case["kv_transfer_params"]
    if "canonical" in case:
        assert canonical_document(parse(carrier["kvparams"])).decode() == case["canonical"]
        assert canonical_json(native_members(carrier), fractions=[]).decode() == case["canonical_native"]
    replay = ReplayWindow(case["since"])
    for kid, nonce in case.get("used", []):
        assert replay.try_use(f"{kid} {nonce} ", case["now"] + 1000, case["now"])
    keyring = ring_of(case)
    for given_as in (json.dumps(carrier), carrier):
        before = deepcopy(given_as)
        window = replay if given_as is carrier else deepcopy(replay)
        arguments: Any = (given_as, keyring, case["audience"], case["now"], window)
        if case["refused"] is None:
            assert verify_params(*arguments, instance=case.get("instance")) == read_request(carrier)
        else:
            with pytest.raises(UntrustedParams) as caught:
                verify_params(*arguments, instance=case.get("instance"))
            assert caught.value.reason == case["refused"]
        assert given_as == before


def test_every_reason_has_a_vector_and_the_spec_says_what_it_is() -> None:
    assert {case["refused"] for case in CASES} == {None, *UNTRUSTED_REASONS}


# what is signed


@pytest.mark.parametrize("native", [{}, NATIVE, {**NATIVE, "remote_blocks_expiry_time": 12345.75}])
@pytest.mark.parametrize(
    "prefix", [None, [1, 2, 3], {"count": 1, "packed": "AQAAAA==", "x": 1}, {"count": 1, "ids": [1]}]
)
def test_what_was_signed_is_believed_and_says_what_it_said(native: dict[str, Any], prefix: object) -> None:
    document = {**SMALL, "prefix": prefix, "extensions": {"com.example": {"b": [1, None], "a": "\u2028"}}}
    carrier = signer().sign(parse(document), native)
    found = check(carrier)
    assert {name: value for name, value in carrier.items() if name != "kvparams"} == native
    assert dump(found) == {**document, "signature": dump(found)["signature"]}
    assert read_request(carrier) == found
    again = signer().sign(found, native)  # one that was signed is signed anew
    assert check(again).signature.nonce != found.signature.nonce


def test_nothing_at_all_is_nothing_to_believe() -> None:
    for nothing in (None, "null", {}, "{}", {"prompt_token_ids": [1]}):
        assert check(nothing) is None
    wrongs: list[Any] = [[], 5, "[]", "{", {"kvparams": 5}, {"kvparams": SMALL | {"version": "2.0"}}]
    for wrong in wrongs:
        with pytest.raises(InvalidParams):
            check(wrong)


def differ(one: object, other: object) -> bool:
    return json.dumps(one) != json.dumps(other)


def mutated(draw: Callable[[Any], Any], carrier: dict[str, Any]) -> dict[str, Any]:
    """Exactly one value in it is another, has gone, or has come."""
    at: Any = carrier
    while True:
        is_object = isinstance(at, dict)
        if is_object and draw(st.integers(0, 5)) == 0:
            at[draw(st.text("abc", min_size=9, max_size=9))] = draw(ODD)
            return carrier
        key: Any = draw(st.sampled_from(sorted(at))) if is_object else draw(st.integers(0, len(at) - 1))
        inner: Any = at[key]
        if type(inner) in (dict, list) and inner and draw(st.integers(0, 4)):
            at = inner
            continue
        if draw(st.integers(0, 3)) == 0:
            del at[key]
        else:
            at[key] = draw(ODD.filter(partial(differ, inner)))
        return carrier


ODD: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-2, 2**64) | st.floats(allow_nan=False) | st.text(max_size=3)
    | st.sampled_from(["pool", "k", "evil.example", "decode", "prefill", [], {}, ["k1"], {"count": 0, "packed": ""}])
)  # fmt: skip


@settings(max_examples=150)
@given(st.data())
def test_one_change_anywhere_and_it_is_not_believed(data: st.DataObject) -> None:
    """Spec-mandated, 1.0#13.4 and 1.0#13.5."""
    document = {
        **SMALL,
        "prefix": {"count": 2, "digest": TokenPrefix.by_digest([1, 2]).digest_text()},
        "load_keys": ["a"],
    }
    carrier = json.loads(json.dumps(signer().sign(parse(document), NATIVE)))
    check(carrier)
    changed = mutated(data.draw, deepcopy(carrier))
    try:
        found = check(changed)
    except (UntrustedParams, InvalidParams):
        return
    # all that may differ is what is not there for a parser: nothing
    assert json.dumps(changed, sort_keys=True) == json.dumps(carrier, sort_keys=True), found


def test_a_verifier_that_looked_at_the_document_alone_would_let_changed_native_keys_in() -> None:
    """The control: it is the digest of native keys that refuses them."""
    carrier = signer().sign(parse(SMALL), NATIVE)
    changed = {**carrier, "remote_host": "evil.example"}
    assert refused(changed) == "native"
    assert read_request(changed) == check(carrier)


def test_what_cannot_be_signed_is_said_in_words() -> None:
    with pytest.raises(NotCanonical, match="cannot be signed"):
        signer().sign(parse({**SMALL, "extensions": {"com.example": {"x": 0.5}}}))
    wrongs: dict[str, Any] = {"huge": 2**64, "nan": float("nan"), "infinite": [float("-inf")], "half": "\ud800"}
    for name, wrong in wrongs.items():
        with pytest.raises(NotCanonical, match=name if name != "half" else "surrogates"):
            signer().sign(parse(SMALL), {"fraction": 0.5, name: wrong})
        assert refused({**signer().sign(parse(SMALL), {"fraction": 0.5}), name: wrong}) == "uncanonical"
    with pytest.raises(NoSigningKey):
        signer(keyring=SigningKeyring([SigningKey("k", bytes(32), NOW + 1)])).sign(parse(SMALL))
    for wrong in ({"audience": ""}, {"audience": "a b"}, {"audience": "é"}, {"lifetime_s": 0}, {"lifetime_s": 3601}):
        with pytest.raises(ValueError, match="1 to"):
            signer(**wrong)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_fraction_among_native_keys_is_believed_as_any_text_of_the_same_double(value: float) -> None:
    """Spec-mandated, 1.0#13.2; the next double is another one, and so is the integer."""
    carrier = signer().sign(parse(SMALL), {"expiry": value})
    texts = {repr(value), f"{value:.17e}", to_json(value).decode()}
    whole = json.dumps(carrier | {"expiry": "HERE"})
    for text in texts:
        assert check(whole.replace('"HERE"', text)) is not None
    assert refused(carrier | {"expiry": math.nextafter(value, 0 if value else 1)}) == "native"
    if value.is_integer() and -(2**63) <= value < 2**64:
        assert refused(carrier | {"expiry": int(value)}) == "native"


def test_ids_of_a_prompt_that_nobody_signed_are_not_used() -> None:
    """Spec-mandated, 1.0#13.14: nobody else holds them against anything, as they are not among what is signed."""
    for prefix, good in ((None, False), ([1, 2], True), ([1, 2, 3, 4], False), ([2], False)):
        document = parse(SMALL if prefix is None else SMALL | {"prefix": prefix})
        carrier = signer().sign(document, NATIVE | {"prompt_token_ids": [1, 2, 3]})
        if good:
            assert check(carrier) is not None
        else:
            assert refused(carrier) == "native"
        assert check({name: value for name, value in carrier.items() if name != "prompt_token_ids"}) is not None


# keys and time


def test_the_newest_key_signs_and_the_old_one_is_believed_until_nothing_of_it_is_left() -> None:
    """Spec-mandated, 1.0#13.7: a key is changed without one request lost, at any moment."""
    old, new = SigningKey("old", b"o" * 32, NOW - 1000, NOW + 120), SigningKey("new", b"n" * 32, NOW + 60)
    ring = SigningKeyring([old, new])
    at = [float(NOW)]
    signing = signer(keyring=ring, now=lambda: at[0])
    seen: list[str] = []
    carrier: dict[str, object] = {}
    for second in range(0, 400, 20):
        at[0] = NOW + second
        carrier = signing.sign(parse(SMALL), NATIVE)
        for later in (0, 100, 299):
            assert check(carrier, keyring=ring, now=at[0] + later) is not None
        seen.append(check(carrier, keyring=ring, now=at[0]).signature.kid)
    assert seen == ["old"] * 3 + ["new"] * 17
    assert refused(carrier, keyring=SigningKeyring([old]), now=at[0]) == "key"


def test_a_signer_changes_its_keys_at_once() -> None:
    signing = signer()
    assert check(signing.sign(parse(SMALL))).signature.kid == "k"
    other = SigningKeyring([SigningKey("other", b"o" * 32, NOW)])
    signing.use_keyring(other)
    assert check(signing.sign(parse(SMALL)), keyring=other).signature.kid == "other"
    signing.use_keyring(SigningKeyring([SigningKey("later", b"o" * 32, NOW + 5)]))
    with pytest.raises(NoSigningKey):
        signing.sign(parse(SMALL))


@given(offset=st.integers(-5000, 5000), lifetime=st.integers(1, MAX_LIFETIME_S), skew=st.integers(0, 60))
def test_it_is_believed_in_its_time_and_within_what_clocks_may_differ(offset: int, lifetime: int, skew: int) -> None:
    """Spec-mandated, 1.0#13.11."""
    carrier = signer(lifetime_s=lifetime).sign(parse(SMALL))
    at = NOW + offset
    if -skew <= offset < lifetime + skew:
        assert check(carrier, now=at, skew_s=skew, replay=ReplayWindow(0)) is not None
    else:
        said = refused(carrier, now=at, skew_s=skew, replay=ReplayWindow(0))
        assert said == ("early" if offset < 0 else "expired")


@given(offset=st.integers(-30, 329), gap=st.integers(1, 60), took=st.integers(0, 400))
def test_what_an_engine_before_this_one_has_accepted_is_refused(offset: int, gap: int, took: int) -> None:
    """Spec-mandated, 1.0#13.9: however wrong the proxy's clock may be, and however long the engine took to start."""
    carrier = signer().sign(parse(SMALL))
    accepted = NOW + offset
    assert check(carrier, now=accepted, replay=ReplayWindow(0)) is not None
    began = accepted + gap
    assert refused(carrier, now=began + took, replay=ReplayWindow(began)) in ("replayed", "expired")


def test_an_engine_takes_what_is_signed_when_what_clocks_may_differ_by_has_passed_since_it_began() -> None:
    """The control: the law above could be kept by refusing everything."""
    for later, good in ((0, False), (29, False), (30, True), (40, True)):
        carrier = signer(now=lambda later=later: NOW + later).sign(parse(SMALL))
        if good:
            assert check(carrier, now=NOW + later, replay=ReplayWindow(NOW)) is not None
        else:
            assert refused(carrier, now=NOW + later, replay=ReplayWindow(NOW)) == "replayed"


def test_a_request_that_has_waited_is_judged_by_when_it_came() -> None:
    carrier = signer().sign(parse(SMALL))
    assert refused(carrier, now=NOW + 1000) == "expired"
    assert check(carrier, now=NOW + 1000, arrived=NOW + 10) is not None


# once


def test_it_is_believed_once() -> None:
    """Spec-mandated, 1.0#13.9: also where the other copy is in another form."""
    replay = ReplayWindow(NOW - 100)
    carrier: dict[str, Any] = signer().sign(parse({**SMALL, "prefix": [1]}))
    assert check(carrier, replay=replay) is not None
    assert refused(carrier, replay=replay) == "replayed"
    document = {**carrier["kvparams"], "prefix": dump(TokenPrefix.by_digest([1]))}
    assert refused({"kvparams": document}, replay=replay) == "replayed"
    assert check(carrier, replay=ReplayWindow(NOW - 100)) is not None  # the control: it is the window that refuses
    assert check(signer().sign(parse(SMALL)), replay=replay) is not None


def test_what_is_wrong_uses_no_nonce_up() -> None:
    """Spec-mandated, 1.0#13.10; that values are compared in constant time is `hmac.compare_digest`'s word."""
    replay = ReplayWindow(NOW - 100)
    carrier = signer().sign(parse(SMALL), NATIVE)
    for _ in range(3):
        assert refused({**carrier, "x": 1}, replay=replay) == "native"
        assert refused(carrier, replay=replay, audience="other") == "audience"
        assert refused(carrier, replay=replay, now=NOW + 9999) == "expired"
    assert len(replay) == 0
    assert check(carrier, replay=replay) is not None


def test_each_part_of_a_request_may_use_it_once() -> None:
    replay = ReplayWindow(NOW - 100)
    carrier = signer().sign(parse(SMALL))
    for part in ("0", "1"):
        assert check(carrier, replay=replay, part=part) is not None
        assert refused(carrier, replay=replay, part=part) == "replayed"


@settings(max_examples=200)
@given(
    uses=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(0, 6)), max_size=60),
    capacity=st.integers(1, 8),
)
def test_a_bounded_window_never_lets_anything_in_twice(uses: list[tuple[int, int, int]], capacity: int) -> None:
    """Spec-mandated, 1.0#13.9, against one that never forgets: in any order, time and room a use is new or refused."""
    window = ReplayWindow(0, capacity)
    ever: set[str] = set()
    now = 100
    expiry: dict[str, int] = {}
    for number, life, passed in uses:
        now += passed - 1  # also backwards, a little
        nonce = f"n{number}"
        until = expiry.setdefault(nonce, now + life)
        if window.try_use(nonce, until, now):
            assert nonce not in ever
            ever.add(nonce)
        assert len(window) <= capacity


def test_a_window_with_room_refuses_nothing_that_is_new() -> None:
    """The control: it could keep the law above by refusing everything."""
    window = ReplayWindow(0, 1000)
    assert all(window.try_use(f"n{number}", 50 + number % 7, number / 100) for number in range(1000))
    assert len(window) == 1000
    assert window.try_use("later", 200, 100)
    assert len(window) == 1
    with pytest.raises(ValueError, match="at least one"):
        ReplayWindow(0, 0)


def test_where_there_is_no_more_room_it_refuses_what_expires_first_and_goes_on() -> None:
    window = ReplayWindow(0, 10)
    assert all(window.try_use(f"n{number}", 100 + number, 0) for number in range(50))
    assert len(window) == 10
    assert not window.try_use("n3", 103, 0)  # forgotten, and refused all the same
    assert not window.try_use("new", 139, 0)
    assert window.try_use("new", 141, 0)


# the legs of a plan


HANDOFF: dict[str, object] = {
    "remote_engine_id": "e",
    "remote_request_id": "q",
    "remote_block_ids": [list(range(20))],
    "remote_host": "h",
    "remote_port": 5600,
    "prompt_token_ids": [1],
}
RESULT: dict[str, object] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill_result",
    "mode": "store",
    "load_keys": ["k"],
    "producer": {"id": "p", "incarnation": "i", "x": 1},
    "lease": {"ttl_ms": 5},
    "prefix": {"count": 2, "packed": "AQAAAAIAAAA="},
}
FACTS = RequestFacts("req", "tra", "m", 1, 1, None, None)
PLACE = {"remote_engine_id": "e", "remote_bootstrap_addr": "http://h:1"}


def carriers(
    dialect: Dialect, request: RequestFacts, signing: Signer | None, ends: list[LegFailed | None]
) -> list[Any]:
    """What all legs of a plan carry, two of each role there."""
    table = Table(dialect, fleet_of(2, 2), retries=3)
    table.found = PLACE
    left = list(ends)
    both = HANDOFF | {"kvparams": RESULT}

    def answer(leg: Leg) -> LegResult | LegFailed:
        return left.pop(0) or LegResult({} if leg.answers_client else both)

    table.run(PrefillThenDecode(signing).legs(request, table), answer)
    assert left == []
    return [json.loads(leg.changes["kv_transfer_params"] or b"null") for leg in table.legs]


@pytest.mark.parametrize("dialect", [NIXL, MOONCAKE, STORE])
@pytest.mark.parametrize(
    "request_facts",
    [
        FACTS,
        FACTS._replace(cache_salt='s"'),
        FACTS._replace(token_ids=[1, 2]),
        FACTS._replace(token_ids=[1], cache_salt="s"),
    ],
)
def test_every_leg_of_a_plan_is_signed_and_otherwise_says_the_same(
    dialect: Dialect, request_facts: RequestFacts
) -> None:
    """Spec-mandated, 1.0#13.12: also those after a failure, each with a nonce of its own."""
    failed = LegFailed("broken", another=True, claimed=False)
    ends = [failed, None, failed, None]
    plain = carriers(dialect, request_facts, None, ends)
    signed = carriers(dialect, request_facts, signer(), ends)
    replay = ReplayWindow(NOW - 100)
    assert [one["kvparams"]["phase"] for one in signed] == ["prefill", "prefill", "decode", "decode"]
    for one, other in zip(signed, plain, strict=True):
        chosen = one["kvparams"]["consumer" if one["kvparams"]["phase"] == "decode" else "producer"]["id"]
        assert check(one, replay=replay, instance=chosen) is not None
        assert refused(one, replay=replay) == "replayed"
        assert one["kvparams"].pop("signature")["aud"] == "pool"
        other.pop("prompt_token_ids", None)  # what is not signed does not go along
        assert one == other


def test_an_answer_that_cannot_be_signed_is_not_handed_on() -> None:
    table = Table(NIXL)
    table.found = PLACE
    plan = PrefillThenDecode(signer()).legs(FACTS, table)
    with pytest.raises(HandoffMissing, match=r"cannot be signed: later: "):
        table.run(plan, lambda leg: LegResult(HANDOFF | {"later": 2**64}))
    unsigned = PrefillThenDecode().legs(FACTS, Table(NIXL))
    Table(NIXL).run(unsigned, lambda leg: LegResult(HANDOFF | {"later": 2**64}))


def test_a_producer_with_a_float_is_handed_on_where_nobody_signs() -> None:
    result = RESULT | {"producer": {"id": "p", "load": 0.5}}
    table = Table(STORE)
    table.run(PrefillThenDecode().legs(FACTS, table), lambda leg: LegResult({"kvparams": result}))
    assert json.loads(table.legs[1].changes["kv_transfer_params"] or b"")["kvparams"]["producer"] == result["producer"]
    with pytest.raises(NotCanonical, match=r"producer.load"):
        Table(STORE).run(
            PrefillThenDecode(signer()).legs(FACTS, Table(STORE)), lambda leg: LegResult({"kvparams": result})
        )
