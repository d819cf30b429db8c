"""Real vLLM engines that offload to our tier: the second finds what the first has stored, and no token is another one.

vLLM's own scheduler, OffloadingConnector, tiering manager, host memory and worker; what has stand-ins, because there is
no GPU here, stands in `offloading_on_cpu.py`.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import valkey

from demo.processes import ProcessError, Processes, Server
from kvparams.pages import HEADER_BYTES
from kvparams_connectors.store import Code, GetOp, PutOp, open_store
from tests.connectors.valkey_server import ValkeyServer, wait_until
from tests.vllm.engines import counters, start_engine
from tests.vllm.traffic import Ask, answers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_ROOT: Final = Path(__file__).parents[2]
_TIER: Final = "kvparams_connectors.engines.vllm_tier.tier"
_START_S: Final = 300
_PATIENT: Final = {"lookup_s": 10.0, "deadline_s": 30.0}
"""On a busy machine too all that is stored is loaded."""
_BLOCK: Final = 32
_MAX_BYTES: Final = 1 << 20
_ENGINES: Final = f"kvparams-test-{os.getpid()}-"
"""What their ids begin with."""


def _offload(
    store: str, name: str, *, spec: str = "OnCPU", host_bytes: int = 32 << 20, tier: Mapping[str, object] | None = None
) -> str:
    """vLLM's `--kv-transfer-config` of an engine with our tier."""
    path = {"spec_module_path": "tests.vllm.offloading_on_cpu"} if spec == "OnCPU" else {}
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


def _counted(server: Server) -> dict[str, float]:
    start = "vllm:kvparams_tier_"
    found = {name.removeprefix(start): value for name, value in counters(server).items() if name.startswith(start)}
    return {name: value for name, value in found.items() if "_created" not in name and value}


def _names(server: ValkeyServer) -> list[str]:
    client: Any = valkey.Valkey(port=server.port)
    names = sorted(name.decode() for name in client.scan_iter())
    client.close()
    return names


def _flip(store: str, name: str) -> None:
    """Make one number of a chunk enormous: a bit of its exponent."""
    opened = open_store(store)
    buffer = bytearray(_MAX_BYTES)
    (result,) = opened.get([GetOp(name, (memoryview(buffer),))]).result()
    assert result.code is Code.OK
    at = next(at for at in range(HEADER_BYTES + 4003, result.nbytes, 4) if not buffer[at] & 0x40)
    buffer[at] ^= 0x40
    opened.delete([name]).result()
    (result,) = opened.put([PutOp(name, (memoryview(buffer)[: result.nbytes],))]).result()
    assert result.code is Code.OK
    opened.close()


@pytest.fixture(autouse=True)
def host_memory() -> Iterator[None]:
    """An engine that ends while it starts leaves the file of its host memory behind, and vLLM does not delete it."""
    yield
    for file in Path("/dev/shm").glob(f"vllm_offload_{_ENGINES}*"):
        file.unlink()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path / "valkey", max_memory="512mb") as server:
        yield server


def test_the_second_engine_finds_what_the_first_has_stored(
    model: Path, bare: Server, server: ValkeyServer, tmp_path: Path
) -> None:
    asks = _prompts(1, *_SIZES)
    damaged = _prompts(2, 450)
    with Processes(tmp_path) as processes:
        first = _start(processes, "first", model, _offload(server.url, "first"), core=1)
        expected, expected_damaged = answers(bare.url, asks), answers(bare.url, damaged)
        processes.wait_ready(first, within_s=_START_S)
        assert answers(first.url, asks) == expected
        wait_until(lambda: _counted(first).get("chunks_saved_total", 0) == _CHUNKS, 60)
        before = _names(server)
        assert len(before) == _CHUNKS
        assert answers(first.url, damaged) == expected_damaged
        wait_until(lambda: _counted(first).get("chunks_saved_total", 0) == _CHUNKS + 14, 60)
        processes.stop(first)
        assert "Traceback" not in first.log.read_text("utf-8", "replace")

        (flipped,) = random.Random(3).sample(sorted(set(_names(server)) - set(before)), 1)
        _flip(server.url, flipped)
        blind = _start(processes, "blind", model, _offload(server.url, "blind", tier={"verify": False}))
        second = _start(processes, "second", model, _offload(server.url, "second"), core=1)
        processes.wait_ready(blind, second, within_s=_START_S)
        assert answers(blind.url, damaged) != expected_damaged  # without verification it is believed
        assert _counted(blind)["chunks_loaded_total"] == 14
        assert answers(second.url, asks) == expected
        counts = _counted(second)
        assert counts["chunks_loaded_total"] == _CHUNKS
        assert "chunks_saved_total" not in counts
        seen = counters(second)
        assert seen["vllm:external_prefix_cache_hits_total"] >= (_CHUNKS - len(_SIZES)) * _BLOCK
        assert seen["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"] > 0
        assert answers(second.url, damaged) == expected_damaged  # with it, it is computed
        wait_until(lambda: "chunks_saved_total" in _counted(second), 60)
        assert _counted(second)["chunks_refused_total{reason=flipped_payload}"] == 1
        processes.stop(blind)

        server.kill()
        fresh = _prompts(4, 300, 100)
        again = answers(second.url, fresh)
        assert answers(second.url, asks) == expected
        began = time.monotonic()
        assert answers(second.url, fresh) == again
        assert time.monotonic() - began < 20
        assert _counted(second)["lookups_failed_total"] > 0
        processes.stop(second)
        assert "Traceback" not in second.log.read_text("utf-8", "replace")


def test_what_must_not_be_shared_is_not(model: Path, make_tiny: Any, server: ValkeyServer, tmp_path: Path) -> None:
    """Another model, and what was stored before vLLM has reset its caches."""
    asks = _prompts(5, 200, 300)
    with Processes(tmp_path) as processes:
        first = _start(processes, "first", model, _offload(server.url, "first"))
        transfer = _offload(server.url, "other", tier={"revision": "seed 1"})
        other = _start(processes, "other", make_tiny(seed=1), transfer, core=1)
        processes.wait_ready(first, other, within_s=_START_S)
        expected = answers(first.url, asks)
        wait_until(lambda: _counted(first).get("chunks_saved_total", 0) == 15, 60)
        assert answers(other.url, asks) != expected
        assert "chunks_loaded_total" not in _counted(other)
        response = httpx.post(f"{first.url}/reset_prefix_cache", params={"reset_external": "true"}, timeout=60)
        assert response.status_code == 200, response.text
        assert answers(first.url, asks) == expected
        wait_until(lambda: _counted(first).get("chunks_saved_total", 0) == 30, 60)
        counts = _counted(first)
        assert counts["resets_total"] == 1
        assert "chunks_loaded_total" not in counts


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

    async with httpx.AsyncClient(timeout=300) as client, asyncio.TaskGroup() as group:
        for _ in range(80):
            which = chance.randrange(len(asks))
            patience_s = chance.choice((None, chance.uniform(0.01, 1.0)))
            group.create_task(one(asks[which], expected[which], patience_s))
    return answered


def test_aborts_and_little_memory_leak_nothing(model: Path, bare: Server, server: ValkeyServer, tmp_path: Path) -> None:
    """Both caches are too small for what runs: the engine preempts, host memory gives up chunks, clients leave."""
    chance = random.Random(7)
    shared = [chance.randrange(300, 2000) for _ in range(256)]
    asks = [Ask(shared[: chance.choice((64, 256))] + chance.choices(range(300, 2000), k=120), 40) for _ in range(12)]
    with Processes(tmp_path) as processes:
        transfer = _offload(server.url, "small", host_bytes=1 << 20)
        small = _start(processes, "small", model, transfer, core=1, cache_bytes=5 << 20)
        expected = answers(bare.url, asks)
        processes.wait_ready(small, within_s=_START_S)
        assert answers(small.url, asks) == expected
        answered = asyncio.run(_storm(small.url, asks, expected, chance))
        assert answered > 20
        busy = [f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
        wait_until(lambda: not any(counters(small)[name] for name in busy), 60, pause_s=0.2)
        pinned = "vllm:kv_offload_tiering_active_"
        wait_until(lambda: not any(v for k, v in counters(small).items() if k.startswith(pinned)), 60, pause_s=0.2)
        assert _counted(small)["chunks_loaded_total"] > 0
        assert "chunks_refused_total{reason=flipped_payload}" not in _counted(small)
        assert answers(small.url, asks) == expected
        assert "Traceback" not in small.log.read_text("utf-8", "replace")


def test_two_workers(model: Path, server: ValkeyServer, tmp_path: Path) -> None:
    """Tensor parallel 2: a chunk has both workers' parts, and is none of an engine with one worker."""
    asks = _prompts(6, 100, 300)
    with Processes(tmp_path) as processes:
        told = ("--tensor-parallel-size", "2")
        first = _start(processes, "first", model, _offload(server.url, "first"), *told)
        processes.wait_ready(first, within_s=_START_S)
        expected = answers(first.url, asks)
        wait_until(lambda: _counted(first).get("chunks_saved_total", 0) == 12, 60)
        processes.stop(first)
        second = _start(processes, "second", model, _offload(server.url, "second"), *told)
        processes.wait_ready(second, within_s=_START_S)
        assert answers(second.url, asks) == expected
        wait_until(lambda: _counted(second).get("chunks_loaded_total", 0) == 12, 60)
        processes.stop(second)
        single = _start(processes, "single", model, _offload(server.url, "single"))
        processes.wait_ready(single, within_s=_START_S)
        assert answers(single.url, asks) == expected
        assert "chunks_loaded_total" not in _counted(single)


def test_what_cannot_work_ends_the_engine_in_words(model: Path, server: ValkeyServer, tmp_path: Path) -> None:
    """Also vLLM as it is: it gets as far as making our tier; what stops it is its own copying between GPU and host."""
    refused = {
        "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs": _offload(
            server.url, "stock", spec="TieringOffloadingSpec"
        ),
        "unknown setting stroe; known: store, model, revision": _offload(server.url, "typo", tier={"stroe": 1}),
        "valkey store: unknown setting time": _offload(
            server.url, "url", tier={"store": "valkey://127.0.0.1:1?time=5"}
        ),
    }
    with Processes(tmp_path) as processes:
        engines = {
            words: _start(processes, f"E{number}", model, transfer)
            for number, (words, transfer) in enumerate(refused.items())
        }
        for words, engine in engines.items():
            with pytest.raises(ProcessError):
                processes.wait_ready(engine, within_s=_START_S)
            assert words in engine.log.read_text("utf-8", "replace")
