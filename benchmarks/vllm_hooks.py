"""Our connector with a stopwatch: how long vLLM's engine thread spends in our hooks, in steps that save or load.

vLLM loads `TimedConnector` by its module path; each step is a line `half,orders,seconds,CPU seconds,longest hook` in
the file that the environment variable `KVPARAMS_HOOK_TIMES` names. Run as a program it starts an engine, asks, and
prints percentiles. On a busy machine only the CPU time says anything: the rest is others' turn.

    .venv-vllm/bin/python -m benchmarks.vllm_hooks [--prompts 150] [--store URL] [--json FILE]
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from demo.processes import Processes
from kvparams_connectors.engines.vllm.connector import KVParamsConnector, VLLMConnectorMetadata
from kvparams_connectors.engines.vllm.connector_stats import WorkerMetadata
from tests.interop.vllm.engines import counters, start_engine, transfer_config
from tests.interop.vllm.tiny_model import make_model

__all__ = ["TimedConnector", "main"]

_ROOT: Final = Path(__file__).parents[1]
_HOOKS: Final = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "update_connector_output"),
    *("request_finished", "request_finished_all_groups", "has_pending_push_work", "has_pending_block_frees"),
    *("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_finished"),
    *("get_block_ids_with_load_errors", "get_kv_connector_stats"),
)
"""All that are called while the engine runs, but for the two that end a step."""


class TimedConnector(KVParamsConnector):
    """Adds up what the hooks of a step take."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._file = open(os.environ["KVPARAMS_HOOK_TIMES"], "a", buffering=1)  # noqa: SIM115  as long as the engine
        self.spent: dict[str, float] = {}
        self.cpu = 0.0

    def build_connector_meta(self, scheduler_output: Any) -> VLLMConnectorMetadata:
        made: VLLMConnectorMetadata = self.watch("build_connector_meta", super().build_connector_meta, scheduler_output)
        self._write("scheduler", made)
        return made

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        made: WorkerMetadata | None = self.watch("build_connector_worker_meta", super().build_connector_worker_meta)
        self._write("worker", self._get_connector_metadata())
        return made

    def watch(self, name: str, hook: Callable[..., Any], *args: object, **more: object) -> Any:
        """Call a hook."""
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            return hook(*args, **more)
        finally:
            self.cpu += time.thread_time() - cpu
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start

    def _write(self, half: str, step: VLLMConnectorMetadata) -> None:
        orders = step.orders
        kind = "load" if orders.loads else "save" if orders.saves else "none"
        longest = max(self.spent, key=lambda name: self.spent[name])
        self._file.write(f"{half},{kind},{sum(self.spent.values())},{self.cpu},{longest}\n")
        self.spent.clear()
        self.cpu = 0.0


def _watched(hook: Callable[..., object], name: str) -> Callable[..., object]:
    def watched(self: TimedConnector, *args: object, **more: object) -> object:
        return self.watch(name, hook, self, *args, **more)

    return watched


for _name in _HOOKS:
    setattr(TimedConnector, _name, _watched(getattr(KVParamsConnector, _name), _name))


def _ask(url: str, prompts: int) -> None:
    """Save and load prompts of 100 to 1,500 tokens, and decode."""
    chance = random.Random(3)
    with httpx.Client(timeout=120) as client:
        for _ in range(prompts):
            prompt = [chance.randrange(300, 2000) for _ in range(chance.randrange(100, 1500))]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            for _ in range(2):  # saved, and then loaded
                client.post(f"{url}/v1/completions", json=body).raise_for_status()


@dataclass(frozen=True, slots=True)
class _Spent:
    """By the hooks of one half in one step, or of both."""

    wall_ms: float
    cpu_ms: float
    longest: str


def _read(times: Path) -> dict[str, list[_Spent]]:
    """By kind of step and half; `both` are on one thread, for there is one worker, in the scheduler's process."""
    seen: dict[str, list[_Spent]] = {}
    last: _Spent | None = None
    for line in times.read_text().splitlines():
        half, kind, seconds, cpu, hook = line.split(",")
        spent = _Spent(float(seconds) * 1e3, float(cpu) * 1e3, hook)
        seen.setdefault(f"{kind} {half}", []).append(spent)
        if half == "worker" and last is not None:
            longest = max(last, spent, key=lambda one: one.wall_ms).longest
            both = _Spent(last.wall_ms + spent.wall_ms, last.cpu_ms + spent.cpu_ms, longest)
            seen.setdefault(f"{kind} both", []).append(both)
        last = spent if half == "scheduler" else None
    return seen


def _report(times: Path) -> dict[str, dict[str, float]]:
    """By kind of step and half: how many, median and p99 in ms."""
    found: dict[str, dict[str, float]] = {}
    for name, spent in sorted(_read(times).items()):
        wall = statistics.quantiles([one.wall_ms for one in spent], n=100)
        cpu = statistics.quantiles([one.cpu_ms for one in spent], n=100)
        found[name] = {"steps": len(spent), "median_ms": wall[49], "p99_ms": wall[98], "cpu_p99_ms": cpu[98]}
        slow = Counter(one.longest for one in spent if one.wall_ms >= wall[94])
        print(
            f"{name:15} {len(spent):5} steps: median {wall[49]:.3f} ms, p95 {wall[94]:.3f}, p99 {wall[98]:.3f}; CPU "
            f"{cpu[49]:.3f}, {cpu[94]:.3f}, {cpu[98]:.3f}; the slowest in {dict(slow.most_common(3))}"
        )
    return found


def main() -> None:
    """Ask one engine, then say how long steps took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=150)
    parser.add_argument("--store", help="the URL of a store that runs; default: a file in memory")
    parser.add_argument("--json", type=Path, help="append one line of JSON to this file")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        folder = Path(name)
        model, times = make_model(folder / "model"), folder / "times"
        transfer = json.loads(transfer_config(told.store or f"file://{memory}/kv?size=1GiB"))
        transfer |= {"kv_connector": "TimedConnector", "kv_connector_module_path": "benchmarks.vllm_hooks"}
        with Processes(folder) as processes:
            engine = start_engine(
                processes,
                "timed",
                model,
                "--no-enable-prefix-caching",
                transfer=json.dumps(transfer),
                environment={
                    "KVPARAMS_HOOK_TIMES": str(times),
                    "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'connectors'}",
                },
            )
            processes.wait_ready(engine, within_s=400)
            _ask(engine.url, told.prompts)
            loads = counters(engine)["vllm:kvparams_loads_total"]
        print(f"{loads:.0f} loads")
        found = _report(times)
    if told.json is not None:
        with told.json.open("a") as file:
            file.write(json.dumps({"day": time.strftime("%Y-%m-%d"), "loads": loads, "steps": found}) + "\n")


if __name__ == "__main__":
    main()
