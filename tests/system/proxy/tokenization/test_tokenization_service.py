"""Tests which engine is asked for a prompt's token ids, and the fallback when that fails."""

import asyncio
import json
import threading
from array import array
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.engine_backlog import EngineBacklog
from kvparams.instances import Role
from kvparams.jsontext.document import DEFAULT_LIMITS
from kvparams.routing.breaker import Breaker, BreakerLimits
from kvparams_proxy.event_loop.deadlines import Deadlines
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.requests.intake import ParsedRequest
from kvparams_proxy.tokenization.engine_tokenizer import EngineTokenizer, build_tokenize_body, parse_tokenize_response
from kvparams_proxy.tokenization.errors import TokenizerError
from kvparams_proxy.tokenization.local_tokenizer import LocalEncodingJob, LocalTokenizer
from kvparams_proxy.tokenization.pseudo_tokens import BYTES_PER_TOKEN, MAX_PSEUDO_TOKENS, pseudo_tokens
from kvparams_proxy.tokenization.service import RoutingTokens, TokenIdSource, TokenizersByModel, TokenService
from kvparams_proxy.tokenization.tokenizer_choice import TokenizationMethod
from kvparams_proxy.tokenization.tokenizer_files import load_local_tokenizer
from kvparams_proxy.tokenization.worker import TokenizerWorker
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import UpstreamLimits
from tests.support.proxy.fixtures import Script, Scripted, answer, instance
from tests.support.proxy.made_tokenizers import CHATML, byte_level, save
from tests.support.proxy.steps import read_all
from tests.support.waiting import stays_true_for, until

USER = {"role": "user", "content": "What is a lease?"}


def _inbound(kind: EndpointKind, **body: object) -> ParsedRequest:
    return read_all(kind, json.dumps(body).encode(), "r", "t", DEFAULT_LIMITS, keep_document=True)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalTokenizer:
    return load_local_tokenizer(save(byte_level(), tmp_path_factory.mktemp("tokenizer")))


class Bench:
    """A service, and engines that it may ask."""

    def __init__(self, stack: AsyncExitStack, tokenizers: TokenizersByModel, *urls: str, **limits: Any) -> None:
        loop = asyncio.get_running_loop()
        pools = UpstreamPools(lambda each: UpstreamConnectionPool(each.url, UpstreamLimits()))
        stack.callback(pools.close)
        self.members: list[Member] = []
        for number, url in enumerate(urls):
            breaker = Breaker(BreakerLimits())
            member = Member(instance(Role.PREFILL, url, "nixl", number), breaker, EngineBacklog(loop.time), ready=True)
            self.members.append(member)
            pools.joined(member)
        engines = EngineTokenizer(lambda: self.members, pools, Deadlines(loop), **limits)
        self.service = TokenService(loop, tokenizers, engines)
        stack.callback(self.service.close)

    async def find(self, kind: EndpointKind, **body: object) -> RoutingTokens | None:
        told: asyncio.Future[RoutingTokens | None] = asyncio.get_running_loop().create_future()
        self.service.find(kind, _inbound(kind, **body), told.set_result)
        async with asyncio.timeout(20):
            return await told


async def test_ids_that_the_client_sent_are_used_as_they_are(stack: AsyncExitStack, local: LocalTokenizer) -> None:
    bench = Bench(stack, {None: local})
    found = await bench.find("completions", prompt=[5, 6, 7])
    assert found == RoutingTokens(array("I", [5, 6, 7]), TokenIdSource.CLIENT)


async def test_each_model_has_its_own_way(stack: AsyncExitStack, local: LocalTokenizer) -> None:
    bench = Bench(stack, {"a": local, "b": TokenizationMethod.BYTES})
    by_tokenizer = await bench.find("completions", model="a", prompt="a lease")
    by_bytes = await bench.find("completions", model="b", prompt="a lease")
    assert by_tokenizer is not None
    assert by_tokenizer.source is TokenIdSource.TOKENIZER
    assert list(by_tokenizer.ids) == byte_level().encode("a lease").ids
    assert by_bytes is not None
    assert by_bytes.source is TokenIdSource.BYTES
    assert await bench.find("completions", model="c", prompt="a lease") is None
    assert await bench.find("completions", model="a", prompt=["one", "two"]) is None
    assert await bench.find("generate", model="a", token_ids=[1]) == RoutingTokens(
        array("I", [1]), TokenIdSource.CLIENT
    )


async def test_a_long_text_is_encoded_in_another_thread_and_a_known_one_at_once(
    stack: AsyncExitStack, local: LocalTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(stack, {None: local})
    threads: list[str] = []
    encode = local.encode

    def seen(part: str) -> "array[int]":
        threads.append(threading.current_thread().name)
        return encode(part)

    monkeypatch.setattr(local, "encode", seen)
    chat = {"messages": [{"role": "user", "content": f"word {number} " * 500} for number in range(3)]}
    first = await bench.find("chat", **chat)
    assert set(threads) == {"tokens"}
    threads.clear()
    at_once: list[RoutingTokens | None] = []
    bench.service.find("chat", _inbound("chat", **chat), at_once.append)
    assert at_once == [first]
    assert not threads
    await bench.find("chat", messages=[USER])
    assert set(threads) == {"MainThread"}


async def test_what_a_thread_encodes_is_what_the_loop_would(stack: AsyncExitStack, local: LocalTokenizer) -> None:
    """Many at a time, large and small: one tokenizer, used by two threads."""
    bench = Bench(stack, {None: local})
    texts = [f"{number} a lease on pages " * (1 + 13 * (number % 20)) for number in range(40)]
    found = await asyncio.gather(*(bench.find("completions", prompt=text) for text in texts))
    whole = byte_level()
    for text, prompt in zip(texts, found, strict=True):
        assert prompt is not None
        assert list(prompt.ids) == whole.encode(text).ids
    assert bench.service.found_counts == {TokenIdSource.TOKENIZER: 40}


CANNOT: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [USER], "chat_template": "{{ 1 }}"},
    {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"type": "custom"}]}]},
    {"messages": [{"role": "user", "content": "x" * 200_000}, {"role": "user", "content": 1}]},
]


@pytest.mark.parametrize("body", CANNOT)
async def test_what_cannot_be_rendered_goes_by_bytes(
    stack: AsyncExitStack, local: LocalTokenizer, body: dict[str, Any]
) -> None:
    bench = Bench(stack, {None: local})
    found = await bench.find("chat", **body)
    assert found is not None
    assert found.source is TokenIdSource.BYTES
    assert bench.service.missed_counts == {TokenIdSource.TOKENIZER: 1}


async def test_the_engine_is_asked_what_the_client_asked(
    stack: AsyncExitStack, scripted: Callable[[Script], Awaitable[Scripted]]
) -> None:
    async def tokens(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b'{"count": 3, "max_model_len": 9, "tokens": [1, 2, 3]}'))

    engine = await scripted(tokens)
    bench = Bench(stack, {None: TokenizationMethod.ENGINE}, engine.url)
    assert await bench.find("completions", model="m", prompt="a", max_tokens=3) == RoutingTokens(
        array("I", [1, 2, 3]), TokenIdSource.ENGINE
    )
    chat = {"model": "m", "messages": [USER], "tools": None, "temperature": 0}
    assert (await bench.find("chat", **chat, reasoning_effort="none", documents=[{"text": "x"}])) is not None
    assert engine.heads[0].startswith(b"POST /tokenize HTTP/1.1\r\n")
    assert json.loads(engine.bodies[0]) == {"model": "m", "prompt": "a"}
    assert json.loads(engine.bodies[1]) == {
        "model": "m",
        "messages": [USER],
        "tools": None,
        "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "none", "documents": [{"text": "x"}]},
    }


@pytest.mark.parametrize(
    "raw",
    [
        answer(b"{}", status=b"404 Not Found"),
        answer(b'{"tokens": [1, -2]}'),
        answer(b'{"tokens": [1, "2"]}'),
        answer(b'{"tokens": [1, true]}'),
        answer(b"[1]"),
        answer(b"not JSON"),
        b"not HTTP\r\n\r\n",
        b"",
    ],
)
async def test_an_engine_that_cannot_say_is_not_waited_for(
    stack: AsyncExitStack, scripted: Callable[[Script], Awaitable[Scripted]], raw: bytes
) -> None:
    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        if raw:
            return
        await reader.read()  # it says nothing until the proxy gives up

    engine = await scripted(script)
    bench = Bench(stack, {None: TokenizationMethod.ENGINE}, engine.url, timeout_s=0.2)
    found = await bench.find("completions", prompt="What is a lease?")
    assert found is not None
    assert found.source is TokenIdSource.BYTES
    assert bench.service.missed_counts == {TokenIdSource.ENGINE: 1}


async def test_engines_are_asked_so_many_questions_at_a_time(
    stack: AsyncExitStack, scripted: Callable[[Script], Awaitable[Scripted]]
) -> None:
    release = asyncio.Event()

    async def tokens(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(answer(b'{"tokens": [1]}'))

    engine = await scripted(tokens)
    bench = Bench(stack, {None: TokenizationMethod.ENGINE}, engine.url, most=2, timeout_s=20)
    told: list[RoutingTokens | None] = []
    asked = [asyncio.ensure_future(bench.find("completions", prompt=f"number {n}")) for n in range(2)]
    await asyncio.sleep(0)
    bench.service.find("completions", _inbound("completions", prompt="number 3"), told.append)
    assert told[0] is not None
    assert told[0].source is TokenIdSource.BYTES
    release.set()
    assert {each.source for each in await asyncio.gather(*asked) if each} == {TokenIdSource.ENGINE}
    again = await bench.find("completions", prompt="number 4")
    assert again is not None
    assert again.source is TokenIdSource.ENGINE


async def test_without_an_engine_that_may_be_asked_it_goes_by_bytes(stack: AsyncExitStack) -> None:
    bench = Bench(stack, {None: TokenizationMethod.ENGINE})
    found = await bench.find("completions", prompt="What is a lease?")
    assert found is not None
    assert found.source is TokenIdSource.BYTES


def test_a_question_about_several_prompts_is_not_asked() -> None:
    assert build_tokenize_body("completions", _inbound("completions", prompt=["a"])) is None
    assert parse_tokenize_response(b'{"tokens": []}') == array("I")
    assert parse_tokenize_response(b'{"tokens": [4294967296]}') is None


# pseudo tokens


def _pseudo(kind: EndpointKind, **body: object) -> list[int]:
    inbound = _inbound(kind, **body)
    ids, tokens = pseudo_tokens(kind, inbound.body, inbound.member_spans)
    assert tokens == len(ids)
    return list(ids)


@given(text=st.text(min_size=1), more=st.text())
def test_a_text_that_goes_on_has_pseudo_tokens_that_go_on(text: str, more: str) -> None:
    shorter, longer = _pseudo("completions", prompt=text), _pseudo("completions", prompt=text + more)
    assert longer[: len(shorter)] == shorter


@given(texts=st.lists(st.text(), min_size=1, max_size=5), tools=st.none() | st.text())
def test_a_further_message_adds_pseudo_tokens_behind_the_others(texts: list[str], tools: str | None) -> None:
    said = [{"role": "user", "content": text} for text in texts]
    first = _pseudo("chat", messages=said, tools=tools)
    then = _pseudo("chat", messages=[*said, USER], tools=tools, max_tokens=7)
    assert then[: len(first)] == first
    assert len(then) > len(first)


@pytest.mark.parametrize("tools", [None, "x" * 70_000])
def test_of_a_long_prompt_the_first_pseudo_tokens_are_made_and_all_counted(tools: str | None) -> None:
    """Routing looks at no more, and a copy of a long body takes long."""
    given = {"tools": [tools]} if tools else {}
    for characters in (BYTES_PER_TOKEN * MAX_PSEUDO_TOKENS - 100_000, BYTES_PER_TOKEN * MAX_PSEUDO_TOKENS + 100_000):
        inbound = _inbound("chat", messages=[{"role": "user", "content": "y" * characters}], **given)
        ids, tokens = pseudo_tokens("chat", inbound.body, inbound.member_spans)
        text = b"".join(
            inbound.body[inbound.member_spans[n].value : inbound.member_spans[n].end].rstrip(b'}] "')
            for n in ("tools", "messages")
            if n in inbound.member_spans
        )
        assert tokens == len(text) // BYTES_PER_TOKEN
        assert ids.tobytes() == text[: BYTES_PER_TOKEN * min(tokens, MAX_PSEUDO_TOKENS)]


def test_pseudo_tokens_differ_where_the_texts_do() -> None:
    one, other = _pseudo("completions", prompt="abcdefghijk"), _pseudo("completions", prompt="abcdefXhijk")
    assert one[0] == other[0]
    assert one != other
    assert min(one) > 1 << 24  # no vocabulary has so many


# the thread


async def test_a_lane_does_in_order_what_it_takes_and_takes_no_more_than_fits() -> None:
    lane: TokenizerWorker[int] = TokenizerWorker(asyncio.get_running_loop(), "test", 10)
    gate, told = threading.Event(), list[int]()
    done = asyncio.Event()

    def waits(number: int) -> int:
        assert gate.wait(20)
        return number

    def tell(number: int) -> None:
        told.append(number)
        assert threading.current_thread() is threading.main_thread()
        if number == 2:
            done.set()

    assert lane.submit(partial(waits, 1), tell, 50)  # alone it may be too large
    assert not lane.submit(partial(waits, 0), tell, 1)
    gate.set()
    async with asyncio.timeout(20):
        await until(lambda: not lane.pending_weight)
        assert lane.submit(partial(waits, 2), tell, 10)
        await done.wait()
    assert told == [1, 2]
    lane.close()
    assert not lane.submit(partial(waits, 3), tell, 1)


async def test_nothing_is_told_by_a_lane_that_was_closed() -> None:
    lane: TokenizerWorker[int] = TokenizerWorker(asyncio.get_running_loop(), "test", 10)
    gate, told = threading.Event(), list[int]()

    def job() -> int:
        gate.wait(20)
        return 1

    assert lane.submit(job, told.append, 1)
    lane.close()
    gate.set()
    await stays_true_for(0.05, lambda: told == [])


# files


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tokenizer.json", None, "cannot be read"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", "{", "cannot be read"),
        ("tokenizer_config.json", '{"chat_template": [{}]}', "chat_template"),
        ("chat_template.jinja", "{% if %}", "chat template"),
    ],
)
def test_a_folder_that_is_no_tokenizers_is_refused_at_the_start(
    tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    save(byte_level(), tmp_path, None)
    load_local_tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=said):
        load_local_tokenizer(tmp_path)


def test_a_tokenizer_may_be_named_by_its_file(tmp_path: Path) -> None:
    save(byte_level(), tmp_path, CHATML)
    assert list(load_local_tokenizer(tmp_path / "tokenizer.json").encode_completion({"prompt": "a"}, 10).encode())
    assert list(load_local_tokenizer(tmp_path / "tokenizer.json").encode_chat({"messages": [USER]}, 1000).encode())


def test_tokens_that_only_the_configuration_names_are_added(tmp_path: Path) -> None:
    entry = {"2000": {"content": "<more>", "normalized": False, "special": False}}
    local = load_local_tokenizer(save(byte_level(), tmp_path, pad_token="<pad>", added_tokens_decoder=entry))
    assert len(local.encode_completion({"prompt": "<more><pad>", "add_special_tokens": False}, 100).encode()) == 2


def test_special_tokens_stand_around_a_text_where_the_tokenizer_puts_them(local: LocalTokenizer) -> None:
    assert list(LocalEncodingJob(local, "a lease", special=True).encode()) == byte_level().encode("a lease").ids
    assert list(LocalEncodingJob(local, "a lease", special=False).encode()) == byte_level().encode("a lease").ids[1:]
