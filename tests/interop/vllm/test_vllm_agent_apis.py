"""Tests `/v1/messages` and `/v1/responses` through our proxy before two stock vLLM engines, over NIXL and over a store.

The clients are the Python packages of Anthropic and OpenAI, as agents use them.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, cast

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import anthropic
import httpx
import openai
import pytest

from demo.processes import Processes, Server
from kvparams.jsontext.document import DEFAULT_LIMITS
from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.requests.intake import parse_request
from kvparams_proxy.tokenization.engine_tokenizer import build_tokenize_body
from tests.interop.vllm.engines import ANSWER_S, PATIENCE_S, READY_S, counters, start_engine, transfer_config, until
from tests.interop.vllm.own_connectors import Own, Pair, external, installed, nixl, start_pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_FLAGS: Final = (
    "--enable-prompt-tokens-details",
    "--enable-auto-tool-choice",
    *("--tool-call-parser", "pythonic"),
    *("--reasoning-parser", "deepseek_r1"),
)
_KEEPS: Final = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
_WORDS: Final = ("key", "value", "cache", "page", "block", "store", "engine", "prefill", "decode", "prompt", "load")
_TOOL: Final = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
_FORM: Final = {"type": "json_schema", "schema": _TOOL}
_SAVED: Final = {"deadline_s": 150.0}


@pytest.fixture(scope="module")
def thinking_model(make_tiny: Callable[..., Path]) -> Path:
    """A model whose tokenizer knows where reasoning ends."""
    return make_tiny(0, "thinking")


@pytest.fixture(scope="module")
def alone(thinking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One engine without a connector: what it answers is right."""
    with Processes(tmp_path_factory.mktemp("alone")) as processes:
        engine = start_engine(processes, "alone", thinking_model, *_FLAGS)
        processes.wait_ready(engine, within_s=READY_S)
        yield engine


@pytest.fixture(scope="module", params=["nixl", "store"])
def pair(
    request: pytest.FixtureRequest, thinking_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """A prefill and a decode engine that keep responses, and a proxy."""
    folder = tmp_path_factory.mktemp("agents")
    with Processes(folder) as processes:
        if request.param == "nixl":
            installed("nixl")
            owns = nixl("P", "kv_producer"), nixl("D", "kv_consumer")
        else:
            store = f"file://{folder}/kv?size=256MiB"
            told = {"P": "kv_producer", "D": "kv_consumer"}
            owns = tuple(
                Own(transfer_config(store, role=role, engine_id=name, extra=_SAVED), {}) for name, role in told.items()
            )
        prefill, decode = (Own(own.transfer, {**own.environment, **_KEEPS}) for own in owns)
        yield start_pair(processes, thinking_model, request.param, prefill, decode, *_FLAGS)


def _text(chance: random.Random, most: int = 200) -> str:
    return " ".join(chance.choices(_WORDS, k=chance.randrange(40, most)))


def _messages_body(chance: random.Random, number: int) -> dict[str, Any]:
    """A request as agents send them: turns, tools and their results, thinking, forms."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    turns: list[dict[str, Any]] = [{"role": "user", "content": _text(chance)}]
    if number % 3 == 1:
        thought = {"type": "thinking", "thinking": _text(chance, 60), "signature": "s"}
        called = {"type": "tool_use", "id": "t1", "name": "forecast", "input": {"days": 2}}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": _text(chance, 60)}]}
        turns += [
            {"role": "assistant", "content": [thought, {"type": "text", "text": "Let me see."}, called]},
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        ]
    if number % 4 == 1:
        body["system"] = [{"type": "text", "text": _text(chance, 60), "cache_control": {"type": "ephemeral"}}]
    if number % 5 == 2:
        body["tools"] = [{"name": "forecast", "description": "of the weather", "input_schema": _TOOL}]
        body["tool_choice"] = {"type": chance.choice(("auto", "any", "none"))}
    elif number % 5 == 3:
        body["output_config"] = {"format": _FORM}
    elif number % 5 == 4:
        body |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1100, "stop_sequences": [" "]}
    return {**body, "messages": turns}


def _responses_body(chance: random.Random, number: int) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", "max_output_tokens": 12, "temperature": 0, "input": _text(chance)}
    if number % 3 == 1:
        body["input"] = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _text(chance)}]},
            {"type": "function_call", "call_id": "c1", "name": "forecast", "arguments": '{"days":2}'},
            {"type": "function_call_output", "call_id": "c1", "output": _text(chance, 60)},
            {"type": "message", "role": "user", "content": "And now?"},
        ]
    if number % 4 == 1:
        body["instructions"] = _text(chance, 60)
    if number % 5 == 2:
        body["tools"] = [{"type": "function", "name": "forecast", "parameters": _TOOL}]
        body["tool_choice"] = chance.choice(("auto", "required", {"type": "function", "name": "forecast"}))
    elif number % 5 == 3:
        body["text"] = {"format": {**_FORM, "name": "forecast"}}
    elif number % 5 == 4:
        body["reasoning"] = {"effort": "low"}
    return body


_MAKERS: Final = {"/v1/messages": _messages_body, "/v1/responses": _responses_body}
_OWN: Final = ("id", "call_id", "item_id", "signature", "created_at", "usage", "cache_salt")


def _plain(value: Any) -> Any:
    """An answer without what differs between two of them."""
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {name: _plain(each) for name, each in members.items() if name not in _OWN}
    return [_plain(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


def _told(response: httpx.Response, *, stream: bool) -> tuple[Any, dict[str, Any]]:
    """What an answer says, and its usage. Of a stream, deltas are put together: engines send several tokens at once."""
    assert response.status_code == 200, response.text
    if not stream:
        document = response.json()
        return _plain(document), document["usage"]
    texts: dict[str, str] = {}
    order: list[str] = []
    usage: dict[str, Any] = {}
    for block in response.text.strip().split("\n\n"):
        name, _, data = block.partition("\ndata: ")
        event = json.loads(data)
        assert name == f"event: {event['type']}"
        delta = event.get("delta")
        if isinstance(delta, str):
            texts[event["type"]] = texts.get(event["type"], "") + delta
        elif event["type"] == "content_block_delta":
            kind = f"{event['index']} {delta['type']}"
            texts[kind] = texts.get(kind, "") + str(
                next((said for name, said in delta.items() if name not in ("type", "signature")), "")
            )
        if not order or order[-1] != event["type"]:
            order.append(event["type"])
        usage = event.get("usage") or (event.get("response") or {}).get("usage") or usage
    return [order, {kind: text for kind, text in texts.items() if "signature" not in kind}], usage


def _prompt_counts(usage: dict[str, Any]) -> tuple[int, int]:
    """The tokens of the prompt, and those that were cached."""
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    read, made = usage.get("cache_read_input_tokens") or 0, usage.get("cache_creation_input_tokens") or 0
    return usage["input_tokens"] + read + made, read


@pytest.mark.parametrize("path", _MAKERS)
def test_conversations_are_those_of_one_engine(
    pair: Pair,
    alone: Server,
    path: str,
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    """Each prompt is new to all engines; decode computes one token of it, or with a store what is behind its pages."""
    count = effort(15, 200)
    chance, salt = random.Random(7), token_hex(8)  # the engine alone has seen these prompts for another pair
    before, total = external(pair.decode), 0
    different: list[str] = []
    with httpx.Client(timeout=ANSWER_S) as client:
        for number in range(count):
            stream = number % 2 == 1
            body = {**_MAKERS[path](chance, number), "stream": stream, "cache_salt": f"{salt} {number}"}
            right, split = (
                _told(client.post(server.url + path, json=body), stream=stream) for server in (alone, pair.proxy)
            )
            if right[0] != split[0] or _prompt_counts(right[1]) != _prompt_counts(split[1]):
                different.append(f"{body}: {split} instead of {right}")
            total += _prompt_counts(right[1])[0]
    assert not different, "\n\n".join(different[:3])
    loaded = external(pair.decode) - before
    record({"path": path, "conversations": count, "different": 0, "prompt_tokens": total, "loaded": loaded})
    assert total - count <= loaded <= total, f"decode loaded {loaded} of {total} tokens of {count} prompts"


@pytest.mark.parametrize("path", _MAKERS)
def test_cached_tokens_are_those_that_prefill_found(pair: Pair, path: str) -> None:
    body = {**_MAKERS[path](random.Random(11), 0), "cache_salt": f"cached {path[4:]}"}
    with httpx.Client(timeout=ANSWER_S) as client:
        (total, cold), (again, warm) = (
            _prompt_counts(_told(client.post(pair.proxy.url + path, json=body), stream=False)[1]) for _ in range(2)
        )
    assert total == again
    assert cold == 0
    assert total - 33 <= warm < total


@pytest.mark.parametrize("path", _MAKERS)
def test_prompts_are_routed_by_as_many_tokens_as_the_engine_computes(alone: Server, path: str) -> None:
    kind: EndpointKind = "messages" if path == "/v1/messages" else "responses"
    with httpx.Client(timeout=ANSWER_S) as client:
        for number in range(10):
            body = _MAKERS[path](random.Random(40 + number), number)
            told = _told(client.post(alone.url + path, json=body), stream=False)[1]
            raw = json.dumps(body).encode()
            parsed = parse_request(kind, raw, "r", "t", DEFAULT_LIMITS, keep_document=True)
            assert parsed is not None
            asked = build_tokenize_body(kind, parsed)
            answer = client.post(f"{alone.url}/tokenize", content=asked, headers={"content-type": "application/json"})
            assert answer.status_code == 200, (asked, answer.text)
            assert answer.json()["count"] == _prompt_counts(told)[0], answer.text


def test_the_client_of_anthropic_runs_unchanged(pair: Pair, alone: Server) -> None:
    said: list[Any] = []
    for server in (alone, pair.proxy):
        client = anthropic.Anthropic(base_url=server.url, api_key="key", timeout=ANSWER_S, max_retries=0)
        asked: dict[str, Any] = _messages_body(random.Random(21), 1)
        asked["extra_body"] = {"temperature": asked.pop("temperature")}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        counted = client.messages.count_tokens(model="tiny", messages=asked["messages"])
        kinds = [
            (block.type, getattr(block, "thinking", None) or getattr(block, "text", "")) for block in whole.content
        ]
        assert kinds == [
            (block.type, getattr(block, "thinking", None) or getattr(block, "text", "")) for block in streamed.content
        ]
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        said.append((kinds, whole.stop_reason, counted.input_tokens))
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(model="nobody", max_tokens=1, messages=[{"role": "user", "content": "a"}])
        assert cast("dict[str, Any]", missing.value.body)["type"] == "error"
    assert said[0] == said[1]


def test_the_client_of_openai_runs_unchanged(pair: Pair, alone: Server) -> None:
    said: list[Any] = []
    for server in (alone, pair.proxy):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", timeout=ANSWER_S, max_retries=0)
        asked: dict[str, Any] = _responses_body(random.Random(22), 1)
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            streamed = stream.get_final_response()
        said.append((_plain([item.model_dump() for item in whole.output]), whole.status))
        assert [_plain(getattr(item, "content", None)) for item in streamed.output] == [
            _plain(getattr(item, "content", None)) for item in whole.output
        ]
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="nobody", input="a")
    assert said[0] == said[1]


def test_a_stored_response_is_continued_read_and_cancelled_where_it_is(pair: Pair) -> None:
    client = openai.OpenAI(base_url=f"{pair.proxy.url}/v1", api_key="key", timeout=ANSWER_S, max_retries=0)
    first = client.responses.create(model="tiny", input=_text(random.Random(31)), max_output_tokens=8, store=True)
    assert client.responses.retrieve(first.id).output == first.output
    second = client.responses.create(
        model="tiny", input="And then?", previous_response_id=first.id, max_output_tokens=8, store=True
    )
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="And then?", previous_response_id="resp_" + "0" * 48)
    background = client.responses.create(
        model="tiny", input=_text(random.Random(32)), max_output_tokens=1500, background=True, store=True
    )
    assert client.responses.cancel(background.id).status == "cancelled"
    until(lambda: not counters(pair.decode)["vllm:num_requests_running"], PATIENCE_S)
