"""Tests modes before reference engines, as processes: engines that meet, and warm caches, which actors cannot show."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from demo.processes import Processes, Server
from tests.support.waiting import until

LIMIT_S = 60.0
IN_FLIGHT = "reference_engine:requests_in_flight"
COMPUTED = 'reference_engine:prompt_tokens_total{source="computed"}'
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Fleet(NamedTuple):
    single: Server
    prefill: Server
    decode: tuple[Server, Server]
    together: Server
    """A proxy whose mode is `concurrent_legs`."""
    conditional: Server
    forgetful: Server
    """The same, with a policy that looks at no caches."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("modes")
    store = f"file://{folder}/kv?size=64MiB"
    with Processes(folder) as processes:
        single = processes.engine("single")
        # A long prompt takes some seconds there, so that what happens meanwhile can be seen.
        prefill = processes.engine("p0", "prefill", store, "--step-ms", "300")
        decode = processes.engine("d0", "decode", store), processes.engine("d1", "decode", store)
        processes.wait_ready(single, prefill, *decode, within_s=240)
        common = ("--log-requests", "off")
        uncached = ("--mode", "conditional,remote_tokens=128", *common, "--policy")
        together = processes.proxy([prefill], decode, "--mode", "concurrent_legs", *common, connector="store-meet")
        conditional = processes.proxy([prefill], decode, *uncached, "cache_aware")
        forgetful = processes.proxy([prefill], decode, *uncached, "round_robin")
        processes.wait_ready(together, conditional, forgetful, within_s=240)
        yield Fleet(single, prefill, decode, together, conditional, forgetful)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as found:
        yield found


def body(seed: int, tokens: int, **more: Any) -> dict[str, Any]:
    """A prompt that nobody else has, as token ids."""
    dice = random.Random(seed)
    prompt = [dice.randrange(3, 200) for _ in range(tokens)]
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}


async def metric(client: httpx.AsyncClient, server: Server, name: str) -> float:
    text = (await client.get(f"{server.url}/metrics")).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def ask(client: httpx.AsyncClient, server: Server, asked: dict[str, Any]) -> httpx.Response:
    answer = await client.post(f"{server.url}/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer


async def meeting(client: httpx.AsyncClient, fleet: Fleet) -> Server:
    """A decode engine that has begun while prefill has not ended."""
    found: list[Server] = []

    async def both() -> bool:
        found[:] = [each for each in fleet.decode if await metric(client, each, IN_FLIGHT)]
        return bool(found) and await metric(client, fleet.prefill, IN_FLIGHT) > 0

    await until(both, LIMIT_S)
    return found[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_that_meet_run_at_once_and_answer_as_one_engine_does(
    fleet: Fleet, client: httpx.AsyncClient, stream: bool
) -> None:
    asked = body(1 + stream, 3000)
    expected = (await ask(client, fleet.single, asked)).json()
    before = [await metric(client, each, COMPUTED) for each in fleet.decode]
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    asking = asyncio.create_task(ask(client, fleet.together, {**asked, **more}))
    ran = await meeting(client, fleet)
    answer = await asking
    if stream:
        events = [httpx.Response(200, text=line[6:]).json() for line in answer.text.splitlines() if "{" in line]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        usage = next(event["usage"] for event in events if event.get("usage"))
    else:
        text, usage = answer.json()["choices"][0]["text"], answer.json()["usage"]
    assert text == expected["choices"][0]["text"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert usage[name] == expected["usage"][name]
    now = [await metric(client, each, COMPUTED) for each in fleet.decode]
    # The control of "meets": who has fetched nothing computes 3,000.
    assert sum(now) - sum(before) < 100
    assert ran.name == answer.headers["x-kvparams-decode"]


async def test_who_leaves_while_engines_meet_leaves_nothing_on_either(fleet: Fleet, client: httpx.AsyncClient) -> None:
    asking = asyncio.create_task(ask(client, fleet.together, body(5, 3500)))
    await meeting(client, fleet)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    async def idle() -> bool:
        return not any([await metric(client, each, IN_FLIGHT) for each in (fleet.prefill, *fleet.decode)])

    await until(idle, LIMIT_S)
    assert await metric(client, fleet.together, "kvparams_proxy_in_flight") == 0


async def test_what_decode_has_is_not_prefilled_again_and_runs_where_it_is(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    for seed in (11, 12, 13):
        asked = body(seed, 600)
        first = await ask(client, fleet.conditional, asked)
        assert first.headers["x-kvparams-prefill"] == "p0"
        asked["prompt"] = [*asked["prompt"], *range(10, 50)]
        again = await ask(client, fleet.conditional, asked)
        assert "x-kvparams-prefill" not in again.headers
        assert again.headers["x-kvparams-decode"] == first.headers["x-kvparams-decode"]
        assert again.json()["choices"] == (await ask(client, fleet.single, asked)).json()["choices"]
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 576
        asked["cache_salt"] = "another"  # the control: somebody else's KV
        assert (await ask(client, fleet.conditional, asked)).headers["x-kvparams-prefill"] == "p0"


async def test_where_nobody_looks_at_caches_length_decides(fleet: Fleet, client: httpx.AsyncClient) -> None:
    for _ in range(2):
        assert (await ask(client, fleet.forgetful, body(21, 600))).headers["x-kvparams-prefill"] == "p0"
    assert "x-kvparams-prefill" not in (await ask(client, fleet.forgetful, body(22, 100))).headers
