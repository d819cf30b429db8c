"""Real vLLM engines on a machine without a GPU: a tiny model made on the spot, and how an engine that serves it starts.

Source of what stands in the environment: vLLM 0.32.0 envs.py and platforms/cpu.py. Nothing is downloaded.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from demo.processes import ProcessError, Processes, Server, free_port

__all__ = [
    "ENGINE_BYTES",
    "MODEL",
    "Transfer",
    "free_bytes",
    "make_model",
    "nixl_transfer",
    "start_vllm",
    "store_transfer",
]

MODEL: Final = "tiny"
"""What it is called in requests."""
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else a second process: slower to start, and larger
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",  # with the executor of one process vLLM binds nothing, and each engine would take all cores
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONWARNINGS": "ignore",
}
ENGINE_BYTES: Final = 1_300 << 20
"""Of memory, at most."""
_MAKING_S: Final = 300.0
_HERE: Final = "127.0.0.1"
_CONNECTOR: Final = "kvparams_connectors.engines.vllm.connector"
_UNVERIFIED: Final = "demo.unverified_connector"

Transfer = tuple[str, Mapping[str, str]]
"""What follows `--kv-transfer-config`, and what the connector wants in the environment."""


def make_model(folder: Path) -> Path:
    """Make the model, in a process of its own; about 10 s.

    Raises:
        ProcessError: vLLM is not installed, or the model cannot be made.
    """
    if find_spec("vllm") is None:
        raise ProcessError("vLLM is not installed here: run `make demo ENGINE=vllm`, or `make install-vllm`")
    command = [sys.executable, "-W", "ignore", "-m", "demo.tiny_model", str(folder), "0", "float32"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=_MAKING_S, check=False)
    if made.returncode:
        raise ProcessError(f"the model cannot be made: {made.stderr[-2000:]}")
    return folder


def free_bytes() -> int:
    """Memory that processes may still take; what files are kept in can be had back."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def store_transfer(name: str, role: str, store: str, *, verify: bool = True) -> Transfer:
    """Our connector, through a store.

    Args:
        name: of the engine.
        role: `kv_producer` or `kv_consumer`.
        store: its URL. Peers have a port each, which the scheduler and the worker of an engine both have to know.
        verify: whether the engine looks at what it loads.
    """
    if store.startswith("peer://"):
        _, _, told = store.partition("?")
        store = f"peer://{_HERE}:{free_port() if role == 'kv_producer' else 0}?{told}"
    settings = {
        "kv_connector": "KVParamsConnector",
        "kv_connector_module_path": _CONNECTOR if verify else _UNVERIFIED,
        "kv_role": role,
        "engine_id": name,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store},
    }
    return json.dumps(settings), {}


def nixl_transfer(name: str, role: str) -> Transfer:
    """vLLM's own NixlConnector, over UCX on the loopback interface. Arguments as for `store_transfer`.

    Raises:
        ProcessError: NIXL is not installed.
    """
    if find_spec("nixl") is None:
        raise ProcessError("nixl is not installed beside vLLM; `make install-vllm` does that")
    settings = {"kv_connector": "NixlConnector", "kv_role": role, "engine_id": name, "kv_buffer_device": "cpu"}
    environment = {
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": _HERE,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    return json.dumps(settings), environment


def start_vllm(
    processes: Processes, name: str, model: Path, transfer: Transfer | None = None, *, core: int = 0
) -> Server:
    """Starts an engine without waiting for it; it serves after 15 s or more.

    `core` is the one it computes on, counted among those that this process may use.
    """
    port = free_port()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    more: Mapping[str, str] = {} if transfer is None else transfer[1]
    settings = {**_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": str(cores[core % len(cores)]), **more}
    command = ["env", "-u", "VLLM_CPU_KVCACHE_SPACE", *(f"{key}={value}" for key, value in settings.items())]
    command += [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", MODEL, "--host", _HERE, "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"]
    command += ["--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20), "--enable-prompt-tokens-details"]
    command += ["--distributed-executor-backend", "uni"]
    if transfer is not None:
        command += ["--kv-transfer-config", transfer[0]]
    return processes.start(name, *command, port=port)
