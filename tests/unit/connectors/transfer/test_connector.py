"""Tests the connector: it saves the content of the blocks, and engines that may find it do."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvparams.keys import ExtraKey
from kvparams.pages import HEADER_BYTES
from kvparams.params import PROTOCOL_VERSION, Isolation, KVTransferParams, Transfer
from kvparams_connectors.conformance import Fault, FaultyStore
from kvparams_connectors.conformance.toy_engine import (
    PAGE_BYTES,
    SPACE,
    WAIT_S,
    block_table,
    make_tokens,
    save_sequence,
    toy_engine,
)
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.transfer.connector import ConnectorSettings
from kvparams_connectors.transfer.layout import LayoutError
from kvparams_connectors.transfer.reports import LoadReport
from tests.support.connectors.copying_store import in_place_and_copied


@pytest.fixture(params=["in place", "copied"])
def store(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    yield from in_place_and_copied(request.param, 4 << 20)


def params(
    *, isolation: Isolation | None = None, load: list[str] | None = None, store: list[str] | None = None
) -> KVTransferParams:
    return KVTransferParams(
        version=PROTOCOL_VERSION,
        request_id="request",
        transfer=Transfer(id="transfer", attempt=1),
        phase="decode",
        mode="store",
        isolation=isolation,
        load_keys=None if load is None else tuple(load),
        store_keys=None if store is None else tuple(store),
    )


# ---- round trips


@given(
    count=st.integers(1, 60),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12)),
    window=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    seed=st.integers(0, 10**6),
)
def test_what_one_engine_saved_another_loads_whatever_the_block_sizes(
    count: int, sizes: tuple[int, int, int], window: tuple[int, int], seed: int
) -> None:
    """Exactly the tokens that were asked for are written, from and to any position."""
    first, second, page_tokens = sizes
    namespace = replace(SPACE, page_tokens=page_tokens)
    start, end = sorted(min(edge, count) for edge in window)
    store = MemoryStore(4 << 20, unit_bytes=4096)
    with (
        toy_engine(store, block_size=first, seed=seed, namespace=namespace) as source,
        toy_engine(store, block_size=second, namespace=namespace) as target,
    ):
        plan = source.connector.plan(make_tokens(count, seed))
        blocks = block_table(seed)[: -(-count // first)], block_table(seed + 1)[: -(-count // second)]
        report = source.connector.save(plan, blocks[0], 0, count).result()
        assert (report.saved, report.dropped, report.failed) == (len(plan.pages), 0, {})
        other = target.connector.plan(make_tokens(count, seed))
        assert other.keys == plan.keys
        assert target.connector.lookup(other).result().tokens == count
        loaded = target.connector.load(other, blocks[1], start, end).result()
        assert (loaded.end_token, loaded.failure, loaded.refused) == (end, None, ())
        got, wanted = target.sequence(blocks[1])[:, :, :count], source.sequence(blocks[0])[:, :, :count]
        assert torch.equal(got[:, :, start:end], wanted[:, :, start:end])
        assert not got[:, :, :start].any()
        assert not got[:, :, end:].any()
        assert int((target.tensor != 0).sum()) == got[:, :, start:end].numel()
    store.close()


def test_a_sequence_that_grows_is_saved_as_it_grows(store: KVStore) -> None:
    """As chunked prefill and then decode do it: a page is stored once it is full, the last one when all is there."""
    with toy_engine(store, seed=3) as source:
        reports = [
            source.connector.save(source.connector.plan(make_tokens(29)), block_table(3), start, end).result()
            for start, end in ((0, 5), (5, 17), (17, 24), (24, 29))
        ]
        assert [report.saved for report in reports] == [0, 2, 1, 1]
        longer = source.connector.plan([*make_tokens(29), 1, 2, 3, 4])
        assert longer.keys[:3] == source.connector.plan(make_tokens(29)).keys[:3]
        assert source.connector.save(longer, block_table(3), 29, 32).result().saved == 1
        assert source.connector.lookup(longer).result().tokens == 32


def test_what_is_stored_already_is_not_stored_again(store: KVStore) -> None:
    plan, _ = save_sequence(store, 20)
    with toy_engine(store, seed=9) as other:
        report = other.connector.save(plan, block_table(9), 0, 20).result()
        assert (report.saved, report.existing, report.nbytes) == (0, 3, 0)
        assert other.connector.stats().pages_existing == 3


def test_blocks_may_be_overwritten_as_soon_as_save_returns(store: KVStore) -> None:
    """The store is held back until the blocks have other contents."""
    late = FaultyStore(store, lambda operation, _: Fault("late") if operation in ("exists", "put") else None)
    with toy_engine(late, seed=4) as source, toy_engine(store) as target:
        plan = source.connector.plan(make_tokens(20))
        wanted = source.sequence(block_table(4)).clone()
        job = source.connector.save(plan, block_table(4), 0, 20)
        source.tensor.fill_(7)
        late.gate.set()
        assert job.result().saved == 3
        assert target.connector.load(plan, block_table(5), 0, 20).result().end_token == 20
        assert torch.equal(target.sequence(block_table(5))[:, :, :20], wanted[:, :, :20])
    late.close()


# ---- the longest prefix


def test_lookup_finds_the_longest_prefix_without_a_gap(store: KVStore) -> None:
    plan, _ = save_sequence(store, 20)
    with toy_engine(store) as engine:
        lookup = engine.connector.lookup
        assert lookup(plan).result().tokens == 20
        assert lookup(engine.connector.plan(make_tokens(17))).result().tokens == 16  # its partial page is another one
        assert lookup(engine.connector.plan([*make_tokens(20), 1])).result().tokens == 16
        assert lookup(engine.connector.plan([*make_tokens(7), 1, *make_tokens(20)[8:]])).result().tokens == 0
        assert lookup(engine.connector.plan([])).result().tokens == 0
        store.delete([plan.keys[1]]).result()
        assert (lookup(plan).result().tokens, lookup(plan).result().failure) == (8, None)


def test_a_page_of_the_wrong_size_counts_as_not_stored(store: KVStore) -> None:
    plan, _ = save_sequence(store, 20)
    store.delete([plan.keys[0]]).result()
    store.put([PutOp(plan.keys[0], (memoryview(bytes(PAGE_BYTES - 1)),))]).result()
    with toy_engine(store) as engine:
        assert engine.connector.lookup(plan).result().tokens == 0


def test_a_load_uses_what_is_there_up_to_the_first_gap(store: KVStore) -> None:
    plan, wanted = save_sequence(store, 30)
    store.delete([plan.keys[2]]).result()
    with toy_engine(store) as engine:
        report = engine.connector.load(plan, block_table(2), 3, 29).result()
        assert report == LoadReport(3, 16, pages=2, nbytes=2 * PAGE_BYTES, failure=ResultCode.MISS)
        got = engine.sequence(block_table(2))
        assert torch.equal(got[:, :, 3:16], wanted[:, :, 3:16])
        assert not got[:, :, 16:].any()


def test_after_a_load_in_portions_the_tail_is_evicted_before_the_head() -> None:
    store = MemoryStore(8 * 4096, unit_bytes=4096)  # a page takes one unit
    plan, _ = save_sequence(store, 48)
    with toy_engine(store, settings=ConnectorSettings(portion_pages=2, deadline_s=WAIT_S)) as engine:
        assert engine.connector.load(plan, block_table(2), 0, 48).result().pages == 6
        store.put([PutOp(f"pressure-{number}", (memoryview(bytes(10)),)) for number in range(5)]).result()
        assert engine.connector.lookup(plan).result().pages == 3
    store.close()


# ---- what a request says


def test_salts_and_adapters_share_nothing(store: KVStore) -> None:
    with toy_engine(store, seed=1) as engine:
        requests = [
            None,
            params(),
            params(isolation=Isolation()),
            params(isolation=Isolation(cache_salt="a")),
            params(isolation=Isolation(cache_salt="b")),
            params(isolation=Isolation(lora="a")),
            params(isolation=Isolation(cache_salt="a", lora="a")),
        ]
        plans = [engine.connector.plan(make_tokens(20), request) for request in requests]
        assert plans[0].keys == plans[1].keys == plans[2].keys
        assert len({plan.keys for plan in plans}) == 5
        engine.connector.save(plans[3], block_table(1), 0, 20).result()
        assert [engine.connector.lookup(plan).result().tokens for plan in plans] == [0, 0, 0, 20, 0, 0, 0]


def test_load_keys_are_promises_and_never_addresses(store: KVStore) -> None:
    """A key that belongs to somebody else's tokens is counted, and what is stored under it is not read."""
    with toy_engine(store, seed=1) as engine:
        secret = engine.connector.plan(make_tokens(20, seed=9), params(isolation=Isolation(cache_salt="victim")))
        engine.connector.save(secret, block_table(1), 0, 20).result()
        own = engine.connector.plan(make_tokens(20)).keys
        plan = engine.connector.plan(make_tokens(20), params(load=[*secret.keys, own[0], own[1]]))
        assert plan.keys == own
        assert (plan.promised_tokens, plan.foreign_keys) == (16, 3)
        assert engine.connector.lookup(plan).result().tokens == 0
        assert engine.connector.load(plan, block_table(2), 0, 20).result().failure is ResultCode.MISS
        assert engine.connector.plan(make_tokens(20), params(load=[])).promised_tokens == 0


def test_store_keys_limit_what_is_stored(store: KVStore) -> None:
    with toy_engine(store, seed=1) as engine:
        own = engine.connector.plan(make_tokens(20)).keys
        plan = engine.connector.plan(make_tokens(20), params(store=[own[0], "foreign"]))
        assert plan.foreign_keys == 1
        assert engine.connector.save(plan, block_table(1), 0, 20).result().saved == 1
        assert store.exists(["foreign"]).result()[0].code is ResultCode.MISS
        nothing = engine.connector.plan(make_tokens(20), params(store=[]))
        assert engine.connector.save(nothing, block_table(1), 0, 20).result().saved == 0


def test_two_requests_of_equal_ids_and_other_images_share_only_what_comes_before(store: KVStore) -> None:
    with toy_engine(store, seed=1) as engine:
        first = engine.connector.plan(make_tokens(30), None, [ExtraKey(10, 14, b"a" * 32)])
        second = engine.connector.plan(make_tokens(30), None, [ExtraKey(10, 14, b"b" * 32)])
        engine.connector.save(first, block_table(1), 0, 30).result()
        assert engine.connector.lookup(first).result().tokens == 30
        assert engine.connector.lookup(second).result().tokens == 8


# ---- release


def test_release_deletes_the_partial_page_and_leaves_the_shared_ones(store: KVStore) -> None:
    with toy_engine(store, seed=1) as engine:
        plan = engine.connector.plan(make_tokens(20))
        engine.connector.save(plan, block_table(1), 0, 20).result()
        assert engine.connector.release(plan).result().deleted == 1
        assert engine.connector.lookup(plan).result().tokens == 16
        assert engine.connector.release(plan).result().deleted == 0


def test_release_waits_for_the_last_of_several_saves_and_leaves_what_others_saved(store: KVStore) -> None:
    with toy_engine(store, seed=1) as engine, toy_engine(store, seed=1) as other:
        plan = engine.connector.plan(make_tokens(20))
        for _ in range(2):
            engine.connector.save(plan, block_table(1), 0, 20).result()
        assert other.connector.release(plan).result().deleted == 0
        assert engine.connector.release(plan).result().deleted == 0
        assert engine.connector.lookup(plan).result().tokens == 20
        assert engine.connector.release(plan).result().deleted == 1
        full = engine.connector.plan(make_tokens(16))
        engine.connector.save(full, block_table(1), 0, 16).result()
        assert engine.connector.release(full).result().deleted == 0


def test_a_namespace_that_does_not_fit_the_tensors_is_refused_at_start(store: KVStore) -> None:
    with pytest.raises(LayoutError), toy_engine(store, namespace=replace(SPACE, dtype="float16")):
        pass


async def test_the_jobs_of_a_connector_are_awaited_as_well(store: KVStore) -> None:
    with toy_engine(store, seed=1) as engine:
        plan = engine.connector.plan(make_tokens(20))
        assert (await engine.connector.save(plan, block_table(1), 0, 20)).saved == 3
        assert (await engine.connector.lookup(plan)).tokens == 20
        assert (await engine.connector.load(plan, block_table(2), 0, 20)).end_token == 20
        assert (await engine.connector.release(plan)).deleted == 1


def test_a_polled_load_ends(store: KVStore) -> None:
    plan, _ = save_sequence(store, 20)
    with toy_engine(store) as engine:
        job: Job[LoadReport] = engine.connector.load(plan, block_table(2), 0, 20)
        polls = iter(lambda: job.done(), True)
        assert not any(polls)
        assert job.settled()
        assert job.result().end_token == 20


def test_what_is_stored_is_the_documented_page(store: KVStore) -> None:
    """Read back without the connector, by header and payload."""
    plan, wanted = save_sequence(store, 8)
    buffer = memoryview(bytearray(PAGE_BYTES))
    assert store.get([GetOp(plan.keys[0], (buffer,))]).result()[0].nbytes == PAGE_BYTES
    payload = torch.frombuffer(buffer, dtype=torch.float32, offset=HEADER_BYTES)
    assert torch.equal(payload.view(2, 2, 2, 8, 4), wanted[:, :, :8].permute(0, 1, 3, 2, 4))
    assert bytes(buffer[:4]) == b"KVPG"
