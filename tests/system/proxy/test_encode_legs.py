"""Tests the leg to an encode engine, with engines that keep every request."""

import asyncio
import json
from typing import Any

import pytest

from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams_proxy.secret import Secret
from kvparams_proxy.upstream.types import UpstreamLimits
from tests.support.waiting import until
from tests.system.proxy.encode_site import (
    CHAT_ANSWER,
    HANDED_ON,
    HASH,
    PEER,
    PICTURE,
    Script,
    Site,
    chat,
    encoding,
    failing,
)
from tests.system.proxy.test_legs import ANSWER, NIXL, answering
from tests.system.proxy.upstream.test_broken_engines import DONE, EVENT, SSE, chunk, sending

LONG_PICTURE = "data:image/png;base64," + "iVBORw0KGgo" * 100_000
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
]


def responses(**more: Any) -> dict[str, Any]:
    content = [{"type": "input_image", "image_url": PICTURE}, {"type": "input_text", "text": "Who?"}]
    return {"model": "stub", "input": [{"role": "user", "content": content}], "max_output_tokens": 64, **more}


def messages(**more: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo" * 100}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "Who?"}]
    return {"model": "stub", "messages": [{"role": "user", "content": content}], "max_tokens": 64, **more}


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(),
    "/v1/responses": responses(),
    "/v1/messages": messages(),
}
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT_ANSWER,
    "/v1/responses": {"id": "resp_1", "object": "response", "output": [{"type": "message", "content": []}]},
    "/v1/messages": {"id": "msg_1", "type": "message", "content": [{"type": "text", "text": "x"}], "usage": {}},
}


async def encode_failures(there: Site) -> float:
    text = (await there.running.client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("kvparams_proxy_leg_failures_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'role="encode"' in line)


async def breaking(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{")
    await writer.drain()
    writer.close()


async def garbling(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n{[no js")


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_picture_is_encoded_then_prefilled_then_decoded(site: Any, path: str) -> None:
    there = await site(encoding(answer=ANSWERS[path]), answer=ANSWERS[path])
    client: dict[str, Any] = REQUESTS[path] | {"tools": TOOLS, "mm_processor_kwargs": {"max_pixels": 512}}
    got = await there.running.client.post(path, json=client, headers={"x-request-id": "req-7"})
    assert got.status_code == 200, got.text
    assert there.order == ["encode-0", "prefill", "decode"]
    first, second, third = there.bodies

    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = {limit: 1, "stream": False, **({} if path == "/v1/messages" else {"ignore_eos": True})}
    stored = {"store": False} if path == "/v1/responses" else {}
    assert first == {k: v for k, v in client.items() if k != "tools"} | asked | stored
    assert second.pop("ec_transfer_params") == HANDED_ON
    assert second.pop("kv_transfer_params")["do_remote_decode"] is True
    assert second == client | asked | stored
    assert third.pop("kv_transfer_params")["remote_port"] == NIXL["remote_port"]
    third.pop("request_id", None)
    assert third == client

    assert got.headers["x-kvparams-encode"] == "encode-0"
    assert not got.json().get("ec_transfer_params")
    assert not got.json().get("kv_transfer_params")
    assert HASH not in got.text
    assert "127.0.0.1" not in got.text
    assert await there.running.metric('kvparams_proxy_encodings_total{encoded="yes"}') == 1
    assert await there.running.metric('kvparams_proxy_leg_seconds_count{role="encode"}') == 1
    assert await there.running.metric("kvparams_proxy_in_flight") == 0


async def test_a_long_picture_is_found_too(site: Any) -> None:
    there = await site(encoding())
    got = await there.running.client.post("/v1/chat/completions", json=chat(LONG_PICTURE))
    assert got.status_code == 200
    assert there.order == ["encode-0", "prefill", "decode"]
    assert [body["messages"] for body in there.bodies] == [chat(LONG_PICTURE)["messages"]] * 3


async def test_a_client_that_wants_a_stream_has_its_picture_encoded_without_one(site: Any) -> None:
    there = await site(encoding(), decoding=sending(SSE + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n"))
    body = chat(stream=True, stream_options={"include_usage": True}, logprobs=True, max_completion_tokens=9)
    assert (await there.running.client.post("/v1/chat/completions", json=body)).status_code == 200
    assert there.order == ["encode-0", "prefill", "decode"]
    more: dict[str, Any] = {"stream": False, "ignore_eos": True, "max_completion_tokens": 1, "max_tokens": 1}
    assert there.bodies[0] == chat(**more)
    assert there.bodies[2]["stream"] is True


async def test_encodings_of_many_media_in_a_long_answer_are_handed_on(site: Any) -> None:
    many = {f"{number:064x}": HANDED_ON[HASH] | {"item_indices": [number]} for number in range(150)}
    there = await site(encoding(many))
    assert (await there.running.client.post("/v1/chat/completions", json=chat())).status_code == 200
    assert there.bodies[1]["ec_transfer_params"] == many


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "stub", "messages": [{"role": "user", "content": '{"image_url":"x"}'}]}),
        ("/v1/completions", {"model": "stub", "prompt": "Who"}),
        ("/v1/responses", {"model": "stub", "input": "an image"}),
    ],
)
async def test_without_media_no_encode_engine_is_asked(site: Any, path: str, body: dict[str, Any]) -> None:
    there = await site(encoding(), answer=ANSWERS.get(path, ANSWER))
    got = await there.running.client.post(path, json=body)
    assert got.status_code == 200, got.text
    assert there.order == ["prefill", "decode"]
    assert all("ec_transfer_params" not in body for body in there.bodies)
    assert await there.running.metric("kvparams_proxy_encodings_total") == 0


async def test_what_a_client_says_of_encodings_reaches_nobody(site: Any) -> None:
    """The request goes to an encode engine as well: the control of the test."""
    evil = {HASH: {"peer_host": "169.254.169.254", "peer_port": 80}}
    for script in (encoding(), encoding(None)):
        there = await site(script)
        body = chat(ec_transfer_params=evil, vllm_xargs={"ec_transfer_params": evil})
        assert (await there.running.client.post("/v1/chat/completions", json=body)).status_code == 200
        assert there.order == ["encode-0", "prefill", "decode"]
        assert "169.254.169.254" not in json.dumps(there.bodies)


@pytest.mark.parametrize("script", [failing(), failing(b"503 X"), failing(b"429 X"), breaking, garbling])
async def test_another_encode_engine_takes_over(site: Any, script: Script) -> None:
    there = await site(script, encoding())
    orders: set[tuple[str, ...]] = set()
    for number in range(8):  # by their content, pictures go to both
        there.order.clear()
        got = await there.running.client.post("/v1/chat/completions", json=chat(f"{PICTURE}{number}"))
        assert got.status_code == 200, got.text
        orders.add(tuple(there.order))
        assert there.bodies[-2]["ec_transfer_params"] == HANDED_ON
    assert orders == {("encode-0", "encode-1", "prefill", "decode"), ("encode-1", "prefill", "decode")}
    assert await there.running.metric('kvparams_proxy_encodings_total{encoded="yes"}') == 8
    assert await encode_failures(there) >= 1
    assert await there.running.metric("kvparams_proxy_in_flight") == 0


@pytest.mark.parametrize(
    ("script", "legs"),
    [
        (failing(), 2),
        (failing(b"400 X"), 1),
        (breaking, 2),
        (garbling, 2),
        (encoding({HASH: {**PEER, "peer_host": "169.254.169.254"}}), 2),
        (encoding({HASH: {**PEER, "peer_port": 0}}), 2),
        (encoding({HASH: 1}), 2),
    ],
)
async def test_without_an_encoding_prefill_encodes_itself(
    site: Any, caplog: pytest.LogCaptureFixture, script: Script, legs: int
) -> None:
    there = await site(script, script, retries=0)
    got = await there.running.client.post("/v1/chat/completions", json=chat())
    assert got.status_code == 200, got.text
    assert [who[:6] for who in there.order] == ["encode"] * legs + ["prefil", "decode"]
    assert len(set(there.order)) == legs + 2
    assert all("ec_transfer_params" not in body for body in there.bodies)
    assert await there.running.metric('kvparams_proxy_encodings_total{encoded="no"}') == 1
    assert await there.running.metric("kvparams_proxy_in_flight") == 0
    assert "no encode engine has encoded its media" in caplog.text


async def test_a_silent_encode_engine_is_not_waited_for_for_ever(site: Any) -> None:
    async def silent(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    there = await site(silent, prefill_timeout_s=0.2)
    assert (await there.running.client.post("/v1/chat/completions", json=chat())).status_code == 200
    assert there.order == ["encode-0", "prefill", "decode"]
    assert await encode_failures(there) == 1


async def test_encode_engines_that_are_full_or_gone_are_done_without(site: Any, scripted: Any, proxy: Any) -> None:
    limits = UpstreamLimits(connections=1)
    held = asyncio.Event()

    async def slow(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await held.wait()
        await encoding()(body, reader, writer)

    there = await site(slow, upstream_limits=limits)
    first = asyncio.create_task(there.running.client.post("/v1/chat/completions", json=chat()))
    await until(lambda: there.order == ["encode-0"])
    assert (await there.running.client.post("/v1/chat/completions", json=chat())).status_code == 200
    assert there.order == ["encode-0", "prefill", "decode"]
    held.set()
    assert (await first).status_code == 200

    engines = [await scripted(answering(CHAT_ANSWER | {"kv_transfer_params": NIXL})) for _ in range(2)]
    running = await proxy([engines[0].url], [engines[1].url], encode=["http://127.0.0.1:9"])
    got = await running.client.post("/v1/chat/completions", json=chat())
    assert got.status_code == 200, got.text
    assert "x-kvparams-encode" not in got.headers


async def test_a_client_that_leaves_while_its_picture_is_encoded_ends_the_leg(site: Any) -> None:
    left = asyncio.Event()

    async def waiting(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""
        left.set()

    there = await site(waiting)
    request = asyncio.create_task(there.running.client.post("/v1/chat/completions", json=chat()))
    await until(lambda: there.order == ["encode-0"])
    request.cancel()
    async with asyncio.timeout(5):
        await left.wait()

    async def is_over() -> bool:
        return await there.running.metric('kvparams_proxy_requests_total{outcome="gone"}') == 1

    await until(is_over)
    assert there.order == ["encode-0"]
    assert await there.running.metric("kvparams_proxy_in_flight") == 0
    assert await there.running.metric("kvparams_proxy_encodings_total") == 0


async def test_one_picture_goes_to_one_encode_engine_and_many_go_to_all(site: Any) -> None:
    there = await site(encoding(), encoding(), encoding())

    async def ask(number: int, text: str) -> None:
        body = chat(f"{PICTURE}{number}")
        body["messages"][0]["content"][0]["text"] = text
        assert (await there.running.client.post("/v1/chat/completions", json=body)).status_code == 200

    for turn in range(5):
        await ask(0, f"question {turn}")
    assert len({who for who in there.order if who.startswith("encode")}) == 1
    for number in range(20):
        await ask(number, "Who?")
    assert len({who for who in there.order if who.startswith("encode")}) == 3


@pytest.mark.parametrize(
    ("local", "mode"),
    [
        ("prefill-0", "prefill_local_decode_remote"),
        ("decode-0", "decode_local_prefill_remote"),
        (None, "concurrent_legs"),
        (None, "conditional"),
    ],
)
async def test_every_mode_that_splits_has_an_encode_leg(site: Any, local: str | None, mode: str) -> None:
    """Also beside an engine."""
    there = await site(encoding(), local_id=local, modes=(ManagerMode(mode),))
    got = await there.running.client.post("/v1/chat/completions", json=chat(PICTURE * 3))
    assert got.status_code == 200, got.text
    assert there.order == ["encode-0", "prefill", "decode"]
    assert there.bodies[1]["ec_transfer_params"] == HANDED_ON


async def test_a_route_is_explained_by_the_leg_that_costs_most(site: Any) -> None:
    """The control: the request that is explained has an encode leg."""
    there = await site(encoding(), admin_token=Secret("token"))
    bearer = {"authorization": "Bearer token"}
    path = "/v1/chat/completions"
    got = await there.running.client.post(f"/admin/explain-route?path={path}", json=chat(), headers=bearer)
    assert got.status_code == 200, got.text
    assert (got.json()["role"], got.json()["chosen"]) == ("prefill", "prefill-0")
    assert there.order == []
    assert (await there.running.client.post(path, json=chat())).status_code == 200
    assert there.order == ["encode-0", "prefill", "decode"]


async def test_health_and_admission_do_not_need_encode_engines(site: Any, scripted: Any) -> None:
    there = await site(encoding())
    health = (await there.running.client.get("/health")).json()
    assert health["status"] == "ok"
    assert health["roles"]["encode"]["ready"] == 1
