"""Tests a prefill engine whose KV decode cannot fetch: the decode engine gets no blame, and others prefill.

Stock vLLM behaves like this. Every decode engine that remembers a restarted prefill engine refuses its successor under
the same NIXL engine id, while the successor answers all its own legs well.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest

from kvparams.routing.breaker import BreakerLimits
from kvparams.routing.managers.mode_selector import ManagerMode
from tests.support.proxy.acting import NIXL, Actor
from tests.support.proxy.stage import Stage
from tests.support.waiting import until

LIMITS = BreakerLimits(consecutive=3, window=50, failures=25, open_s=0.3, longest_s=0.3)
LATE = BreakerLimits(consecutive=3, window=50, failures=25, open_s=60.0, longest_s=60.0)
StartPairs = Callable[..., Awaitable["Pairs"]]


class Prefill(Actor):
    """Says under which NIXL engine id its KV is."""

    def __init__(self, engine_id: str) -> None:
        super().__init__("prefill")
        self.engine_id = engine_id

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        found = super()._answer(asked)
        found["kv_transfer_params"] = NIXL | {"remote_engine_id": self.engine_id}
        return found


class Decode(Actor):
    """Fails where it is to fetch the KV of one of `stale`."""

    def __init__(self) -> None:
        super().__init__("decode")
        self.stale: set[str] = set()
        self.failed = 0

    async def _leg(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if asked.get("kv_transfer_params", {}).get("remote_engine_id") in self.stale:
            self.failed += 1
            self.fails("500", 1)
        await super()._leg(asked, reader, writer)


class Pairs(Stage):
    """A proxy before such engines."""

    def __init__(self, running: Any, prefill: list[Prefill], decode: list[Decode]) -> None:
        super().__init__(running, prefill, decode)
        self.prefills, self.decodes = prefill, decode

    async def breaker(self, id: str) -> float:
        return await self.running.metric(f'kvparams_proxy_breaker_state{{instance="{id}"')

    async def apart(self, count: int = 1) -> bool:
        """Whether so many pairs are set apart."""
        return await self.running.metric("kvparams_proxy_pairs_apart") == count

    async def many(self, count: int) -> None:
        """So many requests at once, all of which are answered."""
        for actor in (*self.prefills, *self.decodes):
            actor.pause_s = 0.005
        got = await asyncio.gather(*(self.ask() for _ in range(count)))
        assert {each.status_code for each in got} == {200}

    async def ok(self, **more: Any) -> None:
        got = await self.ask(**more)
        assert got.status_code == 200, got.text


@pytest.fixture
def pairs(stack: AsyncExitStack, proxy: Any) -> StartPairs:
    async def start(prefill: int = 2, decode: int = 1, **changes: Any) -> Pairs:
        prefills = [Prefill(f"e{number}") for number in range(prefill)]
        decodes = [Decode() for _ in range(decode)]
        for actor in (*prefills, *decodes):
            await actor.begin()
            stack.callback(actor.end)
        urls = [[actor.url for actor in actors] for actors in (prefills, decodes)]
        return Pairs(await proxy(*urls, **{"breaker": LATE, "probe_interval_s": 60.0, **changes}), prefills, decodes)

    return start


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", [False, True])
async def test_the_pair_is_set_apart_and_the_decode_engine_is_not(pairs: StartPairs, stream: bool, first: bool) -> None:
    """Whichever of the two is chosen first."""
    found = await pairs(modes=(ManagerMode("prefill_then_decode", options={"decode_first": first}),))
    (bad, good), (decode,) = found.prefills, found.decodes
    decode.stale = {"e0"}
    for _ in range(30):
        await found.ok(stream=stream)
    assert await found.breaker("decode-0") == 0
    assert await found.breaker("prefill-0") == 0
    assert await found.apart()
    assert decode.failed == 3
    assert len(bad.bodies) == 3
    assert len(good.bodies) == 30
    assert await found.settled()


async def test_a_burst_through_the_bad_one_opens_no_breaker(pairs: StartPairs) -> None:
    """All of them are in flight before the first one has failed."""
    found = await pairs(retries=4)
    found.decodes[0].stale = {"e0"}
    for actor in found.prefills:
        actor.pause_s = 0.1
    got = await asyncio.gather(*(found.ask() for _ in range(40)))
    assert {each.status_code for each in got} == {200}
    assert await found.breaker("decode-0") == 0
    assert await found.apart()


async def test_where_another_decode_engine_fetches_it_that_one_does(pairs: StartPairs) -> None:
    """The KV is good: only the pair is avoided, not its prefill engine."""
    found = await pairs(decode=2, policy="least_load")
    stale, fresh = found.decodes
    stale.stale = {"e0"}
    for _ in range(15):
        await found.many(8)
    assert 3 <= stale.failed <= 11  # those that were under way with the third
    assert min(len(found.prefills[0].bodies), len(stale.bodies), len(fresh.bodies)) >= 25  # of 120: none is avoided
    assert await found.breaker("decode-0") == 0


async def test_a_decode_engine_that_fails_with_all_is_to_blame_itself(pairs: StartPairs) -> None:
    found = await pairs(decode=2, policy="least_load")
    broken = found.decodes[0]
    broken.stale = {"e0", "e1"}
    for _ in range(15):
        await found.many(8)
    assert await found.breaker("decode-0") == 2
    assert await found.breaker("decode-1") == 0
    assert await found.apart(0)  # its breaker says it all
    assert broken.failed <= 16


async def test_a_decode_engine_is_to_blame_where_another_one_fetches_the_kv_of_the_only_prefill(
    pairs: StartPairs,
) -> None:
    found = await pairs(prefill=1, decode=2)
    found.decodes[0].stale = {"e0"}
    for _ in range(40):
        await found.ok()
    assert found.decodes[0].failed <= 6
    assert await found.breaker("decode-1") == 0


async def test_they_work_together_again_as_soon_as_a_leg_shows_it(pairs: StartPairs) -> None:
    found = await pairs(breaker=LIMITS)
    bad = found.prefills[0]
    found.decodes[0].stale = {"e0"}
    while not await found.apart():
        await found.ok()
    found.decodes[0].stale = set()
    await until(partial(_together, found))
    before = len(bad.bodies)
    for _ in range(10):
        await found.ok()
    assert len(bad.bodies) == before + 5


async def _together(found: Pairs) -> bool:
    await found.ok()
    return await found.apart(0)


async def test_another_incarnation_of_the_prefill_engine_is_believed(pairs: StartPairs) -> None:
    found = await pairs(probe_interval_s=0.1, slow_start_s=0.0)
    bad = found.prefills[0]
    found.decodes[0].stale = {"e0"}
    while not await found.apart():
        await found.ok()
    bad.end()
    await until(partial(_ready, found, 1))
    bad.engine_id = "another"
    await bad.begin()
    await until(partial(_ready, found, 2))
    assert await found.apart(0)
    before = len(bad.bodies)
    for _ in range(10):
        await found.ok()
    assert len(bad.bodies) >= before + 4


async def _ready(found: Pairs, count: int) -> bool:
    return await found.running.metric('kvparams_proxy_instances{role="prefill",state="ready"}') == count


async def test_with_one_prefill_engine_clients_are_told_and_decode_is_still_used(pairs: StartPairs) -> None:
    """Nobody else can prefill: legs fail as the engine says, and requests that are not split are answered."""
    found = await pairs(prefill=1)
    (decode,) = found.decodes
    decode.stale = {"e0"}
    for _ in range(12):
        got = await found.ask()
        assert (got.status_code, got.json()["error"]["code"]) == (502, "decode_failed")
    assert await found.apart()
    got = await found.ask(prompt_logprobs=1)  # decode computes all of it itself
    assert got.status_code == 200, got.text
    decode.stale = set()
    await found.ok()
    assert await found.apart(0)


async def test_an_engine_that_is_busy_is_no_matter_of_pairs(pairs: StartPairs) -> None:
    found = await pairs(prefill=1, decode=2)
    busy = found.decodes[0]

    async def refuse(asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\n{}")

    busy._leg = refuse  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    for _ in range(12):
        await found.ok()
    assert await found.breaker("decode-0") == 2
    assert await found.apart(0)


async def test_engines_that_meet_are_set_apart_as_well(stack: AsyncExitStack, proxy: Any) -> None:
    """Both legs at once: a decode leg fails while its prefill runs, or after it."""
    prefills, decodes = [Actor("prefill"), Actor("prefill")], [Meeting()]
    for actor in (*prefills, *decodes):
        await actor.begin()
        stack.callback(actor.end)
    urls = [[actor.url for actor in actors] for actors in (prefills, decodes)]
    running = await proxy(
        *urls, "store-meet", breaker=LATE, probe_interval_s=60.0, modes=(ManagerMode("concurrent_legs"),)
    )
    found = Stage(running, prefills, decodes)
    decodes[0].stale = "prefill-0"
    for _ in range(30):
        got = await found.ask()
        assert got.status_code == 200, got.text
    assert await running.metric('kvparams_proxy_breaker_state{instance="decode-0"') == 0
    assert await running.metric("kvparams_proxy_pairs_apart") == 1
    assert decodes[0].failed == 3


class Meeting(Actor):
    """Fails where its document names this producer."""

    def __init__(self) -> None:
        super().__init__("decode")
        self.stale = ""
        self.failed = 0

    async def _leg(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.stale and self.stale in json.dumps(asked["kv_transfer_params"]):
            self.failed += 1
            self.fails("500", 1)
        await super()._leg(asked, reader, writer)
