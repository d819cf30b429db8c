"""Tests that vLLM says of its LoRA adapters what the proxy reads: which it serves, how many slots, which are in use."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.client import NO_CERTIFICATES
from demo.processes import Processes, Server
from kvparams.engine_backlog import EngineBacklog
from kvparams.instances import Instance, Role
from kvparams.routing.adapter_metrics import AdapterMetrics, parse_adapter_metrics
from kvparams.routing.breaker import Breaker, BreakerLimits
from kvparams_proxy.execution.leg_outcomes import LegEnd
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.probe_answers import interpret_answer, parse_answer
from kvparams_proxy.upstream.types import ResponseHead
from tests.interop.vllm.engines import ANSWER_S, PATIENCE_S, READY_S, complete, start_engine, until

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

_INSTANCE = Instance("e", "1", Role.AGGREGATED, "http://e", "none")


def _adapters(server: Server) -> list[str]:
    """Returns the adapters that a probe finds."""
    raw = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S, verify=NO_CERTIFICATES).content
    member = Member(_INSTANCE, Breaker(BreakerLimits()), EngineBacklog(lambda: 0.0), ready=True)
    said = interpret_answer(ResponseHead(200), parse_answer(raw), None, member, False)
    assert said.base == "tiny"
    assert said.models == {"tiny", *(said.adapters or ())}
    return list(said.adapters or ())


def _metrics(server: Server) -> AdapterMetrics | None:
    raw = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S, verify=NO_CERTIFICATES).content
    return parse_adapter_metrics(raw)


def _post(server: Server, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=ANSWER_S, verify=NO_CERTIFICATES)


def test_what_an_engine_says_of_its_adapters(model: Path, make_tiny: Callable[..., Path], tmp_path: Path) -> None:
    first, second = make_tiny(1, "adapter"), make_tiny(2, "adapter")
    told = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", f"a={first}")
    with Processes(tmp_path) as processes:
        engine = start_engine(
            processes, "adapters", model, *told, environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        )
        processes.wait_ready(engine, within_s=READY_S)
        assert _adapters(engine) == ["a"]
        assert _post(engine, "/v1/load_lora_adapter", lora_name="b", lora_path=str(second)).status_code == 200
        assert _adapters(engine) == ["a", "b"]

        answer: dict[str, Any] = {}
        running = threading.Thread(
            target=lambda: answer.update(complete(engine.url, [300] * 8, 2000, model="b")), daemon=True
        )
        running.start()
        until(lambda: _metrics(engine) == AdapterMetrics(2, frozenset({"b"})), seen=lambda: _metrics(engine))
        running.join(ANSWER_S)
        assert answer["model"] == "b"
        complete(engine.url, [300] * 8, 1)
        until(lambda: _metrics(engine) == AdapterMetrics(2, frozenset()), seen=lambda: _metrics(engine))

        assert _post(engine, "/v1/unload_lora_adapter", lora_name="b").status_code == 200
        assert _adapters(engine) == ["a"]
        refused = _post(engine, "/v1/completions", model="b", prompt=[300] * 8, max_tokens=1)
        assert LegEnd(_INSTANCE, ResponseHead(refused.status_code), refused.content, None).says_model_missing("b")
        lacking = _post(engine, "/v1/no_such_endpoint", model="b")
        assert lacking.status_code == 404
        assert not LegEnd(_INSTANCE, ResponseHead(404), lacking.content, None).says_model_missing("b")  # the control
        assert json.loads(refused.content)["error"]["code"] == 404
