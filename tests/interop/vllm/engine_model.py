"""Models vLLM's scheduler as a connector sees it (0.32, v1/core/sched/scheduler.py), with blocks that record content.

It follows vLLM's own order of calls, and fails where vLLM would compute on wrong KV, leak a block or free one twice. It
overwrites a block as soon as the block is free. A test decides when loads and copies of saved blocks end, and how far
they get. KV that was computed under one set of weights is wrong under others.
"""

import json
from collections.abc import Callable, Sequence
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvparams.keys import ExtraKey, Geometry, KVShard, Namespace, Page
from kvparams.params import Endpoint, KVTransferParams
from kvparams_connectors.engines.vllm.block_pins import BlockPins
from kvparams_connectors.engines.vllm.connector_metadata import LoadSpec
from kvparams_connectors.engines.vllm.grouped_plan import GroupedPlan, PageChains
from kvparams_connectors.engines.vllm.prefix_lookup import StorePrefixLookup
from kvparams_connectors.engines.vllm.rank_geometry import RankShard
from kvparams_connectors.engines.vllm.request_params import RequestParams
from kvparams_connectors.engines.vllm.scheduler_state import ScheduledRequest, SchedulerOptions, SchedulerState
from kvparams_connectors.engines.vllm.worker_transfers import WorkerTransfers
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import KVStore
from kvparams_connectors.transfer.reports import LoadReport, PrefixHit, SaveReport
from kvparams_connectors.transfer.sequence_plan import SequencePlan
from kvparams_connectors.transfer.shard_grid import ShardGrid

__all__ = ["BLOCK", "NAMESPACE", "PAGE", "SHARE", "EngineModel", "ModelRequest"]

BLOCK = 4
PAGE = 6
NAMESPACE = Namespace("m", "r", "float32", Geometry(1, 1, 4, 4), PAGE)
SHARE = RankShard(NAMESPACE, KVShard.whole(NAMESPACE.geometry), ShardGrid(1, 1))
"""Of the one group of layers."""

_MIXED = -1
"""The life of what was computed on KV of an earlier one."""

T = TypeVar("T")


def _life_of(extras: Sequence[ExtraKey]) -> int:
    return int.from_bytes(extras[0].digest, "big") if extras else 0


@dataclass(eq=False, slots=True)
class _Block:
    """As vLLM's `KVCacheBlock`, as far as it is used."""

    block_id: int
    ref_cnt: int = 0


class _Aside:
    """A lane whose work is done when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], None], Callable[[], None]]] = []
        """To do it, and to leave it out."""

    def submit(self, work: Callable[[Job[T]], T], deadline_s: float, *, timed_out: T, refused: T) -> Job[T]:
        job = Job(1e18, timed_out)

        def do() -> None:
            try:
                value = work(job)
            except Exception as error:  # noqa: BLE001 - as a lane does
                job.fail(error)
            else:
                job.finish(value)

        self.waiting.append((do, lambda: job.finish(timed_out)))
        return job


@dataclass(eq=False)
class ModelRequest:
    name: str
    tokens: list[int]
    handoff: RequestParams
    prompt_tokens: int = 0
    blocks: list[int] = field(default_factory=list[int])
    computed: int = 0
    status: str = "waiting"
    preemptions: int = 0
    claims: int = 0
    """Since the last preemption."""
    result: dict[str, object] | None = None
    mixed: bool = False
    """Its blocks hold KV of several lives."""


class _Search:
    """Finds what the test says is stored."""

    def __init__(self, engine: "EngineModel") -> None:
        self._engine = engine
        self._prefixes = StorePrefixLookup(_NO_STORE, [SHARE], 1.0)

    def plan(
        self, token_ids: Tokens[int], shared: KVTransferParams | None, extras: Tokens[ExtraKey], known: PageChains = ()
    ) -> GroupedPlan:
        plan = self._prefixes.plan(token_ids, shared, extras, known)
        assert plan == self._prefixes.plan(token_ids, shared, extras), "what was known is of something else"
        return plan

    def pages(
        self, token_ids: Tokens[int], shared: KVTransferParams | None, extras: Tokens[ExtraKey], known: PageChains
    ) -> PageChains:
        pages = self._prefixes.pages(token_ids, shared, extras, known)
        assert pages == self._prefixes.plan(token_ids, shared, extras).chains, "what was known is of something else"
        return pages

    def look_up(self, plan: GroupedPlan) -> Job[PrefixHit]:
        job = Job(1e18, PrefixHit(0, 0, 0))
        self._engine.lookups.append((plan, job))
        return job


class _NoStore:
    """Nobody asks it."""


_NO_STORE: KVStore = _NoStore()  # pyright: ignore[reportAssignmentType]


class EngineModel:
    """One engine. `loads`, `lookups` and `aside.waiting` are what is under way."""

    def __init__(self, blocks: int, *, fails: bool = False, clock: float = 0.0, holding: bool = True) -> None:
        """`holding`: False is an engine that gives blocks away although they are still to be copied."""
        self.now = clock
        self.aside = _Aside()
        self.lookups: list[tuple[GroupedPlan, Job[PrefixHit]]] = []
        self.loads: list[tuple[LoadSpec, Job[LoadReport]]] = []
        self.stored: set[bytes] = set()
        """Chains of pages that are stored."""
        self.ordered: set[bytes] = set()
        """Chains of pages that were to be stored at some time."""
        self.damaged: dict[str, set[bytes]] = {}
        """By request, pages that it could not load and that nobody has saved since."""
        rules = SchedulerOptions(
            page_tokens=PAGE, loads=True, saves=True, fails_on_load_error=fails, promise_s=1.0, block_tokens=BLOCK
        )
        self.book = SchedulerState(_Search(self), rules, Endpoint(id="E"), clock=lambda: self.now)
        self.blocks: list[_Block] = [_Block(block) for block in range(blocks)]
        self.cached_block_hash_to_block: object = None  # of vLLM's pool, which nobody looks at here
        self.held = BlockPins(self, 1)
        self.book.pin_blocks = self.held.pin if holding else lambda blocks: 1 << 40
        self.transfers = WorkerTransfers([self], BLOCK, clock=lambda: self.now, aside=self.aside)
        self.free = list(range(blocks))
        self.holds: dict[int, list[tuple[int, ...] | None]] = {block: [None] * BLOCK for block in range(blocks)}
        """By block and place: the life of the weights, and the tokens up to and with the one whose KV stands there.
        None: nothing good."""
        self.life = 0
        self.requests: dict[str, ModelRequest] = {}
        self.reported: set[str] = set()
        self.failed: set[str] = set()
        self.fails = fails

    # ---- vLLM's block pool

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            assert block.ref_cnt, "held too late"
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt, "freed twice"
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.holds[block.block_id] = [None] * BLOCK
                self.free.append(block.block_id)

    # ---- what the transfers see of a store connector

    def plan(
        self,
        token_ids: Tokens[int],
        params: KVTransferParams | None,
        extras: Tokens[ExtraKey],
        known: Tokens[Page] = (),
    ) -> SequencePlan:
        self._saving = (_life_of(extras), *token_ids)
        return _Search(self).plan(token_ids, params, extras, (tuple(known),)).plans[0]

    def load(self, plan: SequencePlan, block_ids: Tokens[int], start_token: int, end_token: int) -> Job[LoadReport]:
        job = Job(1e18, LoadReport(start_token, start_token))
        order = next(one for one in self._orders if one.start == start_token and one.block_ids == tuple(block_ids))
        self.loads.append((order, job))
        return job

    def save(
        self, plan: SequencePlan, block_ids: Tokens[int], start_token: int, end_token: int, *, required: bool = False
    ) -> Job[SaveReport]:
        tokens = self._saving
        for page in plan.pages:
            if start_token < page.end <= end_token:
                for at in range(page.start, page.end):
                    held = self.holds[block_ids[at // BLOCK]][at % BLOCK]
                    assert held == tokens[: at + 2], "a page of something else would be stored"
                self.stored.add(page.chain)
        job = Job(1e18, SaveReport())
        job.finish(SaveReport())
        return job

    # ---- vLLM

    def add(self, name: str, tokens: list[int], handoff: RequestParams) -> None:
        self.requests[name] = ModelRequest(name, tokens, handoff, len(tokens))
        self.book.add_request(name, tokens, handoff)

    def step(self) -> None:
        """schedule, execute, update."""
        running: list[tuple[ModelRequest, int, int]] = []
        for one in list(self.requests.values()):
            if one.status == "running":
                if self._grow(one, len(one.tokens), running):
                    running.append((one, one.computed, len(one.tokens) - one.computed))
            elif one.status in ("waiting", "loading"):
                self._admit(one, running)
        by_name = {one.name: one for one, _, _ in running}
        orders = self.book.build_metadata(
            [
                ScheduledRequest(one.name, start, count, tuple(one.tokens), lambda one=one: [one.blocks])
                for one, start, count in running
            ]
        )
        self._orders = orders.loads
        for one, start, count in running:  # the forward
            for at in range(start):
                held = self._held(one, at)
                assert held is not None, "computed on wrong KV"
                assert held[1:] == tuple(one.tokens[: at + 1]), "computed on wrong KV"
                assert held[0] == self.life or one.mixed, "computed on KV of other weights"
            for at in range(start, start + count):
                life = _MIXED if one.mixed else self.life
                self.holds[one.blocks[at // BLOCK]][at % BLOCK] = (life, *one.tokens[: at + 1])
            one.computed = start + count
        for order in orders.saves:
            for page in self.plan(order.sequence.token_ids, None, order.sequence.extras).pages:
                if order.start < page.end <= order.end:
                    self.ordered.add(page.chain)
                    for chains in self.damaged.values():
                        chains.discard(page.chain)
        self.transfers.save(orders)
        self.transfers.begin(orders)
        seen = self.transfers.finished()
        assert not self.transfers.counts["saves_failed"], "a page of something else would be stored"
        self.held.record_copied(seen.copied)
        assert not seen.bad_blocks & {block for one in by_name.values() for block in one.blocks}
        assert not seen.bad_blocks & set(self.free)
        for one in list(self.requests.values()):
            if one.status == "loading" and seen.bad_blocks.intersection(one.blocks):
                first = next(at for at, block in enumerate(one.blocks) if block in seen.bad_blocks)
                one.computed = first * BLOCK
                self.failed.add(one.name)
        for name in seen.request_ids:
            one = self.requests[name]  # vLLM asserts this
            if one.status == "loading":
                assert name not in self.reported
                self.reported.add(name)
                if self.fails and name in self.failed:
                    self._finish(one)
            else:
                assert one.status == "gone"
                self._free(one)
                del self.requests[name]
        for one, _, _ in running:  # the next token
            if one.status == "running":
                one.tokens.append(7)

    def _admit(self, one: ModelRequest, running: list[tuple[ModelRequest, int, int]]) -> None:
        if one.status == "loading":
            if one.name not in self.reported:
                return
            self.reported.discard(one.name)
            failed = one.name in self.failed
            self.failed.discard(one.name)
            one.status = "waiting"
            if failed and not one.computed:
                self._free(one)
        external = 0
        if one.computed == 0:
            found = self.book.get_matched_tokens(one.name, 0, tuple(one.tokens), one.preemptions)
            if found is None:
                return
            external = found
            assert 0 <= external < len(one.tokens), "the last token is computed"
        need = -(-(external or len(one.tokens)) // BLOCK)
        if need > len(one.blocks) + len(self.free):
            return
        self._grow(one, external or len(one.tokens), running)
        self.book.update_after_alloc(one.name, external, tuple(one.tokens), [one.blocks])
        if external:
            one.claims += 1
            assert one.claims == 1, "an offer is made once"
            one.status, one.computed = "loading", external
        else:
            one.status = "running"
            running.append((one, one.computed, len(one.tokens) - one.computed))

    def preempt(self, one: ModelRequest) -> None:
        assert one.status == "running"
        self._free(one)
        one.status, one.computed, one.claims, one.mixed = "waiting", 0, 0, False
        one.preemptions += 1

    def reset(self, *, preempting: bool) -> None:
        """Other weights, and vLLM's `reset_prefix_cache` with `reset_connector`; `preempting` is its
        `reset_running_requests`, which vLLM refuses while anything is loaded."""
        active = [one for one in self.requests.values() if one.blocks]
        if preempting and all(one.status == "running" for one in active):
            for one in active:
                self.preempt(one)
        for one in self.requests.values():
            one.mixed = bool(one.blocks)
        self.life += 1
        self.book.invalidate_stored(self.extras[0].digest)

    @property
    def extras(self) -> tuple[ExtraKey, ...]:
        """What page keys say of the life."""
        return (ExtraKey(0, 1 << 40, self.life.to_bytes(16, "big")),) if self.life else ()

    def finish(self, one: ModelRequest) -> None:
        """Its last token, a stop word, or a client that left."""
        self._finish(one)

    def _finish(self, one: ModelRequest) -> None:
        loading = one.status == "loading" and one.name not in self.reported
        self.reported.discard(one.name)
        self.failed.discard(one.name)
        one.status = "gone"
        one.result = self.book.finish_request(one.name, computed=one.computed)
        if one.handoff.is_prefill and one.mixed:
            assert '"load_keys": []' in json.dumps(one.result), "KV of several lives is promised"
        elif one.handoff.is_prefill and one.computed >= one.prompt_tokens and not loading:
            plan = self.plan(one.tokens[: one.prompt_tokens], None, self.extras)
            good = self.ordered - self.damaged.get(one.name, set())
            missing = [page.index for page in plan.pages if page.chain not in good]
            assert not missing, "what is promised was never to be stored"
        if not loading:
            self._free(one)
            del self.requests[one.name]

    def end_copy(self, *, done: bool = True) -> None:
        """The lane is through with the save that waits longest; or it left that out."""
        do, leave_out = self.aside.waiting.pop(0)
        (do if done else leave_out)()

    def end_load(self, index: int, end: int | None) -> None:
        """Tokens up to `end` are good; None: all."""
        order, job = self.loads.pop(index)
        end = order.end if end is None else min(order.end, order.start + end)
        tokens = order.sequence.token_ids
        for at in range(order.start, end):
            self.holds[order.block_ids[at // BLOCK]][at % BLOCK] = (_life_of(order.sequence.extras), *tokens[: at + 1])
        if end < order.end:  # a page was damaged: it is put away
            plan = self.plan(tokens, None, order.sequence.extras)
            damaged = next(page.chain for page in plan.pages if page.start <= end < page.end)
            self.stored.discard(damaged)
            self.damaged.setdefault(order.request_id, set()).add(damaged)
        job.finish(LoadReport(order.start, end))

    def end_lookup(self, index: int, *, failed: bool = False) -> None:
        plan, job = self.lookups.pop(index)
        tokens = 0
        for page in plan.pages:
            if page.chain not in self.stored or failed:
                break
            tokens = page.end
        job.finish(PrefixHit(tokens, 0, 0))

    def _grow(self, one: ModelRequest, tokens: int, running: list[tuple[ModelRequest, int, int]]) -> bool:
        """Blocks for so many tokens, if need be of others; False if the request had to give up its own."""
        while len(one.blocks) * BLOCK < tokens:
            if not self.free and self.held.blocks_other_requests:  # vLLM asks, and then rather waits for them
                return False
            if not self.free:  # for a running one only, as a waiting one waits for room
                victims = [other for other in self.requests.values() if other.status == "running" and other is not one]
                victim = victims[0] if victims else one
                self.preempt(victim)
                running[:] = [entry for entry in running if entry[0] is not victim]
                if victim is one:
                    return False
                continue
            block = self.free.pop()
            assert not self.blocks[block].ref_cnt
            self.blocks[block].ref_cnt = 1
            one.blocks.append(block)
        return True

    def _free(self, one: ModelRequest) -> None:
        self.free_blocks([self.blocks[block] for block in one.blocks])
        one.blocks = []

    def _held(self, one: ModelRequest, at: int) -> tuple[int, ...] | None:
        return self.holds[one.blocks[at // BLOCK]][at % BLOCK]
