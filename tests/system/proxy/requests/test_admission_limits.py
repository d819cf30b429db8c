"""Tests limits and drains as a client sees them: who waits, in which order, and what a refusal says."""

import asyncio
import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvparams.instances import Role
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams_proxy.requests.api_keys_file import create_api_key, edit_api_keys
from kvparams_proxy.secret import Secret
from tests.support.proxy.stage import BODY, COMPLETIONS, Stage, StartStage
from tests.support.waiting import until


async def line_up(found: Stage, count: int, **more: Any) -> list[asyncio.Task[Any]]:
    """So many requests, one after the other, each in the queue before the next comes."""
    tasks: list[asyncio.Task[Any]] = []
    for number in range(count):
        tasks.append(asyncio.create_task(found.ask(prompt=f"{number}", **more)))
        await until(partial(_met, found, tasks))
    return tasks


async def _met(found: Stage, tasks: list[asyncio.Task[Any]]) -> bool:
    """Whether the proxy knows of all of them, or has answered."""
    known = await found.running.metric("kvparams_proxy_in_flight") + await found.running.metric(
        "kvparams_proxy_waiting"
    )
    return known + sum(task.done() for task in tasks) >= len(tasks)


async def _waiting(found: Stage, count: int) -> bool:
    return await found.running.metric("kvparams_proxy_waiting") >= count


async def _running(found: Stage, count: int) -> bool:
    return sum(actor.open for actor in found.decode) >= count


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_who_finds_no_room_waits_in_order_and_is_told_when_too_many_do(stage: StartStage, role: str) -> None:
    found = await stage(
        engines=1, limits={Role(role): RoleLimits(requests=1)}, queue=QueueLimits(waiting=3, wait_s=30.0)
    )
    (actor,) = found.of[role]
    actor.held = asyncio.Event()
    tasks = await line_up(found, 6)
    async with asyncio.timeout(10):
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    actor.held.set()
    answers = await asyncio.gather(*tasks)
    assert [got.status_code for got in answers] == [200] * 4 + [503] * 2
    for got in answers[4:]:
        assert got.json()["error"]["code"] == "queue_full"
        assert int(got.headers["retry-after"]) >= 1
    assert [json.loads(body)["prompt"] for body in actor.bodies] == ["0", "1", "2", "3"]
    assert await found.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_what_decode_would_not_let_wait_is_not_prefilled(stage: StartStage, stream: bool) -> None:
    """And once there is room again it is."""
    found = await stage(
        engines=1, limits={Role.DECODE: RoleLimits(requests=1)}, queue=QueueLimits(waiting=2, wait_s=30.0)
    )
    (prefill,), (decode,) = found.prefill, found.decode
    decode.held = asyncio.Event()
    tasks = await line_up(found, 3)
    await until(partial(_waiting, found, 2))
    for _ in range(3):
        got = await found.ask(stream=stream)
        assert (got.status_code, got.json()["error"]["code"]) == (503, "queue_full")
        assert int(got.headers["retry-after"]) >= 1
    assert len(prefill.bodies) == 3
    decode.held.set()
    assert [(await task).status_code for task in tasks] == [200] * 3
    assert (await found.ask(stream=stream)).status_code == 200
    assert len(prefill.bodies) == 4
    assert await found.settled()


async def test_who_has_waited_too_long_is_told_so(stage: StartStage) -> None:
    found = await stage(
        engines=1, limits={Role.DECODE: RoleLimits(requests=1)}, queue=QueueLimits(waiting=3, wait_s=0.1)
    )
    (actor,) = found.decode
    actor.held = asyncio.Event()
    tasks = await line_up(found, 2)
    late = await tasks[1]
    assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
    assert int(late.headers["retry-after"]) >= 1
    actor.held.set()
    assert (await tasks[0]).status_code == 200
    assert await found.settled()


async def test_decode_is_not_waited_for_longer_than_there_is_kv(stage: StartStage) -> None:
    """It is computed again, if that may be tried; otherwise the client hears of it at once."""
    found = await stage(
        engines=1, limits={Role.DECODE: RoleLimits(requests=1)}, queue=QueueLimits(waiting=3, wait_s=60.0), retries=1
    )
    (prefill,), (decode,) = found.prefill, found.decode
    decode.held = asyncio.Event()
    first = await line_up(found, 1)
    await until(partial(_running, found, 1))
    prefill.lease_ms = 100
    (second,) = await line_up(found, 1)

    async def computed_again() -> bool:
        return len(prefill.bodies) == 3

    await until(computed_again)
    late = await second
    assert (late.status_code, late.json()["error"]["code"]) == (503, "kv_expired")
    assert "the KV expired" in late.json()["error"]["message"]
    decode.held.set()
    assert (await first[0]).status_code == 200
    assert await found.settled()


async def test_one_tenant_that_has_its_share_waiting_is_told_to_slow_down(stage: StartStage, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    secrets: dict[str, str] = {}
    with edit_api_keys(keys) as records:
        for tenant in ("loud", "quiet"):
            secret, record = create_api_key(tenant, datetime.now(UTC))
            secrets[tenant] = secret
            records[record.id] = record
    limits = {Role.PREFILL: RoleLimits(requests=1)}
    found = await stage(engines=1, limits=limits, queue=QueueLimits(waiting=8, per_tenant=2), client_keys=keys)
    (actor,) = found.prefill
    actor.held = asyncio.Event()

    async def ask(tenant: str) -> Any:
        headers = {"authorization": f"Bearer {secrets[tenant]}"}
        return await found.running.client.post(COMPLETIONS, json=BODY, headers=headers)

    tasks: list[asyncio.Task[Any]] = []
    for tenant in ("loud", "loud", "loud", "loud", "quiet"):
        tasks.append(asyncio.create_task(ask(tenant)))
        await until(partial(_met, found, tasks))
    actor.held.set()
    answers = await asyncio.gather(*tasks)
    assert [got.status_code for got in answers] == [200, 200, 200, 429, 200]
    assert answers[3].json()["error"]["code"] == "rate_limited"
    assert int(answers[3].headers["retry-after"]) >= 1


async def test_a_retry_waits_for_room_like_everybody(stage: StartStage) -> None:
    found = await stage(engines=2, limits={Role.DECODE: RoleLimits(requests=1)}, queue=QueueLimits(wait_s=30.0))
    first, second = found.decode
    first.held = asyncio.Event()
    running = await line_up(found, 1)
    if not first.bodies:  # it was the other's turn
        first, second = second, first
        first.held, second.held = second.held, None
    second.fails("500", 1)
    (again,) = await line_up(found, 1)
    await until(partial(_waiting, found, 1))
    assert not again.done()
    assert first.held is not None
    first.held.set()
    assert [(await task).status_code for task in (again, *running)] == [200, 200]
    assert await found.settled()


# drain


async def test_who_is_drained_ends_what_it_has_begun_and_gets_nothing_new(stage: StartStage) -> None:
    token = "admin-token-of-this-test"
    found = await stage(admin_token=Secret(token))
    for actor in found.decode:
        actor.held = asyncio.Event()
    task = asyncio.create_task(found.ask(stream=True))
    await until(partial(_running, found, 1))
    number = next(number for number, actor in enumerate(found.decode) if actor.open)
    path = f"/admin/instances/decode-{number}/drain"
    headers = {"authorization": f"Bearer {token}"}
    assert (await found.running.client.post(path, headers=headers)).status_code == 200
    for actor in found.decode:
        assert actor.held is not None
        actor.held.set()
    assert (await task).text.endswith("data: [DONE]\n\n")
    assert [(await found.ask()).status_code for _ in range(4)] == [200] * 4
    assert [len(actor.bodies) for actor in found.decode] == ([1, 4] if number == 0 else [4, 1])
    other = f"/admin/instances/decode-{1 - number}/drain"
    assert (await found.running.client.post(other, headers=headers)).status_code == 200
    refused = await found.ask()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_decode_instance")
    assert int(refused.headers["retry-after"]) >= 1
