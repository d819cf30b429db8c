"""Tests the engine over HTTP: what OpenAI's clients and vLLM's users expect, and what is refused."""

import asyncio
import json
import random
from typing import cast

import httpx
import pytest

from demo.client import JSON, ask, ask_stream, scrape
from tests.support.waiting import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WAIT_S = 20.0


async def settled(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    """The metrics once nothing is in flight any more."""
    metrics: dict[str, float] = {}

    async def is_idle() -> bool:
        nonlocal metrics
        metrics = await scrape(client, url)
        return not metrics["reference_engine:requests_in_flight"]

    await until(is_idle, WAIT_S)
    return metrics


async def events(client: httpx.AsyncClient, url: str, path: str, body: JSON) -> list[JSON]:
    response = await client.post(url + path, json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, last, end = response.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [cast("JSON", json.loads(event.removeprefix("data: "))) for event in found]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 40, "seed": 1}),
        (COMPLETIONS, {"prompt": ["One", "Two"], "n": 2, "max_tokens": 20, "seed": 1, "stop": ["e", "qu"]}),
        (CHAT, {"messages": [{"role": "user", "content": "Grüß dich 🙂"}], "max_tokens": 30, "temperature": 0}),
    ],
)
async def test_a_stream_says_the_same_as_one_answer(
    client: httpx.AsyncClient, single: str, path: str, body: JSON
) -> None:
    whole = await ask(client, single, path, body)
    stream = await ask_stream(client, single, path, body)

    assert stream.outcome == whole.outcome
    assert stream.count("prompt_tokens") == whole.count("prompt_tokens")


async def test_every_way_to_write_a_prompt_means_the_same(client: httpx.AsyncClient, single: str) -> None:
    tokenized = await client.post(f"{single}/tokenize", json={"prompt": "Héllo"})
    ids = tokenized.json()["tokens"]
    assert tokenized.json() == {"count": 7, "max_model_len": 4096, "tokens": ids}

    ways = ["Héllo", ids, ["Héllo"], [ids]]
    texts = {(await ask(client, single, COMPLETIONS, {"prompt": way, "temperature": 0})).text for way in ways}

    assert len(texts) == 1


async def test_a_chat_is_its_tokenized_form(client: httpx.AsyncClient, single: str) -> None:
    messages = [{"role": "system", "content": "Sing."}, {"role": "user", "content": [{"type": "text", "text": "Now."}]}]
    ids = (await client.post(f"{single}/tokenize", json={"messages": messages})).json()["tokens"]

    chat = await ask(client, single, CHAT, {"messages": messages, "temperature": 0, "max_completion_tokens": 12})
    plain = await ask(client, single, COMPLETIONS, {"prompt": ids, "temperature": 0, "max_tokens": 12})

    assert chat.text == plain.text
    assert chat.count("prompt_tokens") == len(ids)


async def test_events_have_the_shape_of_openais(client: httpx.AsyncClient, single: str) -> None:
    body: JSON = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "stream_options": {"include_usage": True}}
    message = {"role": "user", "content": "Hi"}
    chat = await events(client, single, CHAT, {**body, "messages": [message]})
    plain = await events(client, single, COMPLETIONS, {**body, "prompt": "Hi"})

    choices = [cast("list[JSON]", event["choices"]) for event in chat]
    assert choices[0][0]["delta"] == {"role": "assistant", "content": ""}
    assert [cast("JSON", found[0]["delta"]).keys() for found in choices[1:-1]] == [{"content"}] * 3
    assert [found[0]["finish_reason"] for found in choices[:-1]] == [None, None, None, "length"]
    assert choices[-1] == []
    assert cast("JSON", chat[-1]["usage"])["completion_tokens"] == 3
    assert {event["object"] for event in chat} == {"chat.completion.chunk"}
    assert {event["object"] for event in plain} == {"text_completion"}
    assert cast("list[JSON]", plain[0]["choices"])[0].keys() == {
        "index", "text", "logprobs", "finish_reason", "stop_reason",
    }  # fmt: skip
    assert len({event["id"] for event in chat}) == 1


async def test_log_probabilities_come_with_both_kinds_of_answers(client: httpx.AsyncClient, single: str) -> None:
    limits: JSON = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    plain = (await client.post(single + COMPLETIONS, json={**limits, "prompt": "Hi", "logprobs": 2})).json()
    message = {"role": "user", "content": "Hi"}
    asked: JSON = {**limits, "messages": [message], "logprobs": True, "top_logprobs": 2}
    chat = (await client.post(single + CHAT, json=asked)).json()

    choice = plain["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
    content = chat["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == chat["choices"][0]["message"]["content"]
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] < 0 for one in content)


async def test_choices_differ_and_each_is_what_it_is_alone(client: httpx.AsyncClient, single: str) -> None:
    body: JSON = {"max_tokens": 12, "seed": 5, "ignore_eos": True}
    batch = await ask(client, single, COMPLETIONS, {**body, "prompt": ["One", "Two"], "n": 3})
    alone = await ask(client, single, COMPLETIONS, {**body, "prompt": "Two", "n": 3})

    assert len(set(batch.texts.values())) == 6
    assert [batch.texts[3 + index] for index in range(3)] == [alone.texts[index] for index in range(3)]
    assert (batch.count("prompt_tokens"), batch.count("completion_tokens")) == (8, 72)


async def test_requests_without_a_seed_are_not_repeated(client: httpx.AsyncClient, single: str) -> None:
    body: JSON = {"prompt": "Hi", "max_tokens": 30, "ignore_eos": True}

    assert (await ask(client, single, COMPLETIONS, body)).text != (await ask(client, single, COMPLETIONS, body)).text


async def test_usage_says_how_much_of_the_prompt_was_cached(client: httpx.AsyncClient, single: str) -> None:
    prompt = [random.Random(8).randrange(256) for _ in range(100)]
    first = await ask(client, single, COMPLETIONS, {"prompt": prompt, "temperature": 0})
    second = await ask(client, single, COMPLETIONS, {"prompt": prompt, "temperature": 0})
    salted = await ask(client, single, COMPLETIONS, {"prompt": prompt, "temperature": 0, "cache_salt": "s"})

    assert [reply.count("cached_tokens") for reply in (first, second, salted)] == [0, 96, 0]
    assert first.text == second.text == salted.text


@pytest.mark.parametrize(
    ("path", "raw", "status", "word"),
    [
        (COMPLETIONS, b"{", 400, ""),
        (COMPLETIONS, b"[1]", 400, "object"),
        (COMPLETIONS, b'{"prompt": "a", "prompt": "b"}', 400, "prompt"),
        (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400, ""),
        (COMPLETIONS, b'{"prompt": "a", "x": ' + b"[" * 500 + b"]" * 500 + b"}", 400, ""),
        (COMPLETIONS, b"{}", 400, "prompt"),
        (COMPLETIONS, b'{"prompt": ""}', 400, "empty"),
        (COMPLETIONS, b'{"prompt": []}', 400, "empty"),
        (COMPLETIONS, b'{"prompt": [[1], []]}', 400, "empty"),
        (COMPLETIONS, b'{"prompt": [1, true]}', 400, "token"),
        (COMPLETIONS, b'{"prompt": [264]}', 400, "token"),
        (COMPLETIONS, b'{"prompt": {"a": 1}}', 400, "prompt"),
        (COMPLETIONS, b'{"prompt": "a", "max_tokens": "3"}', 400, "max_tokens"),
        (COMPLETIONS, b'{"prompt": "a", "max_tokens": 0}', 400, "max_tokens"),
        (COMPLETIONS, b'{"prompt": "a", "max_tokens": 5000}', 400, "4096"),
        (COMPLETIONS, b'{"prompt": "a", "min_tokens": 9, "max_tokens": 3}', 400, "min_tokens"),
        (COMPLETIONS, b'{"prompt": "a", "n": 2, "temperature": 0}', 400, "temperature"),
        (COMPLETIONS, b'{"prompt": "a", "stop": ""}', 400, "stop"),
        (COMPLETIONS, b'{"prompt": "a", "stream_options": {}}', 400, "stream_options"),
        (COMPLETIONS, b'{"prompt": "a", "best_of": 2}', 400, "best_of"),
        (COMPLETIONS, b'{"prompt": "a", "frequency_penalty": 5}', 400, "frequency_penalty"),
        (COMPLETIONS, b'{"prompt": "a", "model": "gpt"}', 404, "gpt"),
        (CHAT, b'{"messages": []}', 400, "messages"),
        (CHAT, b'{"messages": [{"role": "king", "content": "a"}]}', 400, "king"),
        (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "text"),
        (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}', 400, "tools"),
        ("/tokenize", b"{}", 400, "prompt"),
        ("/v1/embeddings", b"{}", 400, "input"),
        ("/v1/nothing", b"{}", 404, "/v1/nothing"),
    ],
)
async def test_what_cannot_be_served_is_refused_in_words(
    client: httpx.AsyncClient, single: str, path: str, raw: bytes, status: int, word: str
) -> None:
    response = await client.post(single + path, content=raw)

    assert response.status_code == status
    error = response.json()["error"]
    assert error["code"] == status
    assert error["type"] in ("BadRequestError", "NotFoundError")
    assert word in error["message"]


async def test_harmless_values_of_unsupported_fields_are_accepted(client: httpx.AsyncClient, single: str) -> None:
    body: JSON = {"prompt": "a", "temperature": 0, "suffix": "", "best_of": 1}
    body |= {"prompt_logprobs": None, "use_beam_search": False}

    assert (await ask(client, single, COMPLETIONS, {**body, "user": "u", "model": "reference"})).text


async def test_the_request_id_comes_back(client: httpx.AsyncClient, single: str) -> None:
    body: JSON = {"prompt": "a", "max_tokens": 1}
    given = await client.post(single + COMPLETIONS, json=body, headers={"x-request-id": "mine-7"})
    made = await client.post(single + COMPLETIONS, json=body, headers={"x-request-id": "x" * 300})
    refused = await client.post(single + COMPLETIONS, json={}, headers={"x-request-id": "mine-8"})

    assert (given.headers["x-request-id"], given.json()["id"]) == ("mine-7", "cmpl-mine-7")
    assert len(made.headers["x-request-id"]) == 32
    assert refused.headers["x-request-id"] == "mine-8"


async def test_it_says_what_it_serves_and_who_it_is(client: httpx.AsyncClient, single: str) -> None:
    models = (await client.get(f"{single}/v1/models")).json()
    health = (await client.get(f"{single}/health")).json()

    assert models["data"][0]["id"] == "reference"
    assert (health["role"], health["id"], len(health["incarnation"])) == ("both", "single", 32)


async def test_a_client_that_leaves_is_forgotten_at_once(client: httpx.AsyncClient, single: str) -> None:
    """100 clients, streams and whole answers, leave at random moments, some before the first token."""
    draw = random.Random(2)
    before = await settled(client, single)

    async def leave(number: int) -> None:
        prompt = [draw.randrange(256) for _ in range(draw.randrange(1, 500))]
        body: JSON = {"prompt": prompt, "max_tokens": 3_000, "ignore_eos": True, "stream": number % 2 == 0}
        seen, wanted = 0, draw.randrange(40)
        try:
            async with (
                asyncio.timeout(draw.random() * 3),
                client.stream("POST", single + COMPLETIONS, json=body) as response,
            ):
                async for _ in response.aiter_lines():
                    seen += 1
                    if seen >= wanted:
                        return
        except TimeoutError:
            return

    await asyncio.gather(*(leave(number) for number in range(100)))

    after = await settled(client, single)
    assert after["reference_engine:kv_blocks_in_use"] == 0
    assert after["reference_engine:requests_waiting"] == 0
    aborted = 'reference_engine:requests_total{finish="abort"}'
    assert after[aborted] - before.get(aborted, 0) > 20
