"""Tests the states of a request: only existing transitions, one end, and nothing held at the end."""

from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.instances import Instance, Role
from kvparams.routing.plan import KVLease
from kvparams.routing.request_lifecycle import (
    TRANSITIONS,
    LifecycleError,
    LifecycleState,
    RequestLifecycle,
    RequestOutcome,
)

ENGINE = Instance("p", "i", Role.PREFILL, "http://h:1", "nixl")
LEASE = KVLease(ENGINE, 1.0, "t", 1, None)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def through(*states: LifecycleState) -> RequestLifecycle:
    life = RequestLifecycle(Clock())
    for state in states:
        life.enter(state)
    return life


def visited(life: RequestLifecycle) -> list[LifecycleState]:
    return [state for state, _, _ in life.spans]


def test_a_request_that_goes_well() -> None:
    life = through("prefill", "result", "decode", "first_byte")
    life.finish("ok")
    assert visited(life) == ["created", "prefill", "result", "decode", "first_byte", "done"]
    assert [begun_s for _, _, begun_s in life.spans] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert (life.started_s, life.since_s) == (1.0, 6.0)
    assert life.outcome == "ok"


@given(st.lists(st.sampled_from(get_args(LifecycleState)), max_size=12), st.sampled_from(get_args(RequestOutcome)))
def test_whatever_is_tried_no_way_leads_out_of_done_and_an_answer_is_never_empty(
    states: list[LifecycleState], outcome: RequestOutcome
) -> None:
    life = through()
    for state in states:
        try:
            life.enter(state)
        except LifecycleError:
            continue
    try:
        life.finish(outcome)
    except LifecycleError:
        assert life.state != "done"
    else:
        if outcome in ("ok", "midway"):
            assert "first_byte" in visited(life)  # never an empty 200
        if outcome in ("refused", "failed"):
            assert "first_byte" not in visited(life)
        with pytest.raises(LifecycleError):
            life.finish(outcome)
        for state in get_args(LifecycleState):
            with pytest.raises(LifecycleError):
                life.enter(state)
    assert all(after in TRANSITIONS[before] for before, after in pairwise(visited(life)))


def test_nothing_is_done_while_something_is_held() -> None:
    life = through("prefill")
    life.loads.append(ENGINE)
    with pytest.raises(LifecycleError, match="holds 1 loads"):
        life.finish("gone")
    life.loads.clear()
    life.lease = LEASE
    with pytest.raises(LifecycleError, match="lease: True"):
        life.finish("gone")
    life.lease = None
    life.finish("gone")


def test_the_first_byte_means_that_the_kv_was_fetched() -> None:
    life = through("prefill", "result")
    life.lease = LEASE
    life.enter("decode")
    assert life.lease is LEASE
    life.enter("first_byte")
    assert life.lease is None
