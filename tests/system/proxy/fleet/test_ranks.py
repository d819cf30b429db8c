"""Tests several data-parallel ranks behind one URL: as well balanced and cached as that many URLs, never mixed up."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvparams.instances import Instance, Role
from kvparams_proxy.config.mode_parsing import parse_mode_flag
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, RankRange, specs_by_rank
from kvparams_proxy.tokenization.tokenizer_choice import TokenizationMethod
from tests.support.caching_engine import CachingEngine
from tests.support.proxy.acting import Actor
from tests.support.proxy.fixtures import Proxy, running
from tests.support.proxy.stage import BODY as STAGE_BODY
from tests.support.ranked_engine import RankedEngine
from tests.support.waiting import until
from tests.system.proxy.config.test_bootstraps import Bootstrap
from tests.system.proxy.config.test_sglang_pairs import Meeting, Rooms

RANKS, SESSIONS, TURNS, CLIENTS = 4, 128, 6, 24
SLOWNESS = 12
"""Some 7,000 tokens a second: requests queue, as they do where balance matters."""
CAPACITY_BLOCKS = 1500
AGGREGATED: dict[str, Any] = {
    "modes": (parse_mode_flag("aggregated"),),
    "policy": "cache_aware",
    "tokenizers": {None: TokenizationMethod.BYTES},
}
StartRanks = Callable[..., Awaitable[RankedEngine]]
StartFleet = Callable[..., Awaitable[Proxy]]


def ranks_of(
    url: str, role: Role, count: int = RANKS, start: int = 0, dialect: str = "nixl", bootstrap: str | None = None
) -> list[Instance]:
    """Returns the instances of an entry with ranks."""
    spec = InstanceSpec(f"{role[0]}0", url, role, dialect, bootstrap=bootstrap)
    return [one.make_instance() for one in specs_by_rank(spec, RankRange(count, start))]


@pytest.fixture
async def ranked(stack: AsyncExitStack) -> StartRanks:
    """Starts an engine with four ranks."""

    async def start(count: int = RANKS, **more: Any) -> RankedEngine:
        ranks = [CachingEngine(capacity_blocks=CAPACITY_BLOCKS) for _ in range(count)]
        return await stack.enter_async_context(RankedEngine(ranks=ranks, slowness=SLOWNESS, **more))

    return start


@pytest.fixture
async def fleet(stack: AsyncExitStack) -> StartFleet:
    """Starts a proxy in front of instances."""

    async def start(instances: Sequence[Instance], **changes: Any) -> Proxy:
        return await stack.enter_async_context(running(Settings(tuple(instances), log_requests="off", **changes), True))

    return start


def conversations() -> list[list[str]]:
    """Returns the prompts of sessions: each grows with every turn, and six of them begin alike."""
    dice = random.Random(7)
    words = [f"{dice.randrange(1 << 30):x} " for _ in range(4000)]

    def text(size: int) -> str:
        return "".join(dice.choice(words) for _ in range(size))

    systems = [text(200) for _ in range(6)]
    sessions: list[list[str]] = []
    for _ in range(SESSIONS):
        prompt = dice.choice(systems)
        turns: list[str] = []
        for _ in range(TURNS):
            prompt += text(60)
            turns.append(prompt)
        sessions.append(turns)
    return sessions


async def replay(proxy: Proxy) -> None:
    """Sends the sessions, some of them at a time; the turns of one follow one another."""
    waiting = conversations()

    async def client() -> None:
        while waiting:
            for prompt in waiting.pop():
                body = {"model": "m", "prompt": prompt, "max_tokens": 1}
                answer = await proxy.client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())


def spread(tokens: Sequence[int]) -> float:
    """Returns how much more the busiest has than the mean."""
    return max(tokens) * len(tokens) / sum(tokens)


async def measure(mode: str, ranked: StartRanks, fleet: StartFleet) -> tuple[float, float, list[int], list[int]]:
    """Returns the hit ratios of one URL with four ranks and of four URLs, and the prompt tokens of ranks by role."""
    split = mode == "prefill_then_decode"
    role = Role.PREFILL if split else Role.AGGREGATED
    changes = AGGREGATED | {"modes": (parse_mode_flag(mode),)}
    engine, decode = await ranked(), await ranked(2)
    others = ranks_of(decode.url, Role.DECODE, 2) if split else []
    await replay(await fleet([*ranks_of(engine.url, role), *others], **changes))
    decoded = list(decode.seen_tokens)
    urls = [await ranked(1) for _ in range(RANKS)]
    apart = [Instance(f"u{number}", "b", role, each.url, "nixl") for number, each in enumerate(urls)]
    both = [*apart, Instance("d0", "b", Role.DECODE, decode.url, "nixl")] if split else apart
    await replay(await fleet(both, **changes))
    assert set(engine.named_ranks) == set("0123")
    one_url = sum(engine.found_tokens) / sum(engine.seen_tokens)
    four_urls = sum(each.ranks[0].found_tokens for each in urls) / sum(each.ranks[0].seen_tokens for each in urls)
    return one_url, four_urls, engine.seen_tokens, decoded


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["aggregated", "prefill_then_decode"])
async def test_four_ranks_behind_one_url_are_as_good_as_four_urls(
    mode: str, ranked: StartRanks, fleet: StartFleet, record: Callable[[dict[str, object]], None]
) -> None:
    """It is looked at up to three times: on a machine that is busy, engines are idle while clients wait."""
    seen: list[tuple[object, ...]] = []
    while len(seen) < 3:
        one_url, four_urls, tokens, decoded = await measure(mode, ranked, fleet)
        record({"hit ratio": one_url, "of four URLs": four_urls, "max/mean": spread(tokens), "tokens": tokens})
        assert four_urls > 0.51
        is_even = spread(tokens) <= 1.1 and (not any(decoded) or spread(decoded) <= 1.1)
        if one_url >= 0.98 * four_urls and is_even:
            return
        seen.append((one_url, four_urls, tokens, decoded))
    pytest.fail(f"hits of one URL and of four, tokens of prefill and decode ranks: {seen}")


@pytest.mark.slow
async def test_without_ranks_one_url_is_one_cache_and_finds_less(ranked: StartRanks, fleet: StartFleet) -> None:
    """The control of the test above: the engine chooses the ranks, and the proxy cannot know which."""
    engine = await ranked()
    await replay(await fleet([Instance("a0", "b", Role.AGGREGATED, engine.url, "nixl")], **AGGREGATED))
    assert set(engine.named_ranks) == {""}
    assert sum(engine.found_tokens) / sum(engine.seen_tokens) < 0.75


BODY = {"model": "m", "prompt": "what is it", "max_tokens": 1}


async def test_each_leg_names_its_rank_and_the_client_none(ranked: StartRanks, fleet: StartFleet) -> None:
    prefill, decode = await ranked(), await ranked(2)
    proxy = await fleet(
        [*ranks_of(prefill.url, Role.PREFILL), *ranks_of(decode.url, Role.DECODE, 2)], expose_route=True
    )
    for _ in range(2 * RANKS):
        answer = await proxy.client.post("/v1/completions", json=BODY, headers={"X-Data-Parallel-Rank": "7"})
        assert answer.status_code == 200, answer.text
        chosen = (answer.headers["x-kvparams-prefill"], answer.headers["x-kvparams-decode"])
        sent = [engine.requests[-1].headers["x-data-parallel-rank"] for engine in (prefill, decode)]
        assert chosen == (f"p0-dp{sent[0]}", f"d0-dp{sent[1]}")
        named = json.loads(decode.requests[-1].body)["kv_transfer_params"]["remote_engine_id"]
        assert named == f"engine_dp{sent[0]}"
    assert set(prefill.named_ranks) == set("0123")
    assert set(decode.named_ranks) == set("01")


async def test_an_answer_of_another_rank_is_refused(ranked: StartRanks, fleet: StartFleet) -> None:
    prefill, decode = await ranked(lies_about_rank=True), await ranked(2)
    proxy = await fleet([*ranks_of(prefill.url, Role.PREFILL), *ranks_of(decode.url, Role.DECODE, 2)])
    answer = await proxy.client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "handoff_refused")
    assert "`ranks`" in answer.json()["error"]["message"]
    assert decode.requests == []
    assert await proxy.metric('kvparams_proxy_handoffs_refused_total{reason="rank"}') == 1
    prefill.lies_about_rank = False  # the control
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200


async def test_an_engine_that_cannot_pin_responses_may_run_them_on_any_rank(
    ranked: StartRanks, fleet: StartFleet
) -> None:
    """vLLM reads no rank on `/v1/responses`: who answers is right, although another was asked."""
    prefill, decode = await ranked(lies_about_rank=True), await ranked(2)
    proxy = await fleet([*ranks_of(prefill.url, Role.PREFILL), *ranks_of(decode.url, Role.DECODE, 2)])
    body = {"model": "m", "input": "x", "prompt": "what is it"}
    assert (await proxy.client.post("/v1/responses", json=body)).status_code == 200
    assert len(decode.requests) == 1
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 502  # the control


async def test_ranks_of_a_further_node_are_asked_by_their_place_and_known_by_their_number(
    ranked: StartRanks, fleet: StartFleet
) -> None:
    prefill, decode = await ranked(start=4), await ranked(2)
    instances = [*ranks_of(prefill.url, Role.PREFILL, start=4), *ranks_of(decode.url, Role.DECODE, 2)]
    assert [one.id for one in instances[:RANKS]] == ["p0-dp4", "p0-dp5", "p0-dp6", "p0-dp7"]
    proxy = await fleet(instances)
    for _ in range(RANKS):
        assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    assert prefill.named_ranks == dict.fromkeys("0123", 1)


async def test_foreign_load_is_that_of_a_rank_and_one_page_has_it_for_all(
    ranked: StartRanks, fleet: StartFleet
) -> None:
    engine = await ranked(foreign={2: 40})
    proxy = await fleet(ranks_of(engine.url, Role.AGGREGATED), **AGGREGATED)

    async def is_known() -> bool:
        return await proxy.metric("kvparams_proxy_foreign_legs") > 0

    await until(is_known, 20)
    name = 'kvparams_proxy_foreign_legs{instance="a0-dp%d"'
    by_rank = [await proxy.metric(name % number) for number in range(RANKS)]
    assert by_rank[2] > 0
    assert by_rank[0] == by_rank[1] == by_rank[3] == 0
    assert await proxy.metric('kvparams_proxy_queue_depth_readings_total{result="read"}') >= engine.metrics_reads - 1
    for _ in range(6):
        assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    assert "2" not in engine.named_ranks


async def test_one_of_all_ranks_is_probed_and_all_come_and_go_by_that(
    ranked: StartRanks, fleet: StartFleet, stack: AsyncExitStack
) -> None:
    engine, alone = await ranked(), await ranked(1)
    urls = [*ranks_of(engine.url, Role.AGGREGATED), Instance("a1", "b", Role.AGGREGATED, alone.url, "nixl")]
    proxy = await fleet(urls, modes=AGGREGATED["modes"], probe_interval_s=0.2)

    async def are_ready(count: int) -> bool:
        return await proxy.metric("kvparams_proxy_ready{") == count

    await until(lambda: are_ready(RANKS + 1))
    first = engine.probes
    assert first <= RANKS, "each is asked once at the start"
    await until(lambda: alone.probes >= 8)
    assert engine.probes - first <= 1.5 * alone.probes, "not four times as often"
    await engine.close()
    await until(lambda: are_ready(1))
    await engine.listen()
    await until(lambda: are_ready(RANKS + 1))


async def test_a_url_without_connection_is_missing_with_all_its_ranks(
    ranked: StartRanks, fleet: StartFleet, stack: AsyncExitStack
) -> None:
    gone, other = await ranked(), await ranked()
    instances = [
        *ranks_of(gone.url, Role.AGGREGATED),
        Instance("a1", "b", Role.AGGREGATED, other.url, "nixl"),
    ]
    proxy = await fleet(instances, modes=AGGREGATED["modes"], probe_interval_s=60.0, retries=1)
    await gone.close()
    for _ in range(2 * RANKS):  # with one retry each, a second rank of the URL would fail the request
        assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    assert await proxy.metric("kvparams_proxy_leg_failures_total") == 1


async def test_sglang_is_told_both_ranks_in_the_bodies(stack: AsyncExitStack, fleet: StartFleet) -> None:
    rooms, server = Rooms(), Bootstrap()
    server.answer = b'{"dp_size": 2}'
    prefill, decode = Meeting(Role.PREFILL, rooms), Meeting(Role.DECODE, rooms)
    for one in (server, prefill, decode):
        await one.begin()
        stack.callback(one.end)
    instances = [
        *ranks_of(prefill.url, Role.PREFILL, 2, dialect="sglang", bootstrap=server.url),
        *ranks_of(decode.url, Role.DECODE, 3, dialect="sglang"),
    ]
    proxy = await fleet(instances, expose_route=True)
    for _ in range(6):
        sent = STAGE_BODY | {"routed_dp_rank": 7, "data_parallel_rank": 7, "disagg_prefill_dp_rank": 7}
        answer = await proxy.client.post("/v1/completions", json=sent)
        assert answer.status_code == 200, answer.text
        first, second = (json.loads(actor.bodies[-1]) for actor in (prefill, decode))
        assert f"p0-dp{first['routed_dp_rank']}" == answer.headers["x-kvparams-prefill"]
        assert f"d0-dp{second['routed_dp_rank']}" == answer.headers["x-kvparams-decode"]
        # Prefill has to hear it, too: otherwise it wants the rank that the room implies (test_sglang_ranks.py).
        assert first["disagg_prefill_dp_rank"] == second["disagg_prefill_dp_rank"] == first["routed_dp_rank"]
        assert first["bootstrap_room"] == second["bootstrap_room"]
        assert "data_parallel_rank" not in first | second
    ranks = [{json.loads(body)["routed_dp_rank"] for body in actor.bodies} for actor in (prefill, decode)]
    assert ranks == [{0, 1}, {0, 1, 2}]


async def test_mooncake_decode_is_told_of_the_rank_that_prefills(stack: AsyncExitStack, fleet: StartFleet) -> None:
    server, prefill, decode = Bootstrap(), Actor(Role.PREFILL), Actor(Role.DECODE)
    parts = {str(at): {"engine_id": f"e_dp{at + 2}", "worker_addr": {"0": {"0": "tcp://h:1"}}} for at in range(2)}
    server.answer = json.dumps(parts).encode()
    for one in (server, prefill, decode):
        await one.begin()
        stack.callback(one.end)
    instances = [
        *ranks_of(prefill.url, Role.PREFILL, 2, 2, "mooncake", server.url),
        Instance("d0", "b", Role.DECODE, decode.url, "mooncake"),
    ]
    proxy = await fleet(instances, expose_route=True)
    seen: set[str] = set()
    for _ in range(4):
        answer = await proxy.client.post("/v1/completions", json=STAGE_BODY)
        assert answer.status_code == 200, answer.text
        number = answer.headers["x-kvparams-prefill"].removeprefix("p0-dp")
        told = json.loads(decode.bodies[-1])["kv_transfer_params"]
        assert (told["remote_engine_id"], told["remote_bootstrap_addr"]) == (f"e_dp{number}", server.url)
        seen.add(number)
    assert seen == {"2", "3"}
