"""Tests that a stream ends with its last event, whatever its engine sends or omits behind it."""

import asyncio
import json
import time
from typing import Any

import pytest

from tests.system.proxy.upstream.test_broken_engines import BODY, DONE, EVENT, GOOD, SSE, chunk, sending, whole

STREAM: dict[str, Any] = BODY | {"stream": True}
BEHIND: dict[str, bytes] = {
    "an event": EVENT,
    "a long event": b'data: {"choices":[{"text":"%b"}]}\n\n' % (b"x" * 500),
    "an error": b'data: {"error":{"message":"too late"}}\n\n',
    "many events": EVENT * 500,
    "a comment": b": bye\n\n",
    "half an event": EVENT[:20],
    "another end": DONE,
    "garbage": b"\xff\xfe" * 100,
}


async def started(scripted: Any, proxy: Any, *pieces: bytes, **settings: object) -> tuple[Any, Any]:
    prefill, decode = await scripted(sending(whole(GOOD))), await scripted(sending(*pieces))
    return await proxy([prefill.url], [decode.url], **settings), decode


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("how", ["in one read", "in one chunk", "later", "after an unfinished event"])
async def test_nothing_behind_the_last_event_reaches_the_client(scripted: Any, proxy: Any, name: str, how: str) -> None:
    """And its stream has ended well: it has everything."""
    behind, end = BEHIND[name], b"0\r\n\r\n"
    pieces = {
        "in one read": (SSE + chunk(EVENT) + chunk(DONE) + chunk(behind) + end,),
        "in one chunk": (SSE + chunk(EVENT + DONE + behind) + end,),
        "later": (SSE + chunk(EVENT) + chunk(DONE), chunk(behind) + end),
        "after an unfinished event": (SSE + chunk(EVENT[:30]), chunk(EVENT[30:] + DONE + behind) + end),
    }[how]
    running, decode = await started(scripted, proxy, *pieces)
    for _ in range(2):
        got = await running.client.post("/v1/completions", json=STREAM)
        assert (got.status_code, got.content) == (200, EVENT + DONE)
    assert await running.metric('kvparams_proxy_requests_total{outcome="ok"}') == 2
    assert len(decode.bodies) == 2


async def test_a_connection_is_kept_whose_stream_ended_well(scripted: Any, proxy: Any) -> None:
    """The control; and a blank line more is nothing."""
    for more in (b"", b"\n", b"\r\n"):
        running, decode = await started(
            scripted, proxy, SSE + chunk(EVENT) + chunk(DONE), chunk(more) * bool(more) + b"0\r\n\r\n"
        )
        probes = decode.connections
        for _ in range(3):
            assert (await running.client.post("/v1/completions", json=STREAM)).content == EVENT + DONE
        assert decode.connections <= probes + 1


@pytest.mark.parametrize("beat", [b"", b"1\r\n\n\r\n"], ids=["silence", "blank lines"])
@pytest.mark.parametrize("limit_s", [None, 0.1], ids=["no limit", "the request's limit"])
async def test_an_engine_that_does_not_end_its_response_is_not_waited_for(
    scripted: Any, proxy: Any, beat: bytes, limit_s: float | None
) -> None:
    """The client has everything: neither that engine nor the limit of the whole request adds an error."""

    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(EVENT) + chunk(DONE))
        while not writer.is_closing() and not reader.at_eof():
            writer.write(beat)
            await asyncio.sleep(0.02)
        raise ConnectionResetError

    prefill, decode = await scripted(sending(whole(GOOD))), await scripted(script)
    running = await proxy([prefill.url], [decode.url], request_timeout_s=limit_s)
    began = time.monotonic()
    got = await running.client.post("/v1/completions", json=STREAM)
    assert (got.status_code, got.content) == (200, EVENT + DONE)
    assert time.monotonic() - began < 3
    assert await running.metric('kvparams_proxy_requests_total{outcome="ok"}') == 1
    assert await running.metric("kvparams_proxy_ready") == 2


async def test_text_that_looks_like_the_end_is_not(scripted: Any, proxy: Any) -> None:
    event = b'data: {"choices":[{"index":0,"text":"data: [DONE] \\n\\ndata: [DONE]\\n\\n"}]}\n\n'
    running, _ = await started(scripted, proxy, SSE + chunk(event + EVENT + DONE) + b"0\r\n\r\n")
    assert (await running.client.post("/v1/completions", json=STREAM)).content == event + EVENT + DONE


STREAMS = {
    "/v1/messages": b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    "/v1/responses": b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","response":{"output":[]}}\n\n',
}
CHAT: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "x"}], "stream": True}
ERROR = b'{"error":{"message":"prompt is too long","type":"BadRequestError","param":"prompt","code":400}}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", STREAM),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "x", "stream": True}),
        ("/v1/messages", {**CHAT, "max_tokens": 9}),
    ],
)
async def test_a_client_that_asked_for_a_stream_gets_one_or_an_error(
    scripted: Any, proxy: Any, path: str, body: dict[str, Any]
) -> None:
    """Clients of OpenAI's API find no event in a JSON document: to them it is an empty answer without an error."""
    running, decode = await started(scripted, proxy, whole(GOOD), retries=0)
    got = await running.client.post(path, json=body)
    assert (got.status_code, got.json()["error"].get("code")) in ((502, "decode_failed"), (502, None))
    decode.script = sending(whole(ERROR))
    refused = await running.client.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "prompt is too long"
    events = STREAMS.get(path, EVENT + DONE)
    decode.script = sending(
        SSE.replace(b"text/event-stream", b"Text/Event-Stream; charset=utf-8") + chunk(events) + b"0\r\n\r\n"
    )
    good = await running.client.post(path, json=body)
    assert (good.status_code, good.content) == (200, events)


async def test_another_engine_is_asked_where_one_answers_with_a_document(scripted: Any, proxy: Any) -> None:
    prefill = await scripted(sending(whole(GOOD)))
    bad = await scripted(sending(whole(GOOD)))
    good = await scripted(sending(SSE + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n"))
    running = await proxy([prefill.url], [bad.url, good.url])
    for _ in range(4):
        got = await running.client.post("/v1/completions", json=STREAM)
        assert (got.status_code, got.content) == (200, EVENT + DONE)
    assert bad.bodies


async def test_an_endpoint_without_streams_may_be_asked_for_one(scripted: Any, proxy: Any) -> None:
    document = {"object": "list", "data": [{"embedding": [1.0], "index": 0}], "model": "stub"}
    prefill, decode = await scripted(sending(whole(json.dumps(document).encode()))), await scripted(sending())
    running = await proxy([prefill.url], [decode.url])
    got = await running.client.post("/v1/embeddings", json={"model": "stub", "input": "x", "stream": True})
    assert (got.status_code, got.json()) == (200, document)
