"""Tests the data-parallel ranks of one vLLM server: stores at ports of their own, and the proxy before them."""

import json
import random
import re
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml

from demo.client import NO_CERTIFICATES
from demo.processes import Processes, Server, free_port, free_port_block
from tests.interop.vllm.engines import (
    ANSWER_S,
    CALM,
    PATIENCE_S,
    READY_S,
    complete,
    counters,
    start_engine,
    transfer_config,
    until,
)
from tests.interop.vllm.heard import Line
from tests.interop.vllm.legs import decode, prefill, tokens_of
from tests.interop.vllm.own_connectors import installed, nixl

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

_PATIENT = {"deadline_s": 150.0}


def test_ranks_of_a_server_are_read_at_ports_of_their_own(model: Path, bare: Server, tmp_path: Path) -> None:
    port = free_port()
    with Processes(tmp_path) as processes:
        ranks = start_engine(
            processes,
            "ranks",
            model,
            *("--data-parallel-size", "2", "--api-server-count", "1"),
            transfer=transfer_config(f"peer://127.0.0.1:{port}?size=64MiB", engine_id="P", extra=_PATIENT),
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        )
        reading = transfer_config("peer://127.0.0.1:0?size=1MiB", role="kv_consumer", engine_id="D", extra=_PATIENT)
        reader = start_engine(processes, "reader", model, transfer=reading, core=1)
        processes.wait_ready(ranks, reader, within_s=READY_S)
        chance = random.Random(2)
        for rank in (0, 1):
            prompt = chance.choices(range(300, 2000), k=300)
            before = counters(reader)["vllm:kvparams_tokens_loaded_total"]
            found = prefill(ranks.url, prompt, headers={"X-data-parallel-rank": str(rank)})
            assert found["producer"]["address"] == f"127.0.0.1:{port + rank}"
            expected = complete(bare.url, prompt, 12, return_token_ids=True)["choices"][0]["token_ids"]
            assert tokens_of(decode(reader.url, prompt, found)) == expected
            assert counters(reader)["vllm:kvparams_tokens_loaded_total"] - before == 299


def metric(proxy: Server, name: str) -> float:
    """The value of one series of the proxy."""
    text = httpx.get(f"{proxy.url}/metrics", timeout=PATIENCE_S, verify=NO_CERTIFICATES).text
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name} "))


def test_the_proxy_sends_each_leg_to_its_rank_and_hears_of_caches(model: Path, bare: Server, tmp_path: Path) -> None:
    """Stock engines and connector: prefill with two ranks, whose publishers have ports of their own."""
    installed("nixl")
    said, heard = free_port_block(2), free_port_block(2)
    publishes = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{said}"}
    first, second = nixl("P", "kv_producer"), nixl("D", "kv_consumer")
    with ExitStack() as stack:
        for rank in (0, 1):
            lines = f"tcp://127.0.0.1:{said + rank}", f"tcp://127.0.0.1:{heard + rank}"
            stack.enter_context(Line(*lines, binds=True))
        processes = stack.enter_context(Processes(tmp_path))
        engine = start_engine(
            processes,
            "P",
            model,
            *("--data-parallel-size", "2", "--api-server-count", "1", "--enable-prompt-tokens-details"),
            *("--kv-events-config", json.dumps(publishes)),
            transfer=first.transfer,
            environment={**first.environment, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        )
        reader = start_engine(processes, "D", model, transfer=second.transfer, environment=second.environment, core=1)
        processes.wait_ready(engine, reader, within_s=READY_S)
        fleet = {
            "instances": [
                {"id": "P", "url": engine.url, "role": "prefill", "ranks": 2, "kv_events": f"tcp://127.0.0.1:{heard}"},
                {"id": "D", "url": reader.url, "role": "decode"},
            ]
        }
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(fleet))
        more = (*CALM, "--config", str(tmp_path / "fleet.yaml"), "--policy", "cache_aware", "--tokenizer", "bytes")
        proxy = processes.proxy([], [], *more, connector="nixl")
        processes.wait_ready(proxy, within_s=PATIENCE_S)
        chance = random.Random(3)
        routes: dict[str, str] = {}
        for number in range(6):
            prompt = chance.choices(range(300, 2000), k=300)
            expected = complete(bare.url, prompt, 8, return_token_ids=True)["choices"][0]["token_ids"]
            for turn in (0, 1):
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                body["return_token_ids"] = True
                answer = httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=ANSWER_S, verify=NO_CERTIFICATES)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == expected
                route = answer.headers["x-kvparams-prefill"]
                assert routes.setdefault(str(number), route) == route, "the second turn goes where its prefix is"
                details: dict[str, int] = answer.json()["usage"]["prompt_tokens_details"] or {}
                assert (details.get("cached_tokens") or 0) == (288 if turn else 0)
        assert set(routes.values()) == {"P-dp0", "P-dp1"}
        text = httpx.get(f"{engine.url}/metrics", timeout=PATIENCE_S, verify=NO_CERTIFICATES).text
        for rank in (0, 1):
            found = re.search(rf'^vllm:prompt_tokens_total\{{engine="{rank}".*\}} (\S+)$', text, re.MULTILINE)
            assert found is not None
            assert float(found[1]) == 600 * sum(route == f"P-dp{rank}" for route in routes.values())
        for rank in (0, 1):
            name = f'kvparams_proxy_kv_events_batches_total{{instance="P-dp{rank}"}}'
            until(lambda name=name: metric(proxy, name))
