"""Tests a thousand random prompts through proxy, prefill and decode: one engine's tokens, no prompt computed twice."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from demo.client import JSON, Reply, ask, ask_stream, new_client, scrape
from demo.processes import Processes, Server

AT_ONCE = 16
PAGE_TOKENS = 64
BLOCK_TOKENS = 16
SOURCE = 'reference_engine:prompt_tokens_total{{source="{}"}}'


@dataclass(frozen=True, slots=True)
class Case:
    """One request, to be sent to both."""

    stream: bool
    body: JSON
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Work:
    """Where an engine got prompt tokens from, over a run."""

    computed: float
    found: float
    """In its own cache or in the store."""
    refused: float


def cases(count: int, seed: int) -> list[Case]:
    """Lengths on and beside page and block boundaries, prompts that share beginnings, every sampling parameter."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(256) for _ in range(8 * PAGE_TOKENS)] for _ in range(10)]
    found: list[Case] = []
    for _ in range(count):
        edge = draw.choice([PAGE_TOKENS] * 3 + [BLOCK_TOKENS]) * draw.randrange(8)
        length = max(1, draw.choice([edge + draw.randrange(-2, 3)] * 3 + [draw.randrange(1, 500)]))
        shared = draw.choice(beginnings)[: draw.randrange(length + 1)] if draw.random() < 0.6 else []
        prompt = shared + [draw.randrange(256) for _ in range(length - len(shared))]
        body: JSON = {
            "prompt": prompt,
            "max_tokens": draw.randrange(1, 17),
            "seed": draw.randrange(1 << 40),
            "temperature": draw.choice([0, 0.5, 1, 1.7]),
            "top_p": draw.choice([1, 0.9, 0.4]),
            "top_k": draw.choice([-1, 5, 40]),
            "ignore_eos": draw.random() < 0.5,
            "stop": draw.choice([None, None, ["a"], ["{", "xy", "!"]]),
        }
        found.append(Case(draw.random() < 0.5, body, length))
    return found


async def replies(client: httpx.AsyncClient, url: str, asked: list[Case]) -> list[Reply]:
    """The answers to all of them, some at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(case: Case) -> Reply:
        async with room:
            return await (ask_stream if case.stream else ask)(client, url, "/v1/completions", case.body)

    return list(await asyncio.gather(*(one(case) for case in asked)))


async def compared(url: str, decode: str, single: str, asked: list[Case]) -> tuple[list[int], Work]:
    """Which answers of `url` are not those of `single`, and what the decode engine did for them."""
    async with new_client() as client:
        before = await scrape(client, decode)
        ours, theirs = await asyncio.gather(replies(client, url, asked), replies(client, single, asked))
        after = await scrape(client, decode)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    work = Work(
        computed=grown[SOURCE.format("computed")],
        found=grown[SOURCE.format("local_cache")] + grown[SOURCE.format("external_kv")],
        refused=sum(value for name, value in grown.items() if name.startswith("reference_engine:pages_refused_total")),
    )
    different = [at for at, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one.outcome != other.outcome]
    return different, work


def proves_disaggregation(asked: list[Case], work: Work) -> bool:
    """Whether decode computed exactly one token of each prompt, and had all the others."""
    return work == Work(computed=len(asked), found=sum(case.prompt_tokens - 1 for case in asked), refused=0)


@pytest.mark.timeout(1200)
@pytest.mark.slow
async def test_a_thousand_prompts_give_the_tokens_of_one_engine_and_decode_computes_one_token_of_each(
    processes: Processes,
    servers: dict[str, Server],
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    proxy = processes.proxy([servers["prefill"]], [servers["decode"]])
    processes.wait_ready(proxy)
    asked = cases(effort(1_000, 5_000), seed=1)

    different, work = await compared(proxy.url, servers["decode"].url, servers["single"].url, asked)

    seen = {"prompts": len(asked), "different": len(different), "computed_by_decode": work.computed}
    record({**seen, "pages_refused": work.refused})
    assert different == []
    assert proves_disaggregation(asked, work), work


@pytest.mark.slow
async def test_a_decode_engine_that_recomputes_fails_the_check_although_its_tokens_are_right(
    processes: Processes, servers: dict[str, Server], tmp_path: Path
) -> None:
    """Negative control: this decode engine looks into another store, so nothing that was sent reaches it."""
    elsewhere = processes.engine("elsewhere", "decode", f"file://{tmp_path}/kv?size=64MiB")
    proxy = processes.proxy([servers["prefill"]], [elsewhere])
    processes.wait_ready(elsewhere, proxy)
    asked = cases(40, seed=2)

    different, work = await compared(proxy.url, elsewhere.url, servers["single"].url, asked)
    processes.stop(elsewhere, proxy)

    assert different == []
    assert not proves_disaggregation(asked, work), work
