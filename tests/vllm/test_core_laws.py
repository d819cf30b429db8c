"""The laws of the core, held by an engine that behaves like vLLM's scheduler and a store that fails at will."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvparams.params import PROTOCOL_VERSION, KVTransferParams, Transfer
from kvparams_connectors.engines.vllm.documents import Handoff
from tests.vllm.engine_model import EngineModel, ModelRequest

_BLOCKS = 22
_MAX_RUNNING = 4


def _document(phase: str, keys: tuple[str, ...] | None = None) -> Handoff:
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
    return Handoff(params, None)


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
        handoff = Handoff(None, None)
        if kind == "prefill":
            handoff = _document("prefill")
        elif kind == "decode":
            handoff = _document("decode", self.engine.plan(tokens, None, ()).keys)
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

    @rule(seconds=st.sampled_from([0.01, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.engine.now += seconds

    @invariant()
    def blocks_are_where_they_belong(self) -> None:
        held = [block for one in self.engine.requests.values() for block in one.blocks]
        assert sorted(held + self.engine.free) == list(range(_BLOCKS))

    def teardown(self) -> None:
        """Everybody gets an end: nothing waits for ever, nothing is left."""
        for _ in range(60):
            while self.engine.lookups:
                self.engine.end_lookup(0)
            while self.engine.loads:
                self.engine.end_load(0, None)
            self.engine.now += 0.1
            self.engine.step()
            for one in self._of("running"):
                if len(one.tokens) > one.prompt_tokens + 2:
                    self.engine.finish(one)
        assert not self.engine.requests
        assert not len(self.engine.book)
        assert not len(self.engine.transfers)
        assert sorted(self.engine.free) == list(range(_BLOCKS))


class _FailingMachine(_Machine):
    fails = True


TestRecompute = _Machine.TestCase
TestFail = _FailingMachine.TestCase
TestRecompute.settings = TestFail.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
