"""Tests members of a request that change an answer, and the endpoints beside completions and chat."""

import base64
import json
import struct
from typing import cast

import httpx
import pytest

from demo.client import JSON, ask

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
HI: JSON = {"messages": [{"role": "user", "content": "Hi"}], "seed": 4, "max_tokens": 30}
PARAMETERS: JSON = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 1, "maxLength": 6}, "days": {"enum": [1, 2, 3]}},
}
TOOLS: list[JSON] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "nothing"}},
]


async def post(client: httpx.AsyncClient, url: str, path: str, body: JSON) -> JSON:
    response = await client.post(url + path, json=body)
    assert response.status_code == 200, response.text
    return cast("JSON", response.json())


async def choice(client: httpx.AsyncClient, url: str, path: str, body: JSON) -> JSON:
    """The first choice of an answer."""
    return cast("list[JSON]", (await post(client, url, path, body))["choices"])[0]


async def events(client: httpx.AsyncClient, url: str, path: str, body: JSON) -> list[JSON]:
    """A stream's events, without its end marker."""
    text = (await client.post(url + path, json={**body, "stream": True})).text
    *found, end, rest = text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [cast("JSON", json.loads(event.removeprefix("data: "))) for event in found]


def choices_of(found: list[JSON]) -> list[JSON]:
    """The choice of each event that has one."""
    return [one for event in found for one in cast("list[JSON]", event["choices"])]


async def test_echo_puts_the_prompt_before_the_answer(client: httpx.AsyncClient, single: str) -> None:
    body: JSON = {"prompt": "Grüße ", "temperature": 0, "max_tokens": 5}
    plain = (await ask(client, single, COMPLETIONS, body)).text
    echoed = (await ask(client, single, COMPLETIONS, {**body, "echo": True})).text
    streamed = choices_of(await events(client, single, COMPLETIONS, {**body, "echo": True}))

    assert echoed == "Grüße " + plain
    assert [one["text"] for one in streamed] == ["Grüße " + plain[0], *plain[1:]]


async def test_token_ids_come_with_the_answer_and_go_back_in(client: httpx.AsyncClient, single: str) -> None:
    """Continued from the ids already sent, at whatever token: a draw knows its position."""
    body: JSON = {"prompt": "Grüße", "seed": 11, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    whole = await choice(client, single, COMPLETIONS, body)
    streamed = choices_of(await events(client, single, COMPLETIONS, body))
    ids, prompt = cast("list[int]", whole["token_ids"]), cast("list[int]", whole["prompt_token_ids"])

    assert bytes(ids).decode() == whole["text"]
    assert prompt == (await post(client, single, "/tokenize", {"prompt": "Grüße"}))["tokens"]
    assert [one["token_ids"] for one in streamed] == [[token] for token in ids]
    assert [one.get("prompt_token_ids") for one in streamed] == [prompt, *[None] * 23]
    for sent in (1, 10, 23):
        rest = {**body, "prompt": prompt + ids[:sent], "max_tokens": 24 - sent, "repetition_penalty": 1}
        assert (await choice(client, single, COMPLETIONS, rest))["token_ids"] == ids[sent:]


async def test_a_chat_names_its_prompt_once(client: httpx.AsyncClient, single: str) -> None:
    body: JSON = {**HI, "return_token_ids": True}
    ids = (await post(client, single, "/tokenize", {"messages": HI["messages"]}))["tokens"]
    whole = await post(client, single, CHAT, body)
    streamed = await events(client, single, CHAT, body)

    assert whole["prompt_token_ids"] == ids
    assert [event.get("prompt_token_ids") for event in streamed] == [ids, *[None] * (len(streamed) - 1)]
    sent = [token for one in choices_of(streamed) for token in cast("list[int]", one.get("token_ids", []))]
    assert sent == cast("list[JSON]", whole["choices"])[0]["token_ids"]


async def test_text_offsets_count_tokens_even_while_text_is_held_back(client: httpx.AsyncClient, single: str) -> None:
    body: JSON = {"prompt": "a", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 1, "stop": ["~~~~"]}
    whole = cast("JSON", (await choice(client, single, COMPLETIONS, body))["logprobs"])
    streamed = [cast("JSON", one["logprobs"]) for one in choices_of(await events(client, single, COMPLETIONS, body))]

    for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs"):
        assert [value for one in streamed for value in cast("list[object]", one[name])] == whole[name]


@pytest.mark.parametrize(
    "member",
    [
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"repetition_penalty": 1.9},
        {"logit_bias": {"65": 100}},
        {"stop_token_ids": list(range(0x20, 0x50)), "min_tokens": 40},
        {"min_p": 0.99, "temperature": 1, "seed": 1},
    ],
)
async def test_it_changes_the_answer_and_always_in_the_same_way(
    client: httpx.AsyncClient, single: str, member: JSON
) -> None:
    body: JSON = {"prompt": "aaaa", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    plain = (
        await ask(client, single, COMPLETIONS, {**body, "seed": 1, "temperature": member.get("temperature", 0)})
    ).text
    changed = {(await ask(client, single, COMPLETIONS, {**body, **member})).text for _ in range(2)}

    assert len(changed) == 1
    assert plain not in changed


async def test_bias_forces_and_forbids(client: httpx.AsyncClient, single: str) -> None:
    body: JSON = {"prompt": "a", "seed": 1, "max_tokens": 20}

    assert (await ask(client, single, COMPLETIONS, {**body, "logit_bias": {"65": 100}})).text == "A" * 20
    ended = await ask(client, single, COMPLETIONS, {**body, "logit_bias": {"257": 100}})
    assert (ended.text, ended.finish[0], ended.count("completion_tokens")) == ("", "stop", 1)


async def test_usage_comes_with_every_event_where_that_is_asked_for(client: httpx.AsyncClient, single: str) -> None:
    options: JSON = {"include_usage": True, "continuous_usage_stats": True}
    body: JSON = {"prompt": "abc", "max_tokens": 3, "ignore_eos": True, "stream_options": options}
    found = await events(client, single, COMPLETIONS, body)
    usage = [cast("JSON", event["usage"]) for event in found]

    assert [one["completion_tokens"] for one in usage] == [1, 2, 3, 3]
    assert {one["prompt_tokens"] for one in usage} == {4}
    assert ["prompt_tokens_details" in one for one in usage] == [False, False, False, True]
    silent = await events(client, single, COMPLETIONS, {**body, "stream_options": {"continuous_usage_stats": True}})
    assert not any("usage" in event for event in silent)


@pytest.mark.parametrize(
    ("path", "body", "allowed"),
    [
        (COMPLETIONS, {"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        (CHAT, {"structured_outputs": {"json": {"type": "boolean"}}}, {"true", "false"}),
        (CHAT, {"structured_outputs": {"json": '{"enum": [1, 2]}'}}, {"1", "2"}),
        (
            COMPLETIONS,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": []}}}}},
            {'{"a":[]}'},
        ),
    ],
)
async def test_structured_answers_are_what_was_asked_for(
    client: httpx.AsyncClient, single: str, path: str, body: JSON, allowed: set[str]
) -> None:
    asked: JSON = {**body, **({"prompt": "a"} if path == COMPLETIONS else HI), "max_tokens": 30}
    for seed in range(5):
        reply = await ask(client, single, path, {**asked, "seed": seed})
        assert reply.text in allowed
        assert reply.finish[0] == "stop"


@pytest.mark.parametrize(
    ("tool_choice", "names", "finish"),
    [
        ("required", {"get_weather", "nothing"}, "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}, "stop"),
    ],
)
async def test_tools_are_called_with_arguments_that_follow_their_schema(
    client: httpx.AsyncClient, single: str, tool_choice: object, names: set[str], finish: str
) -> None:
    body: JSON = {**HI, "tools": TOOLS, "tool_choice": tool_choice, "max_tokens": 60, "temperature": 3}
    called: set[str] = set()
    for seed in range(8):
        asked = {**body, "seed": seed}
        found = await choice(client, single, CHAT, asked)
        message = cast("JSON", found["message"])
        (call,) = cast("list[JSON]", message["tool_calls"])
        function = cast("dict[str, str]", call["function"])
        called.add(function["name"])
        arguments = cast("JSON", json.loads(function["arguments"]))
        assert (found["finish_reason"], message["content"], call["type"]) == (finish, "", "function")
        assert arguments.keys() == ({"city", "days"} if function["name"] == "get_weather" else set())

        deltas = [cast("JSON", one["delta"]) for one in choices_of(await events(client, single, CHAT, asked))]
        parts = [cast("list[JSON]", delta["tool_calls"])[0] for delta in deltas if "tool_calls" in delta]
        functions = [cast("dict[str, str]", part["function"]) for part in parts]
        assert (parts[0]["type"], functions[0]["name"]) == ("function", function["name"])
        assert "".join(one["arguments"] for one in functions) == function["arguments"]
        assert [part["index"] for part in parts] == [0] * len(parts)
    assert called == names


async def test_tools_stand_in_the_prompt_and_are_not_called_unasked(client: httpx.AsyncClient, single: str) -> None:
    plain = await post(client, single, CHAT, HI)
    auto = await post(client, single, CHAT, {**HI, "tools": TOOLS})
    none = await post(client, single, CHAT, {**HI, "tools": TOOLS, "tool_choice": "none"})

    counts = [cast("dict[str, int]", one["usage"])["prompt_tokens"] for one in (plain, auto, none)]
    assert counts[1] > counts[0] == counts[2]
    assert "tool_calls" not in cast("JSON", cast("list[JSON]", auto["choices"])[0]["message"])


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "a"}}, "regex"),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"choice": ["a"], "json_object": True}}, "one form"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"264": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, "cache_salt"),
        (COMPLETIONS, {"prompt": [7] * 4096}, "your prompt has 4096 tokens"),
        (CHAT, {**HI, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {**HI, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {**HI, "response_format": {"type": "json_schema"}}, "schema"),
        (CHAT, {**HI, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        (GENERATE, {"token_ids": [], "sampling_params": {}}, "empty"),
        (GENERATE, {"token_ids": [264], "sampling_params": {}}, "token"),
        (GENERATE, {"token_ids": [1]}, "sampling_params"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"best_of": 2}}, "best_of"),
        ("/v1/embeddings", {"input": []}, "empty"),
        ("/v1/embeddings", {"input": [[7] * 4097]}, "4096"),
    ],
)
async def test_what_cannot_be_done_is_refused_in_words(
    client: httpx.AsyncClient, single: str, path: str, body: JSON, word: str
) -> None:
    response = await client.post(single + path, json=body)

    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


async def test_tokens_in_and_tokens_out_are_those_of_a_completion(client: httpx.AsyncClient, single: str) -> None:
    sampling: JSON = {"seed": 5, "n": 2, "max_tokens": 20, "logprobs": 2, "stop": ["zz"]}
    ids = list(b"Some prompt")
    plain = await post(client, single, COMPLETIONS, {"prompt": ids, "return_token_ids": True, **sampling})
    body: JSON = {"token_ids": ids, "sampling_params": sampling}
    found = await post(client, single, GENERATE, body)
    streamed = await events(client, single, GENERATE, {**body, "stream_options": {"include_usage": True}})

    said = [cast("list[JSON]", one["choices"]) for one in (found, plain)]
    ours, theirs = ([one["token_ids"] for one in choices] for choices in said)
    assert ours == theirs
    assert cast("str", found["request_id"]).startswith("generate-tokens-")
    assert found["usage"] == plain["usage"]
    logprobs = cast("dict[str, list[JSON]]", said[0][0]["logprobs"])["content"]
    assert [one["token"] for one in logprobs] == [
        f"token_id:{token}" for token in cast("list[int]", said[0][0]["token_ids"])
    ]
    for index in range(2):
        parts = [one for one in choices_of(streamed) if one["index"] == index]
        assert [token for one in parts for token in cast("list[int]", one["token_ids"])] == said[0][index]["token_ids"]
        assert parts[-1]["finish_reason"] == said[0][index]["finish_reason"]
    assert cast("JSON", streamed[-1]["usage"])["completion_tokens"] == cast("JSON", found["usage"])["completion_tokens"]


async def test_embeddings_are_the_same_for_the_same_text_and_say_how_long_it_was(
    client: httpx.AsyncClient, single: str, both: str
) -> None:
    body: JSON = {"input": ["One text", "Another", "One text"]}
    first, second = [await post(client, url, "/v1/embeddings", body) for url in (single, both)]
    packed = await post(client, single, "/v1/embeddings", {**body, "encoding_format": "base64"})
    vectors = [cast("list[float]", one["embedding"]) for one in cast("list[JSON]", first["data"])]

    assert first == second
    assert vectors[0] == vectors[2] != vectors[1]
    assert sum(number**2 for number in vectors[0]) == pytest.approx(1, abs=1e-3)
    assert cast("JSON", first["usage"])["prompt_tokens"] == 9 + 8 + 9
    raw = base64.b64decode(cast("str", cast("list[JSON]", packed["data"])[1]["embedding"]))
    assert list(struct.unpack(f"<{len(vectors[1])}f", raw)) == pytest.approx(vectors[1], abs=1e-6)


async def test_an_endpoint_that_is_not_here_says_so(client: httpx.AsyncClient, single: str) -> None:
    response = await client.post(f"{single}/v1/audio/speech", json={"input": "a"})

    assert response.status_code == 404
    assert "/v1/audio/speech" in response.json()["error"]["message"]
