"""Tests that the proxy with P and D answers generated requests as one engine does, apart from ids and times."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest

from demo.client import scrape
from demo.processes import Server
from tests.system.differential.comparing import Seen, difference, seen
from tests.system.differential.generator import CHAT, COMPLETIONS, GENERATE, JSON, Case, lanes

COMPUTED = 'reference_engine:prompt_tokens_total{source="computed"}'

Both = tuple[Case, Seen, Seen]


async def compared(client: httpx.AsyncClient, single: str, other: str, asked: list[list[Case]]) -> list[Both]:
    """What both said: lanes side by side, the requests of each one after the other."""

    async def run(lane: list[Case]) -> list[Both]:
        return [(case, *await asyncio.gather(seen(client, single, case), seen(client, other, case))) for case in lane]

    return [both for lane in await asyncio.gather(*map(run, asked)) for both in lane]


def differences(found: list[Both]) -> list[str]:
    """In words, each with its request."""
    said = ((case, difference(case, one, other)) for case, one, other in found)
    return [f"{case.path} {case.body}\n{words}" for case, words in said if words is not None]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("proxy", "paths", "seed", "budget", "full"),
    [
        pytest.param("proxy", (COMPLETIONS, CHAT), 1, 300, 6_000, id="openai"),
        pytest.param("proxy", (GENERATE,), 2, 100, 2_000, id="tokens"),
        pytest.param("continuing", (COMPLETIONS, CHAT, GENERATE), 3, 150, 3_000, id="continuing"),
    ],
)
async def test_a_proxy_with_p_and_d_answers_as_one_engine(
    client: httpx.AsyncClient,
    servers: dict[str, Server],
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
    proxy: str,
    paths: tuple[str, ...],
    seed: int,
    budget: int,
    full: int,
) -> None:
    """Refusals too. The decode engine computes one token of each prompt: the work is truly shared."""
    count = effort(budget, full)
    before = await scrape(client, servers["decode"].url)

    found = await compared(client, servers["single"].url, servers[proxy].url, lanes(seed, count, paths))

    after = await scrape(client, servers["decode"].url)
    wrong = differences(found)
    kinds = Counter(case.expected for case, _, _ in found)
    streams = sum(one.kind == "text/event-stream" for _, one, _ in found)
    answered = kinds["answer"]
    record({"requests": len(found), "different": len(wrong), "streams": streams, **kinds})
    assert not wrong, f"{len(wrong)} of {len(found)} differ, the first:\n{wrong[0]}"
    assert 0.05 < 1 - answered / len(found) < 0.2  # refusals
    assert streams > count / 4
    assert answered <= after[COMPUTED] - before[COMPUTED] <= 3 * answered


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"seed": 2}, {"max_tokens": 13}, {"logprobs": 1}, {"echo": True}])
@pytest.mark.parametrize("stream", [False, True])
async def test_two_requests_that_are_not_the_same_are_told_apart(
    client: httpx.AsyncClient, servers: dict[str, Server], change: JSON, stream: bool
) -> None:
    """Negative control: one engine, which has the prompt's KV already."""
    url = servers["single"].url
    body: JSON = {"prompt": "Once upon a time, " * 3, "seed": 1, "max_tokens": 12, "ignore_eos": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    case = Case(COMPLETIONS, body)
    await seen(client, url, case)

    one, same, other = [await seen(client, url, replace(case, body=body | more)) for more in ({}, {}, change)]

    assert difference(case, one, same) is None
    assert difference(case, one, other) is not None
