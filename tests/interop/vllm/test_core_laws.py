"""Tests the laws of the core with a model of vLLM's scheduler and a store that fails at will."""

# pyright: reportPrivateUsage=false
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvparams.keys import ExtraKey
from kvparams.params import PROTOCOL_VERSION, KVTransferParams, Transfer
from kvparams_connectors.engines.vllm.block_pins import BlockPins
from kvparams_connectors.engines.vllm.request_params import RequestParams
from kvparams_connectors.engines.vllm.request_state import RequestState
from kvparams_connectors.engines.vllm.scheduler_state import ScheduledRequest
from tests.interop.vllm.engine_model import EngineModel, ModelRequest
from tests.interop.vllm.half_steps import Pool

_BLOCKS = 22
_MAX_RUNNING = 4


def _document(phase: str, keys: tuple[str, ...] | None = None) -> RequestParams:
    params = KVTransferParams.model_validate(
        {
            "version": PROTOCOL_VERSION,
            "request_id": "r",
            "transfer": Transfer(id="t", attempt=1),
            "phase": phase,
            "mode": "store",
            **({} if keys is None else {"load_keys": keys}),
        }
    )
    return RequestParams(params, None)


class _Machine(RuleBasedStateMachine):
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.engine = EngineModel(_BLOCKS, fails=self.fails)
        self.names = 0

    def _of(self, *statuses: str) -> list[ModelRequest]:
        return [one for one in self.engine.requests.values() if one.status in statuses]

    @precondition(lambda self: len(self._of("waiting", "running", "loading")) < _MAX_RUNNING)
    @rule(size=st.integers(1, 30), kind=st.sampled_from(["plain", "prefill", "decode"]), variant=st.integers(0, 1))
    def comes(self, size: int, kind: str, variant: int) -> None:
        tokens = [variant] + [3] * (size - 1)
        handoff = RequestParams(None, None)
        if kind == "prefill":
            handoff = _document("prefill")
        elif kind == "decode":
            handoff = _document("decode", self.engine.plan(tokens, None, self.engine.extras).keys)
        self.names += 1
        self.engine.add(f"r{self.names}", tokens, handoff)

    @rule(count=st.integers(1, 3))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine.lookups)
    @rule(which=st.integers(0, 99), failed=st.booleans())
    def lookup_ends(self, which: int, failed: bool) -> None:
        self.engine.end_lookup(which % len(self.engine.lookups), failed=failed)

    @precondition(lambda self: self.engine.loads)
    @rule(which=st.integers(0, 99), end=st.none() | st.integers(0, 30))
    def load_ends(self, which: int, end: int | None) -> None:
        self.engine.end_load(which % len(self.engine.loads), end)

    @precondition(lambda self: self.engine.aside.waiting)
    @rule(done=st.integers(0, 9))
    def copy_ends(self, done: int) -> None:
        self.engine.end_copy(done=bool(done))

    @precondition(lambda self: self._of("running"))
    @rule(which=st.integers(0, 99))
    def is_preempted(self, which: int) -> None:
        running = self._of("running")
        self.engine.preempt(running[which % len(running)])

    @precondition(lambda self: self._of("waiting", "running", "loading"))
    @rule(which=st.integers(0, 99))
    def ends(self, which: int) -> None:
        found = self._of("waiting", "running", "loading")
        self.engine.finish(found[which % len(found)])

    @precondition(lambda self: self.engine.stored)
    @rule(which=st.integers(0, 99))
    def page_goes(self, which: int) -> None:
        self.engine.stored.discard(sorted(self.engine.stored)[which % len(self.engine.stored)])

    @rule(preempting=st.booleans())
    def weights_change(self, preempting: bool) -> None:
        self.engine.reset(preempting=preempting)

    @rule(seconds=st.sampled_from([0.01, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.engine.now += seconds

    @invariant()
    def blocks_are_where_they_belong(self) -> None:
        engine = self.engine
        used = {block for one in engine.requests.values() for block in one.blocks}
        assert not used & set(engine.free)
        assert sorted(engine.free) == [block.block_id for block in engine.blocks if not block.ref_cnt]
        if not len(engine.held):
            assert sorted([*used, *engine.free]) == list(range(_BLOCKS))

    def teardown(self) -> None:
        """Everybody gets an end: nothing waits for ever, nothing is left."""
        for _ in range(60):
            while self.engine.lookups:
                self.engine.end_lookup(0)
            while self.engine.loads:
                self.engine.end_load(0, None)
            while self.engine.aside.waiting:
                self.engine.end_copy()
            self.engine.now += 0.1
            self.engine.step()
            for one in self._of("running"):
                if len(one.tokens) > one.prompt_tokens + 2:
                    self.engine.finish(one)
        assert not self.engine.requests
        assert not len(self.engine.book)
        assert not len(self.engine.transfers)
        assert not len(self.engine.held)
        assert sorted(self.engine.free) == list(range(_BLOCKS))


class _FailingMachine(_Machine):
    fails = True


TestRecompute = _Machine.TestCase
TestFail = _FailingMachine.TestCase
TestRecompute.settings = TestFail.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [_Machine, _FailingMachine])
def test_the_laws_at_length(machine: type[_Machine], effort: Callable[[int, int], int]) -> None:
    told = settings(max_examples=effort(200, 5000), stateful_step_count=50, deadline=None)
    run_state_machine_as_test(machine, settings=told)


def _saved_too_late(*, holding: bool) -> EngineModel:
    """A request whose prompt is to be saved, and that has left before it is copied; another one has its blocks."""
    engine = EngineModel(_BLOCKS, holding=holding)
    engine.add("r1", [3] * 20, RequestParams(None, None))
    engine.end_lookup(0)
    engine.step()
    assert len(engine.aside.waiting) == 1
    engine.finish(engine.requests["r1"])
    engine.add("r2", [4] * 30, RequestParams(None, None))
    engine.end_lookup(0)
    engine.step()
    engine.end_copy()  # of r1
    return engine


def test_blocks_are_copied_before_others_have_them() -> None:
    engine = _saved_too_late(holding=True)
    engine.step()
    assert len(engine.held) == 1  # of r2
    assert len(engine.stored) == 3


def test_without_holding_blocks_it_is_noticed() -> None:
    engine = _saved_too_late(holding=False)
    assert not engine.stored
    with pytest.raises(AssertionError, match="of something else"):
        engine.step()


def _saved_across_lives(engine: EngineModel) -> EngineModel:
    """A request is computed, the weights change, it goes on, and its next page is to be saved."""
    engine.add("r1", [3] * 10, RequestParams(None, None))
    engine.end_lookup(0)
    engine.step()
    engine.reset(preempting=False)
    for _ in range(3):
        engine.step()
    while engine.aside.waiting:
        engine.end_copy()
    engine.step()
    return engine


def test_what_was_begun_with_other_weights_is_not_stored() -> None:
    engine = _saved_across_lives(EngineModel(_BLOCKS))
    assert len(engine.stored) == 1  # of the first life


def test_if_it_were_it_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def renew(self: RequestState, life: tuple[ExtraKey, ...]) -> None:
        self._life = life

    monkeypatch.setattr(RequestState, "renew", renew)
    with pytest.raises(AssertionError, match="of something else"):
        _saved_across_lives(EngineModel(_BLOCKS))


@pytest.mark.parametrize("forgets", [True, False])
def test_pages_of_another_life_are_not_taken_for_known(monkeypatch: pytest.MonkeyPatch, *, forgets: bool) -> None:
    renewed = RequestState.renew

    def renew(self: RequestState, life: tuple[ExtraKey, ...]) -> None:
        pages = self.pages
        renewed(self, life)
        self.pages = pages

    if not forgets:
        monkeypatch.setattr(RequestState, "renew", renew)
    engine = EngineModel(_BLOCKS)
    engine.add("r1", [3] * 10, RequestParams(None, None))
    engine.end_lookup(0)
    engine.step()
    engine.reset(preempting=True)
    if forgets:
        engine.step()
        assert engine.lookups
    else:
        with pytest.raises(AssertionError, match="what was known is of something else"):
            engine.step()


def test_the_pages_of_a_sequence_that_grows_are_computed_once() -> None:
    engine = EngineModel(_BLOCKS, holding=False)
    engine.book.add_request("r1", [3] * 7, RequestParams(None, None))
    orders = [
        engine.book.build_metadata([ScheduledRequest("r1", start, 6, tuple([3] * (start + 6)), lambda: [range(8)])])
        for start in (0, 6, 12)
    ]
    pages = [one.saves[0].sequence.pages[0] for one in orders]
    assert [len(one) for one in pages] == [2, 2, 3]  # the prompt's, one of them partial; then what is saved
    assert [page.tokens for page in pages[-1]] == [6, 6, 6]
    for fewer, more in pairwise(pages):
        full = [page for page in fewer if page.tokens == 6]
        assert all(one is other for one, other in zip(full, more, strict=False))


def test_an_engine_waits_for_what_is_held_rather_than_preempt() -> None:
    engine = EngineModel(7)
    for name, size in (("r1", 14), ("r2", 12)):
        engine.add(name, [3] * size, RequestParams(None, None))
        engine.end_lookup(0)
    engine.step()
    engine.finish(engine.requests["r2"])
    assert not engine.free
    assert engine.held.blocks_other_requests
    for _ in range(3):  # it grows to the end of its last block, and then waits
        engine.step()
    assert engine.requests["r1"].preemptions == 0
    while engine.aside.waiting:
        engine.end_copy()
    engine.step()
    engine.step()
    assert len(engine.requests["r1"].blocks) > 4


def test_blocks_are_let_go_when_every_worker_has_copied() -> None:
    pool: Any = Pool()
    del pool.blocks[6:]
    held = BlockPins(pool, 2)
    first, second = held.pin([1, 2]), held.pin([2, 3])
    assert [block.ref_cnt for block in pool.blocks] == [1, 2, 3, 2, 1, 1]
    held.record_copied([first, second])
    held.record_copied([second])
    assert [block.ref_cnt for block in pool.blocks] == [1, 2, 2, 1, 1, 1]
    assert not held.blocks_other_requests
    pool.free_blocks([pool.blocks[1]])
    assert held.blocks_other_requests
    held.record_copied([first, 99])
    held.record_copied([first])  # said once more: nothing
    assert len(held) == 0
    assert [block.ref_cnt for block in pool.blocks] == [1, 0, 1, 1, 1, 1]
