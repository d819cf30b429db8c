"""Tests that a scheduler step waits for lookups within bounds, and never for copies."""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvparams import parse
from kvparams.params import Endpoint
from kvparams_connectors.engines.vllm.connector_metadata import ConnectorMetadata, SaveSpec
from kvparams_connectors.engines.vllm.connector_metadata import TokenSequence as Tokens
from kvparams_connectors.engines.vllm.grouped_plan import GroupedPlan
from kvparams_connectors.engines.vllm.prefix_lookup import StorePrefixLookup
from kvparams_connectors.engines.vllm.request_params import RequestParams
from kvparams_connectors.engines.vllm.scheduler_state import SchedulerOptions, SchedulerState
from kvparams_connectors.engines.vllm.worker_transfers import FinishedTransfers, WorkerTransfers
from kvparams_connectors.jobs import Job, WorkerPool
from kvparams_connectors.store import PutOp, Result, ResultCode
from kvparams_connectors.stores.guard.store import open_guarded
from kvparams_connectors.transfer.reports import LoadReport, PrefixHit, SaveReport
from kvparams_connectors.transfer.sequence_plan import SequencePlan
from tests.interop.vllm.engine_model import SHARE, EngineModel
from tests.support.waiting import wait_until

_SOON_S = 0.02
_WAIT_S = 0.5
_LONG_S = 20.0
_DECODE: dict[str, object] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "decode",
    "mode": "store",
}
T = TypeVar("T")


class _Slow:
    """A search whose answers come after a while; one prompt is looked up for each `begin`."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._plans = EngineModel(1)

    def plan(self, token_ids: Sequence[int], shared: Any, extras: Any, known: Any = ()) -> GroupedPlan:
        return GroupedPlan((self._plans.plan(token_ids, shared, extras),), (None,))

    def pages(self, token_ids: Sequence[int], shared: Any, extras: Any, known: Any) -> Any:
        raise AssertionError("nothing is saved")

    def look_up(self, plan: GroupedPlan) -> Job[PrefixHit]:
        job = Job(time.monotonic() + _LONG_S, PrefixHit(0, 0, 0))
        timer = threading.Timer(self._after_s, job.finish, [PrefixHit(12, 2, 100)])
        timer.daemon = True
        timer.start()
        return job


def _book(after_s: float, wait_s: float) -> SchedulerState:
    rules = SchedulerOptions(
        page_tokens=6, loads=True, saves=True, fails_on_load_error=False, promise_s=1.0, wait_s=wait_s
    )
    book = SchedulerState(_Slow(after_s), rules, Endpoint(id="E"))
    for name in ("r1", "r2"):
        book.add_request(name, [1] * 20, RequestParams(None, None))
    return book


def test_an_answer_that_comes_soon_is_waited_for() -> None:
    book = _book(_SOON_S, _LONG_S)
    assert book.get_matched_tokens("r1", 0, [1] * 20, 0) == 12
    assert book.get_matched_tokens("r2", 0, [1] * 20, 0) == 12


def test_a_load_of_less_than_a_block_is_left_out_and_counted_once_a_request() -> None:
    rules = SchedulerOptions(
        page_tokens=6, loads=True, saves=True, fails_on_load_error=False, promise_s=1.0, wait_s=_LONG_S, block_tokens=4
    )
    book = SchedulerState(_Slow(_SOON_S), rules, Endpoint(id="E"))
    for name, local, offer in (("less", 9, 0), ("none", 12, 0), ("a block", 8, 4), ("nothing of its own", 0, 12)):
        book.add_request(name, [1] * 20, RequestParams(None, None))
        for _ in range(2):  # vLLM may ask again
            assert book.get_matched_tokens(name, local, [1] * 20, 0) == offer
    assert book.counts["loads_small"] == 1


@pytest.mark.parametrize(
    ("policy", "asked", "keys", "offer"),
    [
        ("fail", None, "promised", 19),  # vLLM's own policy
        ("fail", "fail", "promised", 19),
        ("fail", "fail", "foreign", 19),
        ("fail", None, "foreign", 12),
        ("fail", "recompute", "promised", 12),
        ("fail", "recompute", "foreign", 12),
        ("recompute", "recompute", "promised", 12),
        ("recompute", "fail", "promised", 12),  # the middleware refuses it
    ],
)
def test_promised_kv_that_is_gone_fails_the_request_only_where_the_document_lets_it(
    policy: str, asked: str | None, keys: str, offer: int
) -> None:
    """Tokens that are offered and not stored make vLLM fail the request."""
    search, prompt = _Slow(_SOON_S), [1] * 20
    rules = SchedulerOptions(
        page_tokens=6, loads=True, saves=True, fails_on_load_error=policy == "fail", promise_s=0.01, wait_s=_LONG_S
    )
    book = SchedulerState(search, rules, Endpoint(id="E"))
    plan = search.plan(prompt, None, ())
    told = plan.promised_keys(()) if keys == "promised" else ("agreed.by.nobody",)
    members = {"load_keys": told, "on_load_failure": asked}
    params = parse({**_DECODE, **{name: value for name, value in members.items() if value is not None}})
    book.add_request("r", prompt, RequestParams(params, None))
    found: list[int | None] = []
    wait_until(lambda: found.append(book.get_matched_tokens("r", 0, prompt, 0)) or found[-1] is not None, _LONG_S)
    assert found[-1] == offer


@pytest.mark.parametrize(
    ("policy", "keys", "is_waited_for"),
    [("recompute", "foreign", False), ("fail", "foreign", False), ("recompute", "promised", True)],
)
def test_keys_that_match_nothing_are_not_waited_for_and_cost_others_no_patience(
    policy: str, keys: str, is_waited_for: bool
) -> None:
    search, prompt, now = _Slow(0.0), [1] * 20, 0.0
    rules = SchedulerOptions(
        page_tokens=6, loads=True, saves=True, fails_on_load_error=policy == "fail", promise_s=8.0, wait_s=_LONG_S
    )
    book = SchedulerState(search, rules, Endpoint(id="E"), clock=lambda: now)
    own = search.plan(prompt, None, ()).promised_keys(())

    def add(name: str, told: Sequence[str], asked: str) -> None:
        params = parse({**_DECODE, "load_keys": told, "on_load_failure": asked})
        book.add_request(name, prompt, RequestParams(params, None))

    def offer(name: str) -> int | None:
        book.build_metadata([])
        return book.get_matched_tokens(name, 0, prompt, 0)

    add("first", own if keys == "promised" else ["agreed.by.nobody"], "fail")
    assert (offer("first") is None) == is_waited_for
    now = 9.0
    wait_until(lambda: offer("first") is not None, _LONG_S)
    assert book.counts["promises_broken"] == is_waited_for
    add("next", own, "recompute")
    now += 7.0
    assert (offer("next") is None) == (not is_waited_for)


def test_a_step_waits_once_for_all_its_requests() -> None:
    book = _book(_LONG_S, _WAIT_S)
    since = time.monotonic()
    for _ in range(20):
        assert book.get_matched_tokens("r1", 0, [1] * 20, 0) is None
        assert book.get_matched_tokens("r2", 0, [1] * 20, 0) is None
    took = time.monotonic() - since
    assert took >= _WAIT_S
    assert took < 20 * _WAIT_S
    book.build_metadata([])
    since = time.monotonic()
    assert book.get_matched_tokens("r1", 0, [1] * 20, 0) is None
    assert time.monotonic() - since >= _WAIT_S


class _Store:
    """A store connector whose saves do what a test says."""

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._plans = EngineModel(1)
        self.saved: list[Job[SaveReport]] = []

    def plan(self, token_ids: Sequence[int], params: Any, extras: Any, known: Any) -> SequencePlan:
        return self._plans.plan(token_ids, params, extras, known)

    def load(self, plan: SequencePlan, block_ids: Sequence[int], start_token: int, end_token: int) -> Job[LoadReport]:
        raise AssertionError

    def save(
        self, plan: SequencePlan, block_ids: Sequence[int], start_token: int, end_token: int, *, required: bool = False
    ) -> Job[SaveReport]:
        self._save()
        self.saved.append(Job(time.monotonic() + _LONG_S, SaveReport()))
        return self.saved[-1]


def _is(what: bool) -> None:
    assert what


def _orders(*numbers: int | None) -> ConnectorMetadata:
    tokens = Tokens((1,) * 12, None, ())
    return ConnectorMetadata(saves=[SaveSpec(tokens, (0, 1, 2), 0, 12, False, number) for number in numbers])


@contextmanager
def _transfers(save: Callable[[], None]) -> Generator[tuple[WorkerTransfers, _Store]]:
    store, lane = _Store(save), WorkerPool("test")
    try:
        yield WorkerTransfers([store], 4, aside=lane), store
    finally:
        lane.close()


def _heard(transfers: WorkerTransfers) -> FinishedTransfers:
    """What has ended, once something has."""
    found: list[FinishedTransfers] = []

    def heard() -> bool:
        found.append(transfers.finished())
        return bool(found[-1].copied)

    wait_until(heard)
    return found[-1]


def test_a_step_does_not_wait_for_copies() -> None:
    go = threading.Event()
    with _transfers(lambda: _is(go.wait(_LONG_S))) as (transfers, store):
        transfers.save(_orders(1))
        assert transfers.finished().copied == []
        assert transfers.ended() == 0
        go.set()
        assert _heard(transfers).copied == [1]
        assert len(transfers) == 0
        assert transfers.ended() == 1  # it is on its way to the store
        store.saved[0].finish(SaveReport(saved=2))
        assert transfers.ended() == 2


def test_blocks_that_nobody_keeps_are_copied_at_once() -> None:
    here = threading.get_ident()
    seen: list[int] = []
    with _transfers(lambda: seen.append(threading.get_ident())) as (transfers, _):
        transfers.save(_orders(None))
        assert seen == [here]
        assert transfers.finished().copied == []
        assert len(transfers) == 0


class _TooLate:
    """A lane in which nothing gets its turn in time."""

    def submit(self, work: Callable[[Job[T]], T], deadline_s: float, *, timed_out: T, refused: T) -> Job[T]:
        job = Job(time.monotonic() + deadline_s, timed_out)
        job.finish(timed_out)
        return job


def test_saves_that_come_too_late_keep_no_blocks() -> None:
    transfers = WorkerTransfers([_Store(lambda: None)], 4, aside=_TooLate())
    transfers.save(_orders(1, 2))
    assert transfers.finished().copied == [1, 2]
    assert transfers.counts["saves_late"] == transfers.ended() == 2


@pytest.mark.parametrize("number", [None, 3])
def test_a_save_with_a_defect_keeps_no_blocks(number: int | None) -> None:
    def defect() -> None:
        raise RuntimeError("a defect")

    with _transfers(defect) as (transfers, _):
        transfers.save(_orders(number))
        wait_until(lambda: transfers.finished().copied == [3] if number else len(transfers.finished().copied) == 0)
        wait_until(lambda: len(transfers) == 0)
        assert transfers.counts["saves_failed"] == transfers.ended() == 1


def test_a_store_that_can_say_at_once_is_asked_without_another_thread(tmp_path: Path) -> None:
    store = open_guarded(f"file://{tmp_path}/kv?size=1MiB")
    try:
        value = bytearray(b"a page")
        assert store.put([PutOp("there", (memoryview(value),))]).result()[0].code is ResultCode.OK
        for keys in (["there", "away"], ["away"], []):
            assert store.exists_nowait(keys) == store.exists(keys).result()
        assert store.exists_nowait(["a bad key"]) is None
        store.quarantine(["there"])
        assert store.exists_nowait(["there"]) is None
        assert store.exists_nowait(["away"]) == [Result(ResultCode.MISS)]
        prefixes = StorePrefixLookup(store, [SHARE], 1.0)
        look = prefixes.look_up(prefixes.plan([1] * 20, None, ()))
        assert (look.settled(), look.result(0).tokens) == (True, 0)
    finally:
        store.close()
    assert store.exists_nowait(["there"]) is None
