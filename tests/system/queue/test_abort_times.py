"""Tests how soon a decode engine hears that a client has left whose work came through the broker."""

import asyncio
import statistics
import time
from collections.abc import Callable

import pytest

from tests.system.queue.conftest import Nodes
from tests.system.queue.scenes import LIMIT_S, begun, send


@pytest.mark.slow
async def test_an_engine_hears_soon_that_a_client_has_left(
    nodes: Nodes, effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    """From the moment in which the prefill node's proxy ends the leg, which it does as soon as its client has left."""
    began, left = asyncio.Queue[None](), asyncio.Queue[float]()

    async def waits(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        began.put_nowait(None)
        await reader.read()
        left.put_nowait(time.perf_counter())

    way = nodes.prefill()
    await begun(nodes)
    decode = await nodes.decode(waits)
    number, took_s = effort(60, 2_000), list[float]()
    for _ in range(number):
        attempt, _ = send(way)
        async with asyncio.timeout(LIMIT_S):
            await began.get()
            assert left.empty()
            ended_s = time.perf_counter()
            attempt.discard()
            took_s.append(await left.get() - ended_s)
    assert len(decode.engine.bodies) == number
    p99_s = statistics.quantiles(took_s, n=100)[98]
    record({"aborts": number, "p50 ms": round(statistics.median(took_s) * 1e3, 2), "p99 ms": round(p99_s * 1e3, 2)})
    assert statistics.median(took_s) < 0.05
