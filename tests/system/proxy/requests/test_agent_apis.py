"""Tests keys, tenants, aliases and failures of `/v1/messages` and `/v1/responses`, before engines that are scripts."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from kvparams_proxy.requests.api_keys_file import create_api_key, edit_api_keys
from kvparams_proxy.requests.authentication import tenant_cache_salt
from tests.support.proxy.fixtures import Scripted, answer

MESSAGES: Final[dict[str, Any]] = {"model": "stub", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
RESPONSES: Final[dict[str, Any]] = {"model": "stub", "input": "x"}
BODIES: Final = {"/v1/messages": MESSAGES, "/v1/responses": RESPONSES}
HANDOFF: Final = {
    "remote_engine_id": "e",
    "remote_request_id": "q",
    "remote_block_ids": [[1]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}
SSE: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST: Final = {"/v1/messages": "message_stop", "/v1/responses": "response.completed"}
FIRST: Final = {"/v1/messages": "content_block_delta", "/v1/responses": "response.output_text.delta"}


def named(name: str, **members: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **members})}\n\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def document(body: bytes) -> bytes:
    """What an engine answers to either API; a prefill leg gets a handoff."""
    asked: dict[str, Any] = json.loads(body or b'{"model": "stub"}')
    said: dict[str, Any]
    told: dict[str, Any] = asked.get("kv_transfer_params") or {}
    params = HANDOFF if told.get("do_remote_decode") else None
    if "messages" in asked:
        said = {"id": "msg_1", "type": "message", "content": [{"type": "text", "text": "a"}], "usage": {}}
    else:
        said = {"id": asked.get("request_id", "resp_1"), "object": "response", "output": [], "usage": {}}
    return json.dumps({**said, "model": asked["model"], "kv_transfer_params": params}).encode()


async def engine(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(document(body)))


def streaming(path: str, *, breaks: bool) -> Any:
    """An engine that begins a stream, and ends it or breaks off."""

    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(named(FIRST[path], index=0, delta="a")))
        await writer.drain()
        if breaks:
            raise ConnectionResetError
        writer.write(chunk(named(LAST[path], response={"output": []})) + b"0\r\n\r\n")

    return script


def sent(legs: Scripted) -> list[dict[str, Any]]:
    return [json.loads(body) for body in legs.bodies]


def key_of(path: Path, tenant: str) -> str:
    key, record = create_api_key(tenant, datetime.now(UTC))
    with edit_api_keys(path) as records:
        records[record.id] = record
    return key


@pytest.mark.parametrize("path", BODIES)
async def test_both_legs_of_a_tenant_carry_its_salt(scripted: Any, proxy: Any, tmp_path: Path, path: str) -> None:
    """The control is the client without keys: its legs carry none."""
    prefill, decode = await scripted(engine), await scripted(engine)
    keys = tmp_path / "keys.jsonl"
    tenants = {tenant: key_of(keys, tenant) for tenant in ("acme", "other")}
    running = await proxy([prefill.url], [decode.url], client_keys=keys)
    for tenant, key in tenants.items():
        header = {"x-api-key": key} if path == "/v1/messages" else {"authorization": f"Bearer {key}"}
        got = await running.client.post(path, json=BODIES[path], headers=header)
        assert got.status_code == 200, got.text
        for leg in (sent(prefill)[-1], sent(decode)[-1]):
            assert leg["cache_salt"] == tenant_cache_salt(tenant, None)
        assert key not in str(prefill.heads + decode.heads)
    refused = await running.client.post(path, json=BODIES[path], headers={"x-api-key": "kvp_wrong"})
    assert refused.status_code == 401
    if path == "/v1/messages":
        twice = [("x-api-key", key) for key in tenants.values()]
        assert (await running.client.post(path, json=BODIES[path], headers=twice)).status_code == 400
    kind = "authentication_error" if path == "/v1/messages" else "invalid_request_error"
    assert refused.json()["error"]["type"] == kind
    bare = await proxy([prefill.url], [decode.url])
    assert (await bare.client.post(path, json=BODIES[path])).status_code == 200
    assert "cache_salt" not in sent(prefill)[-1]
    assert "cache_salt" not in sent(decode)[-1]


async def test_a_tenant_reaches_no_response_of_another(scripted: Any, proxy: Any, tmp_path: Path) -> None:
    prefill, decode = await scripted(engine), await scripted(engine)
    keys = tmp_path / "keys.jsonl"
    acme, other = ({"authorization": f"Bearer {key_of(keys, tenant)}"} for tenant in ("acme", "other"))
    running = await proxy([prefill.url], [decode.url], client_keys=keys)
    made = (await running.client.post("/v1/responses", json=RESPONSES, headers=acme)).json()["id"]
    assert made == sent(decode)[-1]["request_id"]
    assert "request_id" not in sent(prefill)[-1]
    before = len(decode.bodies)
    goes_on = {**RESPONSES, "previous_response_id": made}
    assert (await running.client.post("/v1/responses", json=goes_on, headers=other)).status_code == 404
    assert (await running.client.get(f"/v1/responses/{made}", headers=other)).status_code == 404
    assert (await running.client.post(f"/v1/responses/{made}/cancel", headers=other)).status_code == 404
    assert (await running.client.get(f"/v1/responses/{made}")).status_code == 401
    assert len(decode.bodies) == before
    assert (await running.client.post("/v1/responses", json=goes_on, headers=acme)).status_code == 200
    assert sent(decode)[-1]["previous_response_id"] == made
    assert "kv_transfer_params" not in sent(decode)[-1]


@pytest.mark.parametrize("length", [1, 100_000], ids=["short", "read in steps"])
async def test_a_stored_response_is_read_whatever_became_of_it(scripted: Any, proxy: Any, length: int) -> None:
    """One that has failed is a response, too: its client asks for the reason."""
    prefill, decode = await scripted(engine), await scripted(engine)
    running = await proxy([prefill.url], [decode.url])
    made = (await running.client.post("/v1/responses", json=RESPONSES)).json()["id"]
    error = {"code": "server_error", "message": "x" * length}
    kept: dict[str, Any] = {"id": made, "object": "response", "status": "failed", "error": error, "output": []}
    decode.models = json.dumps({**kept, "kv_transfer_params": HANDOFF, "worker": decode.url}).encode()
    got = await running.client.get(f"/v1/responses/{made}")
    assert got.status_code == 200
    assert {name: value for name, value in got.json().items() if value is not None} == kept
    assert (await running.client.post(f"/v1/responses/{made}/cancel")).status_code == 200
    assert decode.heads[-1].startswith(f"POST /v1/responses/{made}/cancel ".encode())
    streamed = await running.client.get(f"/v1/responses/{made}", params={"stream": "true"})
    assert (streamed.status_code, streamed.json()["error"]["code"]) == (400, "not_supported")


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_breaks_ends_with_an_error_of_its_api(scripted: Any, proxy: Any, path: str) -> None:
    prefill = await scripted(engine)
    decode = await scripted(streaming(path, breaks=True))
    running = await proxy([prefill.url], [decode.url], retries=0)
    got = await running.client.post(path, json={**BODIES[path], "stream": True})
    first, last = got.text.strip().split("\n\n")
    assert first.startswith(f"event: {FIRST[path]}\n")
    name, data = last.split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error["type"] == "error"
    assert ("error" in error) is (path == "/v1/messages")
    assert await running.metric('kvparams_proxy_requests_total{outcome="midway"}') == 1


@pytest.mark.parametrize("path", BODIES)
async def test_another_engine_takes_over_before_there_is_content(scripted: Any, proxy: Any, path: str) -> None:
    """An engine that has only announced its answer has committed the client to nothing."""
    begins = {"/v1/messages": "message_start", "/v1/responses": "response.created"}

    async def dies(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(named(begins[path], message={"usage": {}}, response={"output": []})))
        await writer.drain()
        raise ConnectionResetError

    prefill = await scripted(engine)
    bad, good = await scripted(dies), await scripted(streaming(path, breaks=False))
    running = await proxy([prefill.url], [bad.url, good.url])
    for _ in range(3):
        got = await running.client.post(path, json={**BODIES[path], "stream": True})
        assert got.status_code == 200
        names = [block.split("\n")[0] for block in got.text.strip().split("\n\n")]
        assert names == [f"event: {FIRST[path]}", f"event: {LAST[path]}"]
    assert bad.bodies


@pytest.mark.parametrize("path", [*BODIES, "/v1/chat/completions"])
async def test_an_alias_is_the_model_that_engines_know(scripted: Any, proxy: Any, path: str) -> None:
    prefill, decode = await scripted(engine), await scripted(engine)
    running = await proxy([prefill.url], [decode.url], model_aliases={"small": "stub", "gone": "nobody"})
    body = {**BODIES.get(path, MESSAGES), "model": "small"}
    await running.client.post(path, json=body)
    assert {leg["model"] for leg in sent(prefill)} == {leg["model"] for leg in sent(decode)} == {"stub"}
    unknown = await running.client.post(path, json={**body, "model": "gone"})
    assert unknown.status_code == 404
    listed = (await running.client.get("/v1/models")).json()["data"]
    assert {model["id"]: model["root"] for model in listed} == {"stub": "stub", "small": "stub"}


async def test_a_model_that_lacks_engines_of_a_role_is_not_listed(scripted: Any, proxy: Any) -> None:
    prefill, decode = await scripted(engine), await scripted(engine)
    prefill.models = b'{"object":"list","data":[{"id":"stub"},{"id":"half"}]}'
    running = await proxy([prefill.url], [decode.url])
    assert [model["id"] for model in (await running.client.get("/v1/models")).json()["data"]] == ["stub"]


async def test_an_engine_that_does_not_say_what_it_stored_is_waited_for_no_longer_than_its_time(
    scripted: Any, proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvparams_proxy.server.stored_responses._TIMEOUT_S", 0.1)

    async def says_nothing(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if body:
            writer.write(answer(document(body)))
        else:
            assert await reader.read(1) == b"", "the proxy goes away"
            left.set()

    left = asyncio.Event()
    prefill, decode = await scripted(engine), await scripted(says_nothing)
    running = await proxy([prefill.url], [decode.url])
    made = (await running.client.post("/v1/responses", json=RESPONSES)).json()["id"]
    refused = await running.client.post(f"/v1/responses/{made}/cancel")
    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "engine_timeout")
    async with asyncio.timeout(5):
        await left.wait()
