"""Tests that engines with open breakers are spared while others are well, and used where there is no other."""

import asyncio
from functools import partial

import pytest

from kvparams.routing.breaker import BreakerLimits
from tests.support.proxy.stage import Stage, StartStage
from tests.support.waiting import until

SOON = BreakerLimits(consecutive=3, open_s=0.05, longest_s=0.05)
LATE = BreakerLimits(consecutive=3, open_s=60.0, longest_s=60.0)


async def _breakers(found: Stage, role: str, *states: int) -> bool:
    """Whether all breakers of this role are in one of these states."""
    names = [f'kvparams_proxy_breaker_state{{instance="{role}-{n}",role="{role}"}}' for n in range(len(found.of[role]))]
    return all([await found.running.metric(name) in states for name in names])


async def tripped(found: Stage, role: str) -> None:
    """All engines of this role have failed until their breakers opened; now they are well."""
    for actor in found.of[role]:
        actor.fails("500")
    await until(partial(_failing, found, role))
    for actor in found.of[role]:
        actor.faults = 0


async def _failing(found: Stage, role: str) -> bool:
    await found.ask()
    return await _breakers(found, role, 1, 2)


async def burst(found: Stage, stream: bool) -> list[int]:
    return [got.status_code for got in await asyncio.gather(*(found.ask(stream=stream) for _ in range(20)))]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engines", [1, 2])
async def test_a_recovered_fleet_answers_its_first_burst(
    stage: StartStage, role: str, stream: bool, engines: int
) -> None:
    """While a trial runs on a half-open engine, nobody else is refused."""
    found = await stage(engines=engines, breaker=BreakerLimits(consecutive=3, open_s=0.3, longest_s=0.3))
    await tripped(found, role)
    await until(partial(_breakers, found, role, 1))  # by itself, with nothing to do
    for actor in found.of[role]:
        actor.pause_s = 0.05
    assert await burst(found, stream) == [200] * 20
    assert await _breakers(found, role, 0)
    assert await found.settled()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_engines_that_answer_probes_are_used_where_all_are_suspected(stage: StartStage, role: str) -> None:
    """Five requests that make engines fail must not take the service away from everybody else."""
    found = await stage(breaker=LATE, probe_interval_s=60.0)
    await tripped(found, role)
    assert await burst(found, stream=False) == [200] * 20
    legs = [len(actor.bodies) for actor in found.of[role]]
    assert min(legs) >= 10  # both took their part
    assert await found.settled()


async def test_who_cannot_be_reached_is_not_used_even_then(stage: StartStage) -> None:
    found = await stage(breaker=LATE, probe_interval_s=60.0)
    gone, suspected = found.decode
    gone.end()
    suspected.fails("500")
    await until(partial(_broken, found, 1))
    before = gone.bodies.copy()
    suspected.faults = 0
    assert await burst(found, stream=False) == [200] * 20
    assert gone.bodies == before


async def _broken(found: Stage, count: int) -> bool:
    await found.ask()
    return await found.running.metric('kvparams_proxy_instances{role="decode",state="broken"}') == count


async def test_while_every_leg_fails_attempts_stay_within_the_budget(stage: StartStage) -> None:
    found = await stage(breaker=SOON)
    for actor in found.decode:
        actor.fails("500")
    requests = 250
    for _ in range(requests // 10):
        codes = {got.status_code for got in await asyncio.gather(*(found.ask() for _ in range(10)))}
        assert codes == {502}
    legs = sum(len(actor.bodies) for actor in found.decode)
    assert requests <= legs <= requests + 200 + 0.2 * requests


async def test_one_bad_engine_among_good_ones_is_spared(stage: StartStage) -> None:
    found = await stage(engines=3, breaker=LATE, probe_interval_s=60.0)
    bad = found.decode[0]
    bad.fails("500")
    for _ in range(40):
        assert (await found.ask()).status_code == 200
    assert 3 <= len(bad.bodies) <= 6


# what an operator is told


async def health(found: Stage, path: str = "/health") -> tuple[int, str]:
    got = await found.running.client.get(path)
    return got.status_code, got.json()["status"]


async def test_health_says_whether_engines_are_well_suspected_or_missing(stage: StartStage) -> None:
    found = await stage(breaker=LATE, probe_interval_s=0.2)
    assert await health(found) == (200, "ok")
    await tripped(found, "decode")
    assert await health(found) == (200, "degraded")
    assert await health(found, "/health/decode") == (200, "degraded")
    assert await health(found, "/health/prefill") == (200, "ok")
    body = (await found.running.client.get("/health")).json()
    assert body["degraded_roles"] == ["decode"]
    for actor in found.decode:
        actor.end()
    await until(partial(_unavailable, found))
    assert await health(found, "/health/decode") == (503, "unavailable")
    assert await health(found, "/health/prefill") == (200, "ok")
    assert (await found.running.client.get("/health")).json()["missing_roles"] == ["decode"]


async def _unavailable(found: Stage) -> bool:
    return await health(found) == (503, "unavailable")


async def test_health_is_degraded_while_breakers_are_half_open(stage: StartStage) -> None:
    found = await stage(breaker=SOON, probe_interval_s=60.0)
    await tripped(found, "decode")
    await until(partial(_breakers, found, "decode", 1))
    assert await health(found) == (200, "degraded")
    for _ in range(3):
        assert (await found.ask()).status_code == 200
    assert await health(found) == (200, "ok")
