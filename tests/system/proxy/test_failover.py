"""Tests that clients do not notice failing engines; where no other engine can be asked, they get an error status."""

import asyncio

import pytest

from tests.support.proxy.acting import FAULTS, Fault, leg_limit_s
from tests.support.proxy.stage import StartStage, text_of
from tests.support.waiting import until


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=pytest.mark.slow) if one == "silent" else one for one in FAULTS]
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("dialect", ["store", "nixl"])
async def test_where_an_engine_fails_another_answers(stage: StartStage, fault: Fault, role: str, dialect: str) -> None:
    found = await stage(dialect, prefill_timeout_s=leg_limit_s(fault), decode_timeout_s=leg_limit_s(fault))
    whole = (await found.ask()).json()["choices"][0]["text"]
    broken, sound = found.of[role]
    broken.fails(fault)
    for stream in (False, True, True, False):
        got = await found.ask(stream=stream)
        assert got.status_code == 200, got.text
        assert text_of(got, stream) == whole
        assert broken.url not in got.text
    assert len(sound.bodies) >= 4
    assert len(broken.bodies) >= (1 if fault == "gone" else 2)  # the control: it was asked, and failed
    assert await found.settled()
    assert await found.running.metric('kvparams_proxy_requests_total{outcome="ok"}') == 5
    assert await found.running.metric('kvparams_proxy_requests_total{outcome="failed"}') == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_refusal_is_not_asked_of_another(stage: StartStage, role: str) -> None:
    found = await stage()
    for actor in found.of[role]:
        actor.fails("refusal")
    got = await found.ask(stream=True)
    assert (got.status_code, got.json()["error"]["message"]) == (400, "too long")
    assert sum(len(actor.bodies) for actor in found.of[role]) == 1


@pytest.mark.parametrize("fault", ["500", "garbage", "silent"])
async def test_with_nixl_a_claimed_transfer_is_never_asked_for_again(stage: StartStage, fault: Fault) -> None:
    """Whoever has seen a decode leg may have fetched the blocks and freed them: a new prefill makes new ones."""
    found = await stage("nixl", decode_timeout_s=leg_limit_s(fault))
    for actor in found.decode:
        actor.fails(fault, 1)
    got = await found.ask()
    assert got.status_code == 200
    assert [len(found.transfers(role)) for role in ("prefill", "decode")] == [3, 3]
    asked = {(d.transfer.id, d.transfer.attempt) for actor in found.prefill for d in actor.documents}
    assert {attempt for _, attempt in asked} == {1, 2, 3}
    assert len({id for id, _ in asked}) == 3
    assert asked == {(d.transfer.id, d.transfer.attempt) for actor in found.decode for d in actor.documents}


async def test_with_nixl_blocks_that_nobody_can_have_fetched_go_to_another_engine(stage: StartStage) -> None:
    found = await stage("nixl", probe_interval_s=60.0)
    found.decode[0].end()
    found.decode[1].fails("reset", 0)
    for _ in range(2):
        assert (await found.ask()).status_code == 200
    assert len(found.transfers("prefill")) == len(set(found.transfers("prefill"))) == 2
    assert sorted(found.transfers("decode")) == sorted(found.transfers("prefill"))


@pytest.mark.parametrize("fault", ["garbage", "500", "silent"])
async def test_with_a_store_the_same_keys_go_to_another_engine_under_another_transfer(
    stage: StartStage, fault: Fault
) -> None:
    found = await stage("store", decode_timeout_s=leg_limit_s(fault))
    first, second = found.decode
    first.fails(fault)
    while not first.bodies:
        assert (await found.ask()).status_code == 200
    assert len(found.transfers("prefill")) == len(second.bodies)
    (failed,) = first.documents
    again = next(d for d in second.documents if d.request_id == failed.request_id)
    assert again.load_keys == failed.load_keys
    assert (again.transfer.attempt, failed.transfer.attempt) == (2, 1)
    assert again.transfer.id != failed.transfer.id


async def test_an_engine_that_refuses_probes_gets_no_work_until_it_is_back(stage: StartStage) -> None:
    # A probe may take as long as lies between two; who is missing is probed more often.
    found = await stage(probe_interval_s=5.0, slow_start_s=0.0)
    broken, sound = found.prefill
    broken.fails("gone")
    assert [(await found.ask()).status_code for _ in range(6)] == [200] * 6
    assert len(broken.bodies) == 1
    assert len(sound.bodies) == 6
    broken.faults = 0
    await broken.begin()

    async def is_used_again() -> bool:
        assert (await found.ask()).status_code == 200
        return len(broken.bodies) >= 3

    await until(is_used_again)


# nobody else may be asked


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_without_retries_the_first_failure_is_the_answer(stage: StartStage, role: str, stream: bool) -> None:
    found = await stage(retries=0)
    for actor in found.of[role]:
        actor.fails("500")
    got = await found.ask(stream=stream)
    assert (got.status_code, got.json()["error"]["code"]) == (502, f"{role}_failed")
    assert sum(len(actor.bodies) for actor in found.of[role]) == 1
    assert await found.settled()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_has_only_so_many_attempts(stage: StartStage, role: str) -> None:
    found = await stage(retries=3)
    for actor in found.of[role]:
        actor.fails("500")
    got = await found.ask()
    assert (got.status_code, got.json()["error"]["code"]) == (502, f"{role}_failed")
    assert sum(len(actor.bodies) for actor in found.of[role]) == 4
    assert await found.settled()


async def test_all_requests_together_have_only_so_many_attempts(stage: StartStage) -> None:
    """While everything fails the budget is used up: then failures are answers. It fills again as requests come."""
    found = await stage()
    broken, sound = found.prefill
    broken.fails("500")
    sound.fails("500")
    for _ in range(12):
        assert {got.status_code for got in await asyncio.gather(*(found.ask() for _ in range(10)))} == {502}
    asked = len(broken.bodies) + len(sound.bodies)
    assert 200 <= asked - 120 <= 200 + 0.2 * 120  # the control: at first each had two more attempts
    sound.faults = 0
    codes = [(await found.ask()).status_code for _ in range(20)]
    assert 5 <= codes.count(502) <= 10  # those that met the broken one first, but for what the requests had paid in
    assert await found.running.metric('kvparams_proxy_retries_total{allowed="no"}') > 0
    assert await found.settled()
