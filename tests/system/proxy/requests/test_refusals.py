"""Tests which requests the edge refuses, with a clear 4xx, and which it lets through."""

import asyncio
import json
from typing import Any

import pytest

from kvparams.jsontext.document import JSONLimits
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.body import declared_length
from tests.support.stub_engine import StubEngines


@pytest.fixture(params=["direct", "plain"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Both ways to write an answer, here in `make test` too."""
    return request.param == "direct"


GOOD: dict[str, Any] = {"model": "stub", "prompt": "x", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}

MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"model":"stub","prompt":"x"',
    b'{"model":"stub","prompt":"x","temperature":NaN}',
    b'{"model":"stub","prompt":"x","temperature":Infinity}',
    b'{"model":"stub","prompt":"x","temperature":1e999}',
    b'{"model":"stub","prompt":"x","model":"other"}',
    b'{"model":"stub","prompt":"x","a":{"b":1,"b":2}}',
    b'{"model":"stub","prompt":"x","pr\\u006fmpt":"y"}',
    b'{"model":"stub","prompt":"\xff"}',
    b'{"model":"stub","prompt":"x","a":' + b"[" * 100 + b"]" * 100 + b"}",
    b"[" * 1_000_000,
    b'{"model":"stub","prompt":"\\ud800"}',
]

WRONG: list[tuple[str, object]] = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", None),
    ("prompt", 5),
    ("prompt", {"a": 1}),
    ("prompt", [""]),
    ("prompt", [[]]),
    ("prompt", [1, "a"]),
    ("prompt", ["a", 1]),
    ("prompt", [1, True]),
    ("prompt", [1, 2.0]),
    ("prompt", [-1]),
    ("prompt", [2**32]),
    ("prompt", [[1], ["a"]]),
    ("model", 7),
    ("model", "x" * 1025),
    ("max_tokens", "5"),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_completion_tokens", -1),
    ("min_tokens", "1"),
    ("n", 0),
    ("n", 10**9),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", []),
    ("cache_salt", 5),
    ("cache_salt", ""),
    ("cache_salt", "x" * 257),
]


async def test_malformed_bodies_are_refused_and_reach_no_engine(stub: StubEngines, stubbed: Any) -> None:
    for raw in MALFORMED:
        got = await stubbed.client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
        assert got.status_code == 400, raw[:80]
        error = got.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    assert sum(engine.counters.requests for engine in stub.engines) == 0


async def test_wrong_values_are_refused_by_name(stub: StubEngines, stubbed: Any) -> None:
    for name, value in WRONG:
        got = await stubbed.client.post("/v1/completions", json=GOOD | {name: value})
        assert got.status_code == 400, (name, value)
        assert got.json()["error"]["param"].startswith(name)
    for messages in ([], None, "x", [1], [{"content": "x"}]):
        got = await stubbed.client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
        assert got.status_code == 400, messages
        assert got.json()["error"]["param"].startswith("messages")
    assert sum(engine.counters.requests for engine in stub.engines) == 0


async def test_null_is_as_good_as_absent(stubbed: Any) -> None:
    nulls = dict.fromkeys(("max_completion_tokens", "min_tokens", "n", "stream", "stream_options", "cache_salt"))
    assert (await stubbed.client.post("/v1/completions", json=GOOD | nulls)).status_code == 200


async def test_an_unknown_model_is_not_found(stubbed: Any) -> None:
    got = await stubbed.client.post("/v1/completions", json=GOOD | {"model": "gpt-x"})
    assert got.status_code == 404
    assert got.json()["error"]["code"] == "model_not_found"


async def test_a_body_over_the_limit_is_refused(stub: StubEngines, proxy: Any) -> None:
    engines = {role: [e.url for e in stub.engines if e.role == role] for role in ("prefill", "decode")}
    running = await proxy(engines["prefill"], engines["decode"], body=JSONLimits(max_bytes=1000))
    fits = GOOD | {"prompt": "x" * 900}
    assert (await running.client.post("/v1/completions", json=fits)).status_code == 200
    got = await running.client.post("/v1/completions", json=GOOD | {"prompt": "x" * 100_000})
    assert got.status_code == 413
    assert "1000 bytes" in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("zeros", "value", "extra", "status"),
    [
        (5_000, None, b"", b"200"),
        (5_000, None, b"connection: upgrade\r\nupgrade: h2c\r\n", b"200"),
        (40_000, None, b"", b"200"),
        (5_000, 99_000_000, b"", b"413"),
        (1, (1 << 64) - 1, b"", b"413"),
    ],
)
async def test_a_content_length_is_judged_by_its_value(
    stubbed: Any, zeros: int, value: int | None, extra: bytes, status: bytes
) -> None:
    """Python reads no number of more than 4,300 digits; zeros in front of it are digits, too."""
    body = json.dumps(GOOD).encode()
    length = len(body) if value is None else value
    reader, writer = await asyncio.open_connection("127.0.0.1", stubbed.port)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%bcontent-length: %b%d\r\n\r\n"
    )
    writer.write(head % (extra, b"0" * zeros, length) + body)
    async with asyncio.timeout(10):
        said = await reader.readline()
    assert said.split()[1] == status
    writer.close()


def test_a_declared_length_is_a_number_of_any_length() -> None:
    assert declared_length(b"0" * 5_000 + b"12") == 12
    assert declared_length(b" 0 ") == 0
    assert declared_length(b"9" * 5_000) > 1 << 62
    for value in (b"-1", b"+1", b"1_0", b"0x1", b"1, 1", b"\xb2"):
        with pytest.raises(ProxyError, match="not a number"):
            declared_length(value)


async def test_token_id_prompts_and_unknown_members_pass_through(stub: StubEngines, stubbed: Any) -> None:
    raw = json.dumps(GOOD | {"prompt": [1, 2, 3], "future_member": {"a": [1.0, None]}}).encode()
    got = await stubbed.client.post("/v1/completions", content=raw)
    assert got.status_code == 200
    assert sum(engine.counters.decode_with_kv for engine in stub.engines) == 1


async def test_an_answer_that_would_not_be_json_is_refused_by_name(stub: StubEngines, stubbed: Any) -> None:
    """The control: the others reach an engine, whatever it makes of them."""
    wrong: list[object] = ["bytes", "bytes_only", 7, {}]
    for encoding in wrong:
        got = await stubbed.client.post(
            "/v1/embeddings", json={"model": "stub", "input": "x", "encoding_format": encoding}
        )
        assert (got.status_code, got.json()["error"]["param"]) == (400, "encoding_format")
    before = sum(engine.counters.requests for engine in stub.engines)
    for encoding in ("float", "base64", None):
        got = await stubbed.client.post(
            "/v1/embeddings", json={"model": "stub", "input": "x", "encoding_format": encoding}
        )
        assert got.json().get("error", {}).get("param") != "encoding_format"
    assert before == 0


async def test_a_path_that_is_not_served_is_named(stubbed: Any) -> None:
    got = await stubbed.client.post("/v1/messages/batches", json=CHAT)
    assert got.status_code == 404
    assert "/v1/messages/batches is not served here" in got.json()["error"]["message"]
    assert got.headers["x-request-id"]


async def test_errors_of_messages_have_the_form_of_anthropic(stubbed: Any) -> None:
    got = await stubbed.client.post("/v1/messages", json={"model": "stub", "messages": CHAT["messages"]})
    assert got.status_code == 400
    assert got.json()["type"] == "error"
    assert got.json()["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in got.json()["error"]["message"]
    assert got.headers["x-request-id"]
