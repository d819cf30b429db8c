"""Tests the connector under faults: a block gets the right bytes or none, and a buffer has one owner at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvparams.keys import KVShard, Namespace, chain_pages
from kvparams.pages import HEADER_BYTES, REASONS_USABLE_BY_OTHERS, PageRefusalReason, page_identity, seal
from kvparams_connectors.conformance import Fault, FaultyStore
from kvparams_connectors.conformance.faults import Operation
from kvparams_connectors.conformance.toy_engine import (
    PAGE_BYTES,
    PART,
    SPACE,
    WAIT_S,
    block_table,
    make_tokens,
    save_sequence,
    toy_engine,
)
from kvparams_connectors.store import KVStore, PutOp, ResultCode
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.transfer.connector import ConnectorSettings
from kvparams_connectors.transfer.reports import LoadReport
from tests.support.connectors.copying_store import in_place_and_copied
from tests.support.connectors.faulty_stores import Silent, memory


@pytest.fixture(params=["in place", "copied"])
def store(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    yield from in_place_and_copied(request.param, 4 << 20)


# ---- pages that are not what was asked for


def sealed_as(namespace: Namespace, ids: list[int], page: int, part: KVShard = PART) -> bytes:
    identity = page_identity(namespace, chain_pages(namespace, ids)[page], part)
    buffer = bytearray(HEADER_BYTES) + bytearray(Random(0).randbytes(identity.payload_bytes))
    seal(memoryview(buffer), identity)
    return bytes(buffer)


def future(page: bytes) -> bytes:
    return page[:4] + b"\2" + page[5:]


GOOD = sealed_as(SPACE, make_tokens(20), 1)
BAD: list[tuple[str, bytes, PageRefusalReason]] = [
    ("torn", GOOD[:-1], "torn"),
    ("nothing", b"", "torn"),
    ("longer than a slot", GOOD + bytes(10_000), "torn"),
    ("flipped payload", GOOD[:-1] + bytes([GOOD[-1] ^ 1]), "flipped_payload"),
    ("flipped header", GOOD[:100] + bytes([GOOD[100] ^ 1]) + GOOD[101:], "flipped_header"),
    ("noise", Random(1).randbytes(PAGE_BYTES), "malformed"),
    ("a page of the next version", future(GOOD), "version"),
    ("the same tokens, another model", sealed_as(replace(SPACE, model="other"), make_tokens(20), 1), "namespace"),
    ("the same tokens, another tenant", sealed_as(replace(SPACE, cache_salt="x"), make_tokens(20), 1), "namespace"),
    ("other tokens", sealed_as(SPACE, make_tokens(20, seed=5), 1), "prefix"),
    ("another page of the same sequence", sealed_as(SPACE, make_tokens(20), 0), "prefix"),
    ("another rectangle of the same size", sealed_as(SPACE, make_tokens(20), 1, KVShard(0, 2, 2, 4)), "rectangle"),
]


@pytest.mark.parametrize(("stored", "reason"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_page_is_refused_and_deleted_unless_others_can_use_it(
    store: KVStore, stored: bytes, reason: PageRefusalReason
) -> None:
    plan, wanted = save_sequence(store, 20)
    store.delete([plan.keys[1]]).result()
    store.put([PutOp(plan.keys[1], (memoryview(stored),))]).result()
    with toy_engine(store) as engine:
        report = engine.connector.load(plan, block_table(2), 0, 20).result()
        assert (report.end_token, report.pages, report.failure) == (8, 1, None)
        assert [(page.index, page.key, page.reason) for page in report.refused] == [(1, plan.keys[1], reason)]
        got = engine.sequence(block_table(2))
        assert torch.equal(got[:, :, :8], wanted[:, :, :8])
        assert not got[:, :, 8:].any()
        assert engine.connector.stats().pages_refused == {reason: 1}
    left = store.exists([plan.keys[1]]).result()[0].code
    if reason in REASONS_USABLE_BY_OTHERS:
        assert left is ResultCode.OK
        return
    assert left is ResultCode.MISS
    with toy_engine(store, seed=1) as source:  # so it can be stored again, and is good
        assert source.connector.save(plan, block_table(1), 0, 20).result().saved == 1
    with toy_engine(store) as engine:
        assert engine.connector.load(plan, block_table(2), 0, 20).result().end_token == 20


@pytest.mark.parametrize("said", [False, True], ids=["sized", "not-sized"])
def test_a_page_of_the_wrong_size_is_missing_or_refused_when_it_is_read(said: bool) -> None:
    """A store that leaves out sizes finds it; the load does not use it, and it goes."""
    store = Silent(said=True) if said else memory()
    plan, wanted = save_sequence(store, 20)
    store.delete([plan.keys[1]]).result()
    store.put([PutOp(plan.keys[1], (memoryview(GOOD[:-1]),))]).result()
    with toy_engine(store) as engine:
        assert engine.connector.lookup(plan).result().tokens == (20 if said else 8)
        report = engine.connector.load(plan, block_table(2), 0, 20).result()
        assert (report.end_token, [one.reason for one in report.refused]) == (8, ["torn"])
        assert torch.equal(engine.sequence(block_table(2))[:, :, :8], wanted[:, :, :8])
        assert engine.connector.lookup(plan).result().tokens == 8
    store.close()


@pytest.mark.parametrize("verified", [True, False], ids=["verified", "control-not-verified"])
def test_without_verification_the_same_flipped_bit_reaches_the_blocks(store: KVStore, verified: bool) -> None:
    plan, wanted = save_sequence(store, 20)

    def judge(operation: Operation, key: str) -> Fault | None:
        return Fault("flip", at=8 * (HEADER_BYTES + 40)) if operation == "get" and key == plan.keys[1] else None

    faulty = FaultyStore(store, judge)
    with toy_engine(faulty, settings=ConnectorSettings(verify=verified, deadline_s=WAIT_S)) as engine:
        report = engine.connector.load(plan, block_table(2), 0, 20).result()
        got = engine.sequence(block_table(2))[:, :, : report.end_token]
        assert report.end_token == (8 if verified else 20)
        assert torch.equal(got, wanted[:, :, : report.end_token]) == verified
    faulty.close()


@pytest.mark.parametrize("fault", [Fault("truncate", at=300), Fault("truncate", at=0), Fault("flip", at=5)])
@pytest.mark.parametrize("verified", [True, False])
def test_no_fault_of_the_length_is_used_even_without_verification(store: KVStore, fault: Fault, verified: bool) -> None:
    plan, _ = save_sequence(store, 20)
    faulty = FaultyStore(store, lambda operation, _: fault if operation == "get" else None)
    with toy_engine(faulty, settings=ConnectorSettings(verify=verified, deadline_s=WAIT_S)) as engine:
        report = engine.connector.load(plan, block_table(2), 0, 20).result()
        expected = 20 if fault.kind == "flip" and not verified else 0
        assert report.end_token == expected
        assert bool(engine.tensor.any()) == bool(expected)
    faulty.close()


def test_pages_that_a_store_mixes_up_are_refused(store: KVStore) -> None:
    plan, _ = save_sequence(store, 20)
    faulty = FaultyStore(store, lambda operation, key: Fault("swap", key=plan.keys[1]) if operation == "get" else None)
    with toy_engine(faulty) as engine:
        report = engine.connector.load(plan, block_table(2), 0, 20).result()
        assert (report.end_token, report.refused[0].reason) == (0, "prefix")
    faulty.close()


@st.composite
def some_fault(draw: st.DrawFn, keys: Sequence[str]) -> Fault | None:
    kind = draw(st.sampled_from(["none", "none", "flip", "truncate", "swap", "fail"]))
    if kind == "flip":
        return Fault("flip", at=draw(st.integers(0, 8 * PAGE_BYTES - 1)))
    if kind == "truncate":
        return Fault("truncate", at=draw(st.integers(0, PAGE_BYTES - 1)))
    if kind == "swap":
        return Fault("swap", key=draw(st.sampled_from(keys)))
    if kind == "fail":
        return Fault("fail", code=draw(st.sampled_from([ResultCode.MISS, ResultCode.UNAVAILABLE, ResultCode.CORRUPT])))
    return None


def harmless(fault: Fault | None, key: str, stored_bytes: int) -> bool:
    if fault is None:
        return True
    behind = {"flip": fault.at >= 8 * stored_bytes, "truncate": fault.at >= stored_bytes, "swap": fault.key == key}
    return behind.get(fault.kind, False)


@given(st.data())
def test_random_faults_never_put_a_wrong_byte_into_a_block(data: st.DataObject) -> None:
    store = MemoryStore(1 << 20, unit_bytes=4096)
    plan, wanted = save_sequence(store, 60)
    chosen = {key: data.draw(some_fault(plan.keys)) for key in plan.keys}
    faulty = FaultyStore(store, lambda operation, key: chosen.get(key) if operation == "get" else None)
    with toy_engine(faulty) as engine:
        report = engine.connector.load(plan, block_table(2), 0, 60).result()
        good = 0
        for key, page in zip(plan.keys, plan.pages, strict=True):
            if not harmless(chosen[key], key, HEADER_BYTES + SPACE.payload_bytes(page.tokens, PART)):
                break
            good = page.end
        assert report.end_token == good
        assert torch.equal(engine.sequence(block_table(2))[:, :, :good], wanted[:, :, :good])
        assert int((engine.tensor != 0).sum()) == wanted[:, :, :good].numel()
    faulty.close()
    store.close()


# ---- deadlines, and who owns a buffer


def late_gets(operation: Operation, key: str) -> Fault | None:
    return Fault("late") if operation == "get" else None


def test_a_late_store_costs_the_deadline_and_its_buffers_are_not_reused(store: KVStore) -> None:
    """The store still writes into the slots after the load was given up: nobody else may have them."""
    plan, _ = save_sequence(store, 16)
    late = FaultyStore(store, late_gets)
    config = ConnectorSettings(arena_bytes=2 * PAGE_BYTES, deadline_s=0.2)
    with toy_engine(late, settings=config) as engine:
        assert engine.connector.stats().slots == 2
        job = engine.connector.load(plan, block_table(2), 0, 16)
        assert job.result() == LoadReport(0, 0, failure=ResultCode.TIMEOUT)
        assert job.wait_settled(WAIT_S)
        assert engine.connector.stats().slots_free == 0
        other = engine.connector.plan(make_tokens(16, seed=8))
        report = engine.connector.save(other, block_table(3), 0, 16).result()
        assert (report.saved, report.dropped) == (0, 2)  # rather than share a buffer
        late.gate.set()
        late.close()
        assert engine.connector.stats().slots_free == 2
        assert not engine.tensor.any()


def test_no_block_is_written_once_the_wait_is_over(store: KVStore) -> None:
    """The pages arrive, whole and good, after the deadline: too late to touch the blocks."""
    plan, _ = save_sequence(store, 20)
    second = plan.keys[1]
    late = FaultyStore(store, lambda operation, key: Fault("late") if (operation, key) == ("get", second) else None)
    config = ConnectorSettings(deadline_s=0.3, portion_pages=1)
    with toy_engine(late, settings=config) as engine:
        job = engine.connector.load(plan, block_table(2), 0, 20)
        report = job.result()
        assert (report.end_token, report.pages, report.failure) == (
            8,
            1,
            ResultCode.TIMEOUT,
        )  # the first page was in time
        got = engine.tensor.clone()
        late.gate.set()
        assert job.wait_settled(WAIT_S)
        assert torch.equal(engine.tensor, got)
        assert int((got != 0).sum()) == 8 * 2 * 2 * 2 * 4
    late.close()


def test_a_load_larger_than_the_arena_goes_through_in_portions(store: KVStore) -> None:
    plan, wanted = save_sequence(store, 200)
    config = ConnectorSettings(arena_bytes=3 * PAGE_BYTES, portion_pages=2, deadline_s=WAIT_S)
    with toy_engine(store, settings=config) as engine:
        jobs = [engine.connector.load(plan, block_table(2), 0, 200) for _ in range(3)]
        assert [job.result().end_token for job in jobs] == [200] * 3
        assert torch.equal(engine.sequence(block_table(2))[:, :, :200], wanted[:, :, :200])
        assert engine.connector.stats().slots_free == 3


def test_a_save_larger_than_the_arena_drops_pages_and_says_so(store: KVStore) -> None:
    config = ConnectorSettings(arena_bytes=2 * PAGE_BYTES, deadline_s=WAIT_S)
    held = FaultyStore(store, lambda operation, _: Fault("late") if operation == "exists" else None)
    with toy_engine(held, seed=1, settings=config) as engine:
        plan = engine.connector.plan(make_tokens(40))
        job = engine.connector.save(plan, block_table(1), 0, 40)
        held.gate.set()
        assert (job.result().saved, job.result().dropped) == (2, 3)
        assert engine.connector.stats().pages_dropped == 3
        assert engine.connector.lookup(plan).result().tokens == 16
        assert engine.connector.save(plan, block_table(1), 16, 32).result().saved == 2
    held.close()


@pytest.mark.parametrize("code", [ResultCode.UNAVAILABLE, ResultCode.TIMEOUT, ResultCode.INTERNAL, ResultCode.DENIED])
def test_a_store_that_fails_is_reported_and_nothing_is_raised(store: KVStore, code: ResultCode) -> None:
    plan, _ = save_sequence(store, 20)
    failing = FaultyStore(store, lambda _, key: Fault("fail", code=code))
    with toy_engine(failing, seed=1) as engine:
        hit = engine.connector.lookup(plan).result()
        assert (hit.tokens, hit.failure) == (0, code)
        assert engine.connector.load(plan, block_table(2), 0, 20).result() == LoadReport(0, 0, failure=code)
        report = engine.connector.save(plan, block_table(1), 0, 20).result()
        assert (report.saved, report.failed) == (0, {code: 3})
        assert engine.connector.stats().store_failures == {code.value: 4}
    failing.close()


def test_after_close_everything_is_unavailable_and_no_slot_is_lost(store: KVStore) -> None:
    plan, _ = save_sequence(store, 20)
    with toy_engine(store, seed=1) as engine:
        engine.connector.close()
        assert engine.connector.load(plan, block_table(2), 0, 20).result().failure is ResultCode.UNAVAILABLE
        assert engine.connector.save(plan, block_table(1), 0, 20).result().failed == {ResultCode.UNAVAILABLE: 3}
        stats = engine.connector.stats()
        assert stats.slots_free == stats.slots


def test_a_block_table_that_is_too_short_is_an_error_and_loses_no_slot(store: KVStore) -> None:
    plan, _ = save_sequence(store, 20)
    with toy_engine(store, seed=1) as engine:
        with pytest.raises(IndexError):
            engine.connector.save(plan, [1, 2], 0, 20)
        job = engine.connector.load(plan, [1, 2], 0, 20)
        with pytest.raises(IndexError):
            job.result()
        assert job.wait_settled(WAIT_S)
        stats = engine.connector.stats()
        assert stats.slots_free == stats.slots
