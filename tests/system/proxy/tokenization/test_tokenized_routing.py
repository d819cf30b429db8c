"""Tests that routing policies see token ids, and that engines and documents do not."""

import asyncio
import json
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvparams.instances import RequestFacts, RoundRobin
from kvparams_proxy.tokenization.errors import TokenizerError
from kvparams_proxy.tokenization.local_tokenizer import LocalTokenizer
from kvparams_proxy.tokenization.tokenizer_choice import (
    TokenizationMethod,
    load_tokenizers,
    parse_tokenizer_choices,
)
from kvparams_proxy.tokenization.tokenizer_files import load_local_tokenizer
from tests.support.proxy.fixtures import StartProxy
from tests.support.proxy.made_tokenizers import byte_level, save
from tests.support.proxy.stage import BODY, COMPLETIONS, StartStage
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until
from tests.unit.proxy.cli.test_command import asked, problems


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[RequestFacts]:
    """What the policy is shown."""
    facts: list[RequestFacts] = []
    choose = RoundRobin.choose

    def shown(self: RoundRobin, candidates: Sequence[Any], request: RequestFacts, turn: int) -> Any:
        facts.append(request)
        return choose(self, candidates, request, turn)

    monkeypatch.setattr(RoundRobin, "choose", shown)
    return facts


def _urls(stub: StubEngines) -> list[list[str]]:
    return [[engine.url for engine in stub.engines if engine.role == role] for role in ("prefill", "decode")]


async def test_a_policy_sees_the_token_ids_of_text_and_chat(
    stub: StubEngines, proxy: StartProxy, seen: list[RequestFacts], folder: Path
) -> None:
    running = await proxy(*_urls(stub), tokenizers={None: load_local_tokenizer(folder)})
    whole = byte_level()
    assert (await running.client.post(COMPLETIONS, json=BODY)).status_code == 200
    expected = whole.encode(BODY["prompt"]).ids
    assert [list(facts.routing_ids or ()) for facts in seen] == [expected, expected]
    assert [(facts.token_ids, facts.prompt_tokens) for facts in seen] == [(None, len(expected))] * 2
    seen.clear()
    chat = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    assert (await running.client.post("/v1/chat/completions", json=chat)).status_code == 200
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(seen[0].routing_ids or ()) == whole.encode(text, add_special_tokens=False).ids
    assert await running.metric("kvparams_proxy_in_flight") == 0


async def test_no_document_speaks_of_ids_that_the_proxy_made(stage: StartStage, folder: Path) -> None:
    """An engine would hold them against the prompt that it has. Those that the client sent are in its documents."""
    running = await stage(tokenizers={None: load_local_tokenizer(folder)})
    assert (await running.ask()).status_code == 200
    documents = [found for actors in running.of.values() for actor in actors for found in actor.documents]
    assert [found.prefix for found in documents] == [None, None]
    assert (await running.ask(prompt=[5, 6, 7])).status_code == 200
    documents = [found for actors in running.of.values() for actor in actors for found in actor.documents]
    assert sum(found.prefix is not None for found in documents) == 2


async def test_ids_that_the_client_sent_are_for_routing_too(
    stub: StubEngines, proxy: StartProxy, seen: list[RequestFacts]
) -> None:
    running = await proxy(*_urls(stub), tokenizers={None: TokenizationMethod.BYTES})
    await running.client.post(COMPLETIONS, json=BODY | {"prompt": [5, 6, 7]})
    assert seen[0].routing_ids == seen[0].token_ids == array("I", [5, 6, 7])
    seen.clear()
    await running.client.post(COMPLETIONS, json=BODY | {"prompt": "What is a lease?"})
    assert list(seen[0].routing_ids or ()) == list(array("I", b'"What is a lease'))
    assert seen[0].token_ids is None


async def test_without_a_tokenizer_nobody_looks_for_ids(
    stub: StubEngines, proxy: StartProxy, seen: list[RequestFacts]
) -> None:
    running = await proxy(*_urls(stub))
    assert (await running.client.post(COMPLETIONS, json=BODY)).status_code == 200
    assert [facts.routing_ids for facts in seen] == [None, None]


class Gated(LocalTokenizer):
    """One that takes its time with what is long enough for another thread: until it is let go."""

    gate: threading.Event

    def encode(self, part: str) -> "array[int]":
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(20)
        return super().encode(part)


async def test_a_text_that_takes_long_holds_up_nobody_else(
    stub: StubEngines, proxy: StartProxy, seen: list[RequestFacts]
) -> None:
    gated = Gated(byte_level())
    gated.gate = threading.Event()
    running = await proxy(*_urls(stub), tokenizers={None: gated})
    long = asyncio.ensure_future(running.client.post(COMPLETIONS, json=BODY | {"prompt": "a lease " * 1_000}))
    try:
        for number in range(3):
            got = await running.client.post(COMPLETIONS, json=BODY | {"prompt": f"number {number}"})
            assert got.status_code == 200
        assert not long.done()
        assert len(seen) == 6
    finally:
        gated.gate.set()
    assert (await long).status_code == 200
    assert list(seen[-1].routing_ids or ()) == byte_level().encode("a lease " * 1_000).ids


async def test_a_client_that_leaves_meanwhile_costs_no_leg(stub: StubEngines, proxy: StartProxy) -> None:
    gated = Gated(byte_level())
    gated.gate = threading.Event()
    running = await proxy(*_urls(stub), tokenizers={None: gated})
    body = json.dumps(BODY | {"prompt": "a lease " * 1_000}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    await writer.drain()
    assert (await running.client.get("/health")).status_code == 200  # it has been read by now, or will be
    writer.transport.abort()
    assert (await running.client.post(COMPLETIONS, json=BODY)).status_code == 200
    legs = sum(engine.counters.requests for engine in stub.engines)
    gated.gate.set()

    async def gone() -> bool:
        return await running.metric('kvparams_proxy_requests_total{outcome="gone"}') == 1

    await until(gone)
    assert sum(engine.counters.requests for engine in stub.engines) == legs == 2
    assert await running.metric("kvparams_proxy_in_flight") == 0


async def test_an_engine_that_is_asked_says_no_ids_and_requests_go_on(
    stub: StubEngines, proxy: StartProxy, seen: list[RequestFacts]
) -> None:
    """The stub engines have no `/tokenize`."""
    running = await proxy(*_urls(stub), tokenizers={None: TokenizationMethod.ENGINE})
    assert (await running.client.post(COMPLETIONS, json=BODY)).status_code == 200
    assert list(seen[0].routing_ids or ()) == list(array("I", b'"Who is ther'))
    assert await running.metric('kvparams_proxy_prompts_total{source="bytes"}') == 1
    assert await running.metric('kvparams_proxy_prompts_missed_total{source="engine"}') == 1


# what an operator says


def test_each_model_may_be_given_its_own_way(folder: Path) -> None:
    assert parse_tokenizer_choices("engine", Path()) == {None: TokenizationMethod.ENGINE}
    assert parse_tokenizer_choices("a=engine, b=models/b,bytes", Path("/x")) == {
        "a": TokenizationMethod.ENGINE,
        "b": Path("/x/models/b"),
        None: TokenizationMethod.BYTES,
    }
    assert parse_tokenizer_choices({"a": "bytes", "*": "t"}, Path("/x")) == {
        "a": TokenizationMethod.BYTES,
        None: Path("/x/t"),
    }
    loaded = load_tokenizers({"a": folder, "b": folder, None: TokenizationMethod.BYTES})
    assert loaded["a"] is loaded["b"]
    assert loaded[None] is TokenizationMethod.BYTES
    with pytest.raises(TokenizerError):
        load_tokenizers({None: folder / "nothing"})


@pytest.mark.parametrize("value", ["", "a=", "a=b,a=c", "x,y", 1, {"a": 1}, {"": "x"}, {"a": "\0"}, ["x"]])
def test_what_says_nothing_clear_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"must be|names"):
        parse_tokenizer_choices(value, Path())


def test_the_flag_and_the_fleet_file_say_it_alike(folder: Path, tmp_path: Path) -> None:
    engines = ["--prefill", "http://a:1", "--decode", "http://b:1"]
    settings = asked(*engines, "--tokenizer", f"m={folder},bytes").settings
    assert isinstance(settings.tokenizers["m"], LocalTokenizer)
    assert settings.tokenizers[None] is TokenizationMethod.BYTES
    assert settings.policy == "cache_aware"
    assert any("cache_aware" in note for note in asked(*engines, "--tokenizer", "bytes").notes)
    named = asked(*engines, "--tokenizer", "bytes", "--policy", "random")
    assert (named.settings.policy, named.notes) == ("random", ())
    assert (asked(*engines).settings.policy, asked(*engines).notes) == ("round_robin", ())
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps({"proxy": {"tokenizer": {"m": "t", "*": "engine"}}, "instances": []}))
    save(byte_level(), tmp_path / "t")
    assert isinstance(asked(*engines, "--config", str(file)).settings.tokenizers["m"], LocalTokenizer)
    assert asked(*engines).settings.tokenizers == {}
    said = problems(*engines, "--tokenizer", str(tmp_path / "nowhere"))
    assert "nowhere" in said
