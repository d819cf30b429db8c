"""Tests what is corrected in answers of `/v1/messages` and `/v1/responses`, and how their streams are relayed."""

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.event_loop.clock import MonotonicClock
from kvparams_proxy.execution.answer_forms import answer_form
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.engine_response import EngineResponse
from kvparams_proxy.execution.response_corrector import ResponseCorrector
from kvparams_proxy.execution.stream_relay import StreamRelay
from kvparams_proxy.requests.endpoints import ENDPOINTS, APIEndpoint
from kvparams_proxy.upstream.types import ResponseHead, UpstreamError, UpstreamErrorResponse
from tests.unit.proxy.execution.test_metrics_stream_events import Client, Owner

MESSAGES, RESPONSES = (
    next(each for each in ENDPOINTS if each.path == path) for path in ("/v1/messages", "/v1/responses")
)
ADDRESS = "http://engine-7.example:8000"
TEXT = "see localhost and main.py on engine-7.example:8000"
"""What a model may write: it is nobody's address."""


def named(name: str, **members: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **members}, separators=(',', ':'))}\n\n".encode()


def message(**more: Any) -> dict[str, Any]:
    return {"id": "msg_r", "type": "message", "role": "assistant", "model": "m", "content": [], **more}


def response(**more: Any) -> dict[str, Any]:
    return {"id": "resp_r", "object": "response", "model": "m", "output": [], "kv_transfer_params": None, **more}


COUNTED = {"input_tokens": 1, "output_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 99}
DETAILS: dict[str, Any] = {"cached_tokens": 99, "cached_tokens_per_turn": []}
TOTALS: dict[str, Any] = {"input_tokens": 100, "input_tokens_details": DETAILS, "output_tokens": 4, "total_tokens": 104}
MESSAGES_STREAM = (
    named("message_start", message=message(usage={"input_tokens": 100, "output_tokens": 0})),
    named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    named("content_block_delta", index=0, delta={"type": "text_delta", "text": TEXT}),
    named("content_block_delta", index=0, delta={"type": "text_delta", "text": "event: message_stop\n\n"}),
    named("content_block_stop", index=0),
    named("message_delta", delta={"stop_reason": "end_turn"}, usage=COUNTED),
    named("message_stop"),
)
RESPONSES_STREAM = (
    named("response.created", response=response(usage=None)),
    named("response.output_item.added", output_index=0, item={"type": "message", "content": []}),
    named("response.output_text.delta", item_id="i", delta=TEXT),
    named("response.output_text.delta", item_id="i", delta='"response":{"type":"response.completed"}'),
    named("response.output_text.done", item_id="i", text=TEXT),
    named("response.completed", response=response(usage=TOTALS, kv_transfer_params={"remote_host": ADDRESS})),
)
STREAMS = {MESSAGES.path: (MESSAGES, MESSAGES_STREAM), RESPONSES.path: (RESPONSES, RESPONSES_STREAM)}


def correcting(endpoint: APIEndpoint, found: dict[str, Any] | None = None) -> ResponseCorrector:
    made = ResponseCorrector("r", EngineAddresses([ADDRESS]), answer_form(endpoint.kind))
    if found is not None:
        made.learn_prefill_usage({"usage": found})
    return made


def relayed(
    endpoint: APIEndpoint, parts: Sequence[bytes], corrections: ResponseCorrector | None = None
) -> tuple[Owner, bytes]:
    client, owner = Client(), Owner()
    made = corrections or correcting(endpoint)
    relay = StreamRelay(client, b"", made, 1 << 20, owner, MonotonicClock(time.monotonic), endpoint)
    relay.on_head(ResponseHead(200, b"text/event-stream"))
    error: UpstreamError | None = None
    for part in parts:
        try:
            relay.on_body(part)
        except UpstreamError as refused:
            error = refused
            break
        except ValueError as fault:  # as `upstream/connection.py` does
            error = UpstreamError(f"the engine's answer is invalid: {fault}")
            break
    relay.on_done(error)
    return owner, client.got


def sent_events(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.split(b"data: ", 1)[1]) for block in raw.strip().split(b"\n\n")]


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_a_stream_is_relayed_whatever_its_pieces_are(path: str, size: int) -> None:
    endpoint, parts = STREAMS[path]
    raw = b"".join(parts)
    owner, got = relayed(endpoint, [raw[at : at + size] for at in range(0, len(raw), size)])
    assert owner.error is None
    assert owner.events == 2
    sent, right = sent_events(got), sent_events(raw)
    assert sent[:-1] == right[:-1]
    if endpoint is RESPONSES:
        right[-1]["response"]["kv_transfer_params"] = None
    assert sent[-1] == right[-1]


@pytest.mark.parametrize("path", STREAMS)
def test_nothing_is_sent_before_there_is_content(path: str) -> None:
    endpoint, parts = STREAMS[path]
    owner, got = relayed(endpoint, parts[:2])
    assert got == b""
    assert owner.error is not None
    assert "without content" in str(owner.error)


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_is_cut_off_is_an_error(path: str) -> None:
    endpoint, parts = STREAMS[path]
    owner, got = relayed(endpoint, parts[:-1])
    assert got
    assert "too early" in str(owner.error)


@pytest.mark.parametrize("path", STREAMS)
def test_behind_the_last_event_only_the_marker_of_other_apis_may_stand(path: str) -> None:
    endpoint, parts = STREAMS[path]
    whole = relayed(endpoint, parts)[1]
    owner, got = relayed(endpoint, [*parts, b"data: [DONE]\n\n"])
    assert (owner.error, got) == (None, whole)
    relay_error = relayed(endpoint, [b"".join([*parts, parts[2]])])[0]
    assert relay_error.error is None  # the client has everything
    assert got == whole


@pytest.mark.parametrize("path", STREAMS)
def test_an_error_in_a_stream_is_found(path: str) -> None:
    endpoint, parts = STREAMS[path]
    error = {MESSAGES.path: {"error": {"type": "api_error", "message": "gone"}}, RESPONSES.path: {"message": "gone"}}
    owner, got = relayed(endpoint, [*parts[:3], named("error", **error[path])])
    assert isinstance(owner.error, UpstreamErrorResponse)
    assert b"gone" not in got
    if endpoint is RESPONSES:
        failed = named("response.failed", response=response(error={"code": "server_error", "message": "gone"}))
        assert isinstance(relayed(endpoint, [*parts[:2], failed])[0].error, UpstreamErrorResponse)


def test_usage_of_messages_is_what_prefill_found() -> None:
    found = {"input_tokens": 36, "output_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 64}
    got = sent_events(relayed(MESSAGES, MESSAGES_STREAM, correcting(MESSAGES, found))[1])
    assert got[0]["message"]["usage"] == {"input_tokens": 100, "output_tokens": 0}
    assert got[-2]["usage"] == {**found, "output_tokens": 4}
    raw = json.dumps(message(usage=COUNTED)).encode()
    assert json.loads(correcting(MESSAGES, found).correct_document(raw))["usage"] == {**found, "output_tokens": 4}
    silent = {"input_tokens": 100, "output_tokens": 1}
    unknown = json.loads(correcting(MESSAGES, silent).correct_document(raw))["usage"]
    assert unknown == {"input_tokens": 100, "output_tokens": 4}
    assert json.loads(correcting(MESSAGES).correct_document(raw))["usage"] == COUNTED


def test_usage_of_responses_is_what_prefill_found() -> None:
    found: dict[str, Any] = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 64, "cached_tokens_per_turn": []},
    }
    got = sent_events(relayed(RESPONSES, RESPONSES_STREAM, correcting(RESPONSES, found))[1])
    assert got[-1]["response"]["usage"] == {**TOTALS, **found}
    assert got[-1]["response"]["kv_transfer_params"] is None
    raw = json.dumps(response(usage=TOTALS)).encode()
    assert json.loads(correcting(RESPONSES, found).correct_document(raw))["usage"] == {**TOTALS, **found}


def test_of_several_turns_only_the_first_is_that_of_prefill() -> None:
    turns = {"cached_tokens": 250, "cached_tokens_per_turn": [99, 151], "input_tokens_per_turn": [100, 160]}
    found: dict[str, Any] = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 64, "cached_tokens_per_turn": []},
    }
    raw = json.dumps(response(usage={**TOTALS, "input_tokens_details": turns})).encode()
    got = json.loads(correcting(RESPONSES, found).correct_document(raw))["usage"]["input_tokens_details"]
    assert got == {**turns, "cached_tokens": 215, "cached_tokens_per_turn": [64, 151]}


@pytest.mark.parametrize("path", STREAMS)
def test_generated_text_is_not_searched_for_addresses_and_other_members_are(path: str) -> None:
    endpoint = STREAMS[path][0]
    block = {"type": "text", "text": TEXT}
    document = message(content=[block]) if endpoint is MESSAGES else response(output=[{"content": [block]}])
    raw = json.dumps({**document, "worker": ADDRESS, "ec_transfer_params": {"peer_host": "h"}}).encode()
    got = json.loads(correcting(endpoint).correct_document(raw))
    assert got == document
    assert "localhost" in str(got)
    hidden = json.dumps({**document, "id": "at-engine-7.example"}).encode()
    assert json.loads(correcting(endpoint).correct_document(hidden))["id"] == document["id"]


@pytest.mark.parametrize("path", STREAMS)
def test_an_address_that_every_event_names_is_hidden_in_every_event(path: str) -> None:
    endpoint, events = STREAMS[path][0], STREAMS[path][1]
    corrector = correcting(endpoint)
    told = [each.replace(b'{"type":', b'{"worker":"%b","type":' % ADDRESS.encode(), 1) for each in events]
    assert all(ADDRESS.encode() in each for each in told)
    found = [corrector.correct_events(each) for each in told]
    assert not any(b'"worker"' in each for each in found)


def test_an_address_in_the_last_response_is_hidden_though_the_first_had_none() -> None:
    corrector = correcting(RESPONSES)
    first, *others, _ = RESPONSES_STREAM
    for each in (first, *others):
        corrector.correct_events(each)
    bad = response(usage=None, worker=ADDRESS, system_fingerprint=ADDRESS, id="resp_engine-7.example:8000")
    found = corrector.correct_events(named("response.completed", response=bad))
    assert b"engine-7" not in found
    assert b"response.completed" in found


@pytest.mark.parametrize("path", STREAMS)
def test_a_long_answer_is_read_in_steps_to_the_same_end(path: str) -> None:
    endpoint = STREAMS[path][0]
    block = {"type": "text", "text": TEXT * 500}
    counted: dict[str, Any] = COUNTED if endpoint is MESSAGES else TOTALS
    found: dict[str, Any] = {"cache_read_input_tokens": 64} if endpoint is MESSAGES else {}
    document = message(content=[block]) if endpoint is MESSAGES else response(output=[{"content": [block]}])
    raw = json.dumps({**document, "usage": counted, "kv_transfer_params": {"remote_host": "h"}}).encode()
    made = EngineResponse(raw, answer_form(endpoint.kind))
    for _ in made.parse_in_steps("r", EngineAddresses([ADDRESS])):
        pass
    assert made.has_content
    short = correcting(endpoint, found).correct_document(raw)
    assert b"".join(map(bytes, correcting(endpoint, found).correct_response(made))) == short
    assert b"remote_host" not in short


@pytest.mark.parametrize("path", STREAMS)
def test_an_answer_of_another_api_is_none(path: str) -> None:
    endpoint = STREAMS[path][0]
    for raw in (b"{}", b'{"choices":[{"text":"a"}]}', b'{"content":"a","output":"a"}'):
        assert not EngineResponse(raw, answer_form(endpoint.kind)).has_content
        with pytest.raises(UpstreamError, match="no content"):
            correcting(endpoint).correct_document(raw)


def test_errors_have_the_form_of_each_api() -> None:
    busy = ProxyError(503, "service_unavailable", "later", code="no_room", retry_after_s=1)
    told = {"type": "error", "error": {"type": "overloaded_error", "message": "later"}}
    assert json.loads(busy.body("anthropic")) == told
    assert busy.sse_event("anthropic") == b"event: error\ndata: " + busy.body("anthropic") + b"\n\n"
    assert json.loads(busy.body("responses"))["error"]["code"] == "no_room"
    event = busy.sse_event("responses").removeprefix(b"event: error\ndata: ")
    assert json.loads(event) == {"type": "error", "code": "no_room", "message": "later", "param": None}
    assert busy.sse_event() == b"data: " + busy.body() + b"\n\n"
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 502: "api_error"}
    for status, kind in kinds.items():
        assert json.loads(ProxyError(status, "k", "m").body("anthropic"))["error"]["type"] == kind
