"""Tests that proxies which share a fleet route by what the others have done, whatever becomes of Valkey or of them.

Engines are stubs with a prefix cache: a request that finds its whole prompt cached went to the right one.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import httpx
import pytest

from benchmarks.replay.trace import BLOCK, Request
from benchmarks.replay.world import World
from benchmarks.replicas_processes.engines import PrefillLog, request_body
from benchmarks.replicas_processes.site import Site, open_site
from tests.support.waiting import until

_FASTER = 10.0
_ENGINES = 4
_BLOCKS = 8
_JSON = {"content-type": "application/json"}


class Fleet:
    """Engines with caches, and replicas in front of them."""

    def __init__(self, site: Site, log: PrefillLog) -> None:
        self.site = site
        self.log = log
        self._numbers = 0

    async def send(self, replica: int, prompts: Iterable[int]) -> int:
        """Sends prompts to a replica, one after the other, and returns how many were cached.

        Raises:
            AssertionError: one was not answered.
        """

        async def is_idle() -> bool:
            return (await self.site.load_seen(replica))[0] == 0

        await until(is_idle)  # what another replica counts as ended may still be under way
        cached = 0
        async with httpx.AsyncClient(timeout=20.0) as client:
            for prompt in prompts:
                self._numbers += 1
                body = self.body(prompt, self._numbers, 2)
                answer = await client.post(self.url(replica), content=body, headers=_JSON)
                assert answer.status_code == 200, answer.text
                assert answer.text.endswith("data: [DONE]\n\n")
                cached += self.log[self._numbers].cached_blocks == _BLOCKS
        return cached

    def url(self, replica: int) -> str:
        """Returns where a replica takes completions."""
        return f"http://127.0.0.1:{self.site.ports[replica]}/v1/completions"

    @staticmethod
    def body(prompt: int, number: int, answer_tokens: int) -> bytes:
        """Returns a request for a prompt of its own."""
        blocks = range(prompt * _BLOCKS, (prompt + 1) * _BLOCKS)
        return request_body(number, Request(0.0, _BLOCKS * BLOCK, answer_tokens, blocks, 0), answer_tokens)

    async def blocks(self) -> list[float]:
        """Returns how many blocks each replica believes to be cached."""
        return [(await self.site.metrics(number, "prefix_cache_blocks"))[0] for number in self.site.ports]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Starts engines and a Valkey server."""
    async with open_site(World(1000, workers=_ENGINES), _FASTER, tmp_path) as (site, log):
        yield Fleet(site, log)


async def test_a_proxy_that_starts_later_routes_by_what_was_cached_before(fleet: Fleet) -> None:
    await fleet.site.start_replica(0, is_sharing=True)
    await fleet.send(0, range(12))
    await fleet.site.start_replica(1, is_sharing=True)
    assert await fleet.blocks() == [12 * _BLOCKS] * 2, "it serves when it knows what the other one knows"
    assert await fleet.send(1, range(12)) == 12
    await fleet.site.start_replica(2, is_sharing=False)
    assert await fleet.blocks() == [12 * _BLOCKS, 12 * _BLOCKS, 0]  # the control: it knows of none


async def test_what_was_missed_while_valkey_was_away_is_known_soon_after(fleet: Fleet) -> None:
    site = fleet.site
    for number in range(2):
        await site.start_replica(number, is_sharing=True)
    await site.meet()

    async def are_apart() -> bool:
        return await site.siblings_known() == [-1, -1]

    async def have_met() -> bool:
        return await site.siblings_known() == [1, 1]

    await asyncio.to_thread(site.valkey.kill)
    await until(are_apart)
    await fleet.send(0, range(12))
    await fleet.send(1, range(12, 24))
    assert await fleet.blocks() == [12 * _BLOCKS] * 2  # the control: each knows its own
    await asyncio.to_thread(site.valkey.start)
    assert await until(have_met) < 10.0

    async def has_learnt() -> bool:
        return min(await fleet.blocks()) >= 24 * _BLOCKS

    await until(has_learnt)
    assert await fleet.send(1, range(12)) == 12
    assert await fleet.send(0, range(12, 24)) == 12
    assert [await site.metrics(number, "exchange_refused_total") for number in range(2)] == [[0.0], [0.0]]


async def _stream(fleet: Fleet, replica: int, prompt: int, answer_tokens: int) -> bool:
    """Returns whether a stream came to its end."""
    body = fleet.body(prompt, prompt, answer_tokens)
    try:
        async with (
            httpx.AsyncClient(timeout=30.0) as client,
            client.stream("POST", fleet.url(replica), content=body, headers=_JSON) as answer,
        ):
            return (await answer.aread()).endswith(b"data: [DONE]\n\n")
    except httpx.TransportError:
        return False


async def _legs(fleet: Fleet, replicas: Sequence[int]) -> set[tuple[float, int]]:
    return {await fleet.site.load_seen(number) for number in replicas}


async def test_a_killed_proxy_loses_its_own_streams_and_the_others_stop_counting_them(fleet: Fleet) -> None:
    site = fleet.site
    for number in range(3):
        await site.start_replica(number, is_sharing=True)
    await site.meet()
    streams = [asyncio.create_task(_stream(fleet, number % 3, number, 2000)) for number in range(12)]

    async def all_are_counted() -> bool:
        return await _legs(fleet, range(3)) == {(12.0, 2)}

    async def rest_is_counted() -> bool:
        return await _legs(fleet, (1, 2)) == {(8.0, 1)}

    await until(all_are_counted)
    site.kill(0)
    assert await until(rest_is_counted) < 3.0
    assert site.legs == 8
    site.delays.itl_ms = 0.0  # the rest of each answer comes at once
    assert await asyncio.gather(*streams) == [number % 3 != 0 for number in range(12)]
