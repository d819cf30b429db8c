"""Tests snapshot saves and staged loads on streams that run in any order that their events allow.

Where CUDA is available, they also run on it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvparams.keys import Geometry, KVShard, Namespace
from kvparams.page_auth import PageAuthKeys
from kvparams.pages import HEADER_BYTES
from kvparams_connectors.store import KVStore, PutOp, Results
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.transfer.block_copier import HostBlockCopier, PageCopy, StagedBlockCopier, make_block_copier
from kvparams_connectors.transfer.connector import ConnectorSettings, KVStoreConnector
from kvparams_connectors.transfer.devices import CudaDevice
from kvparams_connectors.transfer.layout import PagedKVLayout
from kvparams_connectors.transfer.shard_grid import ShardGrid
from tests.support.connectors.copying_store import CopyingStore
from tests.support.connectors.simulated_device import SimulatedDevice

SHAPE = Geometry(layers=3, kv_heads=4, k_dim=8, v_dim=8)
SPACE = Namespace("model", "revision", "float16", SHAPE, page_tokens=8)
PAGE_BYTES = HEADER_BYTES + SPACE.payload_bytes(8, KVShard.whole(SHAPE))
BLOCKS = 24


@pytest.fixture
def store() -> Iterator[KVStore]:
    store = MemoryStore(4 << 20, unit_bytes=4096)
    yield store
    store.close()


def a_cache(seed: int | None, *, block_size: int = 4) -> torch.Tensor:
    shape = (SHAPE.layers, 2, BLOCKS, block_size, SHAPE.kv_heads, SHAPE.k_dim)
    if seed is None:
        return torch.zeros(shape, dtype=torch.float16)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).half() + 1


def staged(
    store: KVStore, cache: torch.Tensor, device: SimulatedDevice, *, bounce_pages: int = 2, heads: int = 4
) -> KVStoreConnector:
    layout = PagedKVLayout.from_stacked(cache)
    config = ConnectorSettings(
        deadline_s=20, portion_pages=5, save_portion_pages=4, grid=ShardGrid(SHAPE.layers, heads), arena_bytes=1 << 20
    )
    part = SPACE.payload_bytes(8, KVShard(0, SHAPE.layers, 0, heads))
    mover = StagedBlockCopier(device, layout, payload_bytes=part, bounce_bytes=bounce_pages * part)
    return KVStoreConnector(store, SPACE, layout, config, mover=mover)


def sequence(cache: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    return cache[:, :, blocks].flatten(2, 3)


def _fill(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


def a_round_trip(seed: int, count: int, *, bounce_pages: int, heads: int, forgetful: bool) -> bool:
    """Save while the engine goes on to overwrite its blocks, load into blocks it has just let go; is it right?"""
    random = Random(seed)
    ids = [random.randrange(1000) for _ in range(count)]
    store = MemoryStore(4 << 20, unit_bytes=4096)
    device, other = SimulatedDevice(seed, forgetful=forgetful), SimulatedDevice(seed + 1, forgetful=forgetful)
    source, target = a_cache(seed), a_cache(None)
    saver, loader = (
        staged(store, source, device, bounce_pages=bounce_pages, heads=heads),
        staged(store, target, other, bounce_pages=bounce_pages, heads=heads),
    )
    blocks = random.sample(range(BLOCKS), -(-count // 4))
    elsewhere = random.sample(range(BLOCKS), -(-count // 4))
    wanted = sequence(source, blocks)[:, :, :count].clone()
    plan = saver.plan(ids)
    job = saver.save(plan, blocks, 0, count, required=True)
    device.engine.run(partial(_fill, source, 7))  # launched right behind the save: the blocks are the engine's again
    device.drain()
    report = job.result()
    assert (report.saved, report.complete) == (len(plan.pages), True)
    other.engine.run(
        partial(_fill, target, 3)
    )  # an earlier step that still writes to blocks that were given to the load
    loaded = loader.load(plan, elsewhere, 0, count).result()
    other.drain()
    assert (loaded.end_token, loaded.refused, loaded.failure) == (count, (), None)
    right = torch.equal(sequence(target, elsewhere)[:, :, :count], wanted)
    for connector in (saver, loader):
        stats = connector.stats()
        assert stats.slots_free == stats.slots
        connector.close()
    store.close()
    return right


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 90),
    bounce_pages=st.integers(1, 7),
    heads=st.sampled_from([1, 2, 4]),
)
def test_a_staged_save_is_a_snapshot_and_a_staged_load_comes_last(
    seed: int, count: int, bounce_pages: int, heads: int
) -> None:
    assert a_round_trip(seed, count, bounce_pages=bounce_pages, heads=heads, forgetful=False)


@pytest.mark.slow
def test_snapshots_on_many_schedules(
    effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    """As above, for longer."""
    rounds, random = effort(200, 20_000), Random(1)
    for seed in range(rounds):
        count, pages, heads = random.randint(1, 90), random.randint(1, 7), random.choice([1, 2, 4])
        assert a_round_trip(seed, count, bounce_pages=pages, heads=heads, forgetful=False), seed
    record({"schedules": rounds, "wrong": 0, "cuda": torch.cuda.is_available()})


class Putting(CopyingStore):
    """Notes which values it was to tell that they go, and may forget to."""

    def __init__(self, *, forgetful: bool) -> None:
        super().__init__(4 << 20, unit_bytes=4096)
        self.told: list[bool] = []
        self._forgetful = forgetful

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        self.told += [op.before_read is not None for op in ops]
        return super().put_blocking([PutOp(op.key, op.buffers) for op in ops] if self._forgetful else ops, deadline)


@pytest.mark.parametrize(
    ("on_device", "seals", "told"),
    [(True, None, True), (True, PageAuthKeys([bytes(32)]), False), (False, None, False)],
    ids=["device", "tagged", "host"],
)
@pytest.mark.parametrize("forgetful", [False, True])
def test_what_comes_from_a_device_is_sealed_when_the_store_lets_it_go(
    on_device: bool, seals: PageAuthKeys | None, told: bool, forgetful: bool
) -> None:
    """On the host the copying tells the checksum. A store that forgets to ask for the rest keeps nothing good."""
    store, cache, device = Putting(forgetful=forgetful), a_cache(1), SimulatedDevice(1)
    layout = PagedKVLayout.from_stacked(cache)
    part = SPACE.payload_bytes(8, KVShard.whole(SHAPE))
    mover = StagedBlockCopier(device, layout, payload_bytes=part, bounce_bytes=4 * part) if on_device else None
    connector = KVStoreConnector(store, SPACE, layout, ConnectorSettings(deadline_s=20), seals=seals, mover=mover)
    plan = connector.plan(list(range(16)))
    job = connector.save(plan, list(range(4)), 0, 16, required=True)
    device.drain()
    assert job.result().complete
    assert store.told == [told] * 2
    load = connector.load(plan, list(range(4)), 0, 16)
    device.drain()
    assert [page.reason for page in load.result().refused] == (["malformed"] if forgetful and told else [])
    device.drain()
    connector.close()
    store.close()


def test_control_without_waits_between_streams_the_same_goes_wrong() -> None:
    wrong = [seed for seed in range(10) if not a_round_trip(seed, 60, bounce_pages=2, heads=4, forgetful=True)]
    assert len(wrong) > 5


def test_best_effort_drops_pages_rather_than_make_the_engine_wait_for_a_bounce_buffer(store: KVStore) -> None:
    device = SimulatedDevice(1)
    cache = a_cache(1)
    connector = staged(store, cache, device, bounce_pages=2)
    plan = connector.plan(list(range(40)))
    job = connector.save(plan, list(range(10)), 0, 40)
    device.drain()
    report = job.result()
    assert (report.saved, report.dropped, report.complete) == (2, 3, False)
    assert connector.save(plan, list(range(10)), 16, 40, required=True).result().saved == 3
    connector.close()


def test_slots_come_back_only_when_nothing_is_copied_to_them_any_more(store: KVStore) -> None:
    """The connector is closed, so nobody seals the pages; the copies to their slots are still under way."""
    device = SimulatedDevice(1)
    connector = staged(store, a_cache(1), device, bounce_pages=4)
    connector.close()
    plan = connector.plan(list(range(16)))
    job = connector.save(plan, list(range(4)), 0, 16)
    assert sum(job.result().failed.values()) == 2
    assert device.steps > 0  # they were waited for
    stats = connector.stats()
    assert stats.slots_free == stats.slots
    device.drain()


def test_both_ways_agree_on_every_piece_of_a_page() -> None:
    """Numpy on the host and torch on a device, from and to any position."""
    cache = a_cache(5)
    layout = PagedKVLayout.from_stacked(cache)
    unit = KVShard(1, 3, 1, 3)
    nbytes = layout.payload_bytes(13, unit)
    blocks = Random(3).sample(range(BLOCKS), 8)
    device = SimulatedDevice(1)
    movers = (
        HostBlockCopier(layout, payload_bytes=nbytes),
        StagedBlockCopier(device, layout, payload_bytes=nbytes, bounce_bytes=nbytes),
    )
    pages: list[bytes] = []
    for mover in movers:
        payload = memoryview(bytearray(nbytes))
        written: dict[int, int] = {}
        event = mover.gather(blocks, [PageCopy(unit, 3, 13, range(3, 16), payload)], written.__setitem__)
        assert written == ({0: xxh3_64_intdigest(payload)} if event is None else {})
        if event is not None:
            event.wait()
        pages.append(bytes(payload))
    assert pages[0] == pages[1]
    results: list[torch.Tensor] = []
    for on_host in (True, False):
        target = a_cache(None)
        to = PagedKVLayout.from_stacked(target)
        made = (
            HostBlockCopier(to, payload_bytes=nbytes)
            if on_host
            else StagedBlockCopier(device, to, payload_bytes=nbytes, bounce_bytes=nbytes)
        )
        made.scatter(blocks, [PageCopy(unit, 5, 10, range(3, 16), memoryview(bytearray(pages[0])))], made.fence())
        results.append(target)
    assert torch.equal(*results)
    assert int((results[0] != 0).sum()) == 10 * 2 * 2 * 2 * 8


def test_a_gpu_is_asked_for_only_where_there_is_one(record: Callable[[dict[str, object]], None]) -> None:
    """On CUDA the whole way runs on real streams; elsewhere the refusal is in words, and the record says so."""
    record({"cuda": torch.cuda.is_available()})
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="no CUDA device"):
            CudaDevice(torch.device("cuda"))
        assert isinstance(
            make_block_copier(PagedKVLayout.from_stacked(a_cache(1)), payload_bytes=1, bounce_bytes=1), HostBlockCopier
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the same ran on simulated streams")
def test_a_round_trip_over_cuda(store: KVStore) -> None:
    source, target = a_cache(1).cuda(), a_cache(None).cuda()
    wanted = source.clone()
    config = ConnectorSettings(deadline_s=20, bounce_bytes=2 * PAGE_BYTES)
    saver = KVStoreConnector(store, SPACE, PagedKVLayout.from_stacked(source), config)
    loader = KVStoreConnector(store, SPACE, PagedKVLayout.from_stacked(target), config)
    plan = saver.plan(list(range(90)))
    blocks = list(range(BLOCKS))[:23]
    job = saver.save(plan, blocks, 0, 90, required=True)
    source.fill_(7)
    assert job.result().complete
    assert loader.load(plan, blocks, 0, 90).result().end_token == 90
    assert torch.equal(sequence(target, blocks)[:, :, :90], sequence(wanted, blocks)[:, :, :90])
    saver.close()
    loader.close()
