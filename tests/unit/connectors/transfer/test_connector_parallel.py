"""Tests that engines of one parallelism use pages of another, whatever their layouts and block sizes."""

from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvparams.keys import DTYPE_BYTES, Geometry, KVShard, Namespace
from kvparams.params import PROTOCOL_VERSION, KVTransferParams, Transfer
from kvparams_connectors.store import KVStore, ResultCode
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.transfer.cache_layouts import CACHE_LAYOUTS, CacheLayout, CacheSpec
from kvparams_connectors.transfer.connector import ConnectorSettings, KVStoreConnector
from kvparams_connectors.transfer.layout import LayoutError, PagedKVLayout
from kvparams_connectors.transfer.reports import SaveReport
from kvparams_connectors.transfer.shard_grid import ShardGrid
from tests.support.connectors.kv_oracle import Raw, engine_tensors, same_bits, truth

FORM = {form.name: form for form in CACHE_LAYOUTS}
MHA = [form for form in CACHE_LAYOUTS if form.name != "mla"]


class Rank:
    """One rank of an engine: its tensors, and a connector."""

    def __init__(
        self,
        store: KVStore,
        namespace: Namespace,
        part: KVShard,
        form: CacheLayout,
        block_size: int,
        kv: Sequence[Raw],
        config: ConnectorSettings,
        *,
        filled: bool,
        seed: int,
    ) -> None:
        shape, count = namespace.geometry, kv[0].shape[1]
        needed = -(-count // block_size)
        self.blocks = Random(seed).sample(range(needed + 2), needed)
        self._build: Callable[[int], list[torch.Tensor]] = lambda tokens: engine_tensors(
            form.dims,
            kv,
            part,
            self.blocks,
            num_blocks=needed + 2,
            block_size=block_size,
            dtype=namespace.dtype,
            k_transposed=form.k_transposed,
            tokens=tokens,
        )
        self.tensors = self._build(count if filled else 0)
        spec = CacheSpec(block_size, part.heads, shape.k_dim, shape.v_dim, namespace.dtype)
        layout = PagedKVLayout.from_engine(self.tensors, spec, form=form, rectangle=part)
        self._connect: Callable[[KVStore], KVStoreConnector] = lambda store: KVStoreConnector(
            store, namespace, layout, config
        )
        self.connector = self._connect(store)

    def move_to(self, store: KVStore) -> None:
        """The same blocks and what is in them, at another store."""
        self.connector.close()
        self.connector = self._connect(store)

    def holds(self, tokens: int) -> bool:
        """Whether the first `tokens` tokens stand in the blocks and nothing else."""
        return same_bits(self.tensors, self._build(tokens))


def ranks(geometry: Geometry, tensor: int, pipeline: int) -> list[KVShard]:
    """What each rank holds; with more ranks than heads, several hold the same one."""
    heads = max(1, geometry.kv_heads // tensor)
    parts: list[KVShard] = []
    for stage in range(pipeline):
        layers = geometry.layers * stage // pipeline, geometry.layers * (stage + 1) // pipeline
        for rank in range(tensor):
            head = rank * geometry.kv_heads // tensor
            parts.append(KVShard(*layers, head, head + heads))
    return parts


def engine(
    store: KVStore,
    namespace: Namespace,
    tensor: int,
    pipeline: int,
    form: CacheLayout,
    block_size: int,
    kv: Sequence[Raw],
    config: ConnectorSettings,
    *,
    filled: bool = False,
) -> list[Rank]:
    return [
        Rank(store, namespace, part, form, block_size, kv, config, filled=filled, seed=number)
        for number, part in enumerate(ranks(namespace.geometry, tensor, pipeline))
    ]


def save(engine: Sequence[Rank], ids: list[int]) -> list[tuple[int, int]]:
    reports: list[SaveReport] = []
    for rank in engine:
        job = rank.connector.save(rank.connector.plan(ids), rank.blocks, 0, len(ids), required=True)
        for tensor in rank.tensors:
            tensor.view(torch.uint8).fill_(0xAB)  # the blocks are the engine's again
        reports.append(job.result())
        assert reports[-1].complete
        rank.connector.close()
    return [(report.saved, report.existing) for report in reports]


def serves(engine: Sequence[Rank], ids: list[int]) -> bool:
    """Whether every rank finds and loads everything, bit for bit."""
    found = True
    for rank in engine:
        plan = rank.connector.plan(ids)
        hit = rank.connector.lookup(plan).result().tokens
        report = rank.connector.load(plan, rank.blocks, 0, len(ids)).result()
        found = found and hit == report.end_token == len(ids)
        assert rank.holds(report.end_token)
        stats = rank.connector.stats()
        assert stats.slots_free == stats.slots
        rank.connector.close()
    return found


def settings_for(grid: ShardGrid | None, **more: bool) -> ConnectorSettings:
    return ConnectorSettings(
        grid=grid, arena_bytes=1 << 20, portion_pages=2, save_portion_pages=1, deadline_s=20, **more
    )


@given(
    dtype=st.sampled_from(list(DTYPE_BYTES)),
    sizes=st.tuples(*[st.sampled_from([(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 3)])] * 2),
    forms=st.tuples(*[st.sampled_from(MHA)] * 2),
    blocks=st.tuples(*[st.sampled_from([16, 32, 64, 128])] * 2),
    page_tokens=st.sampled_from([16, 24, 64]),
    heads=st.sampled_from([2, 8]),
    count=st.integers(1, 150),
)
def test_any_parallelism_form_and_block_size_serves_any_other(
    dtype: str,
    sizes: tuple[tuple[int, int], tuple[int, int]],
    forms: tuple[CacheLayout, CacheLayout],
    blocks: tuple[int, int],
    page_tokens: int,
    heads: int,
    count: int,
) -> None:
    geometry = Geometry(layers=6, kv_heads=heads, k_dim=4, v_dim=4)
    namespace = Namespace("model", "revision", dtype, geometry, page_tokens)
    grid = ShardGrid.shared(geometry, tensor=[size[0] for size in sizes], pipeline=[size[1] for size in sizes])
    kv = truth(geometry, count, dtype, seed=count)
    ids = list(range(count))
    store = MemoryStore(16 << 20, unit_bytes=1024)
    config = settings_for(grid)
    (tensor, pipeline), other = sizes
    save(engine(store, namespace, tensor, pipeline, forms[0], blocks[0], kv, config, filled=True), ids)
    assert serves(engine(store, namespace, *other, forms[1], blocks[1], kv, config), ids)
    store.close()


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(one, marks=() if one in ("bfloat16", "float8_e5m2") else pytest.mark.slow) for one in DTYPE_BYTES],
)
def test_tensor_parallelism_1_2_4_8_and_back(dtype: str) -> None:
    """Each store is filled with what was loaded from the one before: what was wrong once would stay wrong."""
    geometry = Geometry(layers=2, kv_heads=8, k_dim=4, v_dim=4)
    namespace = Namespace("model", "revision", dtype, geometry, 16)
    config = settings_for(ShardGrid.shared(geometry, tensor=(1, 2, 4, 8)))
    kv, ids = truth(geometry, 40, dtype, seed=2), list(range(40))
    form = FORM["kv_first_nhd"]
    stores = [MemoryStore(4 << 20, unit_bytes=1024) for _ in range(8)]
    source = engine(stores[0], namespace, 1, 1, form, 32, kv, config, filled=True)
    for number, (store, after) in enumerate(zip(stores, (2, 4, 8, 4, 2, 1, 8, 1), strict=True)):
        for rank in source:
            rank.move_to(store)
        save(source, ids)
        source = engine(store, namespace, after, 1, form, (128, 32)[number % 2], kv, config)
        assert serves(source, ids)  # from here on the blocks hold what was loaded
    for store in stores:
        store.close()


def test_ranks_that_hold_the_same_head_store_it_once() -> None:
    geometry = Geometry(layers=2, kv_heads=2, k_dim=4, v_dim=4)
    namespace = Namespace("model", "revision", "float16", geometry, 16)
    config = settings_for(ShardGrid.shared(geometry, tensor=(1, 8)))
    kv, ids = truth(geometry, 40, "float16", seed=2), list(range(40))
    store = MemoryStore(4 << 20, unit_bytes=1024)
    eight = engine(store, namespace, 8, 1, FORM["packed_nhd"], 16, kv, config, filled=True)
    assert save(eight, ids) == [(3, 0), (0, 3), (0, 3), (0, 3)] * 2
    assert serves(engine(store, namespace, 1, 1, FORM["packed_nhd"], 16, kv, config), ids)
    store.close()


def test_mla_is_shared_over_pipeline_sizes_and_block_sizes() -> None:
    geometry = Geometry(layers=6, kv_heads=1, k_dim=12, v_dim=0)
    namespace = Namespace("model", "revision", "bfloat16", geometry, 24)
    config = settings_for(ShardGrid.shared(geometry, tensor=(1, 4), pipeline=(1, 2, 3)))
    kv, ids = truth(geometry, 100, "bfloat16", seed=2), list(range(100))
    for before, after in (((4, 2), (1, 3)), ((1, 3), (4, 1))):
        store = MemoryStore(4 << 20, unit_bytes=1024)
        save(engine(store, namespace, *before, FORM["mla"], 32, kv, config, filled=True), ids)
        assert serves(engine(store, namespace, *after, FORM["packed_nhd"], 128, kv, config), ids)
        store.close()


def test_without_a_grid_engines_of_other_parallelism_find_nothing_and_take_no_harm() -> None:
    geometry = Geometry(layers=2, kv_heads=4, k_dim=4, v_dim=4)
    namespace = Namespace("model", "revision", "float16", geometry, 16)
    kv, ids = truth(geometry, 40, "float16", seed=2), list(range(40))
    store = MemoryStore(4 << 20, unit_bytes=1024)
    form = FORM["kv_first_nhd"]
    save(engine(store, namespace, 2, 1, form, 16, kv, settings_for(None), filled=True), ids)
    assert not serves(engine(store, namespace, 4, 1, form, 16, kv, settings_for(None)), ids)
    assert serves(engine(store, namespace, 2, 1, form, 16, kv, settings_for(None)), ids)
    store.close()


def test_an_engine_that_holds_a_part_of_a_unit_loads_its_slice_and_may_not_store() -> None:
    geometry = Geometry(layers=4, kv_heads=8, k_dim=4, v_dim=4)
    namespace = Namespace("model", "revision", "float16", geometry, 16)
    kv, ids = truth(geometry, 40, "float16", seed=2), list(range(40))
    store = MemoryStore(4 << 20, unit_bytes=1024)
    form, grid = FORM["kv_first_nhd"], ShardGrid(4, 4)
    save(engine(store, namespace, 2, 1, form, 16, kv, settings_for(grid), filled=True), ids)
    with pytest.raises(LayoutError, match="load_only"):
        engine(store, namespace, 8, 2, form, 16, kv, settings_for(grid))
    assert serves(engine(store, namespace, 8, 2, form, 16, kv, settings_for(grid, load_only=True)), ids)
    rank = engine(store, namespace, 8, 2, form, 16, kv, settings_for(grid, load_only=True), filled=True)[0]
    assert rank.connector.save(rank.connector.plan(ids[::-1]), rank.blocks, 0, 40).result().saved == 0
    rank.connector.close()
    store.close()


def test_a_page_that_lacks_one_part_is_not_found_and_nothing_of_it_is_written() -> None:
    geometry = Geometry(layers=2, kv_heads=4, k_dim=4, v_dim=4)
    namespace = Namespace("model", "revision", "float16", geometry, 16)
    kv, ids = truth(geometry, 40, "float16", seed=2), list(range(40))
    store = MemoryStore(4 << 20, unit_bytes=1024)
    config = settings_for(ShardGrid(2, 2))
    (source,) = engine(store, namespace, 1, 1, FORM["kv_first_nhd"], 16, kv, config, filled=True)
    plan = source.connector.plan(ids)
    save([source], ids)
    assert store.delete([plan.keys[3]]).result()[0].code is ResultCode.OK
    (target,) = engine(store, namespace, 1, 1, FORM["kv_first_nhd"], 16, kv, config)
    assert target.connector.lookup(plan).result().tokens == 16
    report = target.connector.load(plan, target.blocks, 0, 40).result()
    assert (report.end_token, report.failure, report.pages) == (16, ResultCode.MISS, 1)
    assert target.holds(16)
    target.connector.close()
    store.close()


def test_store_keys_that_name_one_part_of_a_page_store_that_part_alone() -> None:
    geometry = Geometry(layers=2, kv_heads=4, k_dim=4, v_dim=4)
    namespace = Namespace("model", "revision", "float16", geometry, 16)
    kv, ids = truth(geometry, 40, "float16", seed=2), list(range(40))
    store = MemoryStore(4 << 20, unit_bytes=1024)
    config = settings_for(ShardGrid(2, 2))
    (source,) = engine(store, namespace, 1, 1, FORM["kv_first_nhd"], 16, kv, config, filled=True)
    keys = source.connector.plan(ids).keys
    assert len(keys) == 6  # three pages of two parts

    def save_only(*wanted: str) -> list[ResultCode]:
        named = KVTransferParams(
            version=PROTOCOL_VERSION,
            request_id="request",
            transfer=Transfer(id="transfer", attempt=1),
            phase="prefill",
            mode="store",
            store_keys=wanted,
        )
        report = source.connector.save(source.connector.plan(ids, named), source.blocks, 0, 40).result()
        assert (report.saved, report.complete) == (1, True)
        return [result.code for result in store.exists(keys).result()]

    there, missing = ResultCode.OK, ResultCode.MISS
    assert save_only(keys[3]) == [missing, missing, missing, there, missing, missing]
    assert source.connector.lookup(source.connector.plan(ids)).result().tokens == 0
    assert save_only(keys[2]) == [missing, missing, there, there, missing, missing]  # the page is whole now
    assert save_only(keys[0], keys[1]) == [there, there, there, there, missing, missing]
    assert source.connector.lookup(source.connector.plan(ids)).result().tokens == 32
    source.connector.close()
    store.close()


def test_a_grid_is_shared_by_all_sizes_that_were_named() -> None:
    geometry = Geometry(layers=80, kv_heads=8, k_dim=128, v_dim=128)
    assert ShardGrid.shared(geometry, tensor=(1, 2, 4)) == ShardGrid(80, 2)
    assert ShardGrid.shared(geometry, tensor=(8, 16), pipeline=(1, 4)) == ShardGrid(20, 1)
    assert len(ShardGrid(20, 2).units_touching(KVShard(0, 80, 4, 8), geometry)) == 8
    for wrong in ({"tensor": (3,)}, {"pipeline": (3,)}, {"tensor": (0,)}):
        with pytest.raises(ValueError, match=r"ranks|stages"):
            ShardGrid.shared(geometry, **wrong)
    with pytest.raises(ValueError, match="head_unit"):
        ShardGrid(1, 0)
