"""Our connector inside a real vLLM: time to first token on a hit, and what it costs where nothing is found.

    .venv-vllm/bin/python -m benchmarks.vllm_bench hit [--rounds 30] [--json FILE]
    .venv-vllm/bin/python -m benchmarks.vllm_bench lookup|store [--rounds 30] [--tokens 1000] [--model NAME] [--itself]

On a CPU with a tiny model, or one that people serve: ratios mean something, seconds do not. All engines of a comparison
run at the same time, each with one thread that computes, and one of them works at a time: within a round each has its
turn, in an order that changes.

- hit: a prompt of 1,500 tokens whose prefix is stored, on engines whose own cache is off, against the same prompt with
  another salt, which is found nowhere and computed; with the rule that skips loads slower than computing off and on,
  and on with a store that is said to be slow.
- lookup, store: completions of random prompts, eight at a time, all computed: with our connector as a consumer, which
  looks up and stores nothing, or as a cache that stores all; in the same engine while its connector is taken out, as
  two engines that are alike differ by some percent; in an engine with a connector that does nothing, and in two with
  none, whose ratio says by how much engines differ.
  What a save costs is the processor time of the engine beyond that without the connector, for each byte stored, beside
  memcpy of as many bytes to memory that is not in a cache.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import numpy as np
import torch

from benchmarks.ratios import Interval, median_interval
from demo.processes import Processes, Server
from tests.interop.vllm.engines import counters, start_engine, transfer_config
from tests.interop.vllm.tiny_model import TINY, Shape, make_model

__all__ = ["Rounds", "body_of", "engine_cpu_s", "in_rounds", "main", "timed", "together"]

_PREFIX_TOKENS: Final = 1500
_READY_S: Final = 600.0
_OUT: Final = "taken out"
"""The engine with our connector, while it has none."""
_BARE: Final = ("bare", "bare too")
_AT_ONCE: Final = 8
_SAVED: Final = "vllm:kvparams_bytes_saved_total"
_ASKED: Final = "vllm:external_prefix_cache_queries_total"
_STILL_S: Final = 0.02
"""So long an engine uses no processor before it counts as done."""
_DONE_S: Final = 60.0
"""What it saves behind its answers takes less."""
_ROOT: Final = str(Path(__file__).parents[1])
Rounds = dict[str, list[float]]
"""By name: seconds in each round."""


class _Model(NamedTuple):
    """A model with random weights, and what is asked of it."""

    shape: Shape
    dtype: str
    requests: Mapping[int, int]
    """By the tokens of a prompt: how many are timed together."""
    store: str
    """So small that soon all of its memory has been written once, as in a store that has run for a while."""
    cache_bytes: int


_MODELS: Final = {
    "tiny": _Model(TINY, "float32", {200: 64, 1000: 16}, "64MiB", 64 << 20),
    # A small one that people serve; its config.json at HuggingFaceTB/SmolLM2-135M. The vocabulary is the tiny one's.
    "smollm2-135m": _Model(Shape(30, 576, 1536, 9, 3, 64), "bfloat16", {200: 16, 1000: 4}, "256MiB", 512 << 20),
}


def body_of(prompt: Sequence[int], tokens: int, salt: str | None = None) -> dict[str, object]:
    """A completion, greedy."""
    body: dict[str, object] = {"model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
    return {**body, "ignore_eos": True, **({} if salt is None else {"cache_salt": salt})}


def timed(client: httpx.Client, url: str, body: Mapping[str, object]) -> float:
    """Seconds of one request; with one token, the time to the first."""
    start = time.perf_counter()
    response = client.post(f"{url}/v1/completions", json=body)
    seconds = time.perf_counter() - start
    response.raise_for_status()
    return seconds


def in_rounds(rounds: int, sides: Mapping[str, Callable[[int], float]], *, seed: int = 1) -> Rounds:
    """Every side once in every round, in an order that changes; the seconds that each says."""
    order, chance = list(sides), random.Random(seed)
    found: Rounds = {name: [] for name in sides}
    for number in range(rounds):
        chance.shuffle(order)
        for name in order:
            found[name].append(sides[name](number))
    return found


def _told(found: Rounds, name: str, other: str) -> dict[str, object]:
    """Returns the comparison of two sides, for the record."""
    ratio = _ratio(found, name, other)
    return {
        "ratio": asdict(ratio),
        "seconds": statistics.median(found[name]),
        "other_seconds": statistics.median(found[other]),
    }


def _ratio(found: Rounds, name: str, other: str) -> Interval:
    return median_interval([a / b for a, b in zip(found[name], found[other], strict=True)])


def _hit(folder: Path, model: Path, rounds: int) -> dict[str, object]:
    chance = random.Random(1)
    shared = [chance.randrange(300, 2000) for _ in range(_PREFIX_TOKENS)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, Processes(folder) as processes:

        def start(name: str, **extra: object) -> Server:
            transfer = transfer_config(f"file://{memory}/{name}?size=512MiB", extra=extra)
            return start_engine(processes, name, model, "--no-enable-prefix-caching", transfer=transfer)

        off = start("off")
        processes.wait_ready(off, within_s=_READY_S)
        with httpx.Client(timeout=120) as client:

            def stored(server: Server) -> Callable[[int], float]:
                return lambda number: timed(client, server.url, body_of([*shared, 300 + number], 1, "shared"))

            def computed(server: Server) -> Callable[[int], float]:
                own = time.monotonic_ns
                return lambda number: timed(client, server.url, body_of([*shared, 300 + number], 1, f"own {own()}"))

            speed = _PREFIX_TOKENS / statistics.median(computed(off)(number) for number in range(5))
            engines = {
                "rule off": off,
                "rule on": start("on", recompute_tokens_per_s=speed),
                "rule on, slow store": start("slow", recompute_tokens_per_s=1e3 * speed),
            }
            processes.wait_ready(*engines.values(), within_s=_READY_S)
            sides = {name: stored(server) for name, server in engines.items()}
            sides["computed"] = computed(off)
            in_rounds(3, sides)
            found = in_rounds(rounds, sides)
        counts = {name: counters(server) for name, server in engines.items()}
    told: dict[str, object] = {"computed_tokens_per_s": speed}
    for name in engines:
        loads, skipped = (counts[name][f"vllm:kvparams_{what}_total"] for what in ("loads", "loads_skipped"))
        told[name] = {**_told(found, name, "computed"), "loads": loads, "skipped": skipped}
        print(
            f"first token of {_PREFIX_TOKENS} stored tokens / computed, {name}: {_ratio(found, name, 'computed')} "
            f"({statistics.median(found[name]) * 1e3:.1f} / {statistics.median(found['computed']) * 1e3:.1f} ms), "
            f"{loads:.0f} loads, {skipped:.0f} skipped"
        )
    return told


def _core(server: Server) -> int:
    """vLLM's engine process, behind the one that speaks HTTP."""
    pid = server.process.pid
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    cores = [child for child in children if "Engine" in Path(f"/proc/{child}/comm").read_text()]
    assert len(cores) == 1, "vLLM's engine has no process of its own"
    return cores[0]


def engine_cpu_s(server: Server) -> float:
    """Seconds of processor that vLLM's engine process has used: its computing, and our threads in it."""
    stats = (file.read_text().split() for file in Path(f"/proc/{_core(server)}/task").glob("*/schedstat"))
    return sum(int(stat[0]) for stat in stats) / 1e9


def _done_cpu_s(server: Server) -> float:
    """Returns the engine's CPU time once it has nothing more to do: what it saves behind its answers counts, too."""
    before = engine_cpu_s(server)
    give_up = time.monotonic() + _DONE_S
    while time.monotonic() < give_up:
        time.sleep(_STILL_S)
        if (now := engine_cpu_s(server)) - before < _STILL_S / 10:
            return now
        before = now
    raise SystemExit(f"{server.name} was still busy {_DONE_S:g} s after its last answer: is anything else asking it?")


def _module(name: str, path: str) -> dict[str, object]:
    """A connector, for vLLM."""
    return {"kv_connector": name, "kv_connector_module_path": path}


async def together(url: str, bodies: Sequence[Mapping[str, object]]) -> float:
    """Seconds of all, some at a time."""
    gate = asyncio.Semaphore(_AT_ONCE)
    async with httpx.AsyncClient(timeout=120) as client:

        async def one(body: Mapping[str, object]) -> None:
            async with gate:
                (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                group.create_task(one(body))
        return time.perf_counter() - start


def _miss(
    folder: Path, model: Path, kind: _Model, rounds: int, role: str, tokens: int, *, itself: bool
) -> dict[str, object]:
    chance = random.Random(2)
    requests = kind.requests[tokens]

    null = json.dumps({**_module("NullConnector", "benchmarks.vllm_null"), "kv_role": "kv_both"})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, Processes(folder) as processes:
        store = f"file://{memory}/kv?size={kind.store}"
        ours = transfer_config(store, role="kv_consumer" if role == "lookup" else "kv_both")
        ours = json.dumps(json.loads(ours) | _module("RemovableConnector", "benchmarks.vllm_removable"))
        environment = {"PYTHONPATH": os.pathsep.join([_ROOT, os.environ.get("PYTHONPATH", "")])}
        engines = {
            name: start_engine(
                processes,
                name,
                model,
                transfer=transfer,
                cache_bytes=kind.cache_bytes,
                dtype=kind.dtype,
                environment=environment,
            )
            for name, transfer in {role: ours, **({} if itself else {"nothing": null, **dict.fromkeys(_BARE)})}.items()
        }
        processes.wait_ready(*engines.values(), within_s=_READY_S)

        def run(name: str, server: Server) -> Callable[[int], float]:
            """16 tokens out."""

            def once(_: int) -> float:
                prompts = [[chance.randrange(300, 2000) for _ in range(tokens)] for _ in range(requests)]
                before = _done_cpu_s(server)
                if name == _OUT:
                    os.kill(_core(server), signal.SIGUSR1)  # see `vllm_removable.py`
                seconds = asyncio.run(together(server.url, [body_of(prompt, 16) for prompt in prompts]))
                spent[name].append(_done_cpu_s(server) - before)
                if name == _OUT:
                    os.kill(_core(server), signal.SIGUSR2)
                return seconds

            return once

        sides = {name: run(name, server) for name, server in {**engines, _OUT: engines[role]}.items()}
        spent: Rounds = {name: [] for name in sides}
        in_rounds(3, sides)
        for warm in spent.values():
            warm.clear()
        before = counters(engines[role])
        found = in_rounds(rounds, sides)
        after = counters(engines[role])
    assert not after["vllm:kvparams_loads_total"], "what should be found nowhere was found"
    assert after[_ASKED] - before[_ASKED] == rounds * requests * tokens, (
        "the connector was asked otherwise than it should"
    )
    told: dict[str, object] = {"tokens": tokens, "requests": requests}
    print(f"{requests} prompts of {tokens} tokens, none of them found:")
    bare, too = _BARE
    others = ((role, bare), (_OUT, bare), ("nothing", bare), (too, bare))
    for name, other in ((role, _OUT), *(() if itself else others)):
        ratio, cpu = _ratio(found, other, name), _ratio(spent, name, other)
        told[f"throughput of {name} / {other}"] = {**_told(found, other, name), "cpu": asdict(cpu)}
        print(
            f"  throughput of {name} / {other}: {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] "
            f"({requests / statistics.median(found[name]):.1f} / {requests / statistics.median(found[other]):.1f} "
            f"requests/s), CPU of the engine's process {cpu.median:.3f} [{cpu.low:.3f}, {cpu.high:.3f}] of it"
        )
    if stored := (after[_SAVED] - before[_SAVED]) / rounds:
        memcpy = _memcpy_s_per_byte()
        more = median_interval([(a - b) / stored / memcpy for a, b in zip(spent[role], spent[_OUT], strict=True)])
        told["CPU of a stored byte / memcpy"] = {**asdict(more), "memcpy_s": memcpy, "bytes": stored}
        print(
            f"  {stored / 2**20:.0f} MiB stored a round: {more} times the processor of memcpy, "
            f"{more.median * memcpy * 2**20 * 1e6:.0f} us for each MiB"
        )
    return told


def _memcpy_s_per_byte() -> float:
    """Measures the copying of 64 MiB, which is more than a cache holds."""
    source, target = np.ones(64 << 20, np.uint8), np.zeros(64 << 20, np.uint8)
    times: list[float] = []
    for _ in range(9):
        start = time.thread_time()
        np.copyto(target, source)
        times.append(time.thread_time() - start)
    return statistics.median(times) / source.nbytes


def main() -> None:
    """Run, print the ratios, and write them down if told where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("hit", "lookup", "store"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--tokens", type=int, choices=list(_MODELS["tiny"].requests), default=1000, help="of a prompt that is not found"
    )
    parser.add_argument(
        "--model", choices=list(_MODELS), default="tiny", help="lookup, store: its shape; weights are random"
    )
    parser.add_argument("--itself", action="store_true", help="lookup, store: no other engine beside ours")
    parser.add_argument("--json", type=Path, help="append one line of JSON to this file")
    told = parser.parse_args()
    if told.part == "hit" and told.model != "tiny":
        parser.error("hit has the tiny model alone; --model is for lookup and store")
    with tempfile.TemporaryDirectory() as name:
        folder, kind = Path(name), _MODELS[told.model]
        model = make_model(folder / "model", dtype=getattr(torch, kind.dtype), shape=kind.shape)
        if told.part == "hit":
            seen = _hit(folder, model, told.rounds)
        else:
            seen = _miss(folder, model, kind, told.rounds, told.part, told.tokens, itself=told.itself)
    if told.json is not None:
        with told.json.open("a") as file:
            file.write(
                json.dumps(
                    {"day": time.strftime("%Y-%m-%d"), "rounds": told.rounds, "model": told.model, told.part: seen}
                )
                + "\n"
            )


if __name__ == "__main__":
    main()
