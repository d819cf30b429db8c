"""Requests through a real broker, over real engines that share a store: what a client sees."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.chaos.streams import Question, ask, question

from .cluster import Cluster
from .rabbitmq import RabbitMQ

DEADLINE_S: Final = 60.0
FLAGS: Final = ("--continuation", "--retries", "8")


@pytest.fixture
async def cluster(shared_broker: RabbitMQ, names: Iterator[str], tmp_path: Path) -> AsyncIterator[Cluster]:
    store = f"file://{tmp_path}/kv?size=64MiB"
    async with Cluster.running(tmp_path, shared_broker, store, flags=FLAGS, pool=next(names)) as found:
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
