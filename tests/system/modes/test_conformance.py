"""Tests every mode: it answers, whole and streaming, survives failing legs, and cleans up when its client leaves.

A new mode needs a row in the table below.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest

from kvparams import plugins
from kvparams.instances import Role
from kvparams.routing.plan import LegPair
from kvparams_proxy.execution.leg_runner import LegRunner
from tests.support.proxy.acting import FAULTS, Actor, Fault, answer_to, leg_limit_s
from tests.support.proxy.stage import BODY, COMPLETIONS, PROMPT, text_of
from tests.support.waiting import until
from tests.system.modes.conftest import StartMode, Way

WAYS = (
    Way("prefill_then_decode"),
    Way("prefill_then_decode", "nixl"),
    Way("prefill_then_decode,decode_first=true"),
    Way("prefill_local_decode_remote"),
    Way("decode_local_prefill_remote", "nixl"),
    Way("queue_mediated"),
    Way("concurrent_legs", "store-meet"),
    Way("concurrent_legs", "nixl"),
    Way("conditional,remote_tokens=0"),
    Way("conditional", roles=(Role.DECODE,)),
    Way("aggregated", roles=(Role.AGGREGATED,)),
    Way("recompute"),
    Way("recompute", "nixl"),
)
LEGS = [(way, role) for way in WAYS for role in way.roles]
every_way = pytest.mark.parametrize("way", WAYS, ids=str)
every_leg = pytest.mark.parametrize(("way", "role"), LEGS, ids=lambda one: str(one))
EXPECTED = "".join(map(chr, answer_to(list(PROMPT.encode()), 8)))


def test_every_mode_that_is_registered_is_tried() -> None:
    assert {way.mode.partition(",")[0] for way in WAYS} == {*plugins.plugin_names("managers"), "recompute"}


@every_way
async def test_an_answer_is_that_of_the_engine_and_has_the_clients_own_limits(staged: StartMode, way: Way) -> None:
    stage = await staged(way)
    for stream in (False, True):
        got = await stage.ask(stream=stream, stop=["never"])
        assert got.status_code == 200, got.text
        assert text_of(got, stream) == EXPECTED
    asked = {role: [json.loads(body) for actor in actors for body in actor.bodies] for role, actors in stage.of.items()}
    assert {Role(role) for role, bodies in asked.items() if bodies} == set(way.roles)
    *first, last = way.roles
    for body in (body for role in first for body in asked[role]):
        assert (body["max_tokens"], body["stream"], "stop" in body) == (1, False, False)
    assert sorted(body["stream"] for body in asked[last]) == [False, True]
    assert all((body["max_tokens"], body["stop"]) == (8, ["never"]) for body in asked[last])
    assert await stage.settled()


@every_way
async def test_usage_is_counted_once(staged: StartMode, way: Way) -> None:
    stage = await staged(way)
    whole = (await stage.ask()).json()["usage"]
    got = await stage.ask(stream=True, stream_options={"include_usage": True})
    events = [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: {")]
    streamed = next(event["usage"] for event in events if event.get("usage"))
    for usage in (whole, streamed):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 8)
    assert await stage.running.metric("kvparams_proxy_prompt_tokens_sum") == 2 * len(PROMPT)


@pytest.mark.parametrize(
    "fault", [one if one in ("reset", "500") else pytest.param(one, marks=pytest.mark.slow) for one in FAULTS]
)
@every_leg
async def test_a_leg_that_fails_costs_no_answer(staged: StartMode, way: Way, role: Role, fault: Fault) -> None:
    stage = await staged(way, prefill_timeout_s=leg_limit_s(fault), decode_timeout_s=leg_limit_s(fault))
    broken = stage.of[role][0]
    broken.fails(fault)
    for stream in (False, True, True, False):
        got = await stage.ask(stream=stream)
        assert got.status_code == 200, got.text
        assert text_of(got, stream) == EXPECTED
    assert broken.bodies  # the control: it was asked
    await until(stage.settled)


@pytest.mark.parametrize("continuation", [True, False])
@every_way
async def test_a_stream_that_breaks_goes_on_or_ends_with_an_error(
    staged: StartMode, way: Way, continuation: bool
) -> None:
    stage = await staged(way, continuation=continuation)
    broken = stage.of[way.roles[-1]][0]
    broken.breaks_after = 3
    answers = [(await stage.ask(stream=True)).text for _ in range(4)]
    said = [[line[6:] for line in text.splitlines() if line.startswith("data: ")] for text in answers]
    assert broken.bodies  # the control: it was asked
    for events in said:
        ended = events[-1] == "[DONE]"
        read = [json.loads(event) for event in events if event != "[DONE]"]
        text = "".join(choice["text"] for event in read for choice in event.get("choices", ()))
        assert EXPECTED.startswith(text)
        assert (text == EXPECTED) is ("error" not in read[-1])
        assert ended is (text == EXPECTED)
    broke = sum("error" in events[-1] for events in said)
    assert broke == (0 if continuation else len(broken.bodies))
    await until(stage.settled)


@pytest.mark.parametrize("stream", [False, True])
@every_leg
async def test_where_nobody_can_the_client_is_told_and_nothing_is_left(
    staged: StartMode, way: Way, role: Role, stream: bool
) -> None:
    stage = await staged(way)
    last = way.roles[-1]
    for actor in stage.of[role]:
        actor.fails("500")
    got = await stage.ask(stream=stream)
    if way.mode == "recompute" and role is not last:  # that is what it is for
        assert text_of(got, stream) == EXPECTED
    else:
        assert got.status_code == 502, got.text
        assert got.json()["error"]["code"] == f"{role}_failed"
    await until(stage.settled)


@pytest.mark.parametrize("role_fails", ["refusal"])
@every_leg
async def test_a_refusal_is_the_clients(staged: StartMode, way: Way, role: Role, role_fails: Fault) -> None:
    stage = await staged(way)
    for actor in stage.of[role]:
        actor.fails(role_fails)
    got = await stage.ask()
    assert (got.status_code, got.json()["error"]["message"]) == (400, "too long")
    assert sum(len(actor.bodies) for actor in stage.of[role]) == 1
    await until(stage.settled)


async def leaves(stage: Any, stream: bool, at: Any) -> None:
    """A client that goes as soon as `at` is so."""
    url = f"http://127.0.0.1:{stage.running.port}"
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        asking = asyncio.create_task(client.post(COMPLETIONS, json={**BODY, "stream": stream}))
        await until(at)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def over(stage: Any) -> bool:
    """For the proxy."""
    return await stage.running.metric("kvparams_proxy_in_flight") == 0


@pytest.mark.parametrize("stream", [False, True])
@every_leg
async def test_whoever_leaves_during_a_leg_ends_it_and_whatever_runs_beside(
    staged: StartMode, way: Way, role: Role, stream: bool
) -> None:
    stage = await staged(way)
    held = asyncio.Event()
    for actor in stage.of[role]:
        actor.held = held

    async def runs() -> bool:
        return any(actor.open for actor in stage.of[role])

    await leaves(stage, stream, runs)
    await until(lambda: over(stage))  # although the engine has not said a word
    gone = 'kvparams_proxy_requests_total{outcome="gone"}'
    assert await stage.running.metric(gone) == 1
    held.set()
    await until(stage.settled)
    later = stage.of[Role.DECODE if role is Role.PREFILL else role]
    before = sum(len(actor.bodies) for actor in later)
    assert text_of(await stage.ask(), False) == EXPECTED  # the control: nothing of it is in the way of others
    assert sum(len(actor.bodies) for actor in later) == before + 1


@every_way
async def test_whoever_leaves_in_the_middle_of_a_stream_ends_it(staged: StartMode, way: Way) -> None:
    stage = await staged(way)
    goes_on = asyncio.Event()
    for actor in stage.of[way.roles[-1]]:
        actor.stalled = goes_on
    url = f"http://127.0.0.1:{stage.running.port}"
    body = {**BODY, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url, timeout=10) as client,
        client.stream("POST", COMPLETIONS, json=body) as got,
    ):
        async for _ in got.aiter_bytes():
            break
    await until(lambda: over(stage))
    assert await stage.running.metric('kvparams_proxy_requests_total{outcome="gone"}') == 1
    goes_on.set()
    await until(stage.settled)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_decodes_answer_is_held_until_prefill_is_good(staged: StartMode, stream: bool, fails: bool) -> None:
    """Of concurrent legs: what decode says is nothing as long as prefill may fail."""
    stage = await staged(Way("concurrent_legs", "store-meet"))
    held = asyncio.Event()
    first: list[Actor] = list(stage.of["prefill"])
    for actor in first:
        actor.held = held
    asking = asyncio.create_task(stage.ask(stream=stream))

    async def answered() -> bool:
        return any(actor.bodies and not actor.open for actor in stage.of["decode"])

    await until(answered)
    assert not asking.done()
    assert await stage.running.metric("kvparams_proxy_in_flight") > 0
    assert await stage.running.metric("kvparams_proxy_time_to_first_byte_seconds_count") == 0
    if fails:  # it is cut off
        next(actor for actor in first if actor.open).end()
    held.set()
    got = await asking
    assert text_of(got, stream) == EXPECTED
    assert sum(len(actor.bodies) for actor in stage.of["decode"]) == 1 + fails
    await until(stage.settled)


async def test_a_client_that_takes_again_starts_no_time_out_of_decode_while_prefill_runs(
    staged: StartMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a stream broke whose client had fallen behind, and both legs are run again for the rest of it."""
    start = LegRunner.start_pair
    timed: list[bool] = []

    def started(legs: LegRunner, pair: LegPair) -> None:
        start(legs, pair)
        legs.client_ready()
        timed.append(legs._owner in legs._resources.deadlines._deadlines)  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(LegRunner, "start_pair", started)
    stage = await staged(Way("concurrent_legs", "store-meet"))
    assert text_of(await stage.ask(stream=True), stream=True) == EXPECTED
    assert timed == [False]
    await until(stage.settled)
