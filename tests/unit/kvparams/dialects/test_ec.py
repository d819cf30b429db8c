"""Tests which encodings of an encode engine may be handed on, and in what form."""

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.dialects.ec import write_encodings
from kvparams.dialects.interface import HandoffMissing
from kvparams.dialects.registry import load_tables
from kvparams.instances import Instance, Role
from kvparams.routing.handoff_verifier import HandoffRefused, HandoffVerifier
from tests.support.kvparams.dialect_messages import JSON
from tests.support.processor import is_within

PINS = HandoffVerifier(load_tables().values())
NO_TABLES = HandoffVerifier(())
ENGINE = Instance("e", "b", Role.ENCODE, "http://h:1", "ec")

HASH = "4d7721c50a37c90758c55ef5441692a3c3e0fd2ed36247bb0381d3fba3c0864d"
GOOD: dict[str, Any] = {
    "item_indices": [0, 2],
    "peer_host": "h",
    "peer_port": 5601,
    "size_bytes": 512,
    "shape": [2, 64],
}


def written(said: dict[str, Any], verifier: HandoffVerifier = PINS) -> Any:
    return json.loads(write_encodings(said, lambda handed: verifier.verify(ENGINE, handed)))


@pytest.mark.parametrize(
    "said",
    [
        {},
        {HASH: GOOD},
        {HASH: {}, HASH * 2: {"item_indices": [0]}},
        {f"an/adapter:{HASH}": GOOD},
        {f"{number:064x}": GOOD for number in range(250)},
    ],
)
def test_what_engines_say_is_handed_on(said: dict[str, Any]) -> None:
    assert written(said) == said


UNREAD: list[dict[str, Any]] = [
    {"metadata": {"image_grid_thw": [[1, 4, 4]]}},
    {"metadata": {"endpoint": "tcp://10.0.0.8:1"}},
    {"of a later release": {"x": [1.5, "y"]}},
    {"address": "http://10.0.0.8:1"},
    {"text": "\ud800"},
    {f"{number}": {} for number in range(5000)},
]


@pytest.mark.parametrize("more", UNREAD)
def test_members_that_no_consumer_reads_are_left_out(more: dict[str, Any]) -> None:
    assert written({HASH: {**GOOD, **more}}) == {HASH: GOOD}
    assert written({HASH: {**more, "peer_host": None}}) == {HASH: {}}


IMPOSSIBLE: list[dict[str, Any]] = [
    {"": GOOD},
    {"a b": GOOD},
    {f"a b:{HASH}": GOOD},
    {HASH[:31]: GOOD},
    {HASH.upper(): GOOD},
    {HASH + "\n": GOOD},
    {HASH * 3: GOOD},
    {"address": GOOD},
    {"remote_bootstrap_addr": GOOD},
    {"kv_hint": GOOD},
    {HASH: None},
    {HASH: [GOOD]},
    {HASH: {**GOOD, "peer_host": 7}},
    {HASH: {**GOOD, "peer_host": "h/x"}},
    {HASH: {**GOOD, "peer_port": "5601"}},
    {HASH: {**GOOD, "peer_port": 65_536}},
    {HASH: {**GOOD, "peer_port": True}},
    {HASH: {**GOOD, "size_bytes": -1}},
    {HASH: {**GOOD, "shape": [1] * 9}},
    {HASH: {**GOOD, "shape": [2**40, 1]}},
    {HASH: {**GOOD, "item_indices": list(range(5000))}},
    {f"{number:064x}": {} for number in range(257)},
    {f"{number:064x}": {**GOOD, "item_indices": [1] * 256} for number in range(256)},
]


@pytest.mark.parametrize("said", IMPOSSIBLE)
def test_what_is_out_of_bounds_is_not_handed_on(said: dict[str, Any]) -> None:
    with pytest.raises(HandoffMissing, match="the encode engine's ec_transfer_params"):
        written(said)


@pytest.mark.parametrize("verifier", [PINS, NO_TABLES])
@pytest.mark.parametrize("stray", [{"peer_host": "10.0.0.8"}, {"peer_host": "10.0.0.8", "peer_port": None}])
def test_an_address_that_is_not_the_engines_is_refused_whatever_is_registered(
    verifier: HandoffVerifier, stray: dict[str, Any]
) -> None:
    assert written({HASH: GOOD}, verifier) == {HASH: GOOD}
    with pytest.raises(HandoffRefused):
        written({HASH: {**GOOD, **stray}}, verifier)


def test_the_problem_names_nothing_that_the_engine_has_said() -> None:
    for said in ({"a secret": GOOD}, {HASH: {"peer_host": "a secret"}}, {HASH: {"size_bytes": "a secret"}}):
        with pytest.raises(HandoffMissing) as refused:
            written(said)
        assert "secret" not in str(refused.value)


KNOWN = (*GOOD, "metadata", "address")


@given(
    said=st.dictionaries(
        st.one_of(st.text(max_size=5), st.just(HASH), st.sampled_from(["address", "kv_hint"])),
        st.one_of(JSON, st.dictionaries(st.sampled_from(KNOWN), JSON), st.just(GOOD)),
        max_size=4,
    )
)
def test_anything_is_either_refused_or_known_members_alone(said: dict[str, Any]) -> None:
    try:
        handed = written(said)
    except HandoffMissing:
        return
    assert handed.keys() == said.keys()
    for name, encoding in handed.items():
        assert encoding == {key: said[name][key] for key in GOOD if said[name].get(key) is not None}
        assert encoding.get("peer_host", "h") in ("h", "H")


LONG: list[dict[str, Any]] = [
    {f"{number:064x}": GOOD for number in range(200)},
    {f"{number:064x}": {**GOOD, "item_indices": [65_535] * 256} for number in range(256)},
    {HASH: {"metadata": {"x": [[[1]] * 100] * 1000}}},
    {HASH: {"item_indices": [[]] * 20_000}},
    {HASH: {"peer_host": "h" * 4_000_000}},
    {HASH: {f"{number}": {} for number in range(5000)}},
    {"x" * 4_000_000: {}},
    {"x" * 200 + ":" * 4_000_000: {}},
]


@pytest.mark.parametrize("said", LONG)
def test_the_event_loop_is_not_held_by_what_an_engine_says(said: dict[str, Any]) -> None:
    """Written, judged and looked through for addresses."""
    began = time.thread_time()
    with contextlib.suppress(HandoffMissing):
        write_encodings(said, lambda handed: PINS.verify(ENGINE, handed))
    assert is_within(time.thread_time() - began, 0.02)
