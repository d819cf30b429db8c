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
from kvparams.routing.handoff_verifier import HandoffVerifier
from tests.support.kvparams.dialect_messages import JSON
from tests.support.processor import is_within

PINS = HandoffVerifier(load_tables().values())
ENGINE = Instance("e", "b", Role.ENCODE, "http://h:1", "ec")

GOOD: dict[str, Any] = {
    "item_indices": [0, 2],
    "metadata": {},
    "peer_host": "h",
    "peer_port": 5601,
    "size_bytes": 512,
    "shape": [2, 64],
}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"a": GOOD},
        {"a": {}, "b": {"item_indices": [0], "metadata": {"image_grid_thw": [[1, 4, 4]]}}},
        {"a": {"peer_host": None, "of a later release": {"x": [1.5, "y"]}}},
        {f"{number:064x}": GOOD for number in range(250)},
    ],
)
def test_what_engines_say_is_handed_on_as_it_is(said: dict[str, Any]) -> None:
    assert json.loads(write_encodings(said)) == said


IMPOSSIBLE: list[dict[str, Any]] = [
    {"": GOOD},
    {"a b": GOOD},
    {"x" * 257: GOOD},
    {"a": None},
    {"a": [GOOD]},
    {"a": {**GOOD, "peer_host": 7}},
    {"a": {**GOOD, "peer_host": "h/x"}},
    {"a": {**GOOD, "peer_port": "5601"}},
    {"a": {**GOOD, "peer_port": 65_536}},
    {"a": {**GOOD, "peer_port": True}},
    {"a": {**GOOD, "size_bytes": -1}},
    {"a": {**GOOD, "shape": [1] * 9}},
    {"a": {**GOOD, "shape": [2**40, 1]}},
    {"a": {**GOOD, "item_indices": list(range(5000))}},
    {"a": {**GOOD, "text": "\ud800"}},
    {f"{number}": {} for number in range(257)},
    {"a": {"of a later release": ["x" * 4096] * 20}},
]


@pytest.mark.parametrize("said", IMPOSSIBLE)
def test_what_is_out_of_bounds_is_not_handed_on(said: dict[str, Any]) -> None:
    with pytest.raises(HandoffMissing, match="the encode engine's ec_transfer_params"):
        write_encodings(said)


@given(said=st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_anything_is_either_handed_on_unchanged_or_refused(said: dict[str, Any]) -> None:
    try:
        text = write_encodings(said)
    except HandoffMissing:
        return
    assert json.loads(text) == said
    assert len(text) <= 64 << 10


LONG: list[dict[str, Any]] = [
    {f"{number:064x}": GOOD for number in range(200)},
    {"a": {"metadata": {"x": [[[1]] * 100] * 1000}}},
    {"a": {"later": [[]] * 20_000}},
    {"a": {f"{number}": {} for number in range(5000)}},
]


@pytest.mark.parametrize("said", LONG)
def test_the_event_loop_is_not_held_by_what_an_engine_says(said: dict[str, Any]) -> None:
    """Written, judged and looked through for addresses."""
    began = time.thread_time()
    with contextlib.suppress(HandoffMissing):
        write_encodings(said)
        PINS.verify(ENGINE, said)
    assert is_within(time.thread_time() - began, 0.02)
