"""Tests the stub engine's answers, streams, delays and counts."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from demo.client import NO_CERTIFICATES
from tests.support.stub_engine import Counters, Delays, Engine, StubEngines
from tests.support.waiting import until

NIXL_ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.fixture
async def stub() -> AsyncIterator[StubEngines]:
    async with await StubEngines.start(prefill=[0], decode=[0], cached_tokens=3) as engines:
        yield engines


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=10, trust_env=False, verify=NO_CERTIFICATES) as http:
        yield http


async def post(http: httpx.AsyncClient, url: str, path: str = "/v1/completions", **body: object) -> Any:
    answer = await http.post(url + path, json={"model": "stub", "prompt": "a b c", **body})
    assert answer.status_code == 200
    return answer.json()


def events(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]


async def counters_become(http: httpx.AsyncClient, engine: Engine, **wanted: int) -> None:
    """Waits until the engine's counters have these values."""

    async def are_so() -> bool:
        counters = (await http.get(engine.url + "/stats")).json()[str(engine.port)]
        return all(counters[name] == value for name, value in wanted.items())

    await until(are_so)


async def test_a_completion_has_the_tokens_asked_for(stub: StubEngines, client: httpx.AsyncClient) -> None:
    answer = await post(client, stub.engines[1].url, max_tokens=5)
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == " tok" * 5
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert answer["kv_transfer_params"] is None


async def test_a_chat_answer_is_a_message(stub: StubEngines, client: httpx.AsyncClient) -> None:
    answer = await post(client, stub.engines[1].url, "/v1/chat/completions", max_completion_tokens=2, max_tokens=9)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == " tok tok"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_has_one_event_per_token_and_ends_with_done(
    stub: StubEngines, client: httpx.AsyncClient, path: str
) -> None:
    answer = await client.post(stub.engines[1].url + path, json={"prompt": "a", "max_tokens": 20, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    tokens = events(answer.text)
    assert len(tokens) == 20
    assert [token["choices"][0]["finish_reason"] for token in tokens] == [None] * 19 + ["length"]
    assert len({token["id"] for token in tokens}) == 1


async def test_usage_comes_as_one_more_event_if_asked_for(stub: StubEngines, client: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post(stub.engines[1].url + "/v1/completions", json=body)
    last = events(answer.text)[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2


async def test_a_nixl_prefill_is_answered_with_what_a_decode_engine_needs(
    stub: StubEngines, client: httpx.AsyncClient
) -> None:
    prefill, decode = stub.engines
    answer = await post(client, prefill.url, max_tokens=1, kv_transfer_params=NIXL_ASK)
    params = answer["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_block_ids"] == [[*range(1000, 1000 + len(params["remote_block_ids"][0]))]]
    assert params["remote_engine_id"] == f"engine-{prefill.port}"
    assert params["remote_port"] == prefill.port + 1000
    assert params["remote_prefill_cached_tokens"] == 3
    decoded = await post(client, decode.url, kv_transfer_params=params)
    assert decoded["usage"]["prompt_tokens_details"]["cached_tokens"] == decoded["usage"]["prompt_tokens"] - 1
    assert decoded["kv_transfer_params"] is None
    assert (prefill.counters.prefill, prefill.counters.decode_with_kv) == (1, 0)
    assert (decode.counters.prefill, decode.counters.decode_with_kv) == (0, 1)


@pytest.mark.parametrize("missing", ["remote_block_ids", "remote_engine_id"])
@pytest.mark.parametrize("how", ["absent", "null"])
async def test_a_decode_request_without_all_of_it_is_not_counted_as_one_with_kv(
    stub: StubEngines, client: httpx.AsyncClient, missing: str, how: str
) -> None:
    decode = stub.engines[1]
    params: dict[str, object] = {"remote_block_ids": [[1, 2]], "remote_engine_id": "engine-1"}
    if how == "null":
        params[missing] = None
    else:
        del params[missing]
    await post(client, decode.url, kv_transfer_params=params)
    assert (decode.counters.requests, decode.counters.decode_with_kv) == (1, 0)


async def test_names_that_only_stand_in_the_prompt_are_not_members(
    stub: StubEngines, client: httpx.AsyncClient
) -> None:
    engine = stub.engines[1]
    prompt = '{"do_remote_decode": true, "stream": true, "max_tokens": 9, "kvparams": {}}'
    answer = await post(client, engine.url, prompt=prompt, max_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2
    assert (engine.counters.prefill, engine.counters.streams, engine.counters.with_kvparams) == (0, 0, 0)


async def test_of_duplicate_members_the_last_wins_as_in_a_json_parser(
    stub: StubEngines, client: httpx.AsyncClient
) -> None:
    body = b'{"prompt":"a","max_tokens":7,"stream":true,"max_tokens":1,"stream":false}'
    answer = await client.post(stub.engines[0].url + "/v1/completions", content=body)
    assert answer.json()["usage"]["completion_tokens"] == 1


async def test_a_store_prefill_is_answered_with_a_prefill_result(stub: StubEngines, client: httpx.AsyncClient) -> None:
    prefill, decode = stub.engines
    ask = {
        "version": "1.0",
        "request_id": "r-1",
        "transfer": {"id": "t-1", "attempt": 2},
        "phase": "prefill",
        "mode": "store",
        "store_keys": ["k1", "k2"],
    }
    answer = await post(client, prefill.url, max_tokens=8, kv_transfer_params={"kvparams": ask})
    result = answer["kv_transfer_params"]["kvparams"]
    assert result["phase"] == "prefill_result"
    assert (result["request_id"], result["transfer"]) == ("r-1", {"id": "t-1", "attempt": 2})
    assert result["store_keys"] == ["k1", "k2"]
    assert answer["usage"]["completion_tokens"] == 1
    load = {**ask, "phase": "decode", "load_keys": ["k1", "k2"]}
    await post(client, decode.url, kv_transfer_params={"kvparams": load})
    assert (prefill.counters.prefill, prefill.counters.with_kvparams) == (1, 1)
    assert (decode.counters.prefill, decode.counters.decode_with_keys, decode.counters.with_kvparams) == (0, 1, 1)


async def test_a_client_that_leaves_is_counted_and_leaves_nothing_live(
    stub: StubEngines, client: httpx.AsyncClient
) -> None:
    engine = stub.engines[1]
    stub.delays.itl_ms = 5
    body = {"prompt": "a", "max_tokens": 10_000, "stream": True}
    async with client.stream("POST", engine.url + "/v1/completions", json=body) as answer:
        await anext(answer.aiter_lines())
        assert engine.counters.live == 1
    await counters_become(client, engine, live=0, aborted=1)


async def test_a_client_that_leaves_before_the_first_token_is_counted_too(
    stub: StubEngines, client: httpx.AsyncClient
) -> None:
    engine = stub.engines[0]
    stub.delays.prefill_ms = 60_000
    request = asyncio.create_task(post(client, engine.url, kv_transfer_params=NIXL_ASK))
    await counters_become(client, engine, live=1)
    request.cancel()
    await counters_become(client, engine, live=0, aborted=1)


async def test_a_client_that_does_not_read_stops_the_stream_and_reading_on_gets_all_of_it(
    stub: StubEngines, client: httpx.AsyncClient
) -> None:
    engine = stub.engines[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port, limit=1 << 12)
    body = b'{"prompt":"a","max_tokens":40000,"stream":true}'
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    writer.write(body)
    await counters_become(client, engine, live=1)
    for _ in range(10_000):  # twice the turns it takes to write all of it, were nothing in the way
        await asyncio.sleep(0)
    assert engine.counters.live == 1
    answer = await reader.read(-1)
    assert answer.count(b'"text":" tok"') == 40_000
    writer.close()
    await writer.wait_closed()


async def test_stats_reset_and_set_work_on_every_port(stub: StubEngines, client: httpx.AsyncClient) -> None:
    prefill, decode = stub.engines
    await post(client, decode.url)
    stats = (await client.get(prefill.url + "/stats")).json()
    assert stats[str(decode.port)]["requests"] == 1
    assert stats[str(prefill.port)]["role"] == "prefill"
    await client.get(prefill.url + "/reset")
    assert decode.counters == Counters()
    await client.get(decode.url + "/set?itl_ms=2.5&prefill_ms=10")
    assert stub.delays == Delays(itl_ms=2.5, prefill_ms=10)
    assert (await client.get(decode.url + "/set?speed=9")).status_code == 400
    assert (await client.get(prefill.url + "/health")).status_code == 200
    assert (await client.get(prefill.url + "/v1/models")).json()["data"][0]["id"] == "stub"
    assert (await client.get(prefill.url + "/nothing")).status_code == 404
