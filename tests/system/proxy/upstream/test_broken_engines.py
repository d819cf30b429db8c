"""Tests engines that misbehave: the client always learns it, nothing hangs, and nothing is left in flight."""

import asyncio
import json
from typing import Any

import pytest

from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.upstream.types import UpstreamLimits

BODY: dict[str, Any] = {"model": "stub", "prompt": "x", "max_tokens": 4}
NIXL = {"remote_engine_id": "e", "remote_block_ids": [[1]], "remote_host": "127.0.0.1", "remote_port": 1}
GOOD = json.dumps(
    {"choices": [{"index": 0, "text": "x"}], "usage": {"prompt_tokens": 1}, "kv_transfer_params": NIXL}
).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def whole(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def sending(*pieces: bytes, close: bool = False) -> Any:
    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if close:
            raise ConnectionResetError

    return script


CORPUS: dict[str, Any] = {
    "nothing, then closed": sending(close=True),
    "not HTTP": sending(b"SSH-2.0-OpenSSH_9\r\n\r\n"),
    "garbage": sending(bytes(range(256)) * 4),
    "half a status line": sending(b"HTTP/1.1 20", close=True),
    "half the headers": sending(HEAD, close=True),
    "short body": sending(HEAD + b"content-length: 1000\r\n\r\n{", close=True),
    "negative length": sending(HEAD + b"content-length: -5\r\n\r\n{}"),
    "two lengths": sending(HEAD + b"content-length: 5\r\ncontent-length: 9\r\n\r\n{}"),
    "length and chunks": sending(HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
    "bad chunk size": sending(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"),
    "huge chunk size": sending(HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}"),
    "chunks cut off": sending(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(GOOD), close=True),
    "endless header": sending(HEAD + b"x: " + b"a" * 200_000),
    "many headers": sending(HEAD + b"".join(b"x-%d: y\r\n" % n for n in range(20_000))),
    "not JSON": sending(whole(b"<html>oops</html>")),
    "JSON of another kind": sending(whole(b"[1,2]")),
    "empty": sending(whole(b"")),
    "NaN": sending(whole(b'{"choices":[1],"x":NaN}')),
    "no content": sending(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "redirect": sending(b"HTTP/1.1 307 X\r\nlocation: http://evil.example/\r\ncontent-length: 0\r\n\r\n"),
    "switching protocols": sending(b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"),
    "server error": sending(b"HTTP/1.1 500 X\r\ncontent-length: 18\r\n\r\nTraceback 10.0.0.7"),
    "too long": sending(whole(b'{"x":"' + b"a" * 300_000 + b'"}')),
}


async def by_prompt(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as the corpus says under the name that the prompt gives, or well."""
    await CORPUS.get(json.loads(body)["prompt"], sending(whole(GOOD)))(body, reader, writer)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_malformed_answer_is_a_bad_gateway(scripted: Any, proxy: Any, role: str) -> None:
    """Between two of the corpus a sound answer shows that the first did no harm."""
    engines = {r: await scripted(by_prompt if r == role else sending(whole(GOOD))) for r in ("prefill", "decode")}
    limits = UpstreamLimits(answer_bytes=200_000)
    never = BreakerLimits(consecutive=10_000, window=10_000, failures=10_000)  # one engine, and all it does is fail
    running = await proxy(
        [engines["prefill"].url],
        [engines["decode"].url],
        upstream_limits=limits,
        decode_timeout_s=5.0,
        retries=0,
        breaker=never,
    )
    for name in CORPUS:
        for stream in (False, True):
            got = await running.client.post("/v1/completions", json=BODY | {"prompt": name, "stream": stream})
            assert got.status_code in (502, 503), (name, got.text)
            assert got.json()["error"]["message"]
            assert "10.0.0.7" not in got.text
            assert "127.0.0.1" not in got.text
        assert (await running.client.post("/v1/completions", json=BODY)).status_code == 200, name
    assert await running.metric("kvparams_proxy_in_flight") == 0
    assert await running.metric('kvparams_proxy_requests_total{outcome="failed"}') == 2 * len(CORPUS)


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n", whole(GOOD)),
        tuple(bytes([byte]) for byte in whole(GOOD)),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(GOOD[:9]) + chunk(GOOD[9:]) + b"0\r\nx-t: 1\r\n\r\n",),
        (HEAD.replace(b"1.1", b"1.0") + b"\r\n" + GOOD,),
        (HEAD + b"connection: close\r\n\r\n" + GOOD,),
    ],
    ids=["100 first", "byte by byte", "chunks with trailer", "HTTP/1.0", "ended by close"],
)
async def test_every_framing_that_http_allows_is_understood(scripted: Any, proxy: Any, pieces: Any) -> None:
    close = b"content-length" not in b"".join(pieces) and b"chunked" not in b"".join(pieces)
    prefill, decode = await scripted(sending(*pieces, close=close)), await scripted(sending(*pieces, close=close))
    running = await proxy([prefill.url], [decode.url])
    for _ in range(2):
        got = await running.client.post("/v1/completions", json=BODY)
        assert got.status_code == 200
        assert got.json()["choices"] == [{"index": 0, "text": "x"}]


async def test_an_engines_refusal_reaches_the_client_as_a_refusal(scripted: Any, proxy: Any) -> None:
    raw = b'{"error":{"message":"prompt is too long","type":"BadRequestError","param":"prompt","code":400}}'
    refusal = (
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw
    )
    for role in ("prefill", "decode"):
        engines = {r: await scripted(sending(refusal if r == role else whole(GOOD))) for r in ("prefill", "decode")}
        running = await proxy([engines["prefill"].url], [engines["decode"].url])
        for stream in (False, True):
            got = await running.client.post("/v1/completions", json=BODY | {"stream": stream})
            assert got.status_code == 400
            assert got.json()["error"]["message"] == "prompt is too long"


async def test_a_stale_kept_connection_is_replaced_unnoticed(scripted: Any, proxy: Any) -> None:
    """An engine may close an idle connection at the very moment a request is sent on it: that request is sent again,
    once. The control: on a fresh connection the same close is an error (`nothing, then closed` in the corpus)."""
    served = 0

    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        if served % 2 == 0:  # the second request on each connection
            raise ConnectionResetError
        writer.write(whole(GOOD))

    prefill, decode = await scripted(script), await scripted(sending(whole(GOOD)))
    running = await proxy([prefill.url], [decode.url])
    for _ in range(4):
        assert (await running.client.post("/v1/completions", json=BODY)).status_code == 200
    assert served == 7


async def test_an_engine_that_cannot_be_reached_is_named_by_role_and_not_chosen_again(
    scripted: Any, proxy: Any
) -> None:
    prefill, decode = await scripted(sending(whole(GOOD))), await scripted(sending(whole(GOOD)))
    running = await proxy([prefill.url], [decode.url, "http://127.0.0.1:1"])
    codes = [(await running.client.post("/v1/completions", json=BODY)).status_code for _ in range(6)]
    assert codes == [200] * 6  # the first probe has found it out
    assert await running.metric('kvparams_proxy_ready{instance="decode-1"') == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_silent_engine_times_out_its_leg(scripted: Any, proxy: Any, role: str, stream: bool) -> None:
    async def silent(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the proxy gives up

    engines = {r: await scripted(silent if r == role else sending(whole(GOOD))) for r in ("prefill", "decode")}
    urls = [engines["prefill"].url], [engines["decode"].url]
    running = await proxy(*urls, **{f"{role}_timeout_s": 0.2})
    got = await running.client.post("/v1/completions", json=BODY | {"stream": stream})
    assert got.status_code == 504
    assert role in got.json()["error"]["message"]
    assert await running.metric("kvparams_proxy_in_flight") == 0


async def test_a_stream_of_responses_ends_with_an_error_event_of_its_own_shape(scripted: Any, proxy: Any) -> None:
    event = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n'
    seen = asyncio.Event()

    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(event))
        await asyncio.wait_for(seen.wait(), 10)
        raise ConnectionResetError

    prefill, decode = await scripted(sending(whole(GOOD))), await scripted(script)
    running = await proxy([prefill.url], [decode.url])
    async with running.client.stream("POST", "/v1/responses", json={"input": "x", "stream": True}) as got:
        text = ""
        async for piece in got.aiter_text():
            text += piece
            seen.set()
    assert text.startswith(event.decode())
    name, data = text.removeprefix(event.decode()).strip().split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["code"], error["param"]) == ("error", "decode_failed", None)
    assert error["message"]


@pytest.mark.parametrize("end", ["reset", "silence", "garbage"])
async def test_a_stream_that_breaks_midway_ends_with_an_error_event(scripted: Any, proxy: Any, end: str) -> None:
    seen = asyncio.Event()

    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(EVENT) + chunk(EVENT[:10]))
        await asyncio.wait_for(seen.wait(), 10)
        if end == "silence":
            await reader.read()
        writer.write(b"zz\r\n" if end == "garbage" else b"")
        await writer.drain()
        raise ConnectionResetError

    prefill, decode = await scripted(sending(whole(GOOD))), await scripted(script)
    running = await proxy([prefill.url], [decode.url], decode_timeout_s=0.3)
    async with running.client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as got:
        assert got.status_code == 200
        text = ""
        async for piece in got.aiter_text():
            text += piece
            seen.set()
    events = [event for event in text.split("\n\n") if event]
    assert events[0] == EVENT.decode().strip()
    assert json.loads(events[1].removeprefix("data: "))["error"]["message"]
    assert len(events) == 2
    assert await running.metric('kvparams_proxy_requests_total{outcome="midway"}') == 1
    assert await running.metric("kvparams_proxy_in_flight") == 0


async def test_a_stream_without_an_event_is_never_an_empty_200(scripted: Any, proxy: Any) -> None:
    prefill, decode = await scripted(sending(whole(GOOD))), await scripted(sending(SSE + b"0\r\n\r\n"))
    running = await proxy([prefill.url], [decode.url])
    got = await running.client.post("/v1/completions", json=BODY | {"stream": True})
    assert got.status_code == 502


async def test_an_unasked_answer_on_an_idle_connection_is_never_taken_for_one(scripted: Any, proxy: Any) -> None:
    """A second answer behind the first would be somebody else's: the connection is dropped with it."""
    double = whole(GOOD) + whole(b'{"choices":[{"index":0,"text":"not yours"}]}')
    prefill, decode = await scripted(sending(whole(GOOD))), await scripted(sending(double))
    running = await proxy([prefill.url], [decode.url])
    for _ in range(4):
        got = await running.client.post("/v1/completions", json=BODY)
        assert got.status_code == 200
        assert "not yours" not in got.text
    assert decode.connections >= 4


async def test_an_unasked_answer_behind_a_stream_does_not_reach_its_client(scripted: Any, proxy: Any) -> None:
    """It may arrive with the stream's last bytes, and be no stream itself."""
    unasked = b"HTTP/1.1 500 X\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    stream = SSE + chunk(EVENT), chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n" + unasked
    prefill, decode = await scripted(sending(whole(GOOD))), await scripted(sending(*stream))
    running = await proxy([prefill.url], [decode.url])
    for _ in range(3):
        got = await running.client.post("/v1/completions", json=BODY | {"stream": True})
        assert (got.status_code, got.content) == (200, EVENT * 2 + DONE)


async def test_an_engine_with_all_its_connections_in_use_is_busy_not_gone(scripted: Any, proxy: Any) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await asyncio.wait_for(go_on.wait(), 10)
        writer.write(whole(GOOD))

    prefill, decode = await scripted(slow), await scripted(sending(whole(GOOD)))
    running = await proxy(
        [prefill.url], [decode.url], upstream_limits=UpstreamLimits(connections=1), probe_interval_s=60.0
    )
    first = asyncio.create_task(running.client.post("/v1/completions", json=BODY))
    await asyncio.wait_for(begun.wait(), 10)
    got = await running.client.post("/v1/completions", json=BODY)
    assert (got.status_code, got.json()["error"]["code"]) == (503, "prefill_busy")
    assert await running.metric("kvparams_proxy_ready") == 2
    go_on.set()
    assert (await first).status_code == 200
    assert (await running.client.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize("param", ["kv_transfer_params", "kv_transfer_params.kvparams", "kv_transfer_params_of_mine"])
async def test_a_refusal_of_kv_params_is_not_the_clients_fault(
    scripted: Any, proxy: Any, caplog: pytest.LogCaptureFixture, param: str
) -> None:
    """It sent none: the deployment is wired wrongly, and the log says what the engine said. The control is a member of
    the client's own."""
    error = {"message": "mode pull is not spoken here.", "type": "BadRequestError", "param": param}
    raw = json.dumps({"error": error}).encode()
    refusal = b"HTTP/1.1 400 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw
    prefill, decode = await scripted(sending(refusal)), await scripted(sending(whole(GOOD)))
    running = await proxy([prefill.url], [decode.url])
    got = await running.client.post("/v1/completions", json=BODY)
    if param.endswith("mine"):
        assert (got.status_code, got.json()["error"]["param"]) == (400, param)
        return
    assert (got.status_code, got.json()["error"]["code"]) == (502, "prefill_failed")
    assert "--connector" in got.json()["error"]["message"]
    assert "mode pull" not in got.text
    assert "mode pull is not spoken here" in caplog.text


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", [b"401 Unauthorized", b"403 Forbidden"])
async def test_credentials_that_an_engine_refuses_are_no_fault_of_the_client(
    scripted: Any, proxy: Any, role: str, status: bytes
) -> None:
    """The control is another refusal, which is passed on."""
    said = b'{"error":{"message":"the key sk-1 is wrong","type":"invalid_request_error","param":null,"code":7}}'
    for line, expected, code in ((status, 502, f"{role}_unauthorized"), (b"422 X", 422, 7)):
        refuses = sending(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n" % (line, len(said)) + said)
        engines = {r: await scripted(refuses if r == role else sending(whole(GOOD))) for r in ("prefill", "decode")}
        running = await proxy([engines["prefill"].url], [engines["decode"].url], retries=0)
        for stream in (False, True):
            got = await running.client.post("/v1/completions", json=BODY | {"stream": stream})
            assert (got.status_code, got.json()["error"]["code"]) == (expected, code)
            assert ("sk-1" in got.text) is (expected == 422)
