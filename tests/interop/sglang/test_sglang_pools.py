"""Tests our backend on SGLang's own host pools: stored and loaded pages are SGLang's, byte for byte."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from kvparams.pages import HEADER_BYTES
from kvparams_connectors.engines.sglang import backend as sglang_backend
from kvparams_connectors.engines.sglang.host_pages import HostPages
from kvparams_connectors.engines.sglang.self_test import HiCacheSelfTestError
from kvparams_connectors.store import open_store
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.transfer.cache_layouts import LayoutError
from tests.interop.sglang.pools import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    Shape,
    backend_on,
    config_of,
    fill,
    host_pool,
    names,
    of_sglang,
    page_bytes,
    parallel,
    put_value,
    value_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")

_SHAPES = [
    *(Shape("mha", layout) for layout in MHA_LAYOUTS),
    *(Shape("mla", layout) for layout in MLA_LAYOUTS),
    *(Shape("asymmetric", layout) for layout in ("page_first", "page_first_direct")),
    *(Shape("mha", "page_first", dtype) for dtype in (torch.float16, torch.float32, torch.float8_e4m3fn)),
    *(Shape("mla", "layer_first", dtype) for dtype in (torch.float32, torch.float8_e5m2)),
    *(Shape("mha", layout, page_size=size) for layout in ("layer_first", "page_first") for size in (1, 64)),
]


def _named(shape: Shape) -> str:
    return f"{shape.kind}-{shape.layout}-{str(shape.dtype).removeprefix('torch.')}-{shape.page_size}"


def _url(folder: Path) -> str:
    return f"file://{folder}/store?size=64MiB"


@pytest.mark.parametrize("shape", _SHAPES, ids=_named)
def test_pages_come_back_byte_for_byte_in_another_place(shape: Shape, shared_memory: Path) -> None:
    url = _url(shared_memory)
    keys = names(5)
    with parallel(), backend_on(pool := host_pool(shape), config_of(url, mla=shape.kind == "mla")) as backend:
        assert backend.tally.counts["pages_loaded"] == 1  # by the self-test
        fill(pool)
        source = pool.alloc(5 * shape.page_size)
        expected = page_bytes(pool, source)
        assert backend.batch_exists(keys) == 0
        assert backend.batch_set_v1(keys, source) == [True] * 5
        assert backend.batch_set_v1(keys, source) == [True] * 5  # they are there
        assert backend.batch_exists([*keys, *names(1, 99)]) == 5
        assert backend.exists(keys[0])
        fill(pool, 1)
        untouched = pool.alloc(shape.page_size)
        before = page_bytes(pool, untouched)
        target = pool.alloc(5 * shape.page_size)
        assert backend.batch_get_v1(keys, target) == [True] * 5
        assert page_bytes(pool, target) == expected
        assert page_bytes(pool, untouched) == before
        # Another server, and what lies in the store.
        with backend_on(other := host_pool(shape), config_of(url, mla=shape.kind == "mla")) as second:
            assert second.batch_exists(keys) == 5
            target = other.alloc(5 * shape.page_size)
            assert second.batch_get_v1(keys, target) == [True] * 5
            assert page_bytes(other, target) == expected
        stored = value_of(open_store(url), backend._traffic._form.page(keys[3]).key)
        assert stored[HEADER_BYTES:] == expected[3]


@pytest.mark.parametrize("shape", _SHAPES[:7], ids=_named)
def test_copies_of_pages_are_the_same_pages(shape: Shape, shared_memory: Path) -> None:
    """What SGLang does without `interface_v1`."""
    keys = names(3)
    config = config_of(_url(shared_memory), mla=shape.kind == "mla")
    with parallel(), backend_on(pool := host_pool(shape), config) as backend:
        fill(pool)
        source = pool.alloc(3 * shape.page_size)
        expected = page_bytes(pool, source)
        assert backend.batch_set(keys[:2], [pool.get_data_page(int(index)) for index in source[:: shape.page_size][:2]])
        assert backend.set(keys[2], pool.get_data_page(int(source[2 * shape.page_size])))
        target = pool.alloc(3 * shape.page_size)
        assert backend.batch_get_v1(keys, target) == [True] * 3
        assert page_bytes(pool, target) == expected
        blank = [pool.get_dummy_flat_data_page() for _ in range(4)]
        copies = backend.batch_get([*keys, *names(1, 99)], blank)
        assert copies[3] is None
        for number, (index, copy) in enumerate(zip(target[:: shape.page_size], copies[:3], strict=True)):
            assert copy is blank[number]
            pool.set_from_flat_data_page(int(index), copy)
        assert page_bytes(pool, target) == expected
        assert torch.equal(backend.get(keys[1]).view(torch.uint8), copies[1].view(torch.uint8))
        assert backend.get(names(1, 99)[0]) is None


@pytest.mark.parametrize("at", [0, 60, 255, HEADER_BYTES, -1])
def test_a_damaged_page_is_a_miss_and_nothing_behind_it_is_written(at: int, shared_memory: Path) -> None:
    url = _url(shared_memory)
    keys = names(6)
    with parallel(), backend_on(pool := host_pool(Shape()), config_of(url)) as backend:
        fill(pool)
        source = pool.alloc(6 * 16)
        expected = page_bytes(pool, source)
        backend.batch_set_v1(keys, source)
        key = backend._traffic._form.page(keys[3]).key
        value = bytearray(value_of(store := open_store(url), key))
        value[at] ^= 4
        put_value(store, key, bytes(value))
        pool.kv_buffer.zero_()
        assert backend.batch_get_v1(keys, source) == [True] * 3 + [False] * 3
        assert page_bytes(pool, source) == expected[:3] + [bytes(len(expected[0]))] * 3
        assert sum(number for name, number in backend.tally.counts.items() if name.startswith("pages_refused")) == 1
        assert backend.batch_exists(keys) == 3  # it is gone, and can be stored anew
        fill(pool)
        assert backend.batch_set_v1(keys, source) == [True] * 6
        assert backend.batch_get_v1(keys, source) == [True] * 6


def test_the_control_without_verification_the_flipped_byte_is_in_the_pool(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_backend.KVParamsHiCache, "verifies", False)
    url = _url(shared_memory)
    with parallel(), backend_on(pool := host_pool(Shape()), config_of(url)) as backend:
        fill(pool)
        source = pool.alloc(16)
        (expected,) = page_bytes(pool, source)
        backend.batch_set_v1(names(1), source)
        key = backend._traffic._form.page(names(1)[0]).key
        value = bytearray(value_of(store := open_store(url), key))
        value[HEADER_BYTES + 100] ^= 4
        put_value(store, key, bytes(value))
        assert backend.batch_get_v1(names(1), source) == [True]
        (got,) = page_bytes(pool, source)
        assert [number for number in range(len(got)) if got[number] != expected[number]] == [100]


def test_what_differs_shares_nothing(shared_memory: Path) -> None:
    """Rank, layout, page size, dtype, revision, tenant, model: each alone keeps pages apart."""
    url = _url(shared_memory)
    plain = Shape(page_size=32)
    with parallel(), backend_on(pool := host_pool(plain), config_of(url)) as backend:
        fill(pool)
        backend.batch_set_v1(names(1), pool.alloc(32))
        others: list[tuple[Shape, dict[str, object], dict[str, object]]] = [
            (plain, {"tp_size": 2}, {}),
            (plain, {"tp_size": 2, "tp_rank": 1}, {}),
            (plain, {"pp_size": 2}, {}),
            (plain, {"attn_cp_size": 2}, {}),
            (replace(plain, layout="page_first_direct"), {}, {}),
            (replace(plain, page_size=16, heads=4), {}, {}),
            (replace(plain, dtype=torch.float16), {}, {}),
            (plain, {}, {"revision": "2"}),
            (plain, {}, {"tenant": "a"}),
            (plain, {}, {"model": "other"}),
        ]
        for shape, ranks, extra in others:
            with backend_on(host_pool(shape), config_of(url, extra=extra, **ranks)) as other:
                assert other.batch_exists(names(1)) == 0, (shape, ranks, extra)
        with backend_on(host_pool(plain), config_of(url)) as other:
            assert other.batch_exists(names(1)) == 1


def test_both_kinds_of_fp8_are_bytes_to_sglang_and_share_nothing(shared_memory: Path) -> None:
    url = _url(shared_memory)
    model = of_sglang("runtime_context")
    shape = Shape(dtype=torch.float8_e4m3fn)
    with parallel():
        pool = host_pool(shape)
        assert pool.dtype is torch.uint8
        for number, (dtype, found) in enumerate([("fp8_e4m3", 0), ("fp8_e5m2", 0), ("fp8_e4m3", 1), ("fp8_e5m2", 1)]):
            with model.get_model().override(kv_cache_dtype=dtype), backend_on(pool, config_of(url)) as backend:
                assert backend.batch_exists(names(1)) == found, number
                backend.batch_set_v1(names(1), torch.arange(16))
    with (
        pytest.raises(StoreError, match="unknown element type"),
        backend_on(host_pool(shape), config_of(url, extra={"model": "m"})),
    ):
        pass


def test_of_ranks_that_have_the_same_only_one_writes(shared_memory: Path) -> None:
    url = _url(shared_memory)
    shape = Shape("mla", "page_first")
    keys = names(2)
    with parallel():
        pool = host_pool(shape)
        fill(pool)
        source = pool.alloc(32)
        with backend_on(pool, config_of(url, mla=True, tp_rank=1, tp_size=2)) as second:
            assert second.batch_set_v1(keys, source) == [True, True]  # the other one's to do
            assert second.batch_set(keys, [pool.get_data_page(0), pool.get_data_page(16)])
            assert second.batch_exists(keys) == 0
            with backend_on(pool, config_of(url, mla=True, tp_rank=0, tp_size=2)) as first:
                assert first.batch_set_v1(keys, source) == [True, True]
            assert second.batch_exists(keys) == 2
            expected = page_bytes(pool, source)
            target = pool.alloc(32)
            assert second.batch_get_v1(keys, target) == [True, True]
            assert page_bytes(pool, target) == expected
        with backend_on(pool, config_of(url, mla=True)) as alone:
            assert alone.batch_exists(keys) == 2  # the size of tensor parallelism changes nothing


@pytest.mark.parametrize("shape", [Shape(layout="page_unified"), Shape("mla", "page_unified")], ids=_named)
def test_a_layout_that_is_not_known_is_refused_in_words(shape: Shape, shared_memory: Path) -> None:
    words = (
        "the layout 'page_unified' of a M(HA|LA)TokenToKVPoolHost is not supported; set --hicache-mem-layout to one of"
    )
    config = config_of(_url(shared_memory), mla=shape.kind == "mla")
    with parallel(), pytest.raises(LayoutError, match=words), backend_on(host_pool(shape), config):
        pass


def test_pools_that_are_not_known_are_refused_in_words(shared_memory: Path) -> None:
    url = _url(shared_memory)
    with parallel():
        logical = of_sglang("mem_cache.memory_pool_host:LogicalHostPool")(64, 16)
        with pytest.raises(LayoutError, match="LogicalHostPool is not supported"):
            HostPages(logical)
        pool = host_pool(Shape())
        with (
            pytest.raises(LayoutError, match="keeps this model's KV in a MHATokenToKVPoolHost"),
            backend_on(pool, config_of(url, mla=True)),
        ):
            pass
        with pytest.raises(StoreError, match="remove tp_lcm_size"), backend_on(pool, config_of(url, tp_lcm_size=4)):
            pass
        pool.dcp_size = 2
        with pytest.raises(LayoutError, match="remove --dcp-size"):
            HostPages(pool)
        pool.dcp_size = 1
        pool.shared_allocation_domain = object()
        with pytest.raises(LayoutError, match="remove --enable-unified-memory"):
            HostPages(pool)


def test_a_second_pool_is_refused_in_words(shared_memory: Path) -> None:
    """A model with an index or a state besides its KV: what is stored would be half of it."""
    name = of_sglang("mem_cache.hicache_storage:PoolName")
    with parallel(), backend_on(host_pool(Shape()), config_of(_url(shared_memory))) as backend:
        for other in (name.INDEXER, name.MAMBA, name.SWA, name.DRAFT):
            with pytest.raises(LayoutError, match=f"state besides its KV \\(the pool {other}\\)"):
                backend.register_mem_host_pool_v2(host_pool(Shape()), other)
        with pytest.raises(LayoutError, match="state besides its KV"):
            backend.register_mem_host_pool_v2(host_pool(Shape()), name.KV)


def test_memory_that_is_not_where_sglang_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = host_pool(Shape())
    true = pool.get_page_buffer_meta

    def elsewhere(change: Callable[[list[int], list[int], int], tuple[list[int], list[int]]]) -> None:
        def meta(indices: torch.Tensor) -> tuple[list[int], list[int]]:
            addresses, sizes = true(indices)
            return change(addresses, sizes, int(indices[0]) // 16)

        monkeypatch.setattr(pool, "get_page_buffer_meta", meta)

    elsewhere(lambda a, s, page: ([a[0] - 64, *a[1:]], s))
    with pytest.raises(LayoutError, match="memory outside of the host pool"):
        HostPages(pool)
    elsewhere(lambda a, s, page: ([a[0] + (64 if page == 1 else 0), *a[1:]], s))
    with pytest.raises(LayoutError, match="do not lie evenly"):
        HostPages(pool)
    elsewhere(lambda a, s, page: (a[:1], s[:1]))
    with pytest.raises(LayoutError, match="part of it would be lost"):
        HostPages(pool)
    elsewhere(lambda a, s, page: ([a[0], a[0]], s))
    with pytest.raises(LayoutError, match="two pieces of a page overlap"):
        HostPages(pool)


def test_a_page_that_sglang_sees_otherwise_stops_the_server(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An SGLang that orders its memory anew, and says nothing of it, is found by the self-test."""
    pool = host_pool(Shape())
    true = pool.get_data_page

    def flipped(index: int) -> torch.Tensor:
        return true(index).flip(0)

    monkeypatch.setattr(pool, "get_data_page", flipped)
    free = pool.available_size()
    with (
        parallel(),
        pytest.raises(HiCacheSelfTestError, match="differs from the page that SGLang returns"),
        backend_on(pool, config_of(_url(shared_memory))),
    ):
        pass
    assert pool.available_size() == free
    monkeypatch.setattr(sglang_backend, "run_self_test", Mock(return_value=True))
    with parallel(), backend_on(pool, config_of(_url(shared_memory))):
        pass


@pytest.mark.parametrize("count", [0, 1, 3])
def test_tokens_that_are_not_whole_pages_move_nothing(count: int, shared_memory: Path) -> None:
    with parallel(), backend_on(host_pool(Shape()), config_of(_url(shared_memory))) as backend:
        for indices in (torch.arange(16 * count + 5), torch.arange(8, 8 + 16 * count), torch.arange(16 * count) + 9600):
            if indices.numel():
                with pytest.raises(ValueError, match="page"):
                    backend.batch_set_v1(names(count), indices)
        assert backend.batch_set_v1([], torch.arange(0)) == []
        assert backend.batch_get_v1([], torch.arange(0)) == []
        assert backend.batch_exists([]) == 0
