"""Tests the tier under vLLM's own TieringOffloadingManager and host memory, without an engine."""

# pyright: reportPrivateUsage=false
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvparams.pages import HEADER_BYTES
from kvparams_connectors.engines.vllm_tier.chunk_pipeline import OffloadChunkPipeline
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, open_store
from kvparams_connectors.store_url import StoreError
from tests.interop.vllm.offloading_engine import (
    ROW,
    USED,
    Engine,
    base,
    compute,
    engines,
    keys_of,
    offloading_config,
    spec,
    wanted,
)
from tests.interop.vllm.real_stores import KINDS, running_store
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def file_store(shared_memory: Path) -> str:
    return f"file://{shared_memory}/kv?size=32MiB"


@pytest.fixture(params=[kind for kind in KINDS if kind != "peer"])
def shared_store(request: pytest.FixtureRequest, shared_memory: Path) -> Iterator[str]:
    """What engines share, each a real one; with `tiered` each has memory of its own before it."""
    with running_store(request.param, shared_memory) as urls:
        yield urls.writing


def test_the_second_engine_loads_what_the_first_has_stored(shared_store: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = keys_of(1, 10)
    with engines(shared_store, shared_store) as (first, second):
        assert first.serve(keys) == wanted(keys)
        first.settle()
        assert first.counts() == {"chunks_saved": 10, "bytes_saved": 10 * USED}
        more = keys + keys_of(2, 3)
        assert second.serve(more) == wanted(more)
        second.settle()
        assert second.counts() == {
            "chunks_loaded": 10,
            "bytes_loaded": 10 * USED,
            "chunks_saved": 3,
            "bytes_saved": 3 * USED,
        }
        assert second.serve(more) == wanted(more)  # from host memory
        second.settle()
        assert second.counts() == {}
        assert first.tier._asking.size == second.tier._asking.size == 0
    assert "Failed to close mmap_obj" not in caplog.text  # nothing holds vLLM's memory any more


def test_what_host_memory_gave_up_comes_back(shared_store: str) -> None:
    with engines(shared_store, rows=4) as (engine,):
        prompts = [keys_of(seed, 3) for seed in range(6)]
        for keys in prompts:
            assert engine.serve(keys) == wanted(keys)
            engine.settle()
        engine.counts()
        for keys in prompts:
            assert engine.serve(keys) == wanted(keys)
            engine.settle()
        assert engine.counts()["chunks_loaded"] >= 12


def _stored(store: KVStore, engine: Engine, key: bytes) -> tuple[str, bytearray]:
    name = engine.tier._form.name(key)
    buffer = bytearray(ROW * 2)
    (result,) = store.get([GetOp(name, (memoryview(buffer),))]).result()
    assert result.code is ResultCode.OK
    return name, buffer[: result.nbytes]


def test_a_damaged_chunk_is_computed_and_stored_anew(tmp_path: Path) -> None:
    keys = keys_of(3, 6)
    with ValkeyServer(tmp_path) as server, engines(server.url, server.url, server.url) as (first, second, third):
        assert first.serve(keys) == wanted(keys)
        first.settle()
        store = open_store(server.url)
        name, value = _stored(store, first, keys[2])
        value[HEADER_BYTES + 1000] ^= 4
        store.delete([name]).result()
        store.put([PutOp(name, (memoryview(value),))]).result()
        assert second.serve(keys) == wanted(keys)
        second.settle()
        counts = second.counts()
        assert (counts["chunks_loaded"], counts["chunks_refused/flipped_payload"]) == (5, 1)
        assert counts["chunks_saved"] == 1  # the one that was damaged and computed; vLLM offers no others
        assert _stored(store, first, keys[2])[1][HEADER_BYTES:] == compute(keys[2])
        assert third.serve(keys) == wanted(keys)
        third.settle()
        assert third.counts() == {"chunks_loaded": 6, "bytes_loaded": 6 * USED}
        store.close()


def test_without_verification_a_damaged_chunk_is_believed(file_store: str) -> None:
    keys = keys_of(3, 3)
    with (
        engines(file_store) as (first,),
        engines(file_store, told={"module_path": "tests.interop.vllm.unverified_tier"}) as (blind,),
    ):
        first.serve(keys)
        first.settle()
        store = open_store(file_store)
        name, value = _stored(store, first, keys[1])
        value[HEADER_BYTES + 1000] ^= 4
        store.delete([name]).result()
        store.put([PutOp(name, (memoryview(value),))]).result()
        assert blind.serve(keys) != wanted(keys)
        store.close()


def test_a_chunk_that_went_is_computed(file_store: str) -> None:
    """It goes between the question and the load."""
    keys = keys_of(4, 5)
    with engines(file_store, file_store) as (first, second):
        first.serve(keys)
        first.settle()
        context = base.ReqContext("early")
        second.manager.on_new_request(context)
        wait_until(lambda: [second.step(), second.tier.lookup(keys[3], context)][1] is not base.LookupResult.RETRY)
        store = open_store(file_store)
        store.delete([second.tier._form.name(keys[3])]).result()
        hits = second.found(context, keys)
        assert hits == 3
        second.manager.on_request_finished(context)
        second.settle()
        counts = second.counts()
        assert counts["chunks_gone"] == 1
        assert counts["chunks_loaded"] in (3, 4)  # the one behind it as well, if its load had begun
        store.close()


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"told": {"revision": "s"}}, {"told": {"model": "n"}}])
def test_other_models_share_nothing(file_store: str, change: dict[str, Any]) -> None:
    keys = keys_of(5, 4)
    with engines(file_store) as (first,), engines(file_store, **change) as (other,):
        first.serve(keys)
        first.settle()
        assert other.serve(keys) == wanted(keys)
        other.settle()
        assert other.counts()["chunks_saved"] == 4


def test_a_store_that_dies_costs_no_deadline_and_no_answer(tmp_path: Path) -> None:
    long = {"deadline_s": 300.0}
    with ValkeyServer(tmp_path) as server, engines(server.url, told=long) as (engine,):
        first = keys_of(6, 4)
        assert engine.serve(first) == wanted(first)
        engine.settle()
        server.kill()
        began = time.monotonic()
        for seed in range(7, 17):
            keys = keys_of(seed, 4)
            assert engine.serve(keys) == wanted(keys)
            engine.settle()
        assert time.monotonic() - began < 60
        counts = engine.counts()
        assert counts["lookups_failed"] > 0
        assert any(name.startswith("store_failures/") for name in counts)


def test_after_a_reset_nothing_older_is_used(file_store: str) -> None:
    """vLLM resets its caches when weights change."""
    keys = keys_of(8, 4)
    with engines(file_store, file_store) as (engine, other):
        assert engine.serve(keys) == wanted(keys)
        engine.manager.reset_cache()
        engine.counts()
        assert engine.serve(keys) == wanted(keys)
        engine.settle()
        assert engine.counts() == {"chunks_saved": 4, "bytes_saved": 4 * USED}
        assert other.serve(keys) == wanted(keys)
        other.settle()
        assert other.counts()["chunks_loaded"] == 4  # of before
    with engines(file_store, told={"keep_on_reset": True}) as (keeping,):
        keeping.manager.reset_cache()
        assert keeping.serve(keys) == wanted(keys)
        keeping.settle()
        assert keeping.counts()["chunks_loaded"] == 4


def test_a_hash_that_can_be_forged_is_left_alone(file_store: str) -> None:
    short = [base.make_offload_key(bytes([number] * 16), 0) for number in range(3)]
    with engines(file_store, file_store) as (first, second):
        assert first.serve(short) == wanted(short)
        first.settle()
        assert first.counts() == {"chunks_nameless": 3}
        assert second.serve(short) == wanted(short)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"stroe": 1}, "stroe: is not known here; did you mean store"),
        ({"revision": None}, "the KV layout depends on the attention backend"),
        ({"store": "nothing://x"}, "nothing"),
        ({"store": "valkey://127.0.0.1:1?time=5"}, "valkey store: time: is not known here"),
        ({"locality": "HERE"}, "must be LOCAL or REMOTE"),
    ],
)
def test_what_is_wrong_is_refused_when_the_engine_starts(file_store: str, told: dict[str, Any], words: str) -> None:
    config = offloading_config(file_store, told=told)
    tier = config.extra_config["secondary_tiers"][0]
    for name in [name for name, value in told.items() if value is None]:
        del tier[name]
    with pytest.raises(Exception, match=words):
        spec.TieringOffloadingSpec(config).get_manager()


def test_rows_that_are_other_than_expected_are_refused(file_store: str) -> None:
    made = spec.TieringOffloadingSpec(offloading_config(file_store))
    made.config = type("Config", (), {**vars(made.config), "worker_kv_bytes_per_block": 100})()
    with pytest.raises(StoreError, match="8192 bytes in vLLM's host memory, but 200 bytes"):
        made.get_manager()


def test_vllm_itself_does_not_offload_from_a_cpu(file_store: str) -> None:
    """Why the tests of whole engines have stand-ins (`offloading_on_cpu.py`); should it ever work, they can go."""
    with pytest.raises(Exception, match="only supported on CUDA-alike and XPU GPUs"):
        spec.TieringOffloadingSpec(offloading_config(file_store)).get_worker(None)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asks=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 6), st.booleans()), min_size=1, max_size=14
    ),
    lost=st.sets(st.integers(0, 13), max_size=5),
)
def test_whatever_two_engines_do_every_chunk_is_right(
    shared_memory: Path, asks: list[tuple[int, int, int, bool]], lost: set[int]
) -> None:
    """Prompts with common beginnings, host memory that is too small, a store that loses and damages chunks."""
    store = f"file://{shared_memory}/{uuid4().hex}?size=8MiB"
    chance = random.Random(0)
    with engines(store, store, rows=6) as pair:
        other = open_store(store)
        for number, (which, prompt, count, quiet) in enumerate(asks):
            keys = keys_of(prompt, 6)[:count]
            assert pair[which].serve(keys) == wanted(keys)
            if quiet:
                pair[which].settle()
            if number in lost:
                name = pair[0].tier._form.name(chance.choice(keys))
                buffer = bytearray(ROW * 2)
                (result,) = other.get([GetOp(name, (memoryview(buffer),))]).result()
                if result.code is ResultCode.OK:
                    other.delete([name]).result()
                    if quiet:
                        buffer[chance.randrange(result.nbytes)] ^= 1
                        other.put([PutOp(name, (memoryview(buffer)[: result.nbytes],))]).result()
        for engine in pair:
            engine.settle()
            assert engine.tier._asking.size == 0
            assert not engine.manager._jobs
        other.close()


def test_a_full_store_looks_like_success(shared_memory: Path) -> None:
    """Best effort: what does not fit drives out what is older, and no request is the worse for it."""
    with engines(f"file://{shared_memory}/kv?size=1MiB", rows=64) as (engine,):
        for seed in range(40):
            keys = keys_of(seed, 8)
            assert engine.serve(keys) == wanted(keys)
        engine.settle()
        assert engine.counts()["chunks_saved"] > 100


def test_the_self_test_is_done_before_serving(file_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[bool] = []
    real: Callable[[OffloadChunkPipeline], bool] = OffloadChunkPipeline.self_test

    def noted(moving: OffloadChunkPipeline) -> None:
        done.append(real(moving))

    monkeypatch.setattr(OffloadChunkPipeline, "self_test", noted)
    with engines(file_store) as (engine,):
        assert done == [True]
        assert engine.counts() == {}
