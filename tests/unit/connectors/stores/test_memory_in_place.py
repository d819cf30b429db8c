"""Tests values of a memory store that are written and read in place: nobody sees them early, and nothing moves them."""

import threading
from collections.abc import Iterator

import pytest
import torch

from kvparams.page_auth import PageAuthKeys
from kvparams.pages import HEADER_BYTES
from kvparams_connectors.conformance.toy_engine import (
    PAGE_BYTES,
    SPACE,
    WAIT_S,
    block_table,
    make_tokens,
    save_sequence,
    toy_engine,
)
from kvparams_connectors.store import GetOp, PutOp, Result, ResultCode
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.transfer.block_copier import HostBlockCopier
from kvparams_connectors.transfer.connector import KVStoreConnector
from kvparams_connectors.transfer.layout import PagedKVLayout
from kvparams_connectors.value_memory import CreatedValue, PinnedValue
from tests.support.connectors.copying_store import CopyingStore

UNIT = 4096
UNITS = 8


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore(UNITS * UNIT, unit_bytes=UNIT)
    yield store
    assert store.pinned_count == 0, "a value is still pinned"
    store.close()


def create(store: MemoryStore, key: str, content: bytes) -> CreatedValue:
    (value,) = store.memory.create_values([(key, len(content))])
    assert isinstance(value, CreatedValue)
    value.view[:] = content
    return value


def put(store: MemoryStore, key: str, content: bytes) -> ResultCode:
    return store.put([PutOp(key, (memoryview(content),))], WAIT_S).result()[0].code


def get(store: MemoryStore, key: str) -> bytes | None:
    target = memoryview(bytearray(UNITS * UNIT))
    (result,) = store.get([GetOp(key, (target,))], WAIT_S).result()
    return bytes(target[: result.nbytes]) if result.code is ResultCode.OK else None


def pin(store: MemoryStore, key: str) -> PinnedValue:
    (value,) = store.memory.pin_values([key])
    assert value is not None
    return value


# ---- values that are created


def test_a_value_is_visible_when_it_is_published_and_not_before(store: MemoryStore) -> None:
    value = create(store, "key", b"content")
    assert get(store, "key") is None
    assert store.exists(["key"]).result() == [Result(ResultCode.MISS)]
    assert store.memory.pin_values(["key"]) == [None]
    assert store.delete(["key"]).result() == [Result(ResultCode.MISS)]
    store.memory.publish_values([value])
    assert get(store, "key") == b"content"
    assert store.memory.create_values([("key", 7)]) == [ResultCode.EXISTS]


def test_an_abandoned_value_leaves_its_room(store: MemoryStore) -> None:
    whole = bytes(UNITS * UNIT)
    store.memory.abandon_values([create(store, "key", whole)])
    assert get(store, "key") is None
    assert put(store, "other", whole) is ResultCode.OK


@pytest.mark.parametrize("published", [True, False])
def test_a_put_of_the_same_key_waits_for_whoever_writes_it(store: MemoryStore, published: bool) -> None:
    value = create(store, "key", b"ours")
    assert store.memory.create_values([("key", 4)]) == [ResultCode.UNAVAILABLE]
    job = store.put([PutOp("key", (memoryview(b"theirs"),))], WAIT_S)
    assert not job.done()
    (store.memory.publish_values if published else store.memory.abandon_values)([value])
    assert job.result()[0].code is (ResultCode.EXISTS if published else ResultCode.OK)
    assert get(store, "key") == (b"ours" if published else b"theirs")


def test_what_is_being_written_or_read_is_not_evicted(store: MemoryStore) -> None:
    """The control: as soon as nobody does, it goes."""
    half = bytes(UNITS // 2 * UNIT)
    assert put(store, "read", half) is ResultCode.OK
    pinned, created = pin(store, "read"), create(store, "written", half)
    assert store.memory.create_values([("more", 1)]) == [ResultCode.FULL]
    assert put(store, "more", b"1") is ResultCode.FULL
    store.memory.unpin_values([pinned])
    store.memory.publish_values([created])
    store.memory.publish_values([create(store, "more", half)])
    assert get(store, "read") is None
    assert get(store, "written") == half


def test_values_that_fit_nowhere_in_one_piece_are_left_to_a_put(store: MemoryStore) -> None:
    for number in range(UNITS):
        assert put(store, f"{number}", bytes(UNIT)) is ResultCode.OK
    store.delete(["1", "3"]).result()
    held = store.memory.pin_values([f"{number}" for number in (0, 2, 4, 5, 6, 7)])
    assert store.memory.create_values([("long", 2 * UNIT)]) == [ResultCode.UNAVAILABLE]
    assert put(store, "long", b"x" * 2 * UNIT) is ResultCode.OK
    in_pieces = pin(store, "long")
    assert len(in_pieces.views) == 2
    store.memory.unpin_values([in_pieces, *(value for value in held if value is not None)])
    store.delete(["long"]).result()
    assert store.memory.create_values([("key", UNITS * UNIT + 1), ("a b", 1)]) == [
        ResultCode.TOO_LARGE,
        ResultCode.INVALID,
    ]


def test_a_deleted_value_stays_while_it_is_pinned(store: MemoryStore) -> None:
    assert put(store, "key", b"content") is ResultCode.OK
    pinned = pin(store, "key")
    assert store.delete(["key"]).result()[0].code is ResultCode.OK
    for number in range(3 * UNITS):
        put(store, f"{number}", b"x" * UNIT)
    assert bytes(pinned.views[0]) == b"content"
    store.memory.unpin_values([pinned])


def test_a_closed_store_gives_no_access() -> None:
    store = MemoryStore(UNITS * UNIT, unit_bytes=UNIT)
    memory = store.memory
    assert put(store, "key", b"content") is ResultCode.OK
    pinned = pin(store, "key")
    store.close()
    assert memory.create_values([("other", 1)]) == [ResultCode.UNAVAILABLE]
    assert memory.pin_values(["key"]) == [None]
    assert bytes(pinned.views[0]) == b"content"


# ---- a connector


def test_what_was_saved_in_place_is_the_same_as_what_was_put() -> None:
    found: list[list[bytes]] = []
    for kind in (MemoryStore, CopyingStore):
        store = kind(4 << 20, unit_bytes=UNIT)
        plan, _ = save_sequence(store, 61)
        targets = [memoryview(bytearray(PAGE_BYTES)) for _ in plan.keys]
        results = store.get([GetOp(key, (target,)) for key, target in zip(plan.keys, targets, strict=True)]).result()
        found.append([bytes(target[: result.nbytes]) for target, result in zip(targets, results, strict=True)])
        store.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("place", [HEADER_BYTES, PAGE_BYTES - 1, 45, 250])
@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_bit_that_flips_in_the_store_reaches_no_block(place: int, page: int) -> None:
    """The control: before it flips the same pages are loaded."""
    store = MemoryStore(4 << 20, unit_bytes=UNIT)
    plan, wanted = save_sequence(store, 24)
    with toy_engine(store) as engine:
        assert engine.connector.load(plan, block_table(2), 0, 24).result().end_token == 24
    pinned = pin(store, plan.keys[page])
    pinned.views[0][place] ^= 1
    store.memory.unpin_values([pinned])
    with toy_engine(store) as engine:
        report = engine.connector.load(plan, block_table(2), 0, 24).result()
        assert (report.end_token, report.pages, report.failure) == (8 * page, page, None)
        assert [one.index for one in report.refused] == [page]
        got = engine.sequence(block_table(2))
        assert torch.equal(got[:, :, : 8 * page], wanted[:, :, : 8 * page])
        assert not got[:, :, 8 * page :].any()
        engine.connector.close()
    assert store.exists([plan.keys[page]]).result()[0].code is ResultCode.MISS
    store.close()


def test_a_page_in_pieces_and_those_behind_it_are_loaded_through_slots() -> None:
    store = MemoryStore(16 * 512, unit_bytes=512)  # a page takes three units
    plan, wanted = save_sequence(store, 24)
    held = [pin(store, key) for key in plan.keys]
    raw = bytes(held[1].views[0])
    store.memory.unpin_values(held[1:2])
    store.delete([plan.keys[1]]).result()
    for number in range(10):
        assert put(store, f"{number}", b"x") is ResultCode.OK
    store.delete([f"{number}" for number in range(0, 10, 2)]).result()
    assert put(store, plan.keys[1], raw) is ResultCode.OK
    held[1] = pin(store, plan.keys[1])
    assert [len(one.views) > 1 for one in held] == [False, True, False]
    store.memory.unpin_values(held)
    with toy_engine(store) as engine:
        report = engine.connector.load(plan, block_table(2), 0, 24).result()
        assert report.end_token == 24
        assert torch.equal(engine.sequence(block_table(2))[:, :, :24], wanted[:, :, :24])
    store.close()


def test_pages_with_tags_are_put_and_verified_in_place() -> None:
    store = MemoryStore(4 << 20, unit_bytes=UNIT)
    keys = PageAuthKeys([bytes(32)])
    with toy_engine(store, seed=1) as engine, toy_engine(store) as other:
        layouts = PagedKVLayout.from_stacked(engine.tensor), PagedKVLayout.from_stacked(other.tensor)
        source, target, stranger = (
            KVStoreConnector(store, SPACE, layout, seals=seals)
            for layout, seals in ((layouts[0], keys), (layouts[1], keys), (layouts[1], PageAuthKeys([b"x" * 32])))
        )
        plan = source.plan(make_tokens(24))
        assert source.save(plan, block_table(1), 0, 24).result().saved == 3
        refused = stranger.load(plan, block_table(2), 0, 24).result()
        assert (refused.end_token, [one.reason for one in refused.refused]) == (0, ["locked"])
        assert not other.tensor.any()
        assert target.load(plan, block_table(2), 0, 24).result().end_token == 24
        assert torch.equal(other.sequence(block_table(2))[:, :, :24], engine.sequence(block_table(1))[:, :, :24])
        for connector in (source, target, stranger):
            connector.close()
    store.close()


def test_a_save_that_raises_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(4 << 20, unit_bytes=UNIT)

    def fail(*_arguments: object) -> None:
        raise RuntimeError("the blocks are gone")

    with toy_engine(store, seed=1) as engine:
        plan = engine.connector.plan(make_tokens(24))
        with monkeypatch.context() as patched:
            patched.setattr(HostBlockCopier, "gather", fail)
            with pytest.raises(RuntimeError, match="gone"):
                engine.connector.save(plan, block_table(1), 0, 24)
        assert store.pinned_count == 0
        assert engine.connector.save(plan, block_table(1), 0, 24).result().saved == 3
    store.close()


def test_engines_that_save_and_load_the_same_pages_at_once_load_what_was_saved() -> None:
    """A store so small that pages are evicted meanwhile."""
    store = MemoryStore(12 * UNIT, unit_bytes=UNIT)
    failures: list[object] = []

    def work(number: int) -> None:
        with toy_engine(store, seed=1) as engine, toy_engine(store) as other:
            for turn in range(20):
                plan = engine.connector.plan(make_tokens(24, (turn + number) % 5))
                report = engine.connector.save(plan, block_table(1), 0, 24).result()
                loaded = other.connector.load(plan, block_table(2), 0, 24).result()
                same = torch.equal(
                    other.sequence(block_table(2))[:, :, : loaded.end_token],
                    engine.sequence(block_table(1))[:, :, : loaded.end_token],
                )
                if not same or loaded.refused or not (report.saved + report.existing + sum(report.failed.values())):
                    failures.append((report, loaded))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S * 3)
    assert not failures
    assert store.pinned_count == 0
    store.close()
