"""Tests transfers that a proxy gives up, and hand-overs of every kind of request; both legs are driven by hand."""

import asyncio
import json
import random
import uuid
from typing import cast

import httpx
import pytest

from demo.client import JSON, scrape
from tests.support.waiting import until

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
CONTROL = "/v1/kvparams"
COMPUTED = 'reference_engine:prompt_tokens_total{source="computed"}'
DROPPED = "reference_engine:pages_released_total"
IN_FLIGHT = "reference_engine:requests_in_flight"
RELEASED = 'reference_engine:transfers_total{end="released"}'
CANCELLED = 'reference_engine:transfers_total{end="cancelled"}'
WAIT_S = 20.0


def transfer() -> JSON:
    """A transfer that nobody else has."""
    return {"request_id": uuid.uuid4().hex, "transfer": {"id": uuid.uuid4().hex, "attempt": 1}}


def said(which: JSON, phase: str) -> JSON:
    """The member with the document of a transfer."""
    return {"kv_transfer_params": {"kvparams": {"version": "1.0", "mode": "store", **which, "phase": phase}}}


def prompt_of(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


def nameless(choices: list[JSON]) -> list[JSON]:
    """The choices, their tool calls without ids."""
    for choice in choices:
        for call in cast("list[JSON]", cast("JSON", choice.get("message", {})).get("tool_calls", [])):
            del call["id"]
    return choices


async def post(client: httpx.AsyncClient, url: str, path: str, body: JSON) -> JSON:
    response = await client.post(url + path, json=body)
    assert response.status_code == 200, response.text
    return cast("JSON", response.json())


async def grown(client: httpx.AsyncClient, url: str, name: str, before: dict[str, float]) -> float:
    return (await scrape(client, url)).get(name, 0) - before.get(name, 0)


async def settled(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    """The metrics once nothing is in flight any more."""
    metrics: dict[str, float] = {}

    async def is_idle() -> bool:
        nonlocal metrics
        metrics = await scrape(client, url)
        return not metrics[IN_FLIGHT]

    await until(is_idle, WAIT_S)
    return metrics


@pytest.mark.parametrize("released", [True, False])
async def test_a_released_transfer_leaves_nothing_in_the_store(
    client: httpx.AsyncClient, prefill: str, decode: str, released: bool
) -> None:
    """With the control that without a release the decode engine computes one token."""
    body: JSON = {"prompt": prompt_of(10 + released, 200), "max_tokens": 1}
    which = transfer()
    await post(client, prefill, COMPLETIONS, {**body, **said(which, "prefill")})
    before, freed = await scrape(client, decode), await scrape(client, prefill)

    if released:
        assert await post(client, prefill, CONTROL, said(which, "release")) == {}
    await post(client, decode, COMPLETIONS, {**body, **said(transfer(), "decode")})

    assert await grown(client, prefill, DROPPED, freed) == (4 if released else 0)
    assert await grown(client, prefill, RELEASED, freed) == released
    assert await grown(client, decode, COMPUTED, before) == (200 if released else 1)


async def test_what_was_stored_before_stays_when_a_later_transfer_is_released(
    client: httpx.AsyncClient, prefill: str, both: str
) -> None:
    prompt = prompt_of(20, 150)
    first, second = transfer(), transfer()
    await post(client, both, COMPLETIONS, {"prompt": prompt, "max_tokens": 1, **said(first, "prefill")})
    longer: JSON = {"prompt": [*prompt[:140], *prompt_of(21, 60)], "max_tokens": 1}
    await post(client, prefill, COMPLETIONS, {**longer, **said(second, "prefill")})
    freed = await scrape(client, prefill)

    await post(client, prefill, CONTROL, said(second, "release"))
    before = await scrape(client, both)
    await post(client, both, COMPLETIONS, {"prompt": prompt, "max_tokens": 1, **said(transfer(), "decode")})

    assert await grown(client, prefill, DROPPED, freed) == 2  # from the third page on they were its own
    assert await grown(client, both, COMPUTED, before) <= 22


@pytest.mark.slow
async def test_a_release_ends_a_prefill_leg_that_still_runs(client: httpx.AsyncClient, prefill: str) -> None:
    which = transfer()
    body: JSON = {"prompt": [prompt_of(seed, 3_000) for seed in range(30, 34)], "max_tokens": 1}
    before = await settled(client, prefill)
    running = asyncio.create_task(client.post(prefill + COMPLETIONS, json={**body, **said(which, "prefill")}))

    async def is_under_way() -> bool:
        return await grown(client, prefill, COMPUTED, before) >= 500

    await until(is_under_way, WAIT_S)

    await post(client, prefill, CONTROL, said(which, "release"))

    assert (await running).status_code == 500
    after = await settled(client, prefill)
    assert after["reference_engine:kv_blocks_in_use"] == 0
    assert after[DROPPED] > before[DROPPED]


async def test_a_cancelled_decode_leg_ends_with_an_error_event(client: httpx.AsyncClient, both: str) -> None:
    """One event, however many choices it ends."""
    which = transfer()
    limits: JSON = {"max_tokens": 3_000, "ignore_eos": True, "n": 3, "stream": True}
    body: JSON = {"prompt": "abc", **limits, **said(which, "decode")}
    before = await scrape(client, both)
    lines: list[str] = []
    async with client.stream("POST", both + COMPLETIONS, json=body) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if len(lines) == 10:
                await post(client, both, CONTROL, said(which, "cancel"))

    events = [line.removeprefix("data: ") for line in lines if line]
    assert "cancelled" in json.loads(events[-2])["error"]["message"]
    assert [event for event in events if "error" in event] == [events[-2]]
    assert (await settled(client, both))["reference_engine:kv_blocks_in_use"] == 0
    assert await grown(client, both, CANCELLED, before) == 1
    assert await grown(client, both, "reference_engine:generation_tokens_total", before) < 2_000


@pytest.mark.parametrize("phase", ["release", "cancel"])
async def test_a_transfer_that_is_not_known_or_over_is_no_fault(
    client: httpx.AsyncClient, prefill: str, phase: str
) -> None:
    which = transfer()
    before = await scrape(client, prefill)

    assert await post(client, prefill, CONTROL, said(which, phase)) == {}
    await post(client, prefill, COMPLETIONS, {"prompt": "abc", "max_tokens": 1, **said(which, "prefill")})
    for _ in range(2):
        assert await post(client, prefill, CONTROL, said(which, phase)) == {}

    assert await grown(client, prefill, RELEASED, before) == (phase == "release")
    assert await grown(client, prefill, CANCELLED, before) == 0


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "kv_transfer_params"),
        ({"kv_transfer_params": {}}, "release or cancel"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "release or cancel"),
        (said(transfer(), "prefill"), "release or cancel"),
        (said({"request_id": "a"}, "release"), "transfer"),
        (said({**transfer(), "version": "2.0"}, "release"), "version"),
    ],
)
async def test_what_is_no_release_is_refused_in_words(
    client: httpx.AsyncClient, prefill: str, body: JSON, word: str
) -> None:
    response = await client.post(prefill + CONTROL, json=body)

    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


TOOL: JSON = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}}
CHATTED: JSON = {"messages": [{"role": "user", "content": "Hi"}], "seed": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "abc", "echo": True, "seed": 1}),
        (COMPLETIONS, {"prompt": ["abc", "abd"], "n": 2, "logprobs": 2, "seed": 1, "stop": ["a"], "min_tokens": 3}),
        (COMPLETIONS, {"prompt": "abc", "temperature": 0, "presence_penalty": 2, "repetition_penalty": 1.5}),
        (COMPLETIONS, {"prompt": "abc", "seed": 1, "stop_token_ids": list(range(33, 60)), "return_token_ids": True}),
        (COMPLETIONS, {"prompt": "abc", "seed": 1, "structured_outputs": {"choice": ["yes", "no"]}}),
        (CHAT, {**CHATTED, "response_format": {"type": "json_object"}, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {**CHATTED, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}),
        (CHAT, {**CHATTED, "return_token_ids": True, "n": 2}),
        (GENERATE, {"token_ids": [1, 2, 3] * 40, "sampling_params": {"seed": 1, "logprobs": 1, "n": 2}}),
    ],
)
async def test_every_kind_of_request_is_handed_over(
    client: httpx.AsyncClient, prefill: str, decode: str, single: str, path: str, body: JSON
) -> None:
    """The prefill leg keeps the client's members, apart from limits; they must not disturb it."""
    limits: JSON = {"max_tokens": 1, "n": 1, "min_tokens": 0}
    inside = cast("JSON", body.get("sampling_params", {}))
    short: JSON = {**body, "sampling_params": inside | limits} if path == GENERATE else body | limits
    which = transfer()
    result = await post(client, prefill, path, {**short, **said(which, "prefill")})
    before = await scrape(client, decode)

    found = await post(client, decode, path, {**body, **said(which, "decode")})
    expected = await post(client, single, path, body)

    assert cast("JSON", result["kv_transfer_params"]).keys() == {"kvparams"}
    choices = cast("list[JSON]", found["choices"])
    assert nameless(choices) == nameless(cast("list[JSON]", expected["choices"]))
    assert await grown(client, decode, COMPUTED, before) == len(choices)
