"""Tests data-parallel engines of one server that keep pages in their own memory: each has a port of its own."""

import random
from pathlib import Path

import pytest

from demo.processes import Processes, Server, free_port
from tests.interop.vllm.engines import READY_S, complete, counters, start_engine, transfer_config
from tests.interop.vllm.legs import decode, prefill, tokens_of

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
