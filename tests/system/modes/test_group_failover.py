"""Tests that a request goes on in the second replica when one engine of the first fails."""

import asyncio
from functools import partial

import pytest

from kvparams.instances import Role
from kvparams.routing.admission import QueueLimits, RoleLimits
from tests.support.proxy.acting import FAULTS, Fault, answer_to, leg_limit_s
from tests.support.proxy.stage import BODY, text_of
from tests.support.waiting import until
from tests.system.modes.conftest import StartMode, Way

IN_ORDER, FIRST = "prefill_then_decode", "prefill_then_decode,decode_first=true"
WAYS = (
    Way(IN_ORDER),
    Way(IN_ORDER, "nixl"),
    Way(FIRST),
    Way(FIRST, "nixl"),
    Way("concurrent_legs", "store-meet"),
    Way("concurrent_legs", "nixl"),
)


@pytest.mark.parametrize(
    "fault", [one if one in ("reset", "500") else pytest.param(one, marks=pytest.mark.slow) for one in FAULTS]
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_where_one_of_a_group_fails_another_group_answers(
    staged: StartMode, way: Way, role: str, fault: Fault
) -> None:
    limit_s = leg_limit_s(fault)
    found = await staged(way, "group", prefill_timeout_s=limit_s, decode_timeout_s=limit_s, retries=1)
    found.of[role][0].fails(fault)
    for number in range(4):
        got = await found.ask(stream=number % 2 == 1)
        assert got.status_code == 200, got.text
        assert text_of(got, number % 2 == 1)
        assert got.headers["x-kvparams-decode"].endswith("decode-1")
    assert found.of[role][0].bodies or fault == "gone"  # the control: it was asked, and failed
    assert await found.settled()
    assert await found.running.metric('kvparams_proxy_requests_total{outcome="ok"}') == 4


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_a_stream_goes_on_in_another_group(staged: StartMode, way: Way) -> None:
    found = await staged(way, "compatibility", continuation=True)
    found.of["decode"][0].breaks_after = 3
    answers = [await found.ask(stream=True, max_tokens=8) for _ in range(4)]
    right = "".join(map(chr, answer_to(list(BODY["prompt"].encode()), 8)))
    assert [text_of(got, True) for got in answers] == [right] * 4
    assert await found.running.metric("kvparams_proxy_continuations_total") >= 1
    assert await found.settled()


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_where_all_have_failed_a_group_is_not_left_for_nothing(staged: StartMode, way: Way) -> None:
    """The control: no pair is any better, and the client is told what the last one said."""
    found = await staged(way, "group", retries=3)
    for actor in found.of["decode"]:
        actor.fails("500")
    got = await found.ask()
    assert got.status_code == 502, got.text
    assert sum(len(actor.bodies) for actor in found.of["decode"]) == 4
    assert await found.settled()


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_who_waits_in_a_group_that_goes_is_answered_by_another(staged: StartMode, way: Way) -> None:
    """Six requests for two groups with room for one each: some wait in the group that goes, with the other leg's
    engine, or its KV, in hand."""
    scarce = "prefill" if way.mode == FIRST else "decode"
    limits = {role: RoleLimits(requests=1 if role == scarce else 8) for role in Role}
    found = await staged(way, "group", limits=limits, queue=QueueLimits(8, None, 30.0), retries=2)
    held = [asyncio.Event() for _ in found.of[scarce]]
    for actor, event in zip(found.of[scarce], held, strict=True):
        actor.held = event
    asked = [asyncio.create_task(found.ask()) for _ in range(2)]

    async def both_run() -> bool:
        return all(actor.open for actor in found.of[scarce])

    async def all_wait(count: int) -> bool:
        return await found.running.metric("kvparams_proxy_waiting") >= count

    await until(both_run)
    asked += [asyncio.create_task(found.ask()) for _ in range(4)]
    await until(partial(all_wait, 4))
    found.of[scarce][0].end()  # with it goes what it ran, and those that waited for it
    held[1].set()
    answers = await asyncio.gather(*asked)
    held[0].set()
    assert [got.status_code for got in answers] == [200] * 6, [got.text for got in answers]
    assert {got.headers["x-kvparams-decode"].rpartition(" ")[2] for got in answers} == {"decode-1"}
    await until(found.settled)


async def test_a_lease_that_is_of_no_use_any_more_ends_nobody_who_waits_for_prefill(staged: StartMode) -> None:
    """KV waits for room in a group that goes. Its request then waits for the other group's prefill engine, for longer
    than the KV would have stayed."""
    limits = {role: RoleLimits(requests=1) for role in Role}
    found = await staged(Way(IN_ORDER), "group", limits=limits, queue=QueueLimits(8, None, 30.0), retries=3)
    prefill, decode = found.of["prefill"], found.of["decode"]
    for actor in (*prefill, *decode):
        actor.lease_ms = 500
    held = asyncio.Event()
    for actor in decode:
        actor.held = held

    async def running(role: str, count: int) -> bool:
        return sum(actor.open for actor in found.of[role]) == count

    async def waiting(count: int) -> bool:
        return await found.running.metric("kvparams_proxy_waiting") == count

    async def retried(times: int) -> bool:
        return await found.running.metric('kvparams_proxy_retries_total{allowed="yes"}') >= times

    asked = [asyncio.create_task(found.ask()) for _ in range(2)]
    await until(partial(running, "decode", 2))
    for count in range(1, 5):
        asked.append(asyncio.create_task(found.ask()))
        await until(partial(waiting, count))  # two for each decode engine
    computes = asyncio.Event()
    for actor in prefill:
        actor.held = computes
    asked += [asyncio.create_task(found.ask()) for _ in range(2)]
    await until(partial(running, "prefill", 2))
    decode[0].end()
    await until(partial(retried, 5))  # what it ran, what waited for it, and by their leases what waits for the other
    computes.set()
    held.set()
    answers = await asyncio.gather(*asked)
    assert [got.status_code for got in answers] == [200] * 8, [got.text for got in answers]
    await until(found.settled)
