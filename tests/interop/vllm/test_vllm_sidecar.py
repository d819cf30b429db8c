"""Tests the proxy beside stock vLLM engines with the real NixlConnector: as a sidecar, and in vLLM's server."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from demo.processes import Processes, Server, free_port
from kvparams.instances import Role
from tests.interop.vllm.beside import REMOTE
from tests.interop.vllm.engines import ANSWER_S, CALM, PATIENCE_S, READY_S, start_engine
from tests.interop.vllm.own_connectors import Alone, Pair, external, installed, nixl, start_pair
from tests.interop.vllm.traffic import answers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(tmp_path_factory.mktemp("logs")) as group:
        yield group


@pytest.fixture(scope="module")
def pair(processes: Processes, model: Path) -> Pair:
    installed("nixl")
    return start_pair(processes, model, "nixl", nixl("P", "kv_producer"), nixl("D", "kv_consumer"))


def _sidecar(processes: Processes, pair: Pair, role: Role) -> Server:
    port = free_port()
    local, remote, there = pair.prefill, pair.decode, Role.DECODE
    if role is Role.DECODE:
        local, remote, there = pair.decode, pair.prefill, Role.PREFILL
    command = [sys.executable, "-m", "kvparams", "sidecar", "--role", role, "--engine", f"{local.name}={local.url}"]
    command += [f"--{there}", f"{remote.name}={remote.url}", "--port", str(port), "--log-requests", "off", *CALM]
    return processes.start(f"sidecar-{role}", *command, port=port)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_tokens_are_those_of_one_engine_and_kv_went_from_one_to_the_other(
    pair: Pair, processes: Processes, alone: Alone, role: Role, record: Callable[[dict[str, object]], None]
) -> None:
    sidecar = _sidecar(processes, pair, role)
    processes.wait_ready(sidecar, within_s=PATIENCE_S)
    before = external(pair.decode)
    assert answers(sidecar.url, alone.asks) == alone.answers
    loaded = external(pair.decode) - before
    assert loaded > 0
    record({"beside": role, "prompts": len(alone.asks), "different": 0, "tokens_loaded": loaded})


def test_vllms_own_server_splits_requests(
    pair: Pair, processes: Processes, model: Path, alone: Alone, record: Callable[[dict[str, object]], None]
) -> None:
    own = nixl("S", "kv_producer")
    more = ("--middleware", "tests.interop.vllm.beside.Beside")
    environment = {**own.environment, REMOTE: pair.decode.url}
    split = start_engine(processes, "S", model, *more, transfer=own.transfer, environment=environment)
    processes.wait_ready(split, within_s=READY_S)
    before = external(pair.decode)
    assert answers(split.url, alone.asks) == alone.answers
    loaded = external(pair.decode) - before
    assert loaded > 0
    record({"beside": "in vLLM's server", "prompts": len(alone.asks), "different": 0, "tokens_loaded": loaded})
    steered = {"model": "tiny", "prompt": "x", "max_tokens": 1, "kv_transfer_params": {"do_remote_prefill": True}}
    assert httpx.post(f"{split.url}/v1/completions", json=steered, timeout=ANSWER_S).status_code == 200
    refused = httpx.post(f"{split.url}/v1/load_lora_adapter", json={}, timeout=ANSWER_S)
    assert (refused.status_code, "not for clients" in refused.text) == (404, True)
    assert "vllm:" in httpx.get(f"{split.url}/metrics", timeout=ANSWER_S).text
