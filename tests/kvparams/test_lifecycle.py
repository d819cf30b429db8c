"""The states of a request: only the ways that exist, one end, nothing held at it."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.lifecycle import Lifecycle, LifecycleError, Outcome, State
from kvparams.plan import KVLease
from kvparams.scheduling import Instance, Role

ENGINE = Instance("p", "i", Role.PREFILL, "http://h:1", "nixl")
LEASE = KVLease(ENGINE, 1.0, "t", 1, None)


class Moves:
    def __init__(self) -> None:
        self.seen: list[tuple[State, State, float]] = []

    def moved(self, before: State, after: State, spent_s: float) -> None:
        self.seen.append((before, after, spent_s))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def through(*states: State) -> tuple[Lifecycle, Moves]:
    moves = Moves()
    life = Lifecycle(moves, Clock())
    for state in states:
        life.enter(state)
    return life, moves


def test_a_request_that_goes_well() -> None:
    life, moves = through("prefill", "result", "decode", "first_byte")
    life.leave("ok")
    assert [span.state for span in life.spans] == ["created", "prefill", "result", "decode", "first_byte", "done"]
    assert [spent for _, _, spent in moves.seen] == [1.0] * 5
    assert life.outcome == "ok"


@given(st.lists(st.sampled_from(get_args(State)), max_size=12), st.sampled_from(get_args(Outcome)))
def test_whatever_is_tried_no_way_leads_out_of_done_and_an_answer_is_never_empty(
    states: list[State], outcome: Outcome
) -> None:
    life, moves = through()
    for state in states:
        try:
            life.enter(state)
        except LifecycleError:
            continue
    try:
        life.leave(outcome)
    except LifecycleError:
        assert life.state != "done"
    else:
        if outcome in ("ok", "midway"):
            assert "first_byte" in [after for _, after, _ in moves.seen]  # never an empty 200
        if outcome in ("refused", "failed"):
            assert "first_byte" not in [after for _, after, _ in moves.seen]
        with pytest.raises(LifecycleError):
            life.leave(outcome)
        for state in get_args(State):
            with pytest.raises(LifecycleError):
                life.enter(state)
    assert all(before == after for (_, before, _), (after, _, _) in zip(moves.seen, moves.seen[1:], strict=False))


def test_nothing_is_done_while_something_is_held() -> None:
    life, _ = through("prefill")
    life.loads.append(ENGINE)
    with pytest.raises(LifecycleError, match="holds 1 loads"):
        life.leave("gone")
    life.loads.clear()
    life.lease = LEASE
    with pytest.raises(LifecycleError, match="lease: True"):
        life.leave("gone")
    life.lease = None
    life.leave("gone")


def test_the_first_byte_means_that_the_kv_was_fetched() -> None:
    life, _ = through("prefill", "result")
    life.lease = LEASE
    life.enter("decode")
    assert life.lease is LEASE
    life.enter("first_byte")
    assert life.lease is None
