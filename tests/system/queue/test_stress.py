"""Tests decode nodes that are killed all the time and a broker that goes away twice.

Every request is answered, once, and rightly.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import httpx
import pytest

from demo.processes import Server, free_port
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.waiting import until
from tests.system.chaos.streams import Asked, Question, ask
from tests.system.queue.cluster import Cluster
from tests.system.queue.rabbitmq import RabbitMQ
from tests.system.queue.test_end_to_end import questions

DEADLINE_S: Final = 600.0
"""A broker that starts on a machine that is full takes minutes."""
AT_ONCE: Final = 24
EVERY_S: Final = 2.0
FLAGS: Final = ("--continuation", "--retries", "20", "--queue-wait", "400")


async def asked_all(port: int, these: Sequence[Question], number: int, seen: list[Asked], at_once: int) -> float:
    """So many requests, a few at a time; how long it took."""
    left = iter(range(number))
    began = time.monotonic()

    async def client() -> None:
        for one in left:
            seen.append(await ask(port, these[one % len(these)], DEADLINE_S, salt=f"{one % 997}"))

    await asyncio.gather(*(client() for _ in range(at_once)))
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3600)
async def test_nothing_is_lost_while_nodes_are_killed_and_the_broker_goes_away(
    own_broker: RabbitMQ,
    single: str,
    tmp_path: Path,
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    number = effort(300, 10_000)
    these = await questions(single, 60, 7, tokens=16)
    with ValkeyServer(tmp_path / "valkey") as store:
        decode = [()] * 3
        async with Cluster.running(tmp_path, own_broker, store.url, decode=decode, flags=FLAGS) as cluster:
            seen: list[Asked] = []
            over = asyncio.Event()
            storm = asyncio.create_task(cluster.storm(EVERY_S, over, random.Random(3)))
            load = asyncio.create_task(asked_all(cluster.prefill[0].port, these, number, seen, AT_ONCE))
            for part, end in ((1, own_broker.stop), (2, own_broker.kill)):
                await until(lambda part=part: len(seen) >= number * part // 3, DEADLINE_S)
                await asyncio.to_thread(end)
                await asyncio.to_thread(own_broker.start)
            took_s = await load
            over.set()
            hits = await storm
            sidecar = cluster.prefill[0].sidecar
            assert sidecar is not None
            retries = await metric(sidecar, "kvparams_proxy_retries_total")
    ends = Counter(one.seen for one in seen)
    others = [(one.seen, one.status, one.said) for one in seen if one.seen != "right"]
    record(
        {
            "requests": number,
            "kills": hits,
            "broker restarts": 2,
            "retries": retries,
            "seconds": round(took_s, 1),
            **ends,
        }
    )
    assert not others[:10]
    assert ends["right"] == number
    assert hits >= 3
    assert retries  # it was felt


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
async def test_throughput_beside_that_without_a_broker(
    shared_broker: RabbitMQ,
    single: str,
    tmp_path: Path,
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    """The same engines, in turns, both ways."""
    number = effort(60, 400)
    these = await questions(single, 30, 11, tokens=16)
    with ValkeyServer(tmp_path / "valkey") as store:
        async with Cluster.running(tmp_path, shared_broker, store.url, pool="throughput") as cluster:
            port = free_port()
            direct = cluster.direct(port)
            await asyncio.to_thread(cluster.processes.wait_ready, direct)
            found: dict[str, list[float]] = {"queue": [], "direct": []}
            for turn in range(4):
                for name, where in (("queue", cluster.prefill[0].port), ("direct", port)):
                    seen: list[Asked] = []
                    took_s = await asked_all(where, these, number, seen, 16)
                    assert Counter(one.seen for one in seen) == {"right": number}
                    if turn:  # the first warms up
                        found[name].append(number / took_s)
    best = {name: round(max(rates), 1) for name, rates in found.items()}
    record(
        {"requests a second": best, "requests in each turn": number, "share of direct": best["queue"] / best["direct"]}
    )
    assert best["queue"] > 0.25 * best["direct"]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
async def test_a_slow_decode_node_takes_less_work_without_being_told(
    shared_broker: RabbitMQ,
    single: str,
    tmp_path: Path,
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    """Three nodes alike, but that one computes a token in eight times the time. The control: without a broker each gets
    its turn, a third of all."""
    number = effort(120, 1_200)
    these = await questions(single, 30, 13, tokens=16)
    decode = [("--step-ms", str(step_ms)) for step_ms in (40, 5, 5)]
    with ValkeyServer(tmp_path / "valkey") as store:
        async with Cluster.running(tmp_path, shared_broker, store.url, decode=decode, room=4, pool="slow") as cluster:
            port = free_port()
            direct = cluster.direct(port)
            await asyncio.to_thread(cluster.processes.wait_ready, direct)
            share: dict[str, float] = {}
            for name, where in (("queue", cluster.prefill[0].port), ("direct", port)):
                before = await decoded(cluster)
                seen: list[Asked] = []
                await asked_all(where, these, number, seen, 12)
                assert Counter(one.seen for one in seen) == {"right": number}
                slow, *others = (now - was for now, was in zip(await decoded(cluster), before, strict=True))
                assert slow + sum(others) == number
                share[name] = round(slow / number, 3)
    record({"requests": number, "share of the slow one of three": share})
    assert 0 < share["queue"] < 0.2
    assert share["direct"] > 0.3


async def decoded(cluster: Cluster) -> list[float]:
    """How many requests each decode engine has had."""
    servers = [node.engine for node in cluster.decode]
    return [await metric(server, "reference_engine:requests_total") for server in servers if server is not None]


async def metric(server: Server, name: str) -> float:
    """The sum of one metric."""
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
        text = (await client.get(f"{server.url}/metrics")).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))
