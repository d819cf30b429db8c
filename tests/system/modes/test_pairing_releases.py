"""Tests that KV that no engine will fetch is released by an engine that may be paired with its holder, or by none."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from kvparams.instances import Role
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.secret import Secret
from tests.support.proxy.acting import NIXL, Actor
from tests.support.proxy.fixtures import answer, instance, running, scripted, stack
from tests.support.proxy.stage import BODY, COMPLETIONS
from tests.support.waiting import until

__all__ = ["scripted", "stack"]

ADMIN = {"authorization": "Bearer admin-token-of-this-test"}


@pytest.mark.parametrize("partner_stays", [True, False])
@pytest.mark.parametrize("kind", ["group", "compatibility"])
async def test_a_release_goes_to_a_partner_or_to_nobody(
    stack: AsyncExitStack, scripted: Any, kind: str, partner_stays: bool
) -> None:
    """Its client leaves while prefill runs, and that has answered all the same."""
    prefilling, goes_on = asyncio.Event(), asyncio.Event()

    async def prefill(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prefilling.set()
        await reader.read()  # the client has left
        await goes_on.wait()
        whole = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}], "kv_transfer_params": NIXL}
        writer.write(answer(json.dumps(whole).encode()))

    producer, stranger, partner = await scripted(prefill), Actor("decode"), Actor("decode")
    for actor in (stranger, partner):
        await actor.begin()
        stack.callback(actor.end)
    instances = (
        replace(instance(Role.PREFILL, producer.url, "nixl"), **{kind: "A"}),
        replace(instance(Role.DECODE, stranger.url, "nixl", 0), **{kind: "B"}),
        replace(instance(Role.DECODE, partner.url, "nixl", 1), **{kind: "A"}),
    )
    settings = Settings(instances, admin_token=Secret("admin-token-of-this-test"))
    proxy = await stack.enter_async_context(running(settings, direct=True))
    asking = asyncio.create_task(proxy.client.post(COMPLETIONS, json=BODY))
    async with asyncio.timeout(5):
        await prefilling.wait()
    if not partner_stays:
        assert (await proxy.client.post("/admin/instances/decode-1/drain", headers=ADMIN)).status_code == 200
    asking.cancel()
    goes_on.set()
    ends = [f"kvparams_proxy_transfers_{end}_total" for end in ("released", "orphaned")]

    async def told() -> bool:
        return sum([await proxy.metric(end) for end in ends]) == 1

    await until(told)
    assert stranger.releases == []
    assert len(partner.releases) == partner_stays
    assert [await proxy.metric(end) for end in ends] == [partner_stays, not partner_stays]
