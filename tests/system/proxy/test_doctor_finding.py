"""Tests that `kvparams doctor http://PROXY` finds a proxy whose predictions of cached tokens no longer come true."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from kvparams.cli import main
from kvparams.instances import Instance, Role
from kvparams_connectors.advice import Advice
from kvparams_connectors.cli import doctor_command
from tests.support.proxy.fixtures import Proxy, StartProxy
from tests.support.proxy.publisher import Publisher, stored
from tests.support.proxy.stage import StartStage
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until
from tests.system.proxy.fleet.test_kv_events import ports

PROMPT = Random(7).choices(range(1000), k=641)

Doctor = Callable[[str], Awaitable[tuple[int, str]]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """What it says of a URL. It looks at no machine here, which takes its time."""
    monkeypatch.setattr(doctor_command, "examine_machine", list[Advice])

    async def run(url: str) -> tuple[int, str]:
        status = await asyncio.to_thread(main, ["doctor", url])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


@pytest.fixture
def at() -> tuple[int, int]:
    return ports()


def urls(stub: StubEngines, role: Role) -> list[str]:
    return [engine.url for engine in stub.engines if engine.role == role]


def url_of(running: Proxy) -> str:
    return f"http://127.0.0.1:{running.port}"


async def test_predictions_that_do_not_come_true_are_found(
    stub: StubEngines, proxy: StartProxy, doctor: Doctor, at: tuple[int, int]
) -> None:
    """An engine's KV events say that it has all prompts, and its answers say 7 tokens. The control is the same proxy
    before anybody asks."""
    telling = Instance(
        "p", "p.1", Role.PREFILL, urls(stub, Role.PREFILL)[0], "nixl", kv_events=f"tcp://127.0.0.1:{at[0]}"
    )
    decode = Instance("d", "d.1", Role.DECODE, urls(stub, Role.DECODE)[0], "nixl")
    running = await proxy([], [], policy="cache_aware", instances=(telling, decode))
    prompts = [Random(number).choices(range(1000), k=641) for number in range(40)]

    async def heard() -> bool:
        return await running.metric("kvparams_proxy_kv_events_connected") == 1

    async def told() -> bool:
        return await running.metric("kvparams_proxy_kv_events_batches_total") == len(prompts)

    with Publisher(at) as publisher:
        await until(heard)
        for ids in prompts:
            publisher.say(stored(ids[:640]))
        await until(told)
        status, said = await doctor(url_of(running))
        assert (status, "WARNING" in said, "the proxy has not predicted any cached tokens yet" in said) == (
            0,
            False,
            True,
        )
        for ids in prompts:
            asked = {"model": "stub", "prompt": ids, "max_tokens": 1}
            assert (await running.client.post("/v1/completions", json=asked)).status_code == 200
    assert await running.metric("kvparams_proxy_prefix_cache_alarm") == 1
    status, said = await doctor(f"{url_of(running)}/")
    assert status == 0, "it works, and hurts"
    assert "WARNING only " in said
    assert "% of the tokens that were predicted to be cached were cached: turn on prefix caching" in said
    for number in range(256):  # all that is remembered: nothing is expected of these
        asked = {"model": "stub", "prompt": Random(1000 + number).choices(range(1000), k=128), "max_tokens": 1}
        assert (await running.client.post("/v1/completions", json=asked)).status_code == 200
    status, said = await doctor(url_of(running))
    assert "WARNING only next to none of the tokens that were predicted to be cached were cached" in said


async def test_those_that_come_true_are_well(proxy: StartProxy, doctor: Doctor) -> None:
    async with await StubEngines.start(prefill=[0], decode=[0], cached_tokens=640) as stub:
        running = await proxy(urls(stub, Role.PREFILL), urls(stub, Role.DECODE), policy="cache_aware")
        for _ in range(4):
            asked = {"model": "stub", "prompt": PROMPT, "max_tokens": 1}
            assert (await running.client.post("/v1/completions", json=asked)).status_code == 200
        status, said = await doctor(url_of(running))
    assert (status, "WARNING" in said) == (0, False)
    assert "  ok      the kvparams proxy answers\n" in said
    assert "  ok      85 % of the tokens that were predicted to be cached were cached\n" in said, (
        "this engine counts others"
    )


async def test_engines_that_do_not_report_are_a_finding_of_their_own(stage: StartStage, doctor: Doctor) -> None:
    site = await stage(policy="cache_aware", engines=1)
    for _ in range(3):
        assert (await site.ask(prompt=PROMPT, max_tokens=1)).status_code == 200
    _, said = await doctor(url_of(site.running))
    assert "WARNING the proxy predicts cached tokens, but no engine reports its cached tokens: make the engines" in said


async def test_a_proxy_that_does_not_look_is_well(stubbed: Proxy, doctor: Doctor) -> None:
    status, said = await doctor(url_of(stubbed))
    assert (status, "the proxy's policy does not use engines' caches" in said) == (0, True)


async def test_what_is_no_proxy_is_an_error(stub: StubEngines, doctor: Doctor) -> None:
    status, said = await doctor(stub.engines[0].url)
    assert (status, "ERROR" in said, "1 error found" in said) == (1, True, True)
    for url in ("http://127.0.0.1:1", "http://user:s3cret@127.0.0.1:1", "http://", "https://127.0.0.1:1"):
        status, said = await doctor(url)
        assert (status, said.count("ERROR"), "the proxy does not answer" in said) == (1, 1, True), said
        assert "s3cret" not in said
