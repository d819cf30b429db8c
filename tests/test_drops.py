"""Streams dropped at random moments, real processes: nothing stays in flight, nothing grows."""

import asyncio
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from demo.processes import Processes, Server

AT_ONCE = 25
PROMPT = "It was the best of times, it was the worst of times. " * 8


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[list[Server]]:
    """The proxy, then two prefill and two decode reference engines."""
    store = f"file://{tmp_path}/store?size=128MiB"
    with Processes(tmp_path) as processes:
        prefill = [processes.engine(f"p{n}", "prefill", store) for n in range(2)]
        decode = [processes.engine(f"d{n}", "decode", store) for n in range(2)]
        proxy = processes.proxy(prefill, decode)
        processes.wait_ready(*prefill, *decode, proxy)
        yield [proxy, *prefill, *decode]


def resident_kib(server: Server) -> int:
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:"))


def descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def gauge(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=30).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def busy(fleet: list[Server]) -> dict[str, float]:
    proxy, *engines = fleet
    found = {server.name: gauge(server, "reference_engine:requests_in_flight") for server in engines}
    found |= {f"{server.name} blocks": gauge(server, "reference_engine:kv_blocks_in_use") for server in engines}
    return found | {proxy.name: gauge(proxy, "kvparams_proxy_in_flight")}


async def drop(port: int, draw: random.Random) -> None:
    """Ask for a stream and leave at a random moment."""
    prompt = PROMPT[draw.randrange(300) :]
    body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "stream": draw.random() < 0.8}
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + raw)
    try:
        async with asyncio.timeout(draw.random() * 0.4):
            await reader.read(100)
            await asyncio.sleep(1)
    except TimeoutError:
        pass
    writer.transport.abort()


async def drops(proxy: Server, count: int, draw: random.Random) -> None:
    port = int(proxy.url.rsplit(":", 1)[1])
    left = count
    while left > 0:
        some = min(AT_ONCE, left)
        await asyncio.gather(*(drop(port, draw) for _ in range(some)))
        left -= some


async def calm(fleet: list[Server]) -> dict[str, float]:
    """Wait, bounded, until nothing is in flight; what is left where it is not."""
    async with asyncio.timeout(10):
        while any((left := busy(fleet)).values()):  # noqa: ASYNC110  other processes say nothing when they are done
            await asyncio.sleep(0.05)
    return left


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_dropped_streams_leave_nothing_in_flight_and_nothing_grows(
    fleet: list[Server], effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    proxy = fleet[0]
    draw = random.Random(11)
    fresh_fds = descriptors(proxy)
    await drops(proxy, 100, draw)  # until everything that is made once has been made
    await calm(fleet)
    before_kib = resident_kib(proxy)
    count = effort(500, 5_000)
    await drops(proxy, count, draw)
    await calm(fleet)
    after_kib, after_fds = resident_kib(proxy), descriptors(proxy)
    gone = gauge(proxy, 'kvparams_proxy_requests_total{outcome="gone"}')
    record({"dropped": count, "rss_kib": [before_kib, after_kib], "descriptors": [fresh_fds, after_fds], "gone": gone})
    assert gone > count / 3  # the control: clients did leave before their answers were complete
    assert after_kib - before_kib < 4096
    assert after_fds <= fresh_fds + AT_ONCE * (len(fleet) - 1)  # idle connections, kept for the next request
