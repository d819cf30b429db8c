"""Tests that LoRA adapters are followed and routed through the whole proxy, between engines of both roles."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvparams.instances import DataParallelRank, Role
from kvparams_proxy.config.settings import Settings
from tests.support.proxy.adapter_engine import AdapterActor
from tests.support.proxy.fixtures import Proxy, StartProxy, instance, running
from tests.support.waiting import until

_ADAPTERS = ["a", "b", "c", "d"]


class Site:
    """A proxy before two engines of each role, with four adapters and two slots each."""

    def __init__(self, running: Proxy, prefill: list[AdapterActor], decode: list[AdapterActor]) -> None:
        self.running = running
        self.prefill, self.decode = prefill, decode

    @property
    def roles(self) -> list[list[AdapterActor]]:
        return [self.prefill, self.decode]

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
    async def start(policy: str, dialect: str = "store", count: int = 2, **changes: object) -> Site:
        roles = ("prefill", "decode")
        actors = {role: [AdapterActor(role, list(_ADAPTERS), 2) for _ in range(count)] for role in roles}
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
        # Which engines get the requests depends on how they meet; each role loses the adapter where it is in use.
        await until(lambda: all(any("a" in actor.by_model for actor in role) for role in found.roles))
        for role in found.roles:
            next(actor for actor in role if "a" in actor.by_model).adapters.remove("a")
        await until(lambda: all("a" in actor.by_model for actor in found.engines if "a" in actor.adapters))
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
    for _ in range(2):
        assert (await found.ask("a")).status_code == 200
    await until(lambda: engines[0].probes == 2)
    missed = engines[0].missed
    assert 1 <= missed <= 2
    for _ in range(6):
        assert (await found.ask("a")).status_code == 200
    assert engines[0].missed <= missed + 1  # its answer to the probe may have been on its way
    assert len(engines[1].by_model) == 8
    assert sum(len(actor.by_model) for actor in found.prefill) == 8  # no prompt is computed again
    assert (await found.ask("b")).status_code == 200  # what it still has it still gets
    engines[1].adapters.remove("a")
    assert (await found.ask("a")).status_code == 404

    async def is_no_candidate() -> bool:
        refused = await found.ask("a")
        return (refused.status_code, refused.json()["error"]["code"]) == (503, f"no_{role}_instance")

    await until(is_no_candidate)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_one_engine_of_many_that_serves_an_adapter_is_found(site: StartSite, role: str) -> None:
    found = await site("round_robin", count=6, probe_interval_s=60.0, retries=0)
    engines = found.prefill if role == "prefill" else found.decode
    for actor in engines[:-1]:
        actor.adapters.remove("a")
    for _ in range(3):
        answer = await found.ask("a")
        assert answer.status_code == 200, answer.text
    assert len(engines[-1].by_model) == 3
    assert await found.running.metric("kvparams_proxy_retries_denied_total") == 0


_ECHOES = {
    "SGLang's words": (
        b"400 Bad Request",
        "The following requested LoRA adapters are not loaded: a\nLoaded adapters: [].",
    ),
    "vLLM": (b"404 Not Found", "The model `a` does not exist."),
}


@pytest.mark.parametrize("said", _ECHOES)
async def test_no_client_can_take_an_adapter_from_others(site: StartSite, said: str) -> None:
    """Engines repeat a client's input when they refuse it: as a part of what they say, or even as all of it."""
    found = await site("round_robin", probe_interval_s=60.0)
    status, text = _ECHOES[said]
    for actor in found.engines:
        actor.refusal_status = status
        actor.echoes = True
        actor.held_page = asyncio.Event()  # until it is answered, nothing is known
    for seed in (f"1 validation error: {text}", text):
        for _ in range(4):
            assert (await found.ask("a", seed=seed)).status_code == int(status[:3])
            for _ in range(2):
                assert (await found.ask("a")).status_code == 200
    assert "a" in await found.models()
    probed = [actor.probes for actor in found.prefill]
    assert max(probed) == 2  # the control: it was asked, and once at a time
    for actor in found.engines:
        assert actor.held_page is not None
        actor.held_page.set()
    for _ in range(4):
        assert (await found.ask("a")).status_code == 200


async def test_a_refusal_with_an_adapters_name_in_it_is_not_asked_of_others(site: StartSite) -> None:
    found = await site("round_robin", probe_interval_s=60.0)
    for actor in found.engines:
        actor.refusal_status, actor.echoes = b"400 Bad Request", True
    refused = await found.ask("a", seed="LoRA adapters are not loaded: a")
    assert refused.status_code == 400
    assert sum(len(actor.bodies) for actor in found.engines) == 1
    assert [actor.probes for actor in found.engines] == [1] * 4


@pytest.mark.parametrize("policy", ["round_robin", "least_load", "cache_aware"])
async def test_an_adapter_lost_behind_a_url_is_lost_by_all_its_ranks(stack: AsyncExitStack, policy: str) -> None:
    prefill = [AdapterActor("prefill", list(_ADAPTERS), 2) for _ in range(2)]
    decode = AdapterActor("decode", list(_ADAPTERS), 2)
    for actor in (*prefill, decode):
        await actor.begin()
        stack.callback(actor.end)
    ranks = [DataParallelRank(number, 4) for number in range(4)]
    instances = (
        *(replace(instance(Role.PREFILL, prefill[0].url, "store", one.index), rank=one) for one in ranks),
        instance(Role.PREFILL, prefill[1].url, "store", 9),
        instance(Role.DECODE, decode.url, "store"),
    )
    settings = Settings(instances, policy=policy, slow_start_s=0.0, probe_interval_s=60.0)
    found = Site(await stack.enter_async_context(running(settings, True)), prefill, [decode])
    before = prefill[0].probes
    prefill[0].adapters.remove("a")
    for _ in range(6):
        assert (await found.ask("a")).status_code == 200
    assert prefill[0].missed <= 2  # no rank after another; until the probe has told, the next request may come
    assert policy == "least_load" or prefill[0].missed >= 1
    await until(lambda: prefill[0].probes > before or prefill[0].missed == 0)
    assert prefill[0].probes <= before + 1
    assert len(prefill[1].by_model) == 6


async def test_the_only_engine_that_a_request_may_have_is_not_asked_for_ever(stack: AsyncExitStack) -> None:
    """Its prefill engine is paired with one decode engine. Another one serves the adapter, for other engines."""
    prefill, lost, other = (AdapterActor(role, list(_ADAPTERS), 2) for role in ("prefill", "decode", "decode"))
    for actor in (prefill, lost, other):
        await actor.begin()
        stack.callback(actor.end)
    instances = (
        replace(instance(Role.PREFILL, prefill.url, "store"), group="one"),
        replace(instance(Role.DECODE, lost.url, "store"), group="one"),
        replace(instance(Role.DECODE, other.url, "store", 1), group="two"),
    )
    settings = Settings(instances, slow_start_s=0.0, probe_interval_s=60.0)
    found = Site(await stack.enter_async_context(running(settings, True)), [prefill], [lost, other])
    lost.held_page = asyncio.Event()  # until it is answered, the adapter is not known to be lost
    lost.adapters.remove("a")
    assert (await found.ask("a")).status_code in (404, 503)
    assert 1 <= lost.missed <= 2
    assert len(prefill.by_model) <= 2
    lost.held_page.set()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_another_404_is_the_answer(site: StartSite, role: str) -> None:
    """An endpoint that an engine lacks says nothing of its adapters."""
    found = await site("round_robin", probe_interval_s=60.0)
    for actor in found.prefill if role == "prefill" else found.decode:
        actor.refusal = lambda asked: b'{"detail":"Not Found"}'
    assert (await found.ask("a")).status_code == 404
    assert "a" in await found.models()
