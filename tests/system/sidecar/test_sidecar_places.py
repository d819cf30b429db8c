"""Tests the proxy beside one engine: clients' answers, forbidden members, and what is left when clients go."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from demo.client import JSON, ask, ask_stream, scrape
from demo.processes import Server
from kvparams.instances import Role
from tests.support.waiting import until
from tests.system.sidecar.places import Place

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = "It was the best of times, it was the worst of times, it was the age of wisdom. "
ASKS: list[tuple[str, JSON]] = [
    (COMPLETIONS, {"prompt": STORY * 3, "max_tokens": 12, "temperature": 0}),
    (COMPLETIONS, {"prompt": STORY * 4, "max_tokens": 5, "n": 2, "seed": 3}),
    (CHAT, {"messages": [{"role": "user", "content": STORY * 5}], "max_tokens": 9, "temperature": 0}),
    (CHAT, {"messages": [{"role": "user", "content": STORY}], "max_completion_tokens": 6, "seed": 1}),
]
LOADED = 'reference_engine:prompt_tokens_total{source="external_kv"}'
GAUGES = ("reference_engine:requests_in_flight", "reference_engine:kv_blocks_in_use")


async def idle(client: httpx.AsyncClient, beside: Place) -> None:
    """Wait until neither engine runs or holds anything, and the proxy has no request; in 2 s, or it has failed."""

    async def is_idle() -> bool:
        seen = [await scrape(client, url) for url in (beside.prefill, beside.decode)]
        proxy = await scrape(client, beside.ours)
        busy = [metrics[name] for metrics in seen for name in GAUGES]
        busy += [value for name, value in proxy.items() if name.startswith("kvparams_proxy_in_flight")]
        assert len(busy) > len(GAUGES) * 2
        return not any(busy)

    await until(is_idle, 2.0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_answers_are_those_of_one_engine(
    beside: Place, client: httpx.AsyncClient, single: Server, stream: bool
) -> None:
    how = ask_stream if stream else ask
    for number, (path, body) in enumerate(ASKS):
        salted = {**body, "cache_salt": f"{beside.name} {stream} {number}"}  # whoever loads has not computed it before
        before = await scrape(client, beside.decode)
        got = await how(client, beside.server.url, path, salted)
        after = await scrape(client, beside.decode)
        right = await how(client, single.url, path, body)
        assert got.outcome == right.outcome
        for name in ("prompt_tokens", "completion_tokens"):
            assert got.count(name) == right.count(name)
        assert got.kv_transfer_params is None
        assert {"x-kvparams-prefill", "x-kvparams-decode", "x-request-id"} <= got.headers.keys()
        assert after[LOADED] > before[LOADED], "decode had the prompt from prefill"
    await idle(client, beside)


async def test_what_prefill_found_in_its_cache_is_in_the_usage(beside: Place, client: httpx.AsyncClient) -> None:
    body: JSON = {"prompt": STORY * 4, "max_tokens": 2, "temperature": 0, "cache_salt": f"usage {beside.name}"}
    first = await ask(client, beside.server.url, COMPLETIONS, body)
    second = await ask_stream(client, beside.server.url, COMPLETIONS, body)
    assert (first.count("cached_tokens"), first.count("completion_tokens")) == (0, 2)
    assert second.count("cached_tokens") > 100
    assert second.count("prompt_tokens") == first.count("prompt_tokens")


async def test_what_a_client_says_of_kv_reaches_no_engine(
    beside: Place, client: httpx.AsyncClient, single: Server
) -> None:
    path, body = ASKS[0]
    steering: JSON = {"kv_transfer_params": {"kvparams": {"version": "1.0"}}, "do_remote_prefill": True}
    refused = await client.post(f"{single.url}{path}", json=body | steering)
    assert refused.status_code == 400, "the control: an engine that hears it minds"
    got = await ask(client, beside.server.url, path, body | steering)
    assert got.outcome == (await ask(client, single.url, path, body)).outcome
    stripped = {name: n for name, n in (await scrape(client, beside.ours)).items() if "requests_stripped_total" in name}
    assert sum(stripped.values()) >= 1
    words = await client.post(f"{beside.server.url}/v1/kvparams", json=steering)
    assert words.status_code == 404
    assert "POST /v1/kvparams is not" in words.json()["error"]["message"]


async def test_other_paths_are_the_engines_here_or_refused(beside: Place, client: httpx.AsyncClient) -> None:
    url = beside.server.url
    local = beside.prefill if beside.local is Role.PREFILL else beside.decode
    told = {"prompt": "Hello"}
    asked = await client.post(f"{url}/tokenize", json=told)
    assert asked.status_code == 200
    if beside.name.startswith("sidecar"):
        assert asked.json() == (await client.post(f"{local}/tokenize", json=told)).json()
    embedded = await client.post(f"{url}/v1/embeddings", json={"input": "Hello"})
    assert len(embedded.json()["data"]) == 1
    models = await client.get(f"{url}/v1/models")
    assert [model["id"] for model in models.json()["data"]] == ["reference"]
    health = (await client.get(f"{beside.ours}/health")).json()
    assert health["status"] == "ok"
    refused = await client.post(f"{url}/v1/nothing", json={})
    assert refused.status_code == 404
    assert "/v1/nothing" in refused.json()["error"]["message"]
    unknown = await client.post(f"{url}{COMPLETIONS}", json={"prompt": "x", "model": "another"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def leave(beside: Place, client: httpx.AsyncClient, phase: str, number: int) -> None:
    """Ask for something and leave in this phase. Prefill may have gone by before anybody has looked: then decode is
    left, and the caller tries again."""
    tokens = 400
    prompt = f"{phase} {number} {beside.name} " + STORY * (40 if phase == "prefill" else 2)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": phase == "stream"}
    raw = json.dumps(body).encode()
    lines = (f"POST {COMPLETIONS} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(raw)}")
    head = "\r\n".join((*lines, "", "")).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", beside.port)
    try:
        async with asyncio.timeout(20):
            writer.write(head + raw)
            if phase == "stream":
                await reader.readuntil(b"data: ")
                return
            while not (await scrape(client, beside.decode))[GAUGES[0]]:
                if phase == "prefill" and (await scrape(client, beside.prefill))[GAUGES[0]]:
                    return
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(("phase", "state"), [("prefill", "prefill"), ("decode", "decode"), ("stream", "first_byte")])
async def test_a_client_that_leaves_ends_both_sides(
    beside: Place, client: httpx.AsyncClient, phase: str, state: str
) -> None:
    left = f'kvparams_proxy_transitions_total{{from="{state}",to="done"}}'
    before = await scrape(client, beside.ours)
    aborted = 'reference_engine:requests_total{finish="abort"}'
    url = beside.prefill if phase == "prefill" else beside.decode
    ended = (await scrape(client, url)).get(aborted, 0.0)
    for number in range(10):
        await leave(beside, client, phase, number)
        await idle(client, beside)
        after = await scrape(client, beside.ours)
        if after.get(left, 0.0) > before.get(left, 0.0) and (await scrape(client, url)).get(aborted, 0.0) > ended:
            break
    else:
        raise AssertionError(f"nobody has left in {phase}")
    gone = 'kvparams_proxy_requests_total{outcome="gone"}'
    assert after[gone] > before.get(gone, 0.0)
    got = await ask(client, beside.server.url, *ASKS[0])
    assert got.count("completion_tokens") == 12
