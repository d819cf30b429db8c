"""Tests that an empty answer is a failure, whatever its status: another engine is asked, or the client is told."""

import asyncio
import json
from typing import Any

import pytest

from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.upstream.types import UpstreamLimits
from tests.system.proxy.upstream.test_broken_engines import BODY, DONE, EVENT, GOOD, SSE, chunk, sending, whole

CHAT: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
IDS: dict[str, Any] = {"model": "stub", "token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}
ASKED = {"/v1/completions": BODY, "/v1/chat/completions": CHAT, "/inference/v1/generate": IDS}
NEVER = BreakerLimits(consecutive=10_000, window=10_000, failures=10_000)
USAGE = b'"usage":{"prompt_tokens":3,"completion_tokens":0,"total_tokens":3}'
BODIES = [
    b"{}",
    b'{"choices":[],%b}' % USAGE,
    b'{"id":"x", "choices" : [ ] }',
    b'{"choices":null}',
    b'{"choices":[{}]}',
    b'{"choices":{"index":0}}',
    b'{"choices":"[{1"}',
]


def streaming(*events: bytes) -> Any:
    return sending(SSE + b"".join(map(chunk, events)) + b"0\r\n\r\n")


def event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


async def good(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    streams = json.loads(body).get("stream")
    writer.write(SSE + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n" if streams else whole(GOOD))


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_another_ones_turn_and_else_an_error(scripted: Any, proxy: Any, path: str, stream: bool) -> None:
    asked = ASKED[path] | {"stream": stream}
    for raw in BODIES:
        empty = streaming(event(raw), DONE) if stream else sending(whole(raw))
        prefill, decode = await scripted(good), [await scripted(empty), await scripted(good)]
        running = await proxy([prefill.url], [engine.url for engine in decode], breaker=NEVER)
        for _ in range(2):
            got = await running.client.post(path, json=asked)
            assert (got.status_code, b'"text":"x"' in got.content.replace(b" ", b"")) == (200, True), raw
        assert len(decode[0].bodies) >= 1  # the control: it was asked
        alone = await proxy([prefill.url], [decode[0].url], breaker=NEVER, retries=0)
        got = await alone.client.post(path, json=asked)
        assert (got.status_code, got.json()["error"]["code"]) == (502, "decode_failed"), raw
        assert "without content" in got.text or "no content" in got.text
        assert await alone.metric('kvparams_proxy_requests_total{outcome="ok"}') == 0
        assert await alone.metric("kvparams_proxy_in_flight") == 0


async def test_a_whole_empty_answer_to_a_stream_is_none_either(scripted: Any, proxy: Any) -> None:
    prefill, decode = await scripted(good), await scripted(sending(whole(BODIES[1])))
    running = await proxy([prefill.url], [decode.url], retries=0)
    assert (await running.client.post("/v1/completions", json=BODY | {"stream": True})).status_code == 502


@pytest.mark.parametrize(
    "events",
    [
        (event(b'{"choices":[]}'), EVENT),
        (b": here\n\n", event(b'{"choices" : [ ],"prompt_filter_results":[{"index":0}]}'), b": still\n\n", EVENT),
        (event(b'{"choices":[{"index":0,"text":"","finish_reason":"stop"}]}'),),
        (event(b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'), EVENT),
        (b'data: {"choices":\ndata: [\ndata: {"index":0,"text":"x"}]}\n\n',),
        (b'data:{ "choices" : [ { "index" : 0, "text" : "x" } ] }\r\n\r\n',),
        (EVENT, event(b'{"choices":[],%b}' % USAGE)),
    ],
)
@pytest.mark.parametrize("together", [True, False])
async def test_what_comes_before_the_content_is_kept(
    scripted: Any, proxy: Any, events: tuple[bytes, ...], together: bool
) -> None:
    sent = [b"".join(chunk(each) for each in (*events, DONE))] if together else [chunk(e) for e in (*events, DONE)]
    prefill, decode = await scripted(good), await scripted(sending(SSE, *sent, b"0\r\n\r\n"))
    running = await proxy([prefill.url], [decode.url], retries=0)
    got = await running.client.post("/v1/completions", json=BODY | {"stream": True})
    assert (got.status_code, got.content) == (200, b"".join(events) + DONE)


async def test_a_model_may_have_nothing_to_say(scripted: Any, proxy: Any) -> None:
    silent = b'{"choices":[{"index":0,"text":"","finish_reason":"stop"}]}'
    prefill, decode = await scripted(good), await scripted(sending(whole(silent)))
    running = await proxy([prefill.url], [decode.url], retries=0)
    got = await running.client.post("/v1/completions", json=BODY)
    assert (got.status_code, got.content) == (200, silent)


async def test_an_error_behind_empty_events_is_told_as_one(scripted: Any, proxy: Any) -> None:
    """At once, and in a status: the client has nothing yet."""
    refusal = event(b'{"error":{"message":"too long","type":"x","param":"prompt","code":400}}')

    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(b": here\n\n" + event(b'{"choices":[]}') + refusal))
        await reader.read()  # it does not end by itself

    prefill, decode = await scripted(good), await scripted(script)
    running = await proxy([prefill.url], [decode.url])
    got = await running.client.post("/v1/completions", json=BODY | {"stream": True})
    assert (got.status_code, got.json()["error"]["message"]) == (400, "too long")


async def test_an_error_before_the_content_is_told_as_one(scripted: Any, proxy: Any) -> None:
    """Whatever else came with it."""
    refusal = event(b'{"error":{"message":"too long","type":"x","param":"prompt","code":400}}')
    script = sending(SSE, chunk(b": here\n\n" + event(b'{"choices":[]}') + refusal + EVENT + DONE) + b"0\r\n\r\n")
    prefill, decode = await scripted(good), await scripted(script)
    running = await proxy([prefill.url], [decode.url])
    got = await running.client.post("/v1/completions", json=BODY | {"stream": True})
    assert (got.status_code, got.json()["error"]["message"]) == (400, "too long")


async def test_empty_events_without_end_are_bounded(scripted: Any, proxy: Any) -> None:
    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE)
        while True:
            writer.write(chunk(event(b'{"choices":[],"x":"%b"}' % (b"a" * 10_000))))
            await writer.drain()

    prefill, decode = await scripted(good), await scripted(script)
    running = await proxy([prefill.url], [decode.url], retries=0, upstream_limits=UpstreamLimits(answer_bytes=100_000))
    got = await running.client.post("/v1/completions", json=BODY | {"stream": True})
    assert got.status_code == 502
    assert await running.metric("kvparams_proxy_in_flight") == 0


async def test_other_endpoints_answer_in_their_own_shape(scripted: Any, proxy: Any) -> None:
    prefill, decode = await scripted(sending(whole(b"{}"))), await scripted(sending(whole(b"{}")))
    running = await proxy([prefill.url], [decode.url], retries=0)
    for path in ("/v1/embeddings", "/v1/messages/count_tokens"):
        got = await running.client.post(path, json={"model": "stub", "input": "x"})
        assert (got.status_code, got.content) == (200, b"{}")
