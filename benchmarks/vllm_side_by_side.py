"""Our connector beside vLLM's own ways to keep KV, in one run: time to first token on a hit, throughput, bytes stored.

    .venv-vllm/bin/python -m benchmarks.vllm_side_by_side [--rounds 30] [--sides NAME,NAME] [--json FILE]

Each side is an engine of its own without a prefix cache; all run at the same time and work in turns, in an
order that changes from round to round. `bare` has no connector. A side that does not start is told with its error.

- mooncake-store: vLLM's MooncakeStoreConnector, over TCP; where it asks CUDA for a device it is answered
  (tests/interop/vllm/without_gpu.py). ours-mooncake: ours with a store on a cluster like it.
- offloading: vLLM's OffloadingConnector; vLLM refuses it on a CPU, so it runs with the stand-ins of
  tests/interop/vllm/offloading_on_cpu.py, which copy while the engine waits. `offloading-plain` is what vLLM says
  without them.
- lmcache: vLLM's LMCacheConnectorV1 with memory of the host; it needs the package lmcache beside vLLM.
- hit: 1,500 stored tokens and one of its own, one token asked for; its ratio to computing them on `bare`.
- throughput: 16 requests, 8 at a time, of 600 tokens each; every second round meets the first 512 of the one before,
  and is told apart from the others.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import httpx

from benchmarks.ratios import median_interval
from benchmarks.vllm_bench import body_of, in_rounds, timed, together
from demo.processes import ProcessError, Processes, Server
from tests.interop.vllm.engines import counters, start_engine, transfer_config
from tests.interop.vllm.own_connectors import mooncake_store
from tests.interop.vllm.tiny_model import make_model
from tests.support.connectors.mooncake_cluster import Cluster

__all__ = ["main"]

_PREFIX_TOKENS: Final = 1500
_READY_S: Final = 600.0
_ROOT: Final = str(Path(__file__).parents[1])
_ERROR: Final = re.compile(r"\b[A-Z]\w*Error: .+$", re.MULTILINE)
_BYTES: Final = re.compile(
    r"vllm:(kvparams_bytes_saved_total|kv_offload_store_bytes_total|mooncake_store_operation_bytes_total\{.*put.*\})"
)
"""Counters of bytes that were stored, by whoever has them."""


@dataclass(frozen=True, slots=True)
class _Side:
    """A `_Side` says how an engine is started."""

    transfer: str | None
    environment: dict[str, str] = field(default_factory=dict[str, str])


def _offloading(*, stand_ins: bool) -> str:
    more = {"spec_name": "OnCPU", "spec_module_path": "tests.interop.vllm.offloading_on_cpu"} if stand_ins else {}
    extra = {"cpu_bytes_to_use": 256 << 20, **more}
    told = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": "offloading"}
    return json.dumps({**told, "kv_connector_extra_config": extra})


def _sides(folder: Path, memory: str, stack: ExitStack, wanted: Callable[[str], bool]) -> dict[str, _Side]:
    sides = {"bare": _Side(None), "ours-file": _Side(transfer_config(f"file://{memory}/kv?size=512MiB"))}
    if wanted("ours-mooncake"):
        (folder / "ours").mkdir()
        ours = stack.enter_context(Cluster(folder / "ours", "512MiB"))
        sides["ours-mooncake"] = _Side(transfer_config(ours.url(local="127.0.0.1")))
    if wanted("mooncake-store"):
        (folder / "theirs").mkdir()
        theirs = stack.enter_context(Cluster(folder / "theirs"))
        own = mooncake_store("mooncake-store", theirs.address, folder)
        sides["mooncake-store"] = _Side(own.transfer, own.environment)
    sides["offloading"] = _Side(_offloading(stand_ins=True))
    sides["offloading-plain"] = _Side(_offloading(stand_ins=False))
    lmcache = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "engine_id": "lmcache"}
    sides["lmcache"] = _Side(json.dumps(lmcache), {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.5"})
    return {name: side for name, side in sides.items() if wanted(name)}


def _start(processes: Processes, model: Path, sides: Mapping[str, _Side]) -> dict[str, Server]:
    """Returns the engines that start, and prints why the others do not."""
    path = os.pathsep.join([_ROOT, os.environ.get("PYTHONPATH", "")])
    servers = {
        name: start_engine(
            processes,
            name,
            model,
            "--no-enable-prefix-caching",
            transfer=side.transfer,
            environment={"PYTHONPATH": path, **side.environment},
        )
        for name, side in sides.items()
    }
    found: dict[str, Server] = {}
    for name, server in servers.items():
        try:
            processes.wait_ready(server, within_s=_READY_S)
        except ProcessError:
            said = _ERROR.findall(server.log.read_text("utf-8", "replace"))
            print(f"{name} does not start: {said[0] if said else server.tail()}")
        else:
            found[name] = server
    return found


def _stored_bytes(server: Server) -> float:
    """Returns the bytes that an engine reports as stored."""
    return sum(value for name, value in counters(server).items() if _BYTES.match(name))


def _measure(servers: Mapping[str, Server], rounds: int) -> dict[str, object]:
    chance = random.Random(1)
    told: dict[str, object] = {}
    before = {name: _stored_bytes(server) for name, server in servers.items()}
    shared = [chance.randrange(300, 2000) for _ in range(_PREFIX_TOKENS)]
    with httpx.Client(timeout=120) as client:

        def first_token(server: Server) -> Callable[[int], float]:
            return lambda number: timed(client, server.url, body_of([*shared, 300 + number], 1))

        sides = {name: first_token(server) for name, server in servers.items()}
        in_rounds(3, sides)
        after = {name: _stored_bytes(server) for name, server in servers.items()}
        hits = in_rounds(rounds, sides)

    def requests(server: Server) -> Callable[[int], float]:
        def run(number: int) -> float:
            draw = random.Random(number // 2)  # every second round meets the prefixes of the one before
            prefixes = [[draw.randrange(300, 2000) for _ in range(512)] for _ in range(16)]
            bodies = [body_of([*prefix, *(chance.randrange(300, 2000) for _ in range(88))], 8) for prefix in prefixes]
            return asyncio.run(together(server.url, bodies))

        return run

    work = in_rounds(rounds, {name: requests(server) for name, server in servers.items()})
    for name, server in servers.items():
        hit = median_interval([a / b for a, b in zip(hits[name], hits["bare"], strict=True)])
        ratios = [b / a for a, b in zip(work[name], work["bare"], strict=True)]
        new, met = median_interval(ratios[::2]), median_interval(ratios[1::2])
        stored = after[name] - before[name]
        external = counters(server).get("vllm:external_prefix_cache_hits_total", 0.0)
        told[name] = {
            "hit": asdict(hit),
            "hit_ms": statistics.median(hits[name]) * 1e3,
            "throughput_new": asdict(new),
            "throughput_met": asdict(met),
            "bytes_of_prefix": stored,
            "tokens_found": external,
        }
        print(
            f"{name}: first token / bare {hit} ({statistics.median(hits[name]) * 1e3:.1f} ms), throughput / bare "
            f"{new} where all is new, {met} where prefixes are met again, {external:.0f} tokens found, "
            f"{stored / 1024:.0f} KiB stored of the prefix"
        )
    return told


def main() -> None:
    """Run, print the table, and write it down if told where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sides", help="only these, and bare")
    parser.add_argument("--json", type=Path, help="append one line of JSON to this file")
    told = parser.parse_args()
    only = None if told.sides is None else {"bare", *told.sides.split(",")}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        sides = _sides(folder, memory, stack, lambda name: only is None or name in only)
        processes = stack.enter_context(Processes(folder))
        servers = _start(processes, make_model(folder / "model"), sides)
        found = _measure(servers, told.rounds)
    if told.json is not None:
        with told.json.open("a") as file:
            file.write(json.dumps({"day": time.strftime("%Y-%m-%d"), "rounds": told.rounds, **found}) + "\n")


if __name__ == "__main__":
    main()
