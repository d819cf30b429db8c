"""Tests a decode engine that fails in the middle of a stream.

The client gets an error event; with continuation, another engine goes on, and the client does not notice.
"""

import asyncio
import json
from typing import Any

import pytest

from kvparams_proxy.config.mode_parsing import parse_mode_flag
from tests.support.proxy.acting import Fault, leg_limit_s
from tests.support.proxy.stage import CHATS, COMPLETIONS, StartStage, events_of
from tests.support.waiting import stops_changing, until

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
UNRESUMABLE: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 1},
    "logprobs of the chosen tokens alone": {"logprobs": 0},
    "stop": {"stop": ["x"]},
    "n": {"n": 2},
    "response_format": {"response_format": {"type": "json_object"}},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "several prompts": {"prompt": ["a", "b"]},
}


@pytest.mark.parametrize("name", ["continuation is off", *UNRESUMABLE])
async def test_a_stream_that_cannot_go_on_ends_with_an_error_event(stage: StartStage, name: str) -> None:
    found = await stage(continuation=name in UNRESUMABLE)
    for actor in found.decode:
        actor.breaks_after = 3
    got = await found.ask(stream=True, **UNRESUMABLE.get(name, {}))
    assert got.status_code == 200
    *events, last = [event.removeprefix("data: ") for event in got.text.split("\n\n") if event]
    assert len(events) == 3
    assert json.loads(last)["error"]["code"] == "decode_failed"
    assert "[DONE]" not in got.text
    assert sum(len(actor.bodies) for actor in found.decode) == 1
    assert await found.settled()
    assert await found.running.metric('kvparams_proxy_requests_total{outcome="midway"}') == 1


async def test_a_chat_with_tools_is_not_continued(stage: StartStage) -> None:
    found = await stage(continuation=True)
    for actor in found.decode:
        actor.breaks_after = 3
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    got = await found.ask(CHATS, stream=True, tools=tools)
    assert '"error"' in got.text
    assert "[DONE]" not in got.text


@pytest.mark.parametrize(("dialect", "path"), [("store", COMPLETIONS), ("nixl", CHATS)])
@pytest.mark.parametrize("more", [{}, USAGE, {"return_token_ids": True}, USAGE | {"return_token_ids": True}], ids=str)
async def test_a_continued_stream_says_what_one_engine_would_have_said(
    stage: StartStage, dialect: str, path: str, more: dict[str, Any]
) -> None:
    found = await stage(dialect, continuation=True)
    whole = await found.ask(path, stream=True, **more)
    want = events_of(whole)
    assert '"token_ids"' not in whole.text or "return_token_ids" in more

    def mend() -> None:
        for actor in found.decode:
            actor.breaks_after = None

    last = next(at for at, event in enumerate(want, 1) if event["choices"][0]["finish_reason"])
    for cut in range(1 + (path == CHATS), len(want)):  # a chat that has said nothing yet cannot be told from reasoning
        for actor in found.decode:
            actor.breaks_after, actor.broke = cut, mend  # whoever is asked first
        before = sum(len(actor.bodies) for actor in found.decode)
        got = await found.ask(path, stream=True, **more)
        asked = sum(len(actor.bodies) for actor in found.decode) - before
        assert asked == (2 if cut < last else 1), cut  # behind the last token nobody else need be asked
        assert events_of(got) == want, cut
    assert await found.settled()
    assert await found.running.metric('kvparams_proxy_requests_total{outcome="midway"}') == 0
    if dialect == "nixl":
        assert len(set(found.transfers("prefill"))) == len(found.transfers("prefill"))


async def test_a_stream_goes_on_as_often_as_the_request_may_be_tried_again(stage: StartStage) -> None:
    found = await stage(engines=4, continuation=True, retries=3)
    asked: dict[str, Any] = {"stream": True, "max_tokens": 12, **USAGE}
    want = events_of(await found.ask(**asked))
    for actor in found.decode:
        actor.breaks_after = 2
    *events, last = events_of(await found.ask(**asked))
    assert events == want[:8]  # two by each of the four
    assert "error" in last
    found.decode[0].breaks_after = None
    assert events_of(await found.ask(**asked)) == want
    assert await found.settled()


@pytest.mark.parametrize("fault", ["500", "silent", "reset", "garbage"])
async def test_whoever_goes_on_may_fail_before_its_first_byte(stage: StartStage, fault: Fault) -> None:
    found = await stage(engines=3, continuation=True, retries=4, decode_timeout_s=leg_limit_s(fault))
    want = events_of(await found.ask(stream=True, **USAGE))
    for actor in found.decode:
        actor.breaks_after = 2
    for _ in range(3):
        for actor in found.decode[1:]:
            actor.fails(fault, 1)
        found.decode[0].breaks_after = None if found.decode[0].breaks_after else 2
        got = await found.ask(stream=True, **USAGE)
        text = "".join(e["choices"][0]["text"] for e in events_of(got) if e != "[DONE]" and e.get("choices"))
        whole = "".join(e["choices"][0]["text"] for e in want[:8])
        assert whole.startswith(text)
        assert (events_of(got) == want) is (got.text.endswith("data: [DONE]\n\n"))
        assert events_of(got)[-1] == "[DONE]" or "error" in events_of(got)[-1]
    assert await found.settled()


async def test_an_event_that_could_not_be_corrected_is_computed_again(stage: StartStage) -> None:
    """It is JSON, but what must change in it stands there twice."""
    found = await stage(continuation=True)
    want = events_of(await found.ask(stream=True))
    details = b'"usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":1}}'
    choice = b'{"index":0,"text":"?","token_ids":[63],"finish_reason":null}'

    def mend() -> None:
        for actor in found.decode:
            actor.breaks_after = None

    for actor in found.decode:
        actor.breaks_after = 2
        actor.breaks_with = b'{"id":"x","choices":[%b],%b,%b}' % (choice, details, details)
        actor.broke = mend
    got = await found.ask(stream=True)
    assert events_of(got) == want
    assert await found.settled()


async def test_an_error_of_whoever_goes_on_is_not_lost(stage: StartStage) -> None:
    """It says so in an event of the stream, as engines do: that must not be taken for the end of the answer."""
    found = await stage(continuation=True, retries=1)
    for actor in found.decode:
        actor.breaks_after = 2
        actor.breaks_with = {"error": {"message": "out of memory", "code": 500}}
    got = await found.ask(stream=True)
    events = events_of(got)
    assert [bool(event.get("choices")) for event in events] == [True] * 4 + [False]
    assert events[-1]["error"]["code"] == "decode_failed"
    assert "out of memory" not in got.text
    assert await found.settled()


async def test_what_only_a_chat_has_is_not_sent_where_it_goes_on_as_a_completion(stage: StartStage) -> None:
    """There `false` may be read as 0, which asks for something else."""
    found = await stage(continuation=True)
    for actor in found.decode:
        actor.breaks_after = 3
    chat_only = {"logprobs": False, "top_logprobs": None, "max_completion_tokens": 8, "add_generation_prompt": True}
    await found.ask(CHATS, stream=True, temperature=0.5, **chat_only)
    bodies = [json.loads(body) for actor in found.decode for body in actor.bodies]
    resumed = [body for body in bodies if isinstance(body.get("prompt"), list)]
    assert len(resumed) == 2
    for body in resumed:
        assert not body.keys() & {"messages", *chat_only}
        assert body["temperature"] == 0.5


class Slow:
    """A client that takes nothing from its first event on. It counts the events of the first engine."""

    watcher: Any
    got = 0
    ended = False

    def watch(self, watcher: Any) -> None:
        self.watcher = watcher

    def head(self, status: int, headers: bytes, length: int | None) -> None: ...

    def body(self, data: bytes) -> None:
        if not self.got:
            self.got = data.count(b'"text": "x"')
            self.watcher.client_slow()

    def end(self) -> None:
        self.ended = True

    def drop(self) -> None: ...


@pytest.mark.parametrize(("mode", "connector"), [("prefill_then_decode", "content"), ("concurrent_legs", "store-meet")])
async def test_a_stream_that_goes_on_waits_for_a_client_who_takes_nothing(
    scripted: Any, proxy: Any, mode: str, connector: str
) -> None:
    """The first engine fails when its client is slow already: the second one is not read before the client has caught
    up, so what waits in the proxy has a bound."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    read = 0

    def event(choice: dict[str, Any]) -> bytes:
        data = b"data: %b\n\n" % json.dumps({"id": "x", "choices": [{"index": 0, **choice}]}).encode()
        return b"%x\r\n%b\r\n" % (len(data), data)

    async def prefill(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = json.dumps({"choices": [{"index": 0, "text": "x"}], "usage": {"prompt_tokens": 1}}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(whole))
        writer.write(whole)

    async def first(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        failed = b'data: {"error":{"message":"lost"}}\n\n'
        said = event({"text": "x", "token_ids": [65], "prompt_token_ids": [1]})
        writer.write(head + said + b"%x\r\n%b\r\n" % (len(failed), failed))

    async def second(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal read
        writer.write(head)
        await asyncio.sleep(0.1)  # beside both legs at once: prefill is good before decode says anything
        for _ in range(500):
            writer.write(event({"text": "y" * 60_000, "token_ids": [66]}))
            await writer.drain()
            read += 60_000
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    producer, one, other = await scripted(prefill), await scripted(first), await scripted(second)
    running = await proxy(
        [producer.url], [one.url, other.url], connector, continuation=True, modes=(parse_mode_flag(mode),)
    )
    body = json.dumps({"model": "stub", "prompt": "x", "max_tokens": 5_000, "stream": True}).encode()
    app = running.app
    async with app.router.lifespan_context(app) as state, asyncio.timeout(100):
        generate = state["generate"]["/v1/completions"]
        client = Slow()
        generate.handle(generate.admit([(b"content-type", b"application/json")]), body, client)
        await until(lambda: other.bodies)
        stalled_at = await stops_changing(lambda: read, 0.3)
        assert stalled_at < 20_000_000, "the second engine was read although the client took nothing"
        client.watcher.client_ready()
        await until(lambda: client.ended, 60.0)
    assert (read, client.got) == (30_000_000, 1)
