"""Tests `/v1/messages` and `/v1/responses` through our proxy before two stock vLLM engines, over NIXL and over a store.

The clients are the Python packages of Anthropic and OpenAI, as agents use them.
"""

import json
import random
from collections import Counter
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
from tests.interop.vllm.agent_traffic import MAKERS, messages_body, next_turn, plain, read_answer, responses_body, text
from tests.interop.vllm.engines import ANSWER_S, PATIENCE_S, READY_S, counters, start_engine, transfer_config, until
from tests.interop.vllm.own_connectors import Own, Pair, installed, nixl, start_pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_FLAGS: Final = (
    "--enable-prompt-tokens-details",
    "--enable-auto-tool-choice",
    *("--tool-call-parser", "pythonic"),
    *("--reasoning-parser", "deepseek_r1"),
)
_KEEPS: Final = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
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


@pytest.mark.parametrize("path", MAKERS)
def test_conversations_are_those_of_one_engine(
    pair: Pair,
    alone: Server,
    path: str,
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    """Decode computes at most one token of each prompt: the rest is prefill's, or in its own cache of earlier turns.

    What is told of the cache is what prefill had in it. vLLM 0.32.0 counts none as computed where NIXL fetches all of
    a prompt, though its last token runs once more.
    """
    count = effort(6, 200)
    chance, salt = random.Random(7), token_hex(8)  # the engine alone has seen these prompts for another pair
    seen: Counter[str] = Counter()
    streamed = 0
    engines = pair.prefill, pair.decode
    before = [_prompt_sources(engine) for engine in engines]
    begun = before[1]
    with httpx.Client(timeout=ANSWER_S) as client:
        for number in range(count):
            body = {**MAKERS[path](chance, number), "cache_salt": f"{salt} {number}"}
            for turn in range(1 + number % 3):
                stream = (number + turn) % 2 == 1
                asked = {**body, "stream": stream}
                right, split = (
                    read_answer(client.post(server.url + path, json=asked), stream=stream)
                    for server in (alone, pair.proxy)
                )
                if split.told != right.told:
                    assert stream, (number, turn, asked)
                    assert _varies(client, alone.url + path, asked), (number, turn, asked)
                    seen["varied"] += 1
                assert split.prompt_tokens == right.prompt_tokens, (number, turn, asked)
                after = [
                    _counted(engine, each, right.prompt_tokens) for engine, each in zip(engines, before, strict=True)
                ]
                found, _ = (now - then for now, then in zip(after, before, strict=True))
                assert split.cached_tokens == right.prompt_tokens - found["local_compute"], (number, turn, asked, found)
                seen.update({"turns": 1, "cached": split.cached_tokens, "prompt": right.prompt_tokens, **split.kinds})
                streamed += stream
                before = after
                body = next_turn(path, body, right, text(chance, 60))
    sources = _prompt_sources(pair.decode) - begun
    record(
        {"path": path, "conversations": count, "different": 0, "streamed": streamed, **seen, "decode": dict(sources)}
    )
    assert sources["local_compute"] <= seen["turns"], sources
    assert sources["external_kv_transfer"] > 0
    assert seen["cached"] > 0


def _varies(client: httpx.Client, url: str, asked: dict[str, Any]) -> bool:
    """Returns whether the engine alone streams different answers to one and the same request.

    vLLM 0.32.0 tells reasoning from text delta by delta: where its end comes in one delta with other tokens, it loses
    or repeats some text. How many come in one depends on time. Conversation 149 had five answers in 80 requests.
    """
    answers = (read_answer(client.post(url, json=asked), stream=True) for _ in range(100))
    return len({json.dumps(answer.told) for answer in answers}) > 1


def _prompt_sources(engine: Server) -> Counter[str]:
    """Returns how many tokens of prompts an engine had from where."""
    name = "vllm:prompt_tokens_by_source_total{source="
    found = {
        each.removeprefix(name)[:-1]: int(value) for each, value in counters(engine).items() if each.startswith(name)
    }
    return Counter(found)


def _counted(engine: Server, before: Counter[str], tokens: int) -> Counter[str]:
    """Returns where an engine had prompts from, once it has counted so many more tokens of them."""
    until(lambda: _prompt_sources(engine).total() >= before.total() + tokens, pause_s=0.01)
    return _prompt_sources(engine)


@pytest.mark.parametrize("path", MAKERS)
def test_cached_tokens_are_those_that_prefill_found(pair: Pair, path: str) -> None:
    body = {**MAKERS[path](random.Random(11), 0), "cache_salt": f"cached {path[4:]}"}
    with httpx.Client(timeout=ANSWER_S) as client:
        cold, warm = (read_answer(client.post(pair.proxy.url + path, json=body), stream=False) for _ in range(2))
    assert cold.prompt_tokens == warm.prompt_tokens
    assert cold.cached_tokens == 0
    assert cold.prompt_tokens - 33 <= warm.cached_tokens < cold.prompt_tokens


@pytest.mark.parametrize("path", MAKERS)
def test_prompts_are_routed_by_as_many_tokens_as_the_engine_computes(alone: Server, path: str) -> None:
    kind: EndpointKind = "messages" if path == "/v1/messages" else "responses"
    with httpx.Client(timeout=ANSWER_S) as client:
        for number in range(10):
            body = MAKERS[path](random.Random(40 + number), number)
            told = read_answer(client.post(alone.url + path, json=body), stream=False)
            raw = json.dumps(body).encode()
            parsed = parse_request(kind, raw, "r", "t", DEFAULT_LIMITS, keep_document=True)
            assert parsed is not None
            asked = build_tokenize_body(kind, parsed)
            answer = client.post(f"{alone.url}/tokenize", content=asked, headers={"content-type": "application/json"})
            assert answer.status_code == 200, (asked, answer.text)
            assert answer.json()["count"] == told.prompt_tokens, answer.text


def test_the_client_of_anthropic_runs_unchanged(pair: Pair, alone: Server) -> None:
    said: list[Any] = []
    for server in (alone, pair.proxy):
        client = anthropic.Anthropic(base_url=server.url, api_key="key", timeout=ANSWER_S, max_retries=0)
        asked: dict[str, Any] = messages_body(random.Random(21), 1)
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
        asked: dict[str, Any] = responses_body(random.Random(22), 1)
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            streamed = stream.get_final_response()
        said.append((plain([item.model_dump() for item in whole.output]), whole.status))
        assert [plain(getattr(item, "content", None)) for item in streamed.output] == [
            plain(getattr(item, "content", None)) for item in whole.output
        ]
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="nobody", input="a")
    assert said[0] == said[1]


def test_a_stored_response_is_continued_read_and_cancelled_where_it_is(pair: Pair) -> None:
    client = openai.OpenAI(base_url=f"{pair.proxy.url}/v1", api_key="key", timeout=ANSWER_S, max_retries=0)
    first = client.responses.create(model="tiny", input=text(random.Random(31)), max_output_tokens=8, store=True)
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
        model="tiny", input=text(random.Random(32)), max_output_tokens=1500, background=True, store=True
    )
    assert client.responses.cancel(background.id).status == "cancelled"
    until(lambda: not counters(pair.decode)["vllm:num_requests_running"], PATIENCE_S)
