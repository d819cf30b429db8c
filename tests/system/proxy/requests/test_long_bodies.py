"""Tests that long bodies are read in steps, with the results of the other reader, while other requests go on."""

import asyncio
import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, cast
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.jsontext.document import AT_ONCE_BYTES, JSONLimits, load_object
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.event_loop.step_runner import StepRunner, StepTask
from kvparams_proxy.execution.stream_resumption import is_resumable
from kvparams_proxy.requests import intake
from kvparams_proxy.requests.authentication import AuthenticatedClient, tenant_cache_salt
from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.requests.intake import ParsedRequest, parse_request_in_steps
from kvparams_proxy.requests.one_token_changes import one_token_changes
from kvparams_proxy.tokenization.engine_tokenizer import build_tokenize_body
from tests.support.proxy.fixtures import JSON, Proxy, answer
from tests.support.proxy.metrics import metric_becomes
from tests.support.proxy.served import serving
from tests.support.proxy.steps import drained, read_all
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
PREFILLED = (
    b'{"choices":[{"index":0,"text":"x"}],"kv_transfer_params":{"remote_engine_id":"e","remote_block_ids":[[1]],'
    b'"remote_host":"127.0.0.1","remote_port":1}}'
)
CLIENT = AuthenticatedClient("key", "tenant", 3, tenant_cache_salt("tenant", None))
SEEDS = st.integers(0, 2**32)


def outcome(how: Callable[[], ParsedRequest]) -> object:
    """What is known of a request, or in which words it is refused."""
    try:
        inbound = how()
    except ProxyError as error:
        return error.status, error.message, error.param, error.code, error.model
    facts = inbound.facts
    ids = [None if found is None else list(found) for found in (facts.token_ids, facts.routing_ids)]
    return (
        facts._replace(token_ids=None, routing_ids=None),
        ids,
        inbound.body,
        list(inbound.member_spans.items()),
        inbound.changes,
        inbound.stream,
        inbound.was_stripped,
    )


def agree(
    kind: EndpointKind, body: dict[str, Any], client: AuthenticatedClient | None = CLIENT
) -> tuple[ParsedRequest, ParsedRequest] | None:
    """All ways to read a long body find the same, or refuse it alike: in steps, at once, and as the proxy chooses."""
    raw = json.dumps(body).encode()
    assert len(raw) > AT_ONCE_BYTES

    def read() -> ParsedRequest:
        return read_all(kind, raw, "req", "tra", JSONLimits(), client, "", keep_document=True)

    found = outcome(read)
    refused = len(cast("tuple[object, ...]", found)) == 5
    with patch.object(intake, "load_packed", return_value=None):
        with patch.object(intake, "load_short_object", load_object):
            assert found == outcome(read)
            at_once = None if refused else read()
        with patch.object(intake, "load_short_object", return_value=None):
            assert found == outcome(read)
            return None if at_once is None else (read(), at_once)


def size(dice: Random) -> int:
    """A length: some are told whole and others are not."""
    return dice.choice((0, 1, 10, 5_000, 40_000, 100_000))


def ids(dice: Random) -> list[object]:
    return [*range(size(dice)), dice.choice((1, 2**32 - 1))]


def wrong_ids(dice: Random) -> list[object]:
    found = ids(dice)
    wrong: list[object] = [True, "x", -1, 2**32, 1.5, None, [], {}, [1], {"a": 1}]
    found.insert(dice.randrange(len(found) + 1), dice.choice(wrong))
    return found


def words(dice: Random) -> str:
    return dice.choice(("word ", "\u00e9", "\U0001f600", '"', "\\")) * size(dice)


def prompt(dice: Random) -> object:
    some = range(dice.randrange(4))
    one: tuple[Callable[[], object], ...] = (
        lambda: words(dice),
        lambda: ids(dice),
        lambda: wrong_ids(dice),
        lambda: [words(dice) for _ in some],
        lambda: [ids(dice) for _ in some],
        lambda: [dice.choice((ids, wrong_ids))(dice) for _ in some],
        lambda: [dice.choice((ids, words))(dice) for _ in some],
        lambda: ["x"] * dice.choice((1024, 1025, 20_000)),
        lambda: {"a": words(dice)},
    )
    return dice.choice(one)()


def part(dice: Random) -> object:
    one: list[object] = [
        {"type": "text", "text": words(dice)},
        {"text": words(dice), "type": "text"},
        {"type": "image_url", "image_url": {"url": words(dice)}},
        words(dice),
        [1.5] * size(dice),
    ]
    return dice.choice(one)


def message(dice: Random) -> object:
    content = dice.choice([words(dice), [part(dice) for _ in range(dice.randrange(4))], None])
    user: object = {"role": "user", "content": content}
    one: list[object] = [user, user, {"content": content, "role": "user"}]
    if dice.random() < 0.1:
        one = [{"role": 1}, {"content": content}, "x", [], 7]
    return dice.choice(one)


def messages(dice: Random) -> object:
    others: list[object] = [[], {}, "x", {"a": words(dice)}]
    return dice.choice(others) if dice.random() < 0.1 else [message(dice) for _ in range(dice.randint(1, 6))]


def carried(dice: Random) -> object:
    """What only a proxy may say, or not, in an object that may be long."""
    one: list[object] = [
        {},
        {"kv_transfer_params": {"a": 1}},
        {"a": 1, "request_id": "x"},
        {"kv_transfer_params": 1, "b": [1, 2]},
        {"extra_args": {"kv_transfer_params": 1, "c": 2, "d": words(dice)}, "rid": "x"},
        {"extra_args": "x"},
        {"decode_worker_id": 7, "token_data": [1] * size(dice), "d": 1},
        {"n": dice.choice((1, 3, 1000)), "prompt_logprobs": dice.choice((None, 1))},
        "text",
        [1],
    ]
    found = dice.choice(one)
    if not isinstance(found, dict):
        return found
    said = cast("dict[str, object]", found)
    pad: dict[str, object] = {"pad": words(dice)}
    return pad | said if dice.random() < 0.5 else said | pad


def others(dice: Random) -> dict[str, Any]:
    """Further members of a request, some of them wrong."""
    one: dict[str, Callable[[], object]] = {
        "model": lambda: dice.choice(("m", "m", "m" * 2000, 7)),
        "max_tokens": lambda: dice.choice((1, 1, 0, -1, "x")),
        "stream": lambda: dice.choice((True, False, "x")),
        "stream_options": lambda: dice.choice([{"include_usage": True}, {}, []]),
        "n": lambda: dice.choice((1, 2, 1000)),
        "cache_salt": lambda: dice.choice(("salt", "salt", "", "s" * 5_000)),
        "prompt_cache_key": lambda: dice.choice(("key", "k" * 50_000)),
        "truncate_prompt_tokens": lambda: dice.choice((-1, 5, 10**6)),
        "logprobs": lambda: 1,
        "tools": lambda: [{"type": "function", "function": {"name": words(dice)}}],
        "stop": lambda: [words(dice)],
        "documents": lambda: [words(dice)],
        "nvext": lambda: carried(dice),
        "vllm_xargs": lambda: carried(dice),
        "sampling_params": lambda: carried(dice),
        "features": lambda: {"mm_hashes": {"image": ["h"]}, "pad": words(dice)},
        "kv_transfer_params": lambda: {"a": words(dice)},
        "request_id": lambda: words(dice),
    }
    return {name: one[name]() for name in dice.sample(sorted(one), dice.randrange(6))}


def shuffled(dice: Random, body: dict[str, Any]) -> dict[str, Any]:
    names = list(body)
    dice.shuffle(names)
    return {name: body[name] for name in names}


@given(SEEDS)
def test_a_long_completion_is_read_alike_in_steps(seed: int) -> None:
    dice = Random(seed)
    body = shuffled(dice, {"pad": "x" * 5000, **others(dice), "prompt": prompt(dice)})
    agree("completions", body, dice.choice((CLIENT, None)))


@given(SEEDS)
def test_a_long_chat_is_read_alike_in_steps(seed: int) -> None:
    dice = Random(seed)
    found = agree("chat", shuffled(dice, {"pad": "x" * 5000, **others(dice), "messages": messages(dice)}))
    if found is None:
        return
    in_steps, at_once = found
    documents = [cast("Mapping[str, object]", each.document) for each in found]
    continued = [is_resumable(document, True, 1, 1) for document in documents]
    assert continued[0] is continued[1], "whether a stream can be continued does not hang on how its body was read"
    assert documents[0].keys() == documents[1].keys()
    assert not in_steps.is_document_complete or in_steps.document == at_once.document
    asked = build_tokenize_body("chat", in_steps)
    assert asked is None or asked == build_tokenize_body("chat", at_once)


@given(SEEDS)
def test_a_long_generate_request_is_read_alike_in_steps(seed: int) -> None:
    dice = Random(seed)
    several: list[object] = [ids(dice), ids(dice), wrong_ids(dice), [], {}]
    given_ids = dice.choice(several)
    found = agree("generate", shuffled(dice, {"token_ids": given_ids, "pad": "x" * 5000, **others(dice)}))
    if found is not None:
        cut = [one_token_changes("generate", each.body, each.member_spans, each.sampling_spans) for each in found]
        assert cut[0] == cut[1], "where the members of long sampling parameters stand is known without a walk"


@given(SEEDS)
def test_what_is_passed_on_is_read_alike_in_steps(seed: int) -> None:
    dice = Random(seed)
    agree("other", shuffled(dice, {"input": messages(dice), "pad": "x" * 5000, **others(dice)}))


def test_ids_are_counted_over_all_of_a_long_list() -> None:
    for count, refused in ((2_097_152, False), (2_097_153, True)):
        raw = b'{"prompt":[%b]}' % b",".join([b"1"] * count)
        steps = parse_request_in_steps("completions", raw, "r", "t", JSONLimits())
        if refused:
            with pytest.raises(ProxyError, match="at most 2097152 token ids"):
                drained(steps)
        else:
            assert len(drained(steps).facts.token_ids or ()) == count


# a running proxy


def long_chat(size: int = 3_000_000) -> bytes:
    """A chat that takes some tenths of a second to read."""
    return b'{"model":"stub","max_tokens":2,"messages":[{"role":"user","content":"%b"}]}' % (b'\\"' * (size // 2))


async def test_a_long_body_reaches_engines_as_it_came_but_for_what_a_leg_changes(
    scripted: Callable[..., Any], proxy: Callable[..., Any]
) -> None:
    """It is not copied for a leg, but sent in pieces."""

    async def answers(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(PREFILLED if b'"do_remote_decode"' in body else b'{"choices":[{"index":0,"text":"x"}]}'))

    engine, other = await scripted(answers), await scripted(answers)
    running: Proxy = await proxy([engine.url], [other.url])
    sent = b'{"kv_hints":%b,' % json.dumps(["x" * 40_000]).encode() + long_chat()[1:]
    got = await running.client.post("/v1/chat/completions", content=sent)
    assert got.status_code == 200, got.text
    (prefill,), (decode,) = engine.bodies, other.bodies
    assert b"kv_hints" not in prefill + decode
    kept = long_chat()[1:-1]
    assert decode.startswith(b"{" + kept + b",")
    assert prefill.replace(b'"max_tokens":1,', b'"max_tokens":2,', 1).startswith(b"{" + kept + b",")
    assert json.loads(decode)["messages"] == json.loads(prefill)["messages"] == json.loads(sent)["messages"]


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1])
async def test_whoever_leaves_while_its_body_is_read_leaves_nothing(stubbed: Proxy, after_s: float) -> None:
    body = long_chat(12_000_000)
    for _ in range(3):
        _, writer = await asyncio.open_connection("127.0.0.1", stubbed.port)
        writer.write(HEAD % len(body) + body)
        await writer.drain()
        await asyncio.sleep(after_s)
        writer.transport.abort()
    for name in ("kvparams_proxy_body_bytes ", "kvparams_proxy_in_flight"):
        await metric_becomes(stubbed, name)
    await metric_becomes(stubbed, "kvparams_proxy_client_connections ", lambda value: value <= 1)
    short = {"model": "stub", "prompt": "x", "max_tokens": 2}
    assert (await stubbed.client.post("/v1/completions", json=short)).status_code == 200


async def test_a_body_whose_client_leaves_is_not_read_to_its_end(
    stubbed: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[StepTask] = []
    run = StepRunner.run

    def noted(self: StepRunner, *given: Any, **more: Any) -> StepTask:
        works.append(run(self, *given, **more))
        return works[-1]

    monkeypatch.setattr(StepRunner, "run", noted)
    body = long_chat(12_000_000)
    _, writer = await asyncio.open_connection("127.0.0.1", stubbed.port)
    writer.write(HEAD % len(body) + body)
    await until(lambda: bool(works), 10)
    assert not works[0].is_finished
    writer.transport.abort()
    await until(lambda: works[0].is_finished, 20)
    assert len(works) == 1
    assert await stubbed.metric("kvparams_proxy_requests_total") == 0  # the control: a request that was read counts
    got = await stubbed.client.post("/v1/chat/completions", content=long_chat())
    assert got.status_code == 200
    assert await stubbed.metric("kvparams_proxy_requests_total") == 1


async def test_long_bodies_are_answered_each_by_itself(stubbed: Proxy) -> None:
    """Some are refused, at their end; the others are not touched by it."""
    bodies = [long_chat(200_000 * (1 + number % 3)) for number in range(12)]
    for number in range(0, 12, 4):
        bodies[number] = bodies[number][:-1] + b',"a":1,"a":2}'
    posts = (stubbed.client.post("/v1/chat/completions", content=body) for body in bodies)
    statuses = [got.status_code for got in await asyncio.gather(*posts)]
    assert statuses == [400 if number % 4 == 0 else 200 for number in range(12)]


@pytest.mark.slow
async def test_bodies_that_were_refused_are_released_without_the_collector(stub: StubEngines) -> None:
    """Forty of 15 MB: an error that knew of the text it was raised for would hold it."""
    body = b'{"prompt":["' + b"a" * 15_000_000 + b'"],"a":1,"a":2}'
    async with serving(stub, "--log-requests", "off") as served:
        first = 0.0
        for _ in range(41):
            got = await served.client.post("/v1/completions", content=body, headers=JSON)
            assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_json")
            first = first or served.rss_mib()
        await until(lambda: served.rss_mib() < first + 20, 20)
