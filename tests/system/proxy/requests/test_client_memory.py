"""Tests the memory for clients' bodies: it is bounded, small reads are joined, and leaving clients free it."""

import asyncio
import json
from typing import Any

import pytest

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.body import BodyBudget, RequestBody
from tests.support.proxy.metrics import metric_becomes
from tests.support.proxy.served import Served, serving
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

MIB = 1 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)


async def part_of_a_body(port: int, raw: bytes) -> asyncio.StreamWriter:
    """Sends `raw`, and waits until the kernel has taken all of it."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.transport.set_write_buffer_limits(0)
    writer.write(raw)
    await writer.drain()
    return writer


async def held(served: Served, mib: float) -> None:
    """Waits until the proxy holds so much of bodies."""
    await metric_becomes(served, "kvparams_proxy_body_bytes ", lambda value: value >= mib * MIB, 20.0)


async def released(served: Served) -> None:
    await metric_becomes(served, "kvparams_proxy_body_bytes ", 0.0, 20.0)
    await metric_becomes(served, "kvparams_proxy_client_connections ", lambda value: value <= 1, 20.0)


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "plain"])
async def test_what_clients_sent_who_left_is_released(stub: StubEngines, direct: bool) -> None:
    """Ten connections, 15 of 16 MB each, five times over; the collector would not run for a long while."""
    raw = HEAD % (16 * MIB) + b"[" * (15 * MIB)
    async with serving(stub, "--log-requests", "off", direct=direct) as served:
        first = served.rss_mib()
        for _ in range(5):
            writers = await asyncio.gather(*(part_of_a_body(served.port, raw) for _ in range(10)))
            await held(served, 149)
            for writer in writers:
                writer.transport.abort()
            await released(served)
        await until(lambda: served.rss_mib() < first + 10, 20)


@pytest.mark.slow
async def test_a_body_in_crumbs_takes_its_size(stub: StubEngines) -> None:
    """14 MB in chunks of two bytes."""
    async with serving(stub, "--log-requests", "off") as served:
        first = served.rss_mib()
        writer = await part_of_a_body(served.port, CHUNKED + b"2\r\n[[\r\n" * (7 * MIB))
        await held(served, 13.9)
        assert served.rss_mib() < first + 32
        writer.transport.abort()
        await released(served)
        await until(lambda: served.rss_mib() < first + 10, 20)


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "plain"])
async def test_all_bodies_together_are_bounded(stub: StubEngines, direct: bool) -> None:
    """Beyond the bound a request is answered 503; when others have gone there is room again."""
    bound = ("--max-body-memory", str(40 * MIB), "--log-requests", "off")
    body = {"model": "stub", "prompt": "x" * MIB, "max_tokens": 2}
    async with serving(stub, *bound, direct=direct) as served:
        writers = [await part_of_a_body(served.port, HEAD % (16 * MIB) + b"[" * (13 * MIB)) for _ in range(3)]
        await held(served, 38.9)
        refused = await served.client.post("/v1/completions", json=body | {"prompt": "x" * (2 * MIB)})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "body_memory_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await served.client.post("/v1/completions", json=body | {"prompt": "x"})).status_code == 200
        for writer in writers:
            writer.transport.abort()
        await released(served)
        assert (await served.client.post("/v1/completions", json=body | {"prompt": "x" * (2 * MIB)})).status_code == 200
        assert await served.metric("kvparams_proxy_bodies_refused_total") == 1
        assert await served.metric("kvparams_proxy_body_bytes ") == 0


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "plain"])
async def test_who_is_refused_in_the_middle_of_a_body_is_told_that_the_connection_ends(
    stub: StubEngines, direct: bool
) -> None:
    """Otherwise a client sends its next request on a connection that is being closed."""
    async with serving(stub, "--max-body-memory", str(40 * MIB), "--log-requests", "off", direct=direct) as served:
        others = [await part_of_a_body(served.port, HEAD % (16 * MIB) + b"[" * (13 * MIB)) for _ in range(3)]
        await held(served, 38.9)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(HEAD % (16 * MIB) + b"[" * (2 * MIB))
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close\r\n" in head.lower()
        for each in (writer, *others):
            each.transport.abort()


async def test_a_body_counts_as_long_as_its_request_runs(stubbed: Any) -> None:
    """The budget is empty before and after, whatever becomes of the request."""
    for sent in (
        json.dumps({"model": "stub", "prompt": "x", "max_tokens": 2}).encode(),
        json.dumps({"model": "stub", "prompt": "x", "max_tokens": 2, "stream": True}).encode(),
        b"{",
        b"",
    ):
        await stubbed.client.post("/v1/completions", content=sent)
        assert await stubbed.metric("kvparams_proxy_body_bytes ") == 0


def test_pieces_are_joined_and_the_budget_is_exact() -> None:
    budget = BodyBudget(100)
    body = RequestBody(80, budget)
    for _ in range(30):
        body.add(b"ab")
    other = RequestBody(80, budget)
    with pytest.raises(ProxyError, match="memory limit"):
        other.add(b"x" * 41)
    other.add(b"x" * 40)
    assert (budget.held_bytes, budget.refused) == (100, 1)
    with pytest.raises(ProxyError, match="larger than 80"):
        body.add(b"y" * 21)
    assert body.join() == b"ab" * 30
    assert budget.held_bytes == 100
    for _ in range(2):
        body.release()
        assert budget.held_bytes == 40
    other.release()
    assert budget.held_bytes == 0
