"""Tests the content of each leg, with engines that keep every request."""

import asyncio
import json
import re
from typing import Any, cast

import pytest

from kvparams import parse
from tests.support.kvparams.planning import echoed

ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": "stub",
    "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
    "usage": {
        "prompt_tokens": 4,
        "completion_tokens": 1,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3},
    },
}
NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[812, 813]],
    "remote_engine_id": "engine-a",
    "remote_request_id": "cmpl-1-0-abc",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_blocks_expiry_time": None,
    "huge": 2**63 - 1,
}
CLIENT: dict[str, Any] = {
    "model": "stub",
    "prompt": "Who",
    "max_tokens": 64,
    "max_completion_tokens": 64,
    "min_tokens": 2,
    "stream": False,
    "stream_options": None,
    "x_unknown": {"kept": [1, 2.50]},
}


def answering(document: dict[str, Any], *, echoes: bool = True) -> Any:
    """Answers so; `echoes`: a document in it is that of the leg."""

    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        params: Any = document.get("kv_transfer_params")
        asked = json.dumps(json.loads(body or b"{}").get("kv_transfer_params") or {})
        if echoes and isinstance(params, dict):
            params = echoed(cast("dict[str, Any]", params), asked)
        raw = json.dumps(document | ({} if params is None else {"kv_transfer_params": params})).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw
        )

    return script


async def test_prefill_is_asked_for_one_token_and_decode_for_what_the_client_asked(scripted: Any, proxy: Any) -> None:
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": NIXL}))
    decode = await scripted(answering(ANSWER | {"kv_transfer_params": {"secret": "10.0.0.9"}}))
    running = await proxy([prefill.url], [decode.url])
    got = await running.client.post("/v1/completions", json=CLIENT, headers={"x-request-id": "req-7"})
    assert got.status_code == 200
    first, second = json.loads(prefill.bodies[0]), json.loads(decode.bodies[0])

    params = first.pop("kv_transfer_params")
    document = parse(params.pop("kvparams"))
    assert params["do_remote_decode"] is True
    assert params["do_remote_prefill"] is False
    assert (document.phase, document.mode, document.request_id) == ("prefill", "pull", "req-7")
    limits = {"max_tokens": 1, "max_completion_tokens": 1, "ignore_eos": True, "stream": False}
    assert first == {k: v for k, v in CLIENT.items() if k not in ("min_tokens", "stream_options")} | limits

    params = second.pop("kv_transfer_params")
    document = parse(params.pop("kvparams"))
    assert params == NIXL
    assert (document.phase, document.request_id) == ("decode", "req-7")
    assert document.producer is not None
    assert (document.producer.id, document.producer.incarnation) == ("prefill-0", None)
    assert second == CLIENT

    for engine in (prefill, decode):
        assert b"x-request-id: req-7\r\n" in engine.heads[0]
    assert got.json()["kv_transfer_params"] is None  # as an engine alone would answer
    assert "10.0.0" not in got.text


async def test_every_attempt_has_a_transfer_id_of_its_own(scripted: Any, proxy: Any) -> None:
    """Spec-mandated, 1.0#3.15: two requests with the client's same X-Request-Id must not claim each other's KV."""
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": NIXL}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url])
    for _ in range(3):
        await running.client.post("/v1/completions", json=CLIENT, headers={"x-request-id": "same"})
    legs = zip(prefill.bodies, decode.bodies, strict=True)
    ids = [[parse(json.loads(b)["kv_transfer_params"]["kvparams"]).transfer.id for b in pair] for pair in legs]
    assert all(first == second for first, second in ids)
    assert len({first for first, _ in ids}) == 3
    assert all(re.fullmatch(r"[0-9a-f]{24}-[0-9a-f]+", first) for first, _ in ids)  # 96 bits, and no word of a client


async def test_client_supplied_params_and_steering_headers_never_reach_an_engine(scripted: Any, proxy: Any) -> None:
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": NIXL}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url])
    evil = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil.example", "remote_port": 1},
        "bootstrap_host": "evil.example",
        "vllm_xargs": {"kv_transfer_params": "evil.example", "harmless": 1},
        "sampling_params": {"extra_args": {"kv_transfer_params": {"remote_host": "evil.example"}, "x": 2}},
        "request_id": "evil.example",
    }
    headers = {"x-data-parallel-rank": "3", "x-override-bootstrap-host": "evil.example", "traceparent": "00-1-2-3"}
    got = await running.client.post("/v1/completions", json=CLIENT | evil, headers=headers)
    assert got.status_code == 200
    for engine in (prefill, decode):
        sent = json.loads(engine.bodies[0])
        assert b"evil.example" not in engine.bodies[0]
        assert sent["vllm_xargs"] == {"harmless": 1}
        assert sent["sampling_params"] == {"extra_args": {"x": 2}}
        assert b"x-data-parallel-rank" not in engine.heads[0].lower()
        assert b"x-override" not in engine.heads[0].lower()
        assert b"traceparent: 00-1-2-3" in engine.heads[0]


async def test_engines_are_asked_at_their_own_path_however_the_client_spells_it(scripted: Any, proxy: Any) -> None:
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": NIXL}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url])
    for path in ("/v1/completions", "/v1/%63ompletions", "/v1/completions%0A", "/v1/completions?a=/../b"):
        assert (await running.client.post(path, json=CLIENT)).status_code == 200
    for engine in (prefill, decode):
        assert {head.split(b"\r\n")[0] for head in engine.heads} == {b"POST /v1/completions HTTP/1.1"}


async def test_token_ids_are_named_by_digest_and_a_salt_isolates(scripted: Any, proxy: Any) -> None:
    result = {
        "version": "1.0",
        "request_id": "r",
        "transfer": {"id": "t", "attempt": 1},
        "phase": "prefill_result",
        "mode": "store",
        "load_keys": ["k1", "k2"],
        "producer": {"id": "theirs", "incarnation": "i9"},
        "lease": {"ttl_ms": 1000},
    }
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": {"kvparams": result}}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url], "store")
    body = {"model": "stub", "prompt": [1, 2, 4_294_967_295], "cache_salt": "tenant-1", "n": 3}
    got = await running.client.post("/v1/completions", json=body)
    assert got.status_code == 200
    asked = parse(json.loads(prefill.bodies[0])["kv_transfer_params"]["kvparams"])
    told = parse(json.loads(decode.bodies[0])["kv_transfer_params"]["kvparams"])
    assert asked.mode == told.mode == "store"
    assert asked.prefix is not None
    assert told.prefix is not None
    assert asked.prefix.covers([1, 2, 4_294_967_295])
    assert asked.isolation is not None
    assert asked.isolation.cache_salt == "tenant-1"
    assert told.load_keys == ("k1", "k2")
    assert told.producer is not None
    assert told.producer.id == "theirs"
    assert "n" not in json.loads(prefill.bodies[0])
    assert json.loads(decode.bodies[0])["n"] == 3


async def test_sampling_params_that_are_null_are_those_that_are_not_there(scripted: Any, proxy: Any) -> None:
    """Found by feeding the edge."""
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": NIXL}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url])
    client = {"model": "stub", "token_ids": [1, 2], "sampling_params": None}
    assert (await running.client.post("/inference/v1/generate", json=client)).status_code == 200
    assert json.loads(prefill.bodies[0])["sampling_params"] == {"max_tokens": 1, "ignore_eos": True}
    assert json.loads(decode.bodies[0])["sampling_params"] is None


@pytest.mark.parametrize("dialect", ["nixl", "store"])
@pytest.mark.parametrize("params", [None, {}, {"remote_host": "10.0.0.7"}, "text", [1]])
async def test_a_prefill_answer_without_a_handoff_is_an_error_not_a_silent_recompute(
    scripted: Any, proxy: Any, dialect: str, params: object
) -> None:
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": params}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url], dialect)
    got = await running.client.post("/v1/completions", json=CLIENT)
    assert got.status_code == 502
    assert got.json()["error"]["code"] == "handoff_missing"
    assert not decode.bodies
    assert await running.metric("kvparams_proxy_in_flight") == 0


@pytest.mark.parametrize("document", [{"version": "9.0"}, {"version": "1.0"}, 7])
async def test_a_prefill_document_that_breaks_the_protocol_is_an_error(
    scripted: Any, proxy: Any, document: object
) -> None:
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": {"kvparams": document}}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url], "store")
    got = await running.client.post("/v1/completions", json=CLIENT)
    assert (got.status_code, got.json()["error"]["code"]) == (502, "bad_prefill_answer")
