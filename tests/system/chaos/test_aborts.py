"""Tests clients that leave at every moment of a request: engines stop work, release KV, and no count grows.

The engines are real ones, which report what is in flight and how much of their KV is in use.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.waiting import until
from tests.system.chaos.backings import FileBacking
from tests.system.chaos.cluster import Cluster
from tests.system.chaos.ways import WAYS, Way

PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 20
IN_TIME_S = 2.0
PHASES = ("body", "early", "late", "late", "stream", "end")
ROOM = 2
"""Answers on one engine; so some wait for room, and leave there too. Half of it where there are two fronts."""
DROPS = replace(WAYS[0], name="prefill_then_decode, store-drop", connector="store-drop")
TRIED = (*WAYS[:1], DROPS, *(pytest.param(way, marks=pytest.mark.soak) for way in WAYS[1:]))


class Endpoint(NamedTuple):
    """An `Endpoint` is one of those whose work is split."""

    path: str
    last: bytes = b"[DONE]"
    """Occurs in the last event of a stream, and in none before it."""

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        """Returns a request for an answer of so many tokens."""
        chat = {"messages": [{"role": "user", "content": prompt}]}
        match self.path:
            case "/v1/completions":
                return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
            case "/inference/v1/generate":
                return {"token_ids": [*prompt.encode()], "sampling_params": {"max_tokens": tokens, "ignore_eos": True}}
            case "/v1/responses":
                return {"input": prompt, "max_output_tokens": tokens, "ignore_eos": True}
            case "/v1/messages":  # which has no `ignore_eos`
                return {**chat, "max_tokens": tokens}
            case _:
                return {**chat, "max_tokens": tokens, "ignore_eos": True}


ENDPOINTS = (
    Endpoint("/v1/completions"),
    Endpoint("/v1/chat/completions"),
    Endpoint("/inference/v1/generate"),
    Endpoint("/v1/messages", b"event: message_stop"),
    Endpoint("/v1/responses", b"event: response.completed"),
)


async def leave(port: int, phase: str, number: int, draw: random.Random, endpoint: Endpoint = ENDPOINTS[0]) -> None:
    """Ask for a stream and leave: in the middle of the request's body; before the first byte of the answer (early, with
    a long new prompt, or late, with a short one); in the stream; behind its last event."""
    prompt = f"{number} {PROMPT}" if phase == "early" else PROMPT[draw.randrange(1500) :][:60]
    body = {**endpoint.body(prompt, 4 if phase == "end" else 64), "stream": True}
    if phase in ("early", "late") and draw.random() < 0.3:
        body["stream"] = False
    raw = json.dumps(body).encode()
    lines = (
        f"POST {endpoint.path} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(raw)}",
    )
    head = "\r\n".join((*lines, "", "")).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(30):
            writer.write(head + (raw[: draw.randrange(len(raw))] if phase == "body" else raw))
            if phase in ("stream", "end"):
                status = await reader.readline()
                assert b" 200 " in status, (endpoint.path, status, await reader.read(4096))
            if phase == "stream":
                await reader.readuntil(b"data: ")
            elif phase == "end":
                await reader.readuntil(endpoint.last)
                await reader.readuntil(b"\n\n")
            if phase != "end":
                await asyncio.sleep(draw.random() * (0.03 if phase in ("body", "early") else 0.25))
    finally:
        writer.transport.abort()


async def settled(cluster: Cluster) -> float:
    """How long it takes until nothing is in flight or in use."""

    async def is_idle() -> bool:
        return not await cluster.busy()

    return await until(is_idle, 20.0, pause_s=0.02)


async def left_from(cluster: Cluster) -> dict[str, float]:
    """From which state requests went to their end."""
    seen = await cluster.counted()
    name = 'kvparams_proxy_transitions_total{{from="{}",to="done"}}'
    return {state: seen.get(name.format(state), 0.0) for state in cluster.way.states}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", TRIED, ids=str)
async def test_who_leaves_leaves_nothing_behind(
    tmp_path: Path,
    store: Path,
    way: Way,
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    draw = random.Random(11)
    at_once, rounds, samples = effort(24, 48), effort(12, 208), effort(3, 8)
    room = ROOM if way.beside is None else ROOM // 2
    async with Cluster.running(
        tmp_path, FileBacking(store), engines=2, way=way, extra=("--step-ms", "5"), room=room
    ) as cluster:
        plan = [PHASES[number % len(PHASES)] for number in range(at_once)]
        paths: Counter[str] = Counter()
        number = 0
        after_s: list[float] = []
        held = [cluster.usage()]
        ports = [int(server.url.rpartition(":")[2]) for server in cluster.fronts.values()]
        for turn in range(rounds + 1):  # the first one is not counted: what is made once has been made then
            some = range(number, number + at_once)
            asked = [ENDPOINTS[at % len(ENDPOINTS)] for at in some]
            paths.update(each.path for each in asked)
            leaving = zip(some, asked, strict=True)
            await asyncio.gather(*(leave(draw.choice(ports), plan[at % at_once], at, draw, to) for at, to in leaving))
            number += at_once
            after_s.append(await settled(cluster))
            if turn % (rounds // samples) == 0:
                held.append(cluster.usage())
        left = await left_from(cluster)
        seen = await cluster.counted()
        ends = {
            end: seen.get(f'kvparams_proxy_requests_total{{outcome="{end}"}}', 0.0) for end in ("ok", "gone", "failed")
        }
        engines = await cluster.engine_metrics()
        dropped = sum(found["reference_engine:pages_released_total"] for found in engines)
        aborted = sum(found.get('reference_engine:requests_total{finish="abort"}', 0.0) for found in engines)
    record(
        {
            "left": number,
            "by_path": dict(paths),
            "from": left,
            **ends,
            "aborted": aborted,
            "pages_dropped": dropped,
            "idle_after_s": round(max(after_s), 2),
            "rss_kib": [one.rss_kib for one in held],
            "descriptors": [one.descriptors for one in held],
        }
    )
    assert max(after_s) < IN_TIME_S
    assert all(left.values()), left  # the control: they left from everywhere
    assert ends["gone"] > number / 3
    assert aborted > number / 8
    assert (dropped > 0) is (way is DROPS)
    first, last = held[1], held[-1]
    if not way.inside:  # an engine takes memory for what it computes
        assert last.rss_kib - first.rss_kib < 16_384 * len(ports)
    assert last.descriptors <= held[0].descriptors + 4 * at_once  # connections kept for the next request
