"""Tests real vLLM engines that offload to our tier: the second finds what the first stored, and all tokens are equal.

The scheduler, OffloadingConnector, tiering manager, host memory and worker are vLLM's own. `offloading_on_cpu.py` has
the stand-ins for a GPU.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import valkey

from demo.processes import ProcessError, Processes, Server
from kvparams.pages import HEADER_BYTES
from kvparams_connectors.store import GetOp, PutOp, ResultCode, open_store
from tests.interop.vllm.engines import ANSWER_S, PATIENCE_S, READY_S, counters, start_engine, until
from tests.interop.vllm.traffic import Ask, answers
from tests.support.connectors.valkey_server import ValkeyServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

_ROOT: Final = Path(__file__).parents[3]
_TIER: Final = "kvparams_connectors.engines.vllm_tier.tier"
_PATIENT: Final = {"deadline_s": 5 * PATIENCE_S}
"""On a busy machine too all that is stored is loaded."""
_BLOCK: Final = 32
_MAX_BYTES: Final = 1 << 20
_ENGINES: Final = f"kvparams-test-{os.getpid()}-"
"""What their ids begin with."""


def _offload(
    store: str, name: str, *, spec: str = "OnCPU", host_bytes: int = 32 << 20, tier: Mapping[str, object] | None = None
) -> str:
    """vLLM's `--kv-transfer-config` of an engine with our tier."""
    path = {"spec_module_path": "tests.interop.vllm.offloading_on_cpu"} if spec == "OnCPU" else {}
    told = {
        "type": "KVParamsTier",
        "module_path": _TIER,
        "store": store,
        "revision": "seed 0",
        **_PATIENT,
        **(tier or {}),
    }
    extra = {"spec_name": spec, **path, "cpu_bytes_to_use": host_bytes, "secondary_tiers": [told]}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": f"{_ENGINES}{name}"}
    return json.dumps({**config, "kv_connector_extra_config": extra})


def _start(
    processes: Processes, name: str, model: Path, transfer: str | None, *arguments: str, core: int = 0, **more: Any
) -> Server:
    environment = {"PYTHONPATH": str(_ROOT), "VLLM_SERVER_DEV_MODE": "1"}  # the latter for /reset_prefix_cache
    if "--tensor-parallel-size" in arguments:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    return start_engine(
        processes, name, model, *arguments, transfer=transfer, core=core, environment=environment, **more
    )


def _prompts(seed: int, *sizes: int) -> list[Ask]:
    chance = random.Random(seed)
    return [Ask([chance.randrange(300, 2000) for _ in range(size)]) for size in sizes]


_SIZES: Final = (1, 31, 32, 33, 64, 65, 127, 200, 257, 300, 450, 700)
_CHUNKS: Final = sum(size // _BLOCK for size in _SIZES)


def _counted(server: Server) -> Counter[str]:
    start = "vllm:kvparams_tier_"
    found = {name.removeprefix(start): value for name, value in counters(server).items() if name.startswith(start)}
    return Counter({name: int(value) for name, value in found.items() if "_created" not in name})


def _saved(server: Server, before: Counter[str], count: int) -> None:
    """Wait until it has saved so many chunks since then, and see that it is no more."""
    until(lambda: (_counted(server) - before)["chunks_saved_total"] >= count, seen=lambda: _counted(server) - before)
    assert (_counted(server) - before)["chunks_saved_total"] == count


def _names(server: ValkeyServer) -> set[str]:
    client: Any = valkey.Valkey(port=server.port)
    names = {name.decode() for name in client.scan_iter()}
    client.close()
    return names


def _flip(store: str, name: str) -> None:
    """Make one number of a chunk enormous: a bit of its exponent."""
    opened = open_store(store)
    buffer = bytearray(_MAX_BYTES)
    (result,) = opened.get([GetOp(name, (memoryview(buffer),))]).result()
    assert result.code is ResultCode.OK
    at = next(at for at in range(HEADER_BYTES + 4003, result.nbytes, 4) if not buffer[at] & 0x40)
    buffer[at] ^= 0x40
    opened.delete([name]).result()
    (result,) = opened.put([PutOp(name, (memoryview(buffer)[: result.nbytes],))]).result()
    assert result.code is ResultCode.OK
    opened.close()


@dataclass(frozen=True, slots=True)
class _World:
    """Engines that share a store; each test has prompts of its own."""

    server: ValkeyServer
    first: Server
    second: Server
    blind: Server
    """Does not verify."""
    other: Server
    """Of another model."""
    small: Server
    """Without room, for KV and in host memory."""


@pytest.fixture(scope="module")
def host_memory() -> Iterator[None]:
    """An engine that ends while it starts leaves the file of its host memory behind, and vLLM does not delete it."""
    yield
    for file in Path("/dev/shm").glob(f"vllm_offload_{_ENGINES}*"):
        file.unlink()


@pytest.fixture(scope="module")
def world(
    model: Path, make_tiny: Callable[..., Path], host_memory: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_World]:
    folder = tmp_path_factory.mktemp("offloading")
    with ValkeyServer(folder / "valkey", max_memory="512mb") as server, Processes(folder) as processes:

        def start(name: str, made: Path = model, core: int = 0, cache: int = 64 << 20, **told: Any) -> Server:
            return _start(processes, name, made, _offload(server.url, name, **told), core=core, cache_bytes=cache)

        found = _World(
            server,
            first=start("first"),
            second=start("second", core=1),
            blind=start("blind", tier={"module_path": "tests.interop.vllm.unverified_tier"}),
            other=start("other", make_tiny(seed=1), 1, tier={"revision": "seed 1"}),
            small=start("small", core=1, cache=5 << 20, host_bytes=1 << 20),
        )
        engines = (found.first, found.second, found.blind, found.other, found.small)
        processes.wait_ready(*engines, within_s=READY_S)
        yield found
        processes.stop(*engines)
        for engine in engines:
            assert "Traceback" not in engine.log.read_text("utf-8", "replace"), engine.name


def test_the_second_engine_finds_what_the_first_has_stored(world: _World, bare: Server) -> None:
    asks = _prompts(1, *_SIZES)
    expected = answers(bare.url, asks)
    names, before = _names(world.server), _counted(world.first)
    assert answers(world.first.url, asks) == expected
    _saved(world.first, before, _CHUNKS)
    assert len(_names(world.server) - names) == _CHUNKS
    before, engines = _counted(world.second), counters(world.second)
    assert answers(world.second.url, asks) == expected
    counts, seen = _counted(world.second) - before, counters(world.second)
    assert counts["chunks_loaded_total"] == _CHUNKS
    assert not counts["chunks_saved_total"]
    hits, outside = (
        "vllm:external_prefix_cache_hits_total",
        "vllm:prompt_tokens_by_source_total{source=external_kv_transfer}",
    )
    assert seen[hits] - engines[hits] >= (_CHUNKS - len(_SIZES)) * _BLOCK
    assert seen[outside] > engines[outside]


def test_a_flipped_byte_is_computed_and_without_verification_believed(world: _World, bare: Server) -> None:
    damaged = _prompts(2, 450)
    expected = answers(bare.url, damaged)
    names, before = _names(world.server), _counted(world.first)
    assert answers(world.first.url, damaged) == expected
    _saved(world.first, before, 14)
    (flipped,) = random.Random(3).sample(sorted(_names(world.server) - names), 1)
    _flip(world.server.url, flipped)
    before = _counted(world.blind)
    assert answers(world.blind.url, damaged) != expected
    assert (_counted(world.blind) - before)["chunks_loaded_total"] == 14
    before = _counted(world.second)
    assert answers(world.second.url, damaged) == expected
    until(lambda: (_counted(world.second) - before)["chunks_saved_total"] > 0)
    assert (_counted(world.second) - before)["chunks_refused_total{reason=flipped_payload}"] == 1


def test_what_must_not_be_shared_is_not(world: _World) -> None:
    """Another model, and what was stored before vLLM has reset its caches; from then on `first` shares with nobody."""
    asks = _prompts(5, 200, 300)
    first, other = world.first, world.other
    before = _counted(first)
    expected = answers(first.url, asks)
    _saved(first, before, 15)
    assert answers(other.url, asks) != expected
    assert not _counted(other)["chunks_loaded_total"]
    response = httpx.post(f"{first.url}/reset_prefix_cache", params={"reset_external": "true"}, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    assert answers(first.url, asks) == expected
    _saved(first, before, 30)
    counts = _counted(first) - before
    assert counts["resets_total"] == 1
    assert not counts["chunks_loaded_total"]


async def _storm(url: str, asks: list[Ask], expected: list[str], chance: random.Random) -> int:
    """Eight at a time, many given up; how many were answered."""
    gate, answered = asyncio.Semaphore(8), 0

    async def one(ask: Ask, right: str, patience_s: float | None) -> None:
        nonlocal answered
        async with gate:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    response = await client.post(f"{url}/v1/completions", json=ask.body())
                    assert response.status_code == 200, response.text
                    assert str(response.json()["choices"][0]["token_ids"]) == right
                    answered += 1

    async with httpx.AsyncClient(timeout=ANSWER_S) as client, asyncio.TaskGroup() as group:
        for _ in range(80):
            which = chance.randrange(len(asks))
            patience_s = chance.choice((None, chance.uniform(0.01, 1.0)))
            group.create_task(one(asks[which], expected[which], patience_s))
    return answered


def test_aborts_and_little_memory_leak_nothing(world: _World, bare: Server) -> None:
    """Both caches are too small for what runs: the engine preempts, host memory gives up chunks, clients leave."""
    chance = random.Random(7)
    shared = [chance.randrange(300, 2000) for _ in range(256)]
    asks = [Ask(shared[: chance.choice((64, 256))] + chance.choices(range(300, 2000), k=120), 40) for _ in range(12)]
    small = world.small
    expected = answers(bare.url, asks)
    assert answers(small.url, asks) == expected
    answered = asyncio.run(_storm(small.url, asks, expected, chance))
    assert answered > 20
    busy = [f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    until(lambda: not any(counters(small)[name] for name in busy))
    pinned = "vllm:kv_offload_tiering_active_"
    until(lambda: not any(v for k, v in counters(small).items() if k.startswith(pinned)))
    assert _counted(small)["chunks_loaded_total"] > 0
    assert not _counted(small)["chunks_refused_total{reason=flipped_payload}"]
    assert answers(small.url, asks) == expected


def test_two_workers(world: _World, model: Path, tmp_path: Path) -> None:
    """Tensor parallel 2: a chunk has both workers' parts, and is none of an engine with one worker."""
    asks = _prompts(6, 100, 300)
    with Processes(tmp_path) as processes:
        one, another = (
            _start(processes, name, model, _offload(world.server.url, name), "--tensor-parallel-size", "2")
            for name in ("one", "another")
        )
        processes.wait_ready(one, another, within_s=READY_S)
        before = _counted(one)
        expected = answers(one.url, asks)
        _saved(one, before, 12)
        assert answers(another.url, asks) == expected
        until(lambda: _counted(another)["chunks_loaded_total"] >= 12, seen=lambda: _counted(another))
        assert _counted(another)["chunks_loaded_total"] == 12
        before = _counted(world.second)
        assert answers(world.second.url, asks) == expected
        assert not (_counted(world.second) - before)["chunks_loaded_total"]


def test_what_cannot_work_ends_the_engine_in_words(
    world: _World, model: Path, host_memory: None, tmp_path: Path
) -> None:
    """Also vLLM as it is: it gets as far as making our tier; what stops it is its own copying between GPU and host."""
    url = world.server.url
    refused = {
        "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs": _offload(
            url, "stock", spec="TieringOffloadingSpec"
        ),
        "stroe: is not known here; did you mean store": _offload(url, "typo", tier={"stroe": 1}),
    }
    with Processes(tmp_path) as processes:
        engines = {
            words: _start(processes, f"E{number}", model, transfer)
            for number, (words, transfer) in enumerate(refused.items())
        }
        for words, engine in engines.items():
            with pytest.raises(ProcessError):
                processes.wait_ready(engine, within_s=READY_S)
            assert words in engine.log.read_text("utf-8", "replace")


def test_a_store_that_was_killed_costs_time_alone(world: _World, bare: Server) -> None:
    """The last one: nothing is stored any more."""
    asks, fresh = _prompts(8, 200, 450), _prompts(4, 300, 100)
    expected = answers(bare.url, [*asks, *fresh])
    assert answers(world.second.url, asks) == expected[:2]
    world.server.kill()
    assert answers(world.second.url, fresh) == expected[2:]
    assert answers(world.second.url, asks) == expected[:2]
    began = time.monotonic()
    assert answers(world.second.url, fresh) == expected[2:]
    assert time.monotonic() - began < PATIENCE_S / 2  # nobody waited for a deadline
    assert _counted(world.second)["lookups_failed_total"] > 0
