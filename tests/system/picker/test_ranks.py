"""Tests that a picker chooses among the data-parallel ranks behind one endpoint, and that the engine is told which."""

import asyncio
from pathlib import Path

import httpx

from tests.support.caching_engine import CachingEngine
from tests.support.gateway import start_envoy, start_picker
from tests.support.processes import Processes
from tests.support.ranked_engine import RankedEngine
from tests.system.picker.conftest import AGGREGATED


async def test_a_request_through_envoy_has_the_rank_that_was_picked(processes: Processes, tmp_path: Path) -> None:
    async with RankedEngine(ranks=[CachingEngine() for _ in range(3)]) as engine:
        named = ("--aggregated", f"a0={engine.url}?ranks=3", "--policy", "round_robin")
        picker = await asyncio.to_thread(start_picker, processes, "picker", *AGGREGATED, *named)
        gateway = await asyncio.to_thread(
            start_envoy, processes, tmp_path, "envoy", picker.grpc_port, [engine.port], lambda config: None
        )
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=20.0) as client:
            for number in range(6):
                body = {"model": "m", "prompt": f"{number} " * 100, "max_tokens": 1}
                answer = await client.post("/v1/completions", json=body, headers={"X-Data-Parallel-Rank": "1"})
                assert answer.status_code == 200, answer.text
        assert engine.named_ranks == {"0": 2, "1": 2, "2": 2}
