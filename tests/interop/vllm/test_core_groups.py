"""Tests groups of layers without vLLM: which are known, how far a sequence is held, and what is loaded and saved."""

import time
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.keys import Geometry, KVShard, Namespace
from kvparams_connectors.engines.vllm.connector_metadata import ConnectorMetadata, LoadSpec
from kvparams_connectors.engines.vllm.connector_metadata import TokenSequence as Tokens
from kvparams_connectors.engines.vllm.grouped_plan import GroupedPlan
from kvparams_connectors.engines.vllm.layer_groups import LayerGroup, group_revision, read_groups
from kvparams_connectors.engines.vllm.prefix_lookup import StorePrefixLookup
from kvparams_connectors.engines.vllm.rank_geometry import RankShard
from kvparams_connectors.engines.vllm.request_state_machine import LoadRange, SaveRange
from kvparams_connectors.engines.vllm.transfer_specs import load_specs, save_specs
from kvparams_connectors.engines.vllm.worker_transfers import WorkerTransfers
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import PutOp, Result, ResultCode, open_store
from kvparams_connectors.transfer.cache_layouts import LayoutError
from kvparams_connectors.transfer.reports import LoadReport, PrefixHit
from kvparams_connectors.transfer.shard_grid import ShardGrid
from tests.interop.vllm.engine_model import EngineModel
from tests.interop.vllm.half_steps import FullAttentionSpec, MambaSpec, SlidingWindowSpec, make_cache, make_config

_PAGE, _BLOCK = 4, 2
_WINDOWS = (None, 6, 7)
_KEYS = ("a", "b", "c")


def _shares() -> list[RankShard]:
    shares: list[RankShard] = []
    for name, window in zip(_KEYS, _WINDOWS, strict=True):
        namespace = Namespace("m", name, "float32", Geometry(1, 1, 4, 4), _PAGE)
        shares.append(RankShard(namespace, KVShard.whole(namespace.geometry), ShardGrid(1, 1), window))
    return shares


def _plan(tokens: int) -> GroupedPlan:
    return StorePrefixLookup(EngineModel(1), _shares(), 1.0).plan([1] * tokens, None, ())  # pyright: ignore[reportArgumentType]


def _result(there: bool) -> Result:
    return Result(ResultCode.OK if there else ResultCode.MISS, has_size=False)


# ---- which are known


def _read(*specs: object, page: int = 64, tells: bool = True) -> tuple[LayerGroup, ...]:
    return read_groups(make_config(Path()), make_cache(*specs), page_tokens=page, tells_failures=tells)


class _Short(SlidingWindowSpec):
    """`SlidingWindowSpec`, with other numbers."""

    def __init__(self, window: int | None, block: int = 32) -> None:
        self.sliding_window, self.block_size = window, block


_Short.__name__ = "SlidingWindowSpec"


def test_groups_keep_all_tokens_or_a_window() -> None:
    full, sliding = _read(FullAttentionSpec(), SlidingWindowSpec())
    assert (full.window, full.names) == (None, ("l.0",))
    assert (sliding.window, sliding.names) == (128, ("l.1",))
    (alone,) = _read(FullAttentionSpec(), page=999, tells=False)  # nothing is asked of one group
    assert (alone.window, alone.names) == (None, ("l.0", "l.1"))
    (alone,) = _read(SlidingWindowSpec())
    assert alone.window == 128


@pytest.mark.parametrize(
    ("specs", "more", "words"),
    [
        ([], {}, "no groups of layers"),
        ([FullAttentionSpec(), MambaSpec()], {}, "kind MambaSpec is not supported; supported: FullAttentionSpec, MLA"),
        ([FullAttentionSpec(), SlidingWindowSpec()], {"tells": False}, "disable-hybrid-kv-cache-manager, or turn"),
        ([SlidingWindowSpec()], {"tells": False}, "single requests: turn the store off"),
        ([FullAttentionSpec(), _Short(128, 16)], {}, "blocks of different sizes, [16, 32] tokens"),
        ([FullAttentionSpec(), _Short(127)], {"page": 128}, "to 96 or another multiple of 32 below"),
        ([FullAttentionSpec(), SlidingWindowSpec()], {"page": 48}, "must be whole blocks"),
        ([_Short(None)], {}, "a sliding window of None tokens"),
    ],
)
def test_groups_that_are_not_known_are_refused(specs: list[object], more: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        _read(*specs, **more)
    assert words in str(caught.value)


def test_layers_of_other_groups_have_other_keys() -> None:
    (alone,) = _read(FullAttentionSpec())
    assert group_revision("r", [alone], alone) == "r"  # as ever: what is stored stays of use
    groups = _read(FullAttentionSpec(), SlidingWindowSpec())
    names = {group_revision("r", groups, group) for group in groups}
    assert len(names) == 2
    assert "r" not in names


# ---- up to where a sequence is held


def test_what_a_window_does_not_reach_need_not_be_there() -> None:
    plan = _plan(20)  # five pages
    assert [list(plan.needed(group, 5)) for group in range(3)] == [[0, 1, 2, 3, 4], [3, 4], [3, 4]]
    assert [list(plan.needed(group, 4)) for group in range(3)] == [[0, 1, 2, 3], [2, 3], [2, 3]]
    assert len(plan.promised_keys(())) == 9
    assert plan.promised(plan.promised_keys(())) == 20
    assert plan.promised_keys({(1, 4), (2, 8)}) == plan.promised_keys(())  # nobody needs these
    assert plan.promised(plan.promised_keys({(1, 16)})) == 12
    assert plan.promised(plan.promised_keys({(1, 20)})) == 16
    assert plan.promised(plan.promised_keys({(0, 4)})) == 0
    sizes = {plan.plans[0].identity(part).stored_bytes for part in plan.plans[0].parts(0)}
    (page,) = sizes
    assert plan.stored_bytes(0, 20) == 9 * page
    assert plan.stored_bytes(16, 20) == 3 * page


@given(st.integers(1, 40), st.data())
def test_a_sequence_is_held_as_far_as_all_groups_can_go_on(tokens: int, data: st.DataObject) -> None:
    plan = _plan(tokens)
    pages = len(plan.pages)
    likely = st.sampled_from([True] * 7 + [False])
    there = [data.draw(st.lists(likely, min_size=pages, max_size=pages)) for _ in plan.plans]
    results = [_result(one) for good in there for one in good]
    hit = plan.find_hit(results)

    def enough(pages: int) -> bool:
        """By tokens: an engine that computes the token before the end has all that its layers look at."""
        end = plan.pages[pages - 1].end
        for good, window in zip(there, _WINDOWS, strict=True):
            first = 0 if window is None else max(0, end - window)
            if not all(good[at // _PAGE] for at in range(first, end)):
                return False
        return True

    best = max((pages for pages in range(1, len(plan.pages) + 1) if enough(pages)), default=0)
    assert (hit.pages, hit.tokens) == (best, plan.pages[best - 1].end if best else 0)
    gaps = {
        (group, page.end)
        for group, good in enumerate(there)
        for page, one in zip(plan.pages, good, strict=True)
        if not one
    }
    keys = plan.promised_keys(gaps)
    stored = {key for one, good in zip(plan.plans, there, strict=True) for key in compress(one.keys, good)}
    assert stored.issuperset(keys)
    assert plan.promised(keys) == hit.tokens


def test_a_store_that_fails_is_told_from_one_that_has_nothing() -> None:
    plan = _plan(8)
    good = [_result(True)] * len(plan.keys)
    assert plan.find_hit(good) == PrefixHit(8, 2, plan.stored_bytes(0, 8))
    assert plan.find_hit([*good[:-1], Result(ResultCode.MISS)]).failure is None
    assert plan.find_hit([*good[:-1], Result(ResultCode.TIMEOUT)]).failure is ResultCode.TIMEOUT


def test_a_store_is_asked_once_for_all_groups(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/kv?size=4MiB")
    try:
        prefixes = StorePrefixLookup(store, _shares(), 5.0)
        plan = prefixes.plan([1] * 8, None, ())
        for number, one in enumerate(plan.plans):
            for page in one.pages:
                if number and not page.index:
                    continue  # windows of 6 and 7 reach into both pages
                for part in one.parts(page.index):
                    value = bytearray(one.identity(part).stored_bytes)
                    store.put([PutOp(one.keys[part], (memoryview(value),))]).result()
        assert prefixes.look_up(plan).result(5).tokens == 0
        for one in plan.plans[1:]:
            value = bytearray(one.identity(0).stored_bytes)
            store.put([PutOp(one.keys[0], (memoryview(value),))]).result()
        assert prefixes.look_up(plan).result(5).tokens == 8
    finally:
        store.close()


# ---- what is loaded and saved

_SEQUENCE = Tokens((1,) * 20, None, ())


def test_blocks_behind_a_window_are_not_filled() -> None:
    tables = [[11, 12, 13, 14, 15], [0, 0, 0, 21, 22], [0, 0, 31, 32, 33]]
    orders = load_specs("r", _SEQUENCE, tables, LoadRange(2, 9), block_tokens=_BLOCK, windows=_WINDOWS)
    assert [(one.group, one.start, one.end) for one in orders] == [(0, 2, 9), (1, 6, 9), (2, 4, 9)]
    orders = load_specs("r", _SEQUENCE, tables, LoadRange(8, 9), block_tokens=_BLOCK, windows=_WINDOWS)
    assert [(one.group, one.start) for one in orders] == [(0, 8), (1, 8), (2, 8)]


def _saves(tables: Sequence[Sequence[int]], span: SaveRange, gaps: set[tuple[int, int]], held: list[Any]) -> list[Any]:
    def hold(blocks: Sequence[int]) -> int:
        held.append(list(blocks))
        return len(held)

    return save_specs(
        _SEQUENCE,
        tables,
        span,
        page_tokens=_PAGE,
        block_tokens=_BLOCK,
        windows=_WINDOWS,
        required=True,
        hold=hold,
        gaps=gaps,
    )


def test_pages_whose_blocks_are_gone_are_not_saved() -> None:
    gaps: set[tuple[int, int]] = set()
    held: list[Any] = []
    tables = [[1, 2, 3, 4, 5, 6], [0, 0, 0, 24, 25, 26], [0, 0, 0, 0, 0, 36]]
    orders = _saves(tables, SaveRange(0, 12), gaps, held)
    assert [(one.group, one.start, one.end, one.pin_id) for one in orders] == [(0, 0, 12, 1), (1, 8, 12, 2)]
    assert held == [[1, 2, 3, 4, 5, 6], [25, 26]]
    assert gaps == {(1, 4), (1, 8), (2, 4), (2, 8), (2, 12)}
    assert 0 not in {block for blocks in held for block in blocks}
    # After a preemption it is computed again, and then they are there.
    whole = [[1, 2, 3, 4, 5, 6]] * 3
    orders = _saves(whole, SaveRange(0, 10), gaps, held)
    assert [(one.group, one.start, one.end) for one in orders] == [(0, 0, 10), (1, 0, 10), (2, 0, 10)]
    assert gaps == {(2, 12)}


# ---- a load of several groups is one load


class _Slow:
    """A store connector whose loads end when a test says so."""

    def __init__(self) -> None:
        self.jobs: list[Job[LoadReport]] = []

    def plan(self, token_ids: Sequence[int], params: Any, extras: Any, known: Any) -> Any:
        return SimpleNamespace()

    def load(self, plan: Any, block_ids: Sequence[int], start_token: int, end_token: int) -> Job[LoadReport]:
        self.jobs.append(Job(time.monotonic() + 20, LoadReport(0, 0)))
        return self.jobs[-1]

    def save(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(("ends", "failed"), [((8, 8), set[str]()), ((8, 7), {"r"}), ((4, 8), {"r"}), ((4, 4), {"r"})])
def test_a_request_is_over_when_all_its_groups_are(ends: tuple[int, int], failed: set[str]) -> None:
    groups = _Slow(), _Slow()
    transfers = WorkerTransfers(groups, 2, all_or_nothing=True)
    orders = [LoadSpec("r", _SEQUENCE, (1, 2, 3, 4), 4 * group, 8, group) for group in range(2)]
    transfers.begin(ConnectorMetadata(orders))
    groups[1].jobs[0].finish(LoadReport(4, ends[1], nbytes=1))
    assert transfers.finished().request_ids == set()
    groups[0].jobs[0].finish(LoadReport(0, ends[0], nbytes=2))
    seen = transfers.finished()
    assert (seen.request_ids, seen.failed, seen.bad_blocks) == ({"r"}, failed, set())
    assert [nbytes for nbytes, _ in seen.loads] == [3]
    assert transfers.counts["loads_short"] == len(failed)
    assert transfers.finished().request_ids == set()
