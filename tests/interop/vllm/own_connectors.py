"""Starts engines with vLLM's own connectors, and pairs of them with our proxy in front."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from demo.client import NO_CERTIFICATES
from demo.processes import Processes, Server, free_port, proxy_command
from tests.interop.vllm.engines import ANSWER_S, CALM, PATIENCE_S, READY_S, counters, start_engine
from tests.interop.vllm.traffic import Ask

__all__ = [
    "NIXL_LEASE_S",
    "Alone",
    "Own",
    "Pair",
    "check",
    "example",
    "external",
    "installed",
    "mooncake",
    "mooncake_store",
    "nixl",
    "start_pair",
    "usage",
]

_ROOT: Final = Path(__file__).parents[3]
_WITHOUT_GPU: Final = "tests.interop.vllm.without_gpu"
_HERE: Final = "127.0.0.1"
NIXL_LEASE_S: Final = 120
"""For which prefill keeps blocks that nobody fetches. On a machine ten times overcommitted decode engines waited for up
to 58 s for a transfer; with vLLM's 30 s they fetched then what may have been another request's (see RESULTS.md)."""


@dataclass(frozen=True, slots=True)
class Own:
    """One engine's settings."""

    transfer: str
    environment: dict[str, str]
    bootstrap: str | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode engine, and the proxy before them."""

    prefill: Server
    decode: Server
    proxy: Server


@dataclass(frozen=True, slots=True)
class Alone:
    """Requests, and what one engine without a connector answers."""

    asks: list[Ask]
    answers: list[str]


def installed(package: str) -> None:
    """Fail, in words, where a package that vLLM needs for a connector is missing."""
    if find_spec(package) is None:
        pytest.fail(f"{package} is not installed beside vLLM; `make install-vllm` does that")


def _own(name: str, role: str, engine: str, environment: Mapping[str, str], **more: object) -> Own:
    settings = {"kv_connector": name, "kv_role": role, "engine_id": engine, **more}
    return Own(json.dumps(settings), dict(environment))


def nixl(engine: str, role: str) -> Own:
    """NixlConnector, over UCX on the loopback interface."""
    environment = {
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": _HERE,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    lease = {"kv_lease_duration": NIXL_LEASE_S}
    return _own("NixlConnector", role, engine, environment, kv_buffer_device="cpu", kv_connector_extra_config=lease)


def example(engine: str, folder: Path) -> Own:
    """ExampleConnector, over a folder."""
    return _own(
        "ExampleConnector", "kv_both", engine, {}, kv_connector_extra_config={"shared_storage_path": str(folder)}
    )


def mooncake(engine: str, role: str) -> Own:
    """MooncakeConnector over TCP; see `without_gpu.py`."""
    port = free_port()
    environment = {"VLLM_HOST_IP": _HERE, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), "MC_FORCE_TCP": "1", **_ours()}
    more = {"mooncake_protocol": "tcp", "num_workers": 2}
    own = _own(
        "MooncakeConnector",
        role,
        engine,
        environment,
        kv_connector_module_path=_WITHOUT_GPU,
        kv_connector_extra_config=more,
    )
    return Own(own.transfer, own.environment, f"http://{_HERE}:{port}")


def mooncake_store(engine: str, master: str, folder: Path) -> Own:
    """MooncakeStoreConnector over TCP; see `without_gpu.py`. Each engine lends the store some memory."""
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "global_segment_size": "128MB",
        "local_buffer_size": "64MB",
    }
    file = folder / f"{engine}.json"
    file.write_text(json.dumps(settings))
    environment = {"VLLM_HOST_IP": _HERE, "MOONCAKE_CONFIG_PATH": str(file), "MC_FORCE_TCP": "1", **_ours()}
    return _own("MooncakeStoreConnector", "kv_both", engine, environment, kv_connector_module_path=_WITHOUT_GPU)


def _ours() -> dict[str, str]:
    """So that an engine finds a module of these tests."""
    return {"PYTHONPATH": os.pathsep.join(part for part in (str(_ROOT), os.environ.get("PYTHONPATH")) if part)}


def start_pair(
    processes: Processes, model: Path, connector: str, prefill: Own, decode: Own, *arguments: str, **more: Any
) -> Pair:
    """Start both, wait for them, and put a proxy before them; `arguments` and `more` as for `start_engine`."""

    def start(name: str, own: Own, core: int) -> Server:
        return start_engine(
            processes,
            name,
            model,
            *arguments,
            transfer=own.transfer,
            environment=own.environment,
            core=core,
            **more,
        )

    first, second = start("P", prefill, 0), start("D", decode, 1)
    processes.wait_ready(first, second, within_s=READY_S)
    settings = () if prefill.bootstrap is None else ("--bootstrap", f"P={prefill.bootstrap}")
    proxy = processes.proxy([first], [second], *CALM, *settings, connector=connector)
    processes.wait_ready(proxy, within_s=PATIENCE_S)
    return Pair(first, second, proxy)


def check(
    prefill: Sequence[Server], decode: Sequence[Server], connector: str, *settings: str
) -> "subprocess.CompletedProcess[str]":
    """What `kvparams proxy --check` says of them."""
    command = [*proxy_command(prefill, decode, connector), *settings, "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)


def external(server: Server) -> float:
    """Prompt tokens that an engine had from outside so far."""
    return counters(server)["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"]


def usage(url: str, prompt: Sequence[int], **more: object) -> dict[str, Any]:
    """What one completion says it used."""
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 5, "temperature": 0, "ignore_eos": True, **more}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_S, verify=NO_CERTIFICATES)
    assert response.status_code == 200, response.text
    return response.json()["usage"]
