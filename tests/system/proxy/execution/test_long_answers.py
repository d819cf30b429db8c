"""Tests that long answers are read in steps: they are corrected as short ones are, and delay no other request."""

import asyncio
import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvparams.errors import JSONTextError
from kvparams_proxy.execution.answer_forms import CHOICES_FORM
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.engine_response import LONG_RESPONSE_BYTES, EngineResponse
from kvparams_proxy.execution.response_corrector import ResponseCorrector
from kvparams_proxy.upstream.types import BodyBuffer, UpstreamError, UpstreamErrorResponse
from tests.support.proxy.fixtures import Proxy, Script, answer
from tests.support.proxy.metrics import metric_becomes
from tests.support.proxy.steps import drained

SEEDS = st.integers(0, 2**32)
PREFILL = {
    "choices": [{"index": 0, "text": "x"}],
    "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
    "kv_transfer_params": {
        "remote_engine_id": "e",
        "remote_block_ids": [[1]],
        "remote_host": "127.0.0.1",
        "remote_port": 1,
    },
}
DECODE = {"id": "cmpl-1", "choices": [{"index": 0, "text": "x"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


def corrections(details: object) -> ResponseCorrector:
    made = ResponseCorrector("req", EngineAddresses(["http://engine-7.example:8000"]), CHOICES_FORM)
    made.cache_report = details
    return made


def outcome(how: Callable[[ResponseCorrector], bytes], details: object) -> object:
    """What the client gets, and what is learnt; or what is wrong."""
    made = corrections(details)
    try:
        body = how(made)
    except UpstreamErrorResponse as refused:
        return dict(refused.error)
    except (JSONTextError, UpstreamError) as error:
        return type(error)
    return json.loads(body), made.usage


def long_text(dice: Random) -> str:
    return dice.choice(("word ", "\u00e9", '"', "\\", "10.0.0.1 ")) * dice.choice((1, 100, 9_000, 40_000))


def spoken(dice: Random) -> dict[str, Any]:
    """An answer that is no short one, with what engines say of themselves."""
    private = {"remote_host": "10.0.0.1", "kv_transfer_params": {"a": [1, {"b": "c"}]}, "disaggregated_params": None}
    logprobs = [{"token": "a", "logprob": -1.5}] * dice.choice((0, 3, 2000))
    choice = {"index": 0, "text": long_text(dice), "logprobs": logprobs}
    choices: list[object] = [
        [choice],
        [choice | private],
        [private | choice, choice],
        [{"a": private}, choice],
        [],
        [dict[str, object]()],
        "x",
    ]
    one: dict[str, Callable[[], object]] = {
        "id": lambda: dice.choice(("cmpl-req", "10.0.0.1:8000-5", "x" * 5_000, 7)),
        "object": lambda: "text_completion",
        "system_fingerprint": lambda: dice.choice(("vllm-1", "engine-7.example:8000", None)),
        "choices": lambda: dice.choice(choices),
        "usage": lambda: dice.choice([{"prompt_tokens": 5}, {"prompt_tokens_details": {"cached_tokens": 4}}, None]),
        "kv_transfer_params": lambda: dice.choice([None, {"a": 1}, {"a": long_text(dice)}, "x"]),
        "error": lambda: dice.choice([None, {"message": "no"}, "no"]),
        "data": lambda: [{"embedding": [0.5] * dice.choice((1, 5_000))}] * 3,
        "nvext": lambda: {"worker_id": dice.choice(("w", "10.0.0.1")), "pad": long_text(dice)},
        "x_params": lambda: [private | {"kept": 1}] * dice.choice((1, 300)),
        "remote_port": lambda: 7,
        "odd": lambda: long_text(dice),
    }
    names = dice.sample(sorted(one), dice.randint(1, 7))
    return {"pad": "p" * LONG_RESPONSE_BYTES, **{name: one[name]() for name in names}}


@given(SEEDS)
def test_a_long_answer_is_corrected_as_a_short_one_is(seed: int) -> None:
    """As long as there is no more of the engine's own than a short answer may have."""
    dice = Random(seed)
    document = spoken(dice)
    assume(sum(min(len(json.dumps(document.get(name, ""))), 16_384) for name in ("data", "nvext", "odd")) < 28_000)
    raw = json.dumps(document, ensure_ascii=dice.random() < 0.5).encode()
    details = dice.choice([{"cached_tokens": 1}, None])
    read = drained(EngineResponse(raw).parse_in_steps("req", EngineAddresses(["http://engine-7.example:8000"])))

    def in_steps(made: ResponseCorrector) -> bytes:
        return b"".join(made.correct_response(read))

    assert outcome(in_steps, details) == outcome(lambda made: made.correct_document(raw), details)
    assert read.has_content is EngineResponse(raw).has_content


@pytest.mark.parametrize(
    "raw",
    [
        b"[%b]" % (b"1," * 10_000),
        b'{"a":"%b"' % (b"x" * 10_000),
        b'{"a":[%b]}' % (b"1," * 10_000),
        b'{"a":"%b","b":NaN}' % (b"x" * 10_000),
        b'{"kv_transfer_params":{"a":[%b1]}}' % (b"1," * 300_000),
        b'{"kv_transfer_params":{%b"z":1}}' % b"".join(b'"%d":1,' % i for i in range(40_000)),
        b'{"kv_transfer_params":{"a":"%b"}}' % (b"x" * (1 << 21)),
        b'{"pad":"%b","kv_transfer_params":%b1%b}' % (b"x" * 10_000, b'{"a":' * 600, b"}" * 600),
        b'{"choices":[{"x":1}%b]}' % (b',{"remote_host":"a","kv_transfer_params":1}' * 5_000),
        b'{"choices":[{%b"x":1}]}' % (b'"remote_host":"a","kv_transfer_params":1,' * 5_000),
        b'{"pad":"%b","a":[{"remote_host":1%b,"x":1}]}' % (b"x" * 10_000, b" " * 200_000),
    ],
)
def test_what_cannot_be_used_is_refused_wherever_it_is_looked_at(raw: bytes) -> None:
    """Not JSON, more about KV than may be handed on, or too much to be taken out of it."""
    read = drained(EngineResponse(raw).parse_in_steps("req", EngineAddresses()))
    assert not read.has_content
    with pytest.raises(JSONTextError):
        _ = read.document
    with pytest.raises(JSONTextError):
        corrections(None).correct_response(read)


def test_kv_params_of_a_long_prompt_are_there_in_full() -> None:
    params = {"remote_block_ids": [list(range(100_000))], "remote_host": "h" * 40_000}
    read = drained(
        EngineResponse(json.dumps({"kv_transfer_params": params}).encode()).parse_in_steps("req", EngineAddresses())
    )
    assert read.document["kv_transfer_params"] == params


def test_a_long_body_is_gathered_without_a_copy_of_all_of_it() -> None:
    buffer = BodyBuffer(1 << 20)
    for _ in range(10):
        buffer.add(b"a" * 50_000)
    whole = buffer.take()
    assert whole == b"a" * 500_000
    assert type(whole) is not bytes
    assert buffer.take() == b""
    with pytest.raises(ValueError, match="longer"):
        buffer.add(b"b" * ((1 << 20) + 1))


# a running proxy

BODY = {"model": "stub", "prompt": "x", "max_tokens": 2}


def filled(document: dict[str, Any], name: str, unit: bytes, size: int) -> bytes:
    """An answer of about so many bytes, with a list of `unit` in it."""
    text = json.dumps(document).encode()
    return text[:-1] + b',"%b":[' % name.encode() + unit * (size // len(unit)) + b"1]}"


@pytest.fixture
def answered(scripted: Callable[..., Any], proxy: Callable[..., Any]) -> Callable[..., Any]:
    """Starts a proxy before a prefill and a decode engine that answer so."""

    async def start(prefill: bytes, decode: bytes, **changes: object) -> Proxy:
        def saying(what: bytes) -> Script:
            async def says(_body: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(answer(what))

            return says

        engines = [await scripted(saying(what)) for what in (prefill, decode)]
        return await proxy([engines[0].url], [engines[1].url], **changes)

    return start


@pytest.mark.parametrize("unit", [b"1e1,", b'{"a":"b"},', b'"\\"\\"\\"",'])
async def test_a_long_answer_reaches_the_client_whole(answered: Callable[..., Any], unit: bytes) -> None:
    raw = filled(DECODE, "prompt_logprobs", unit, 3_000_000)
    running: Proxy = await answered(json.dumps(PREFILL).encode(), raw)
    got = await running.client.post("/v1/completions", json=BODY)
    assert got.status_code == 200
    document = got.json()
    assert document["usage"].pop("prompt_tokens_details") == {"cached_tokens": 1}, "what prefill said"
    assert document == json.loads(raw) | {"id": document["id"]}


async def test_a_long_prefill_answer_is_handed_on(answered: Callable[..., Any]) -> None:
    raw = filled(PREFILL, "prompt_token_ids", b"12345,", 3_000_000)
    running: Proxy = await answered(raw, json.dumps(DECODE).encode())
    got = await running.client.post("/v1/completions", json=BODY)
    assert got.status_code == 200, got.text
    assert await running.metric("kvparams_proxy_in_flight") == 0


@pytest.mark.parametrize("broken", ["prefill", "decode"])
async def test_a_long_answer_that_is_none_is_reported(answered: Callable[..., Any], broken: str) -> None:
    raw = filled(PREFILL if broken == "prefill" else DECODE, "x", b"1,", 1_000_000)[:-1]
    good = json.dumps(PREFILL).encode(), json.dumps(DECODE).encode()
    running: Proxy = await answered(*((raw, good[1]) if broken == "prefill" else (good[0], raw)), retries=0)
    got = await running.client.post("/v1/completions", json=BODY)
    assert (got.status_code, got.json()["error"]["code"]) == (502, f"{broken}_failed")
    assert await running.metric("kvparams_proxy_in_flight") == 0


@pytest.mark.parametrize("long", ["prefill", "decode"])
@pytest.mark.parametrize("after_s", [0.01, 0.05, 0.2])
async def test_whoever_leaves_while_an_answer_is_read_leaves_nothing(
    answered: Callable[..., Any], long: str, after_s: float
) -> None:
    raw = filled(PREFILL if long == "prefill" else DECODE, "x", b'{"a":"b"},', 6_000_000)
    good = json.dumps(PREFILL).encode(), json.dumps(DECODE).encode()
    running: Proxy = await answered(*((raw, good[1]) if long == "prefill" else (good[0], raw)))
    body = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    for _ in range(2):
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(head % len(body) + body)
        await asyncio.sleep(after_s)  # how far the request has come by then
        writer.transport.abort()
    for name in ("kvparams_proxy_in_flight", "kvparams_proxy_requests_running", "kvparams_proxy_body_bytes "):
        await metric_becomes(running, name)
