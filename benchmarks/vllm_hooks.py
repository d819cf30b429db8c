"""Our connector with a stopwatch: how long vLLM's engine thread spends in our hooks, in steps that save or load.

vLLM loads `TimedConnector` by its module path; each such step is a line `half,orders,seconds` in the file that the
environment variable `KVPARAMS_HOOK_TIMES` names. Run as a program it starts an engine, asks, and prints percentiles:

    .venv-vllm/bin/python -m benchmarks.vllm_hooks
"""

import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from demo.processes import Processes
from kvparams_connectors.engines.vllm.connector import KVParamsConnector, StepMetadata
from tests.vllm.engines import counters, start_engine, transfer_config
from tests.vllm.tiny_model import make_model

__all__ = ["TimedConnector", "main"]


class TimedConnector(KVParamsConnector):
    """Adds up what the hooks of a step take."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._file = open(os.environ["KVPARAMS_HOOK_TIMES"], "a", buffering=1)  # noqa: SIM115  as long as the engine
        self._spent = 0.0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        start = time.perf_counter()
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._spent += time.perf_counter() - start
        return found

    def on_new_request(self, request: Any) -> None:
        start = time.perf_counter()
        super().on_new_request(request)
        self._spent += time.perf_counter() - start

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        start = time.perf_counter()
        made = super().build_connector_meta(scheduler_output)
        self._spent += time.perf_counter() - start
        self._write("scheduler", made)
        return made

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        super().start_load_kv(forward_context, **kwargs)
        self._spent += time.perf_counter() - start

    def wait_for_save(self) -> None:
        start = time.perf_counter()
        super().wait_for_save()
        self._spent += time.perf_counter() - start

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        start = time.perf_counter()
        found = super().get_finished(finished_req_ids)
        self._spent += time.perf_counter() - start
        self._write("worker", self._get_connector_metadata())
        return found

    def _write(self, half: str, step: StepMetadata) -> None:
        kind = "load" if step.orders.loads else "save" if step.orders.saves else "none"
        self._file.write(f"{half},{kind},{self._spent}\n")
        self._spent = 0.0


def main() -> None:
    """Save and load prompts of 100 to 1,500 tokens, and decode; then say how long steps took."""
    chance = random.Random(3)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        folder = Path(name)
        model, times = make_model(folder / "model"), folder / "times"
        transfer = json.loads(transfer_config(f"file://{memory}/kv?size=1GiB"))
        transfer |= {"kv_connector": "TimedConnector", "kv_connector_module_path": "benchmarks.vllm_hooks"}
        with Processes(folder) as processes:
            engine = start_engine(
                processes,
                "timed",
                model,
                "--no-enable-prefix-caching",
                transfer=json.dumps(transfer),
                environment={"KVPARAMS_HOOK_TIMES": str(times), "PYTHONPATH": str(Path(__file__).parents[1])},
            )
            processes.wait_ready(engine, within_s=400)
            with httpx.Client(timeout=120) as client:
                for _ in range(150):
                    prompt = [chance.randrange(300, 2000) for _ in range(chance.randrange(100, 1500))]
                    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                    for _ in range(2):  # saved, and then loaded
                        client.post(f"{engine.url}/v1/completions", json=body).raise_for_status()
            loads = counters(engine)["vllm:kvparams_loads_total"]
        seen: dict[tuple[str, str], list[float]] = {}
        for line in times.read_text().splitlines():
            half, kind, seconds = line.split(",")
            seen.setdefault((half, kind), []).append(float(seconds) * 1e3)
    print(f"{loads:.0f} loads")
    for (half, kind), values in sorted(seen.items()):
        cuts = statistics.quantiles(values, n=100)
        print(f"{half:9} {kind:4} {len(values):5} steps: median {cuts[49]:.3f} ms, p99 {cuts[98]:.3f} ms")


if __name__ == "__main__":
    main()
