"""Tests that LoRA adapters are followed and routed through the whole proxy, between engines of both roles."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.support.proxy.adapter_engine import AdapterActor
from tests.support.proxy.fixtures import Proxy, StartProxy
from tests.support.waiting import until

_ADAPTERS = ["a", "b", "c", "d"]


class Site:
    """A proxy before two engines of each role, with four adapters and two slots each."""

    def __init__(self, running: Proxy, prefill: list[AdapterActor], decode: list[AdapterActor]) -> None:
        self.running = running
        self.prefill, self.decode = prefill, decode

    @property
    def engines(self) -> list[AdapterActor]:
        return [*self.prefill, *self.decode]

    async def ask(self, model: str, **more: Any) -> httpx.Response:
        body = {"model": model, "prompt": "Who is there?", "max_tokens": 4, **more}
        return await self.running.client.post("/v1/completions", json=body)

    async def models(self) -> list[str]:
        listed = (await self.running.client.get("/v1/models")).json()["data"]
        assert all(card.get("parent") == (None if card["id"] == "stub" else "stub") for card in listed)
        return [card["id"] for card in listed]


StartSite = Callable[..., Awaitable[Site]]


@pytest.fixture
def site(stack: AsyncExitStack, proxy: StartProxy) -> StartSite:
    async def start(policy: str, dialect: str = "store", **changes: object) -> Site:
        actors = {role: [AdapterActor(role, list(_ADAPTERS), 2) for _ in range(2)] for role in ("prefill", "decode")}
        for actor in (*actors["prefill"], *actors["decode"]):
            await actor.begin()
            stack.callback(actor.end)
        urls = [[actor.url for actor in actors[role]] for role in ("prefill", "decode")]
        running = await proxy(*urls, dialect, policy=policy, slow_start_s=0.0, **changes)
        return Site(running, actors["prefill"], actors["decode"])

    return start


@pytest.mark.parametrize("policy", ["cache_aware", "least_load", "round_robin"])
async def test_engines_load_each_adapter_once_where_the_policy_looks_at_it(site: StartSite, policy: str) -> None:
    found = await site(policy)
    # Four adapters fit into two engines with two slots each, once the proxy knows that there are two.
    for adapter in ("a", "b", "c", "d") * 4:
        assert (await found.ask(adapter)).status_code == 200

    async def slots_are_known() -> bool:
        for actor in found.engines:
            actor.loads = 0
        for adapter in ("c", "a", "d", "b", "b", "d") * 2:
            assert (await found.ask(adapter)).status_code == 200
        return sum(actor.loads for actor in found.engines) == 0

    if policy == "round_robin":  # the control
        assert not await slots_are_known()
        return
    await until(slots_are_known)
    text = (await found.running.client.get("/metrics")).text
    assert 'kvparams_proxy_adapter_legs_total{loaded="yes",role="prefill"}' in text
    assert await found.running.metric('kvparams_proxy_adapter_legs_total{loaded="yes",role="decode"}') >= 12


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin"])
async def test_what_is_loaded_and_unloaded_while_requests_run_is_followed(site: StartSite, policy: str) -> None:
    found = await site(policy, probe_interval_s=0.2)
    ended = False
    statuses = set[int]()

    async def traffic(adapter: str) -> None:
        while not ended:
            statuses.add((await found.ask(adapter, stream=True)).status_code)

    async with asyncio.TaskGroup() as group:
        for adapter in ("a", "b"):
            group.create_task(traffic(adapter))
        await until(lambda: all(actor.by_model for actor in found.engines))
        found.prefill[0].adapters.remove("a")
        found.decode[1].adapters.remove("a")
        for actor in found.engines:
            actor.adapters.append("new")

        async def is_served() -> bool:
            return "new" in await found.models()

        await until(is_served)
        for _ in range(4):
            assert (await found.ask("new")).status_code == 200
        ended = True
    assert statuses == {200}
    assert await found.running.metric("kvparams_proxy_breaker_state") == 0.0
    for actor in found.engines:
        actor.adapters.remove("new")

    async def is_gone() -> bool:  # once engines of all roles have told that they do not serve it
        refused = await found.ask("new")
        return refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"

    await until(is_gone)
    assert "new" not in await found.models()


@pytest.mark.parametrize("dialect", ["store", "nixl"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_adapter_that_an_engine_has_lost_is_asked_of_another(site: StartSite, role: str, dialect: str) -> None:
    """No probe has told of it, and none will for a minute but the one that the 404 causes."""
    found = await site("round_robin", dialect, probe_interval_s=60.0)
    engines = found.prefill if role == "prefill" else found.decode
    engines[0].adapters.remove("a")
    for _ in range(6):
        assert (await found.ask("a")).status_code == 200
    assert engines[0].missed == 1  # the control: it was asked once, and no more
    assert len(engines[1].by_model) == 6
    assert sum(len(actor.by_model) for actor in found.prefill) == 6  # no prompt is computed again
    assert (await found.ask("b")).status_code == 200  # what it still has it still gets
    engines[1].adapters.remove("a")
    last = await found.ask("a")
    assert last.status_code == 404
    assert engines[1].missed == 1
    refused = await found.ask("a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, f"no_{role}_instance")
    assert engines[1].missed == 1  # it is no candidate any more


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_another_404_is_the_answer(site: StartSite, role: str) -> None:
    """An endpoint that an engine lacks says nothing of its adapters."""
    found = await site("round_robin", probe_interval_s=60.0)
    for actor in found.prefill if role == "prefill" else found.decode:
        actor.refusal = lambda asked: b'{"detail":"Not Found"}'
    assert (await found.ask("a")).status_code == 404
    assert "a" in await found.models()
