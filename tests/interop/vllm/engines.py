"""Runs real vLLM engines as child processes, and sends them the requests of tests."""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from demo.client import NO_CERTIFICATES
from demo.processes import Processes, Server, free_port
from tests.interop.vllm.fork_server import API_SERVER, SOCKET, ForkRequest, fork_engine
from tests.support.waiting import wait_until

__all__ = [
    "ANSWER_S",
    "CALM",
    "CONNECTOR",
    "ENVIRONMENT",
    "PATIENCE_S",
    "READY_S",
    "SAVED",
    "by_its_name",
    "child",
    "complete",
    "counters",
    "multi",
    "one_and_two",
    "start_engine",
    "transfer_config",
    "until",
    "wait_saved",
]

CONNECTOR: Final = "kvparams_connectors.engines.vllm.connector"
UNVERIFIED: Final = "demo.unverified_connector"
"""The control: what is damaged reaches the model."""
SAVED: Final = "vllm:kvparams_pages_saved_total"
READY_S: Final = 900.0
"""Within which engines serve, on a machine that does much else: 20 s of a processor each."""
ANSWER_S: Final = 300.0
"""Within which they answer; milliseconds as a rule."""
PATIENCE_S: Final = 120.0
"""For what becomes true behind an answer."""
_DEADLINE_S: Final = 60.0
"""Of loads, saves and lookups: on a busy machine too all that is stored is loaded."""
CALM: Final = ("--probe", "5")
"""For a proxy: an engine that is busy is not taken for one that is gone."""
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the platform takes the executor of several processes: slower, larger
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",  # with the executor of one process vLLM binds nothing, and each engine would take all cores
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONWARNINGS": "ignore",
}
"""Of a process that has an engine."""
_NOT_TOLD: Final = "VLLM_CPU_KVCACHE_SPACE"
"""The environment variable that would set the size of all caches."""
_CALM_RANKS: Final = Path(__file__).parent / "calm_ranks"
_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")


def transfer_config(
    store: str,
    *,
    role: str = "kv_both",
    policy: str = "recompute",
    engine_id: str = "E",
    extra: Mapping[str, object] | None = None,
    verifies: bool = True,
) -> str:
    """vLLM's `--kv-transfer-config` with our connector by its module path; `extra` are further settings of it."""
    return json.dumps(
        {
            "kv_connector": "KVParamsConnector",
            "kv_connector_module_path": CONNECTOR if verifies else UNVERIFIED,
            "kv_role": role,
            "engine_id": engine_id,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"store": store, "deadline_s": _DEADLINE_S, **(extra or {})},
        }
    )


def by_its_name(folder: Path) -> dict[str, str]:
    """The environment in which vLLM's plugins register our connector, so that MultiConnector finds it by its name."""
    plugin = folder / "plugin" / "kvparams_vllm_test-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: kvparams-vllm-test\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkvparams_test = kvparams_connectors.engines.vllm.plugin:register\n"
    )
    paths = (str(plugin.parent), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def child(store: str, extra: Mapping[str, object] | None = None) -> dict[str, object]:
    """Ours for MultiConnector, by its registered name."""
    told = json.loads(transfer_config(store, extra=extra))
    return {name: told[name] for name in ("kv_connector", "kv_role", "kv_connector_extra_config")}


def multi(*children: Mapping[str, object]) -> str:
    """vLLM's `--kv-transfer-config` with several connectors."""
    told = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return json.dumps({**told, "kv_connector_extra_config": {"connectors": list(children)}})


def one_and_two(processes: Processes, model: Path, transfer: str) -> tuple[Server, Server]:
    """An engine of one rank and one of two, without caches of their own, that are ready."""
    told = "--no-enable-prefix-caching"
    one = start_engine(processes, "one", model, told, transfer=transfer)
    two = start_engine(
        processes,
        "two",
        model,
        *(told, "--tensor-parallel-size", "2"),
        transfer=transfer,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    processes.wait_ready(one, two, within_s=READY_S)
    return one, two


def start_engine(
    processes: Processes,
    name: str,
    model: Path,
    *arguments: str,
    transfer: str | None = None,
    core: int = 0,
    block_size: int = 32,
    cache_bytes: int = 64 << 20,
    dtype: str = "float32",
    environment: dict[str, str] | None = None,
    port: int | None = None,
    forked: bool = True,
) -> Server:
    """Start an engine; does not wait for it.

    It serves within a few seconds where the tests' fork server starts it. That is so unless it has several ranks or
    `forked` is false: then it takes about 15 s.
    """
    port = port or free_port()
    ranks = "--tensor-parallel-size" in arguments or "--data-parallel-size" in arguments
    settings = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": str(core), **(environment or {})}
    if "--tensor-parallel-size" in arguments:
        path = (str(_CALM_RANKS), settings.get("PYTHONPATH") or os.environ.get("PYTHONPATH"))
        settings["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    options = ["--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    options += ["--dtype", dtype, "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"]
    options += ["--block-size", str(block_size), "--kv-cache-memory-bytes", str(cache_bytes)]
    if "--tensor-parallel-size" not in arguments:
        options += ["--distributed-executor-backend", "uni"]
    if transfer is not None:
        options += ["--kv-transfer-config", transfer]
    options += arguments
    fork_server = os.environ.get(SOCKET)
    if forked and not ranks and fork_server is not None:
        told = {name: value for name, value in os.environ.items() if name != _NOT_TOLD}
        log = processes.log_of(name, port)
        process = fork_engine(fork_server, ForkRequest(options, {**told, **settings}, str(log)))
        return processes.add(Server(name, f"http://127.0.0.1:{port}", log, process))
    command = ["env", "-u", _NOT_TOLD, *(f"{key}={value}" for key, value in settings.items())]
    return processes.start(name, *command, sys.executable, "-m", API_SERVER, *options, port=port)


def counters(server: Server) -> dict[str, float]:
    """What /metrics says, by name; a label that tells things apart stands behind it: `name{source=x}`."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S, verify=NO_CERTIFICATES).text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        told = [
            label for label in (labels or "").split(",") if label and not label.startswith(("engine=", "model_name="))
        ]
        found[name + ("{" + ",".join(told).replace('"', "") + "}" if told else "")] = float(value)
    return found


def complete(url: str, prompt: str | Sequence[int], max_tokens: int = 16, **more: object) -> dict[str, Any]:
    """One completion, greedy."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_S, verify=NO_CERTIFICATES)
    response.raise_for_status()
    return response.json()


def wait_saved(server: Server, pages: int, before: float = 0.0) -> None:
    """Wait until our connector has saved so many pages since `before`. Engines save behind their answers, and count in
    later steps: small requests, of which nothing is saved, make them take some."""

    def saved() -> float:
        complete(server.url, [300] * 5, 1)
        return counters(server)[SAVED] - before

    until(lambda: saved() >= pages, seen=saved)


def until(
    condition: Callable[[], object],
    within_s: float = PATIENCE_S,
    *,
    pause_s: float = 0.05,
    seen: Callable[[], object] | None = None,
) -> float:
    """Calls `wait_until` with the bounds of a real engine."""
    return wait_until(condition, within_s, pause_s=pause_s, seen=seen)
