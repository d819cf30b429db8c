"""Tests the time-outs of streams, and a limit for a whole request.

An engine counts as silent while it sends nothing with content for the client.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvparams.instances import Role
from kvparams.routing.admission import RoleLimits
from tests.system.proxy.upstream.test_broken_engines import BODY, DONE, EVENT, GOOD, HEAD, SSE, chunk, sending, whole

LIMIT_S = 0.4
BEAT_S = 0.05
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
CHAT: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "x"}], "stream": True}
SAID = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
BEATS: dict[str, bytes] = {
    "comments": b": beat\n\n",
    "empty events": b"data: \n\n",
    "named events without data": b"event: ping\n\n",
    "events without a choice": b'data: {"choices":[]}\n\n',
    "blank lines": b"\r\n",
    "an event that never ends": b"x",
    "roles": ROLE,
}

Writer = asyncio.StreamWriter


def beating(before: bytes, beat: bytes, *, chunked: bool = True) -> Any:
    """Sends `before`, then `beat` again and again until nobody listens."""

    async def script(body: bytes, reader: asyncio.StreamReader, writer: Writer) -> None:
        writer.write(before)
        while not writer.is_closing():
            writer.write(chunk(beat) if chunked else beat)
            await writer.drain()
            await asyncio.sleep(BEAT_S)
        raise ConnectionResetError

    return script


async def timed(asked: Awaitable[Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return await asked, time.monotonic() - began


async def started(scripted: Any, proxy: Any, script: Any, **settings: object) -> Any:
    prefill, decode = await scripted(sending(whole(GOOD))), await scripted(script)
    return await proxy([prefill.url], [decode.url], **{"decode_timeout_s": LIMIT_S, "retries": 0, **settings})


@pytest.mark.parametrize("name", BEATS)
async def test_an_engine_that_says_nothing_is_silent_however_often_it_does(
    scripted: Any, proxy: Any, name: str
) -> None:
    running = await started(scripted, proxy, beating(SSE, BEATS[name]))
    got, spent_s = await timed(running.client.post("/v1/chat/completions", json=CHAT))
    if name == "roles":  # the first one begins the answer
        assert got.status_code == 200
        assert json.loads(got.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "decode_timeout"
    else:
        assert (got.status_code, got.json()["error"]["code"]) == (504, "decode_timeout")
    assert LIMIT_S <= spent_s < LIMIT_S + 2
    assert await running.metric("kvparams_proxy_in_flight") == 0


@pytest.mark.parametrize("name", BEATS)
async def test_an_engine_that_stops_saying_anything_is_silent(scripted: Any, proxy: Any, name: str) -> None:
    """Between two events with content. A role says nothing new where there was content, but who sends one has a choice
    to speak of: it is no heartbeat, and its answer is bounded by its tokens."""
    if name == "roles":
        return
    running = await started(scripted, proxy, beating(SSE + chunk(ROLE) + chunk(SAID), BEATS[name]))
    got, spent_s = await timed(running.client.post("/v1/chat/completions", json=CHAT))
    assert got.content.startswith(ROLE + SAID)
    assert json.loads(got.text.strip().split("\ndata: ")[-1])["error"]["code"] == "decode_timeout"
    assert LIMIT_S <= spent_s < LIMIT_S + 2


@pytest.mark.parametrize(
    ("before", "beat"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"y"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n", b"x: y\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (HEAD + b"content-length: 1000\r\n\r\n", b" "),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (SSE + chunk(EVENT) + b"0\r\n", b"x: y\r\n"),
    ],
    ids=["a header", "headers", "100", "a body", "chunks", "trailers"],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_answer_that_trickles_is_bounded(
    scripted: Any, proxy: Any, before: bytes, beat: bytes, stream: bool, role: str
) -> None:
    script = beating(before, beat, chunked=False)
    engines = {r: await scripted(script if r == role else sending(whole(GOOD))) for r in ("prefill", "decode")}
    limits = {f"{each}_timeout_s": LIMIT_S for each in ("prefill", "decode")}
    running = await proxy([engines["prefill"].url], [engines["decode"].url], retries=0, **limits)
    got, spent_s = await timed(running.client.post("/v1/completions", json=BODY | {"stream": stream}))
    if got.status_code == 200:  # its stream had begun
        assert '"decode_timeout"' in got.text
    else:
        assert (got.status_code, got.json()["error"]["code"]) == (504, f"{role}_timeout")
    assert LIMIT_S <= spent_s < LIMIT_S + 2


async def test_a_stream_that_goes_on_may_take_longer_than_any_silence(scripted: Any, proxy: Any) -> None:
    """The control."""

    async def script(body: bytes, reader: asyncio.StreamReader, writer: Writer) -> None:
        writer.write(SSE)
        for _ in range(6):
            await asyncio.sleep(LIMIT_S / 2)
            writer.write(chunk(SAID))
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    running = await started(scripted, proxy, script)
    got, spent_s = await timed(running.client.post("/v1/chat/completions", json=CHAT))
    assert got.content == SAID * 6 + DONE
    assert spent_s > 2 * LIMIT_S


async def test_a_stream_of_responses_is_alive_with_any_event(scripted: Any, proxy: Any) -> None:
    """A tool may run for longer than the time-out: events tell of it that have no content."""
    name = b"response.code_interpreter_call.interpreting"
    events = [b'event: %b\ndata: {"type":"%b"}\n\n' % (name, name)] * 6
    events.append(b'event: response.completed\ndata: {"type":"response.completed","response":{"output":[]}}\n\n')

    async def script(body: bytes, reader: asyncio.StreamReader, writer: Writer) -> None:
        writer.write(SSE)
        for event in events:
            writer.write(chunk(event))
            await asyncio.sleep(LIMIT_S / 2)
        writer.write(b"0\r\n\r\n")

    running = await started(scripted, proxy, script)
    got = await running.client.post("/v1/responses", json={"input": "x", "stream": True})
    assert got.content == b"".join(events)


async def test_a_client_that_takes_its_time_is_no_silence_of_its_engine(scripted: Any, proxy: Any) -> None:
    """It takes nothing for longer than the time-out, while its engine could go on."""
    event = b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n' % (b"x" * 10_000)

    async def script(body: bytes, reader: asyncio.StreamReader, writer: Writer) -> None:
        writer.write(SSE)
        for _ in range(2000):
            writer.write(chunk(event))
            await writer.drain()
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    running = await started(scripted, proxy, script, client_timeout_s=20.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1 << 16)
    body = json.dumps(BODY | {"stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    await reader.readexactly(1000)
    await asyncio.sleep(3 * LIMIT_S)
    got = b""
    async with asyncio.timeout(20):
        while data := await reader.read(1 << 20):
            got = got[-100:] + data
    writer.close()
    assert DONE in got


SLOW: dict[str, Callable[[], dict[str, Any]]] = {
    "prefill is silent": lambda: {"prefill": beating(b"", b"", chunked=False)},
    "decode is silent": lambda: {"decode": beating(b"", b"", chunked=False)},
    "decode streams for ever": lambda: {"decode": beating(SSE, EVENT)},
}


@pytest.mark.parametrize("name", SLOW)
async def test_a_request_may_have_a_limit_of_its_own(scripted: Any, proxy: Any, name: str) -> None:
    scripts = {"prefill": sending(whole(GOOD)), "decode": sending(whole(GOOD)), **SLOW[name]()}
    engines = {role: await scripted(script) for role, script in scripts.items()}
    running = await proxy([engines["prefill"].url], [engines["decode"].url], request_timeout_s=LIMIT_S)
    got, spent_s = await timed(running.client.post("/v1/completions", json=BODY | {"stream": True}))
    assert LIMIT_S <= spent_s < LIMIT_S + 2
    if name == "decode streams for ever":
        *events, error = got.content.split(b"\n\n")[:-1]
        assert set(events) == {EVENT.strip()}
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "request_timeout"
    else:
        assert (got.status_code, got.json()["error"]["code"]) == (504, "request_timeout")
    assert await running.metric("kvparams_proxy_in_flight") == 0
    assert await running.metric("kvparams_proxy_ready") == 2  # no engine is blamed
    if name != "decode is silent":
        return
    engines["decode"].script = sending(whole(GOOD))
    good = await running.client.post("/v1/completions", json=BODY)  # the control
    assert good.status_code == 200


async def test_a_request_that_waits_for_room_has_its_limit_too(scripted: Any, proxy: Any) -> None:
    held = asyncio.Event()

    async def script(body: bytes, reader: asyncio.StreamReader, writer: Writer) -> None:
        await asyncio.wait_for(held.wait(), 10)
        writer.write(whole(GOOD))

    prefill, decode = await scripted(script), await scripted(sending(whole(GOOD)))
    limits = {Role.PREFILL: RoleLimits(requests=1)}
    running = await proxy([prefill.url], [decode.url], limits=limits, request_timeout_s=LIMIT_S)
    both = [asyncio.create_task(running.client.post("/v1/completions", json=BODY)) for _ in range(2)]
    for got in await asyncio.gather(*both):
        assert (got.status_code, got.json()["error"]["code"]) == (504, "request_timeout")
    assert await running.metric("kvparams_proxy_in_flight") == 0
    held.set()
    assert (await running.client.post("/v1/completions", json=BODY)).status_code == 200
