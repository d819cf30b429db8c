"""Tests SGLang's own controllers and their storage threads on our backend, as a server uses them, without a GPU.

The copy between the device and the host pool is not tested, because it needs kernels that only run on a GPU.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from kvparams_connectors.engines.sglang import backend as sglang_backend
from kvparams_connectors.store import open_store
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.transfer.cache_layouts import LayoutError
from tests.interop.sglang.engine import Engine
from tests.interop.sglang.pools import (
    Shape,
    extra_config,
    fill,
    fill_pages,
    of_sglang,
    page_bytes,
    parallel,
    put_value,
    value_of,
)
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.processes import free_ports
from tests.support.waiting import wait_until

# The first one compiles SGLang's hash, a minute on a slow machine.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

_ROOT = Path(__file__).parents[3]
_TOKENS = list(range(7, 7 + 16 * 12))
_LONG_S = 60.0


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One rank, as SGLang wants it."""
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield distributed.new_group([0])
    distributed.destroy_process_group()


Start = Callable[..., Engine]


@pytest.fixture
def start(group: Any) -> Iterator[Start]:
    """Start controllers; they are detached at the end, as SGLang does it."""
    engines: list[Engine] = []

    def make(url: str, kind: str = "hybrid", shape: Shape | None = None, **extra: object) -> Engine:
        engine = Engine(kind, shape or Shape(), group, extra_config(url, **extra))
        engines.append(engine)
        return engine

    with parallel():
        yield make
        for engine in engines:
            engine.controller.detach_storage_backend()


@contextmanager
def within(seconds: float) -> Generator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
@pytest.mark.parametrize("shape", [Shape(), Shape("mla", "layer_first"), Shape(layout="page_first_direct")], ids=str)
def test_what_one_server_computed_another_one_loads(kind: str, shape: Shape, start: Start, shared_memory: Path) -> None:
    url = f"file://{shared_memory}/store?size=64MiB"
    first, second = start(url, kind, shape), start(url, kind, shape)
    tokens = len(_TOKENS)
    assert first.load(_TOKENS) == (0, 0, [])
    stored, pages = first.store(_TOKENS, 1)
    assert stored == tokens
    assert second.load(_TOKENS) == (tokens, tokens, pages)
    assert second.load(_TOKENS[:80] + [1] * 80) == (80, 80, pages[:5])
    assert second.load([1, *_TOKENS]) == (0, 0, [])


def test_more_pages_than_sglang_asks_for_at_a_time(start: Start, shared_memory: Path) -> None:
    """SGLang cuts at 128 pages, we at portions."""
    url = f"file://{shared_memory}/store?size=64MiB"
    shape = Shape(page_size=1, tokens=1024)
    tokens = list(range(1000, 1300))
    first, second = start(url, "hybrid", shape), start(url, "plain", shape)
    stored, pages = first.store(tokens, 1)
    assert stored == 300
    assert second.load(tokens) == (300, 300, pages)


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_a_damaged_page_ends_the_prefix(kind: str, start: Start, server: ValkeyServer) -> None:
    engine = start(server.url, kind)
    _, pages = engine.store(_TOKENS, 1)
    key = engine.backend._traffic._form.page(engine.hashes(_TOKENS)[7]).key
    store = open_store(server.url)
    value = bytearray(value_of(store, key))
    value[1000] ^= 1
    put_value(store, key, bytes(value))
    store.close()
    tokens = len(_TOKENS)
    assert engine.load(_TOKENS) == (tokens, 112, pages[:7])
    assert engine.backend.tally.counts["pages_refused.flipped_payload"] == 1
    assert engine.load(_TOKENS) == (112, 112, pages[:7])
    stored, again = engine.store(_TOKENS, 1)
    assert (stored, again) == (tokens, pages)
    assert engine.load(_TOKENS) == (tokens, tokens, pages)


def test_the_control_without_verification_a_flipped_byte_reaches_sglang(
    start: Start, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_backend.KVParamsHiCache, "verifies", False)
    engine = start(server.url)
    _, pages = engine.store(_TOKENS, 1)
    key = engine.backend._traffic._form.page(engine.hashes(_TOKENS)[7]).key
    store = open_store(server.url)
    value = bytearray(value_of(store, key))
    value[1000] ^= 1
    put_value(store, key, bytes(value))
    store.close()
    hit, completed, loaded = engine.load(_TOKENS)
    assert (hit, completed) == (len(_TOKENS), len(_TOKENS))
    assert [number for number, page in enumerate(pages) if loaded[number] != page] == [7]


def test_the_control_with_sglangs_own_file_backend_it_does(group: Any, tmp_path: Path) -> None:
    with parallel():
        engine = Engine("hybrid", Shape(), group, {"file_storage_path": str(tmp_path)}, storage_backend="file")
        _, pages = engine.store(_TOKENS, 1)
        (file,) = tmp_path.glob(f"{engine.hashes(_TOKENS)[7]}*.bin")
        value = bytearray(file.read_bytes())
        value[1000] ^= 1
        file.write_bytes(value)
        hit, completed, loaded = engine.load(_TOKENS)
        engine.controller.detach_storage_backend()
    assert (hit, completed) == (len(_TOKENS), len(_TOKENS))
    assert [number for number, page in enumerate(pages) if loaded[number] != page] == [7]


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_a_killed_store_is_a_miss_at_once_and_used_again_when_it_is_back(
    kind: str, start: Start, server: ValkeyServer
) -> None:
    engine = start(server.url, kind, deadline_s=5 * _LONG_S)
    tokens = len(_TOKENS)
    engine.store(_TOKENS, 1)
    server.kill()
    with within(_LONG_S):  # nobody waits, not even once
        for seed in range(3):
            assert engine.load(_TOKENS) == (0, 0, [])
            assert engine.store(_TOKENS, seed)[0] == 0
    with within(_LONG_S):
        for seed in range(5):
            assert engine.load(_TOKENS) == (0, 0, [])
            assert engine.store(_TOKENS, seed)[0] == 0
    assert sum(number for name, number in engine.backend.tally.counts.items() if "failures" in name)
    server.start()
    wait_until(lambda: engine.store(_TOKENS, 4)[0] == tokens, 120, pause_s=0.2)
    assert engine.load(_TOKENS)[:2] == (tokens, tokens)


def test_a_store_that_stops_costs_the_deadline_and_writes_nothing_late(start: Start, server: ValkeyServer) -> None:
    """SGLang takes its memory back when a call returns; what comes later must not reach it."""
    engine = start(server.url, deadline_s=1)
    keys = engine.hashes(_TOKENS)
    wait_until(lambda: engine.store(_TOKENS, 1)[0] == len(_TOKENS), 120, pause_s=0.2)
    indices = engine.pool.alloc(len(_TOKENS))
    fill(engine.pool, 5)
    before = page_bytes(engine.pool, indices)
    server.stop()
    try:
        with within(_LONG_S):
            assert engine.backend.batch_get_v1(keys, indices) == [False] * len(keys)
    finally:
        server.go_on()
    assert page_bytes(engine.pool, indices) == before
    wait_until(lambda: engine.load(_TOKENS)[1] == len(_TOKENS), 120, pause_s=0.2)
    engine.pool.free(indices)


def test_memory_that_is_used_anew_while_a_store_is_late_is_never_mixed(start: Start, server: ValkeyServer) -> None:
    engine = start(server.url, "plain", Shape(page_size=64, layers=16, heads=8), deadline_s=1)
    tokens = list(range(64 * 4))
    keys = engine.hashes(tokens)
    indices = engine.pool.alloc(len(tokens))
    before = fill_pages(engine.pool, indices, 1)
    server.stop()
    try:
        assert False in engine.backend.batch_set_v1(keys, indices)
        after = fill_pages(engine.pool, indices, 2)
    finally:
        server.go_on()
    wait_until(lambda: engine.backend.batch_set_v1(keys, indices) == [True] * 4, 120, pause_s=0.2)
    fill(engine.pool, 3)
    loaded = sum(engine.backend.batch_get_v1(keys, indices))
    assert all(
        page in pair for page, *pair in zip(page_bytes(engine.pool, indices)[:loaded], before, after, strict=False)
    )
    engine.pool.free(indices)


def test_of_latent_ranks_only_the_first_writes(
    group: Any, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_backend, "run_self_test", Mock(return_value=True))  # it stores a page, which is counted
    url = f"file://{shared_memory}/store?size=64MiB"
    with parallel(tp_size=2, tp_rank=1):
        second = Engine("hybrid", Shape("mla"), group, extra_config(url))
        stored, _ = second.store(_TOKENS, 1)
        assert (stored, second.backend.tally.counts) == (0, {})
        with parallel(tp_size=2, tp_rank=0):
            first = Engine("hybrid", Shape("mla"), group, extra_config(url))
            stored, pages = first.store(_TOKENS, 1)
            assert stored == len(_TOKENS)
            first.controller.detach_storage_backend()
        assert second.load(_TOKENS) == (len(_TOKENS), len(_TOKENS), pages)
        second.controller.detach_storage_backend()


def test_two_ranks_agree_on_the_prefix_that_both_have(server: ValkeyServer) -> None:
    """Each in a process of its own, with SGLang's own reductions over gloo: a page that one has lost, none uses."""
    (port,) = free_ports(1)
    command = [sys.executable, "-W", "ignore", "-m", "tests.interop.sglang.rank", server.url, str(port)]
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    seen = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert seen[0]["keys"] != seen[1]["keys"]
    for rank in seen:
        assert (rank["stored"], rank["whole"], rank["damaged"], rank["gone"]) == (192, [192, 192], [192, 80], [80, 80])
        assert rank["same"] is True


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        ({"deadlin_s": 5}, StoreError, "deadlin_s: is not known here; did you mean deadline_s"),
        ({"store": None}, StoreError, "store: must be the store's URL"),
        ({"store": "nothing:"}, Exception, "nothing"),
        ({"revision": None}, StoreError, "name the weights with the setting revision"),
        ({"tp_lcm_size": 4}, StoreError, "remove tp_lcm_size"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_start_and_can_be_mended(
    extra: dict[str, object], error: type[Exception], words: str, start: Start, shared_memory: Path
) -> None:
    url = f"file://{shared_memory}/store?size=64MiB"
    config = {name: value for name, value in {**extra_config(url), **extra}.items() if value is not None}
    engine = start(url)
    engine.controller.detach_storage_backend()
    attach = engine.controller.attach_storage_backend
    with pytest.raises(Exception, match=words) as raised:
        attach("dynamic", 16, "tiny", dict(config), host_pools=engine.controller.mem_pool_host.entries)
    assert isinstance(raised.value, error)
    attach("dynamic", 16, "tiny", extra_config(url), host_pools=engine.controller.mem_pool_host.entries)
    assert engine.store(_TOKENS, 1)[0] == len(_TOKENS)


def test_the_command_line_of_a_server(start: Start, shared_memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What stands in `--hicache-storage-backend-extra-config`, as SGLang reads it."""
    url = f"file://{shared_memory}/store?size=64MiB"
    text = json.dumps(
        {**extra_config(url), "prefetch_threshold": 32, "prefetch_timeout_base": 2, "allocator": "default"}
    )
    engine = start(url)
    engine.controller.detach_storage_backend()
    config, threshold, *_ = engine.controller.parse_storage_backend_extra_config(text)
    entries = engine.controller.mem_pool_host.entries
    engine.controller.attach_storage_backend("dynamic", threshold, "tiny", config, host_pools=entries)
    assert "interface_v1" not in caplog.text
    assert engine.store(_TOKENS, 1)[0] == len(_TOKENS)
    engine.controller.detach_storage_backend()
    del config["interface_v1"]
    engine.controller.attach_storage_backend("dynamic", threshold, "tiny", config, host_pools=entries)
    assert 'set "interface_v1": 1; without it SGLang copies every page once more' in caplog.text
    assert engine.load(_TOKENS)[:2] == (len(_TOKENS), len(_TOKENS))


def test_a_server_does_not_start_with_a_layout_that_is_not_known(start: Start) -> None:
    with pytest.raises((LayoutError, ValueError), match="the layout 'page_unified'"):
        start("memory:?size=8MiB", "plain", Shape(layout="page_unified"))


def test_metrics_are_sglangs_and_clearing_is_refused(group: Any) -> None:
    with parallel():
        config = extra_config("memory:?size=64MiB")
        engine = Engine("hybrid", Shape(), group, config, enable_storage_metrics=True)
        engine.backend.get_stats()  # the self-test's
        engine.store(_TOKENS, 1)
        engine.load(_TOKENS)
        stats = engine.backend.get_stats()
        collector = of_sglang("observability.metrics_collector:StorageMetricsCollector")({"storage_backend": "dynamic"})
        collector.log_storage_metrics(stats)
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([12], [12])
        assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
        assert engine.backend.get_stats().backup_pgs == []
        with pytest.raises(StoreError, match="does not clear a store"):
            engine.controller.clear_storage_backend()
        engine.controller.detach_storage_backend()
        plain = Engine("hybrid", Shape(), group, extra_config("memory:?size=64MiB"))
        assert plain.backend.get_stats() is None
        plain.controller.detach_storage_backend()


def test_sglangs_own_injector_of_failures(start: Start, monkeypatch: pytest.MonkeyPatch, shared_memory: Path) -> None:
    """Calls fail at random before they reach us; what arrives is right."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    engine = start(f"file://{shared_memory}/store?size=64MiB")
    pages: list[bytes] = []
    for _ in range(40):
        pages = engine.store(_TOKENS, 1)[1]
    seen = {engine.load(_TOKENS)[1] for _ in range(40)}
    assert len(_TOKENS) in seen
    while (found := engine.load(_TOKENS))[1] != len(_TOKENS):
        pass
    assert found[2] == pages
