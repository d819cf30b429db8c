"""Tests one request through the proxy: the legs that engines receive, and the answer that the client gets."""

import json
from typing import Any

import pytest

from kvparams.jsontext.document import JSONLimits
from kvparams_proxy.fleet.fleet import Fleet
from tests.support.proxy.steps import read_all
from tests.support.stub_engine import StubEngines


@pytest.fixture(params=["direct", "plain"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Both ways to write an answer, here in `make test` too."""
    return request.param == "direct"


BODY: dict[str, Any] = {"model": "stub", "prompt": "Who is there?", "max_tokens": 5, "temperature": 0.25}
CHAT: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "Who is there?"}], "max_tokens": 5}


def counted(stub: StubEngines, name: str) -> list[int]:
    return [getattr(engine.counters, name) for engine in stub.engines]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("stream", [False, True])
async def test_each_request_runs_one_prefill_and_one_decode_leg_with_params(
    stub: StubEngines, stubbed: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    for _ in range(4):
        got = await stubbed.client.post(path, json=body | {"stream": stream})
        assert got.status_code == 200
    assert counted(stub, "requests") == [2, 2, 2, 2]
    assert counted(stub, "prefill") == [2, 2, 0, 0]
    assert counted(stub, "decode_with_kv") == [0, 0, 2, 2]
    assert counted(stub, "with_kvparams") == [2, 2, 2, 2]
    assert counted(stub, "streams") == [0, 0, 2 * stream, 2 * stream]
    assert counted(stub, "live") == [0, 0, 0, 0]
    assert await stubbed.metric("kvparams_proxy_in_flight") == 0
    assert await stubbed.metric('kvparams_proxy_requests_total{outcome="ok"}') == 4


async def test_a_whole_answer_tells_what_prefill_found_cached_and_nothing_of_the_engines(stubbed: Any) -> None:
    got = (await stubbed.client.post("/v1/completions", json=BODY)).json()
    assert got["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
    assert got["usage"]["completion_tokens"] == 5
    assert got["kv_transfer_params"] is None
    assert got["choices"][0]["text"]


async def test_a_stream_arrives_whole_with_usage_corrected(stubbed: Any) -> None:
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    got = await stubbed.client.post("/v1/completions", json=body)
    assert got.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in got.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert sum(len(chunk["choices"]) for chunk in chunks) == 5
    assert "kv_transfer_params" not in got.text
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert [usage["prompt_tokens_details"] for usage in usages] == [{"cached_tokens": 7}]


async def test_the_request_id_is_on_the_answer_and_the_route_names_who_ran_it(stubbed: Any) -> None:
    got = await stubbed.client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine-1"})
    assert got.headers["x-request-id"] == "mine-1"
    assert got.headers["x-kvparams-prefill"] == "prefill-0"
    assert got.headers["x-kvparams-decode"] == "decode-0"


@pytest.mark.parametrize("given", ["___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_x", "a b", "x" * 200])
async def test_a_request_id_that_an_engine_could_read_an_address_from_is_replaced(stubbed: Any, given: str) -> None:
    got = await stubbed.client.post("/v1/completions", json=BODY, headers={"x-request-id": given})
    assert got.status_code == 200
    assert got.headers["x-request-id"] != given


async def test_models_health_and_metrics_are_served(stubbed: Any) -> None:
    models = (await stubbed.client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["stub"]
    assert (await stubbed.client.get("/health")).status_code == 200
    assert "kvparams_proxy_leg_seconds" in (await stubbed.client.get("/metrics")).text


async def test_what_is_not_served_is_refused_in_the_openai_shape(stubbed: Any) -> None:
    got = await stubbed.client.get("/v1/nothing")
    assert got.status_code == 404
    assert got.json()["error"]["type"] == "not_found_error"
    assert (await stubbed.client.get("/v1/completions")).status_code == 405


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_missing_role_is_named(stub: StubEngines, proxy: Any, role: str) -> None:
    urls = {r: [e.url for e in stub.engines if e.role == r and r != role] for r in ("prefill", "decode")}
    running = await proxy(urls["prefill"], urls["decode"])
    got = await running.client.post("/v1/completions", json=BODY)
    assert got.status_code == 503
    assert role in got.json()["error"]["message"]
    health = await running.client.get("/health")
    assert (health.status_code, health.json()["missing_roles"]) == (503, [role])
    assert await running.metric("kvparams_proxy_in_flight") == 0


async def test_what_nixls_answer_cannot_describe_one_decode_engine_answers_alone(
    stub: StubEngines, stubbed: Any
) -> None:
    for change in ({"n": 2}, {"prompt": ["one", "two"]}, {"prompt": [[1, 2], [3]]}):
        for engine in stub.engines:
            engine.counters.reset()
        got = await stubbed.client.post("/v1/completions", json=BODY | change)
        assert got.status_code == 200
        assert sum(engine.counters.requests for engine in stub.engines if engine.role == "prefill") == 0
        assert sum(engine.counters.requests for engine in stub.engines if engine.role == "decode") == 1
    one = await stubbed.client.post("/v1/completions", json=BODY | {"prompt": [[1, 2]]})
    assert one.status_code == 200
    assert await stubbed.metric("kvparams_proxy_in_flight") == 0


async def test_whoever_says_something_of_each_prompt_token_computes_them_all(stub: StubEngines, stubbed: Any) -> None:
    """An engine that loaded the KV of a prompt has no logprobs for it."""
    asked: list[tuple[str, dict[str, Any], bool]] = [
        ("/v1/completions", BODY | {"prompt_logprobs": 1}, True),
        ("/v1/completions", BODY | {"echo": True, "logprobs": 0}, True),
        ("/v1/completions", BODY | {"echo": True, "max_tokens": 0}, True),
        ("/v1/chat/completions", CHAT | {"prompt_logprobs": 0}, True),
        ("/v1/completions", BODY | {"echo": True}, False),
        ("/v1/completions", BODY | {"logprobs": 1, "prompt_logprobs": None}, False),
        ("/v1/chat/completions", CHAT | {"echo": True, "logprobs": True}, False),
    ]
    for path, body, alone in asked:
        for engine in stub.engines:
            engine.counters.reset()
        got = await stubbed.client.post(path, json=body)
        assert got.status_code == 200, (path, body)
        prefills = sum(engine.counters.requests for engine in stub.engines if engine.role == "prefill")
        assert prefills == (0 if alone else 1), (path, body)
        assert sum(engine.counters.requests for engine in stub.engines if engine.role == "decode") == 1
    for member, scored in (({"sampling_params": {"prompt_logprobs": 1}}, True), ({"prompt_logprobs": 1}, False)):
        raw = json.dumps({"token_ids": [1, 2, 3]} | member).encode()
        assert read_all("generate", raw, "r", "t", JSONLimits()).facts.prompt_scored is scored


async def test_a_request_that_decode_cannot_finish_costs_no_prefill(stub: StubEngines, proxy: Any) -> None:
    prefill = [engine.url for engine in stub.engines if engine.role == "prefill"]
    running = await proxy(prefill, ["http://127.0.0.1:1"])
    got = await running.client.post("/v1/completions", json=BODY)
    assert (got.status_code, got.json()["error"]["code"]) == (503, "no_decode_instance")
    assert sum(counted(stub, "requests")) == 0


@pytest.mark.parametrize("named", ["header", "body", "nowhere"])
async def test_a_conversation_returns_to_the_pair_that_served_it(stub: StubEngines, proxy: Any, named: str) -> None:
    """The control: whoever names no conversation goes round."""
    urls = {r: [e.url for e in stub.engines if e.role == r] for r in ("prefill", "decode")}
    running = await proxy(urls["prefill"], urls["decode"], policy="session_affinity")
    pairs: list[set[tuple[str, str]]] = []
    for number in range(12):
        headers = {"x-session-id": f"s-{number}"} if named == "header" else {}
        body = BODY | ({"prompt_cache_key": f"s-{number}"} if named == "body" else {})
        turns = [await running.client.post("/v1/completions", json=body, headers=headers) for _ in range(3)]
        assert {turn.status_code for turn in turns} == {200}
        pairs.append({(turn.headers["x-kvparams-prefill"], turn.headers["x-kvparams-decode"]) for turn in turns})
    assert all(len(pair) == 1 for pair in pairs) is (named != "nowhere")
    assert len({role for pair in pairs for one in pair for role in one}) == 4  # no engine is left out


async def test_a_failure_is_one_line_in_the_log_that_names_request_and_route(
    stub: StubEngines, proxy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    urls = {r: [e.url for e in stub.engines if e.role == r] for r in ("prefill", "decode")}
    running = await proxy(urls["prefill"], urls["decode"], "store")  # these stubs do not know every document
    await stub.close()
    got = await running.client.post(
        "/v1/completions", json=BODY | {"prompt": "a secret"}, headers={"x-request-id": "r-1"}
    )
    assert got.status_code == 503
    (line,) = [
        record.getMessage() for record in caplog.records if record.name == "kvparams_proxy.execution.client_response"
    ]
    assert "r-1" in line
    assert "prefill-0" in line
    assert "secret" not in line


async def test_methods_slashes_and_encodings_are_refused_in_words(stubbed: Any) -> None:
    got = await stubbed.client.get("/v1/chat/completions")
    assert (got.status_code, got.headers["allow"]) == (405, "POST")
    assert "POST" in got.json()["error"]["message"]
    assert (await stubbed.client.get("/v1/models/")).status_code == 404
    packed = await stubbed.client.post("/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert packed.status_code == 415
    assert "Content-Encoding" in packed.json()["error"]["message"]


async def test_a_fault_before_the_first_leg_is_answered_and_holds_nothing(
    stubbed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def faulty(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(Fleet, "check_admission", faulty)
    got = await stubbed.client.post("/v1/completions", json=BODY, timeout=5)
    assert got.status_code == 500
    assert "a fault" not in got.text
    assert "a fault" in caplog.text
    assert await stubbed.metric("kvparams_proxy_in_flight") == 0


async def test_readiness_is_told_for_each_role(stub: StubEngines, proxy: Any) -> None:
    running = await proxy([engine.url for engine in stub.engines if engine.role == "prefill"], [])
    whole = await running.client.get("/health")
    assert (whole.status_code, whole.json()["missing_roles"]) == (503, ["decode"])
    assert whole.json()["roles"]["prefill"]["ready"] == 2
    assert (await running.client.get("/health/prefill")).json()["status"] == "ok"
    assert (await running.client.get("/health/decode")).status_code == 503
    assert (await running.client.get("/health/cook")).status_code == 404
