"""Tests requests through a real broker, over real engines that share a store, as a client sees them."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Final

import httpx
import pytest
import pytest_asyncio

from tests.support.waiting import until
from tests.system.chaos.streams import Question, ask, question
from tests.system.queue.cluster import Cluster
from tests.system.queue.rabbitmq import RabbitMQ

DEADLINE_S: Final = 60.0
_IN_FLIGHT: Final = "reference_engine:requests_in_flight"
FLAGS: Final = ("--continuation", "--retries", "8")


pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    shared_broker: RabbitMQ, names: Iterator[str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """One prefill node and two slow decode nodes, for all tests here."""
    logs = tmp_path_factory.mktemp("cluster")
    store, slow = f"file://{logs}/kv?size=64MiB", ("--step-ms", "20")
    async with Cluster.running(logs, shared_broker, store, decode=(slow, slow), flags=FLAGS, pool=next(names)) as found:
        yield found


async def questions(single: str, number: int, seed: int, tokens: int = 24) -> list[Question]:
    """With what one engine answers to each."""
    dice = random.Random(seed)
    asked: list[Question] = []
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for _ in range(number):
            prompt = " ".join(str(dice.randrange(1000)) for _ in range(dice.randrange(4, 40)))
            path = dice.choice(("/v1/completions", "/v1/chat/completions"))
            plain = question(path, prompt, tokens)
            document = await client.post(single + path, json={**plain.body, "stream": False, "stream_options": None})
            choice = document.json()["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            usage = document.json()["usage"]["completion_tokens"]
            asked.append(Question(path, plain.body, (text, choice["finish_reason"], usage)))
    return asked


async def test_streams_and_whole_answers_are_those_of_one_engine(cluster: Cluster, single: str) -> None:
    port = cluster.prefill[0].port
    asked = await questions(single, 12, 1)
    seen = await asyncio.gather(*(ask(port, each, DEADLINE_S) for each in asked))
    assert [(one.seen, one.said) for one in seen] == [("right", "")] * len(asked)
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for each in asked[:4]:
            body = {**each.body, "stream": False, "stream_options": None}
            answers = [
                (await client.post(url + each.path, json=body)).json() for url in (single, f"http://127.0.0.1:{port}")
            ]
            assert answers[0]["choices"] == answers[1]["choices"]
            assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    done = [(await cluster.counts(node))['kvparams_queue_work_total{outcome="done"}'] for node in cluster.decode]
    assert sum(done) == len(asked) + 4
    assert all(done)


async def test_a_client_that_leaves_in_the_middle_of_a_stream_is_felt_by_the_decode_engine(cluster: Cluster) -> None:
    port = cluster.prefill[0].port
    before = await cancelled(cluster)
    body = question("/v1/completions", "1 2 3", 3500).body
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        url = f"http://127.0.0.1:{port}/v1/completions"
        async with client.stream("POST", url, json=body) as answer:
            assert answer.status_code == 200
            chunks = answer.aiter_bytes()  # kept: when it is collected, its connection is closed
            assert await anext(chunks)
            assert await in_flight(cluster) == 1
    await until_in_flight(cluster, 0)
    assert await cancelled(cluster) == before + 1


async def test_without_its_prefill_engine_decode_computes_it_all(cluster: Cluster, single: str) -> None:
    node = cluster.prefill[0]
    assert node.engine is not None
    node.engine.process.kill()
    node.engine.process.wait(10)
    try:
        asked = await questions(single, 4, 5)
        seen = await asyncio.gather(*(ask(node.port, each, DEADLINE_S) for each in asked))
        assert [(one.seen, one.said) for one in seen] == [("right", "")] * len(asked)
    finally:
        cluster.start(node, "engine")
        await cluster.ready(node)


async def test_a_prefill_engine_that_is_killed_in_the_middle_of_requests_loses_none(
    cluster: Cluster, single: str
) -> None:
    """Four have been handed over and are decoded; it is computing for four others, and dies."""
    node = cluster.prefill[0]
    assert node.engine is not None
    asked = await questions(single, 8, 9, tokens=100)
    tasks = [asyncio.create_task(ask(node.port, each, DEADLINE_S)) for each in asked[:4]]
    await until_in_flight(cluster, 4)
    node.engine.process.send_signal(signal.SIGSTOP)
    tasks += [asyncio.create_task(ask(node.port, each, DEADLINE_S)) for each in asked[4:]]
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:

        async def has_four() -> bool:
            text = (await client.get(f"http://127.0.0.1:{node.port}/metrics")).text
            return f'kvparams_proxy_in_flight{{instance="{node.name}",role="prefill"}} 4.0' in text

        await until(has_four, DEADLINE_S)
    node.engine.process.kill()
    node.engine.process.wait(10)
    try:
        seen = await asyncio.gather(*tasks)
        assert [(one.seen, one.said) for one in seen] == [("right", "")] * len(asked)
    finally:
        cluster.start(node, "engine")
        await cluster.ready(node)


@pytest.mark.slow
async def test_when_the_sidecar_that_asked_is_killed_decode_engines_stop(cluster: Cluster) -> None:
    """Its queue goes when nobody has read it for a while; what is sent there comes back."""
    node = cluster.prefill[0]
    body = question("/v1/completions", "3 2 1", 3500).body
    asked = asyncio.create_task(ask(node.port, Question("/v1/completions", body), DEADLINE_S))
    await until_in_flight(cluster, 1)
    assert node.sidecar is not None
    node.sidecar.process.kill()
    node.sidecar.process.wait(10)
    assert (await asked).seen == "cut"
    await until_in_flight(cluster, 0)
    cluster.start(node, "sidecar", *FLAGS)
    await cluster.ready(node)


async def in_flight(cluster: Cluster) -> float:
    """Requests on all decode engines."""
    found = 0.0
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
        for node in cluster.decode:
            text = (await client.get(f"http://127.0.0.1:{node.engine_port}/metrics")).text
            found += sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(_IN_FLIGHT))
    return found


async def until_in_flight(cluster: Cluster, number: int) -> None:
    """Wait until they are so many."""

    async def are_so_many() -> bool:
        return await in_flight(cluster) == number

    await until(are_so_many, DEADLINE_S, pause_s=0.02)


async def cancelled(cluster: Cluster) -> float:
    """What all decode nodes have let go."""
    name = 'kvparams_queue_work_total{outcome="cancelled"}'
    return sum([(await cluster.counts(node))[name] for node in cluster.decode])
