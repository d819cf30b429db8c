"""Tests that an engine's app in this process answers a sink as the same app does over HTTP.

Each play runs twice, over a pool to a real server and in-process, and the sink must hear the same.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvparams_proxy.secret import Secret
from kvparams_proxy.sidecar import inprocess
from kvparams_proxy.sidecar.inprocess import InProcessUpstream
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.interface import ExchangeHandle, Upstream
from kvparams_proxy.upstream.types import ResponseHead, UpstreamError, UpstreamLimits, UpstreamTimeout
from tests.support.waiting import stays_true_for, stops_changing, until
from tests.system.sidecar.serving import served

WAYS = ("http", "in-process")


class Heard:
    """A sink that keeps what it hears. `at_head` and `at_body` may raise."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.body = bytearray()
        self.ends: list[UpstreamError | None] = []
        self.late = 0
        self.begun = asyncio.Event()
        self.some = asyncio.Event()
        self.over = asyncio.Event()
        self.at_head: Callable[[], None] = lambda: None
        self.at_body: Callable[[], None] = lambda: None

    def on_head(self, head: ResponseHead) -> None:
        self.late += bool(self.ends)
        assert self.head is None
        self.head = head
        self.begun.set()
        self.at_head()

    def on_body(self, data: bytes) -> None:
        self.late += bool(self.ends)
        assert data
        assert type(data) is bytes
        self.body += data
        self.some.set()
        self.at_body()

    def on_done(self, error: UpstreamError | None) -> None:
        self.ends.append(error)
        self.over.set()

    @property
    def seen(self) -> tuple[object, ...]:
        """What must be the same both ways; the words of errors may differ."""
        assert len(self.ends) == 1
        assert not self.late
        error, head = self.ends[0], self.head
        what = None if error is None else (type(error), error.connected, error.sent)
        return (what, None if head is None else (head.status, head.content_type, head.retry_after), bytes(self.body))


class App:
    """An engine's app: it does as it is told, and keeps what it saw."""

    def __init__(self, act: Callable[["App", Receive, Send], Awaitable[None]]) -> None:
        self._act = act
        self.scopes: list[Scope] = []
        self.bodies: list[bytes] = []
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.ended = asyncio.Event()
        self.cancelled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.scopes.append(scope)
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        self.asked.set()
        try:
            await self._act(self, receive, send)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.ended.set()


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers or [(b"content-type", b"a/b")]}


def piece(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def until_left(app: App, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    app.left.set()


async def whole(app: App, receive: Receive, send: Send) -> None:
    await send(start(200, (b"Content-Type", b"application/json"), (b"content-length", b"2")))
    await send({"type": "http.response.body", "body": b"{}"})


async def in_pieces(app: App, receive: Receive, send: Send) -> None:
    await send(start())
    for number in range(5):
        await send(piece(b"%d" % number))
        await asyncio.sleep(0)
    await send(piece(b"", more=False))


async def busy(app: App, receive: Receive, send: Send) -> None:
    await send(start(503, (b"content-type", b"x/y"), (b"Retry-After", b"7"), (b"content-length", b"4")))
    await send(piece(b"busy", more=False))


async def nothing(app: App, receive: Receive, send: Send) -> None:
    await send(start(200, (b"content-length", b"0")))
    await send(piece(b"", more=False))


async def breaks_off(app: App, receive: Receive, send: Send) -> None:
    await send(start())
    await send(piece(b"some"))
    await asyncio.sleep(0.01)
    raise RuntimeError("on purpose")


async def goes_on_behind_its_end(app: App, receive: Receive, send: Send) -> None:
    await in_pieces(app, receive, send)
    await until_left(app, receive)
    with suppress(RuntimeError):  # uvicorn says so, as ASGI asks of it
        await send(piece(b"more"))


async def streams(app: App, receive: Receive, send: Send) -> None:
    """For ever, until it hears that its client has left."""
    leaving = asyncio.ensure_future(until_left(app, receive))
    await send(start())
    while not leaving.done():
        await send(piece(b"x"))
        await asyncio.sleep(0.001)


async def silent(app: App, receive: Receive, send: Send) -> None:
    await until_left(app, receive)


Play = Callable[[Upstream, Heard, App], Awaitable[None]]


@asynccontextmanager
async def reached(way: str, app: ASGIApp) -> AsyncGenerator[Upstream]:
    if way == "in-process":
        upstream = InProcessUpstream(app, {})
        try:
            yield upstream
        finally:
            upstream.close()
            await upstream.wait_closed()
        return
    async with served(app, lifespan=False) as url:
        pool = UpstreamConnectionPool(url, UpstreamLimits())
        try:
            yield pool
        finally:
            pool.close()


def post(upstream: Upstream, sink: Heard, body: bytes = b"asked") -> ExchangeHandle:
    return upstream.exchange(upstream.request(b"/v1/x", b"x-request-id: r-1\r\n", body), sink)


async def to_the_end(upstream: Upstream, sink: Heard, app: App) -> None:
    post(upstream, sink)
    assert sink.head is None, "nothing is heard from within exchange"
    await sink.over.wait()


async def aborted(upstream: Upstream, sink: Heard, app: App) -> None:
    handle = post(upstream, sink)
    await sink.some.wait()
    handle.abort(UpstreamTimeout("took too long"))
    handle.abort(UpstreamError("once more"))  # a no-op, as all below
    handle.discard()
    handle.pause()
    handle.resume()
    assert not handle.half_close()
    await app.left.wait()
    sink.body = sink.body[:1]


async def aborted_before_its_answer(upstream: Upstream, sink: Heard, app: App) -> None:
    handle = post(upstream, sink)
    await app.asked.wait()
    handle.abort(UpstreamError("the client has left"))
    await app.left.wait()


async def aborted_while_paused(upstream: Upstream, sink: Heard, app: App) -> None:
    handle = post(upstream, sink)
    await sink.some.wait()
    handle.pause()
    await stays_true_for(0.01, lambda: not app.left.is_set())
    handle.abort(UpstreamError("the client has left"))
    await app.left.wait()
    sink.body = sink.body[:1]


async def refused_at_its_head(upstream: Upstream, sink: Heard, app: App) -> None:
    def no() -> None:
        raise ValueError("not this one")

    sink.at_head = no
    post(upstream, sink)
    await sink.over.wait()
    await app.left.wait()


async def refused_in_its_body(upstream: Upstream, sink: Heard, app: App) -> None:
    def no() -> None:
        raise UpstreamTimeout("enough")

    sink.at_body = no
    post(upstream, sink)
    await sink.over.wait()
    await app.left.wait()
    sink.body = sink.body[:1]


async def a_fault_of_ours(upstream: Upstream, sink: Heard, app: App) -> None:
    def no() -> None:
        raise KeyError("a bug")

    sink.at_body = no
    post(upstream, sink)
    await sink.over.wait()
    await app.left.wait()
    sink.body = sink.body[:1]


async def nobody_waits(upstream: Upstream, sink: Heard, app: App) -> None:
    handle = post(upstream, sink)
    await app.asked.wait()
    assert handle.half_close()
    await sink.over.wait()
    await app.left.wait()


async def closed(upstream: Upstream, sink: Heard, app: App) -> None:
    post(upstream, sink)
    await sink.some.wait()
    upstream.close()
    assert not sink.ends, "not from within"
    await sink.over.wait()
    await app.left.wait()
    sink.body = sink.body[:1]


async def asked_after_the_close(upstream: Upstream, sink: Heard, app: App) -> None:
    upstream.close()
    post(upstream, sink)
    assert not sink.ends
    await sink.over.wait()
    assert not app.scopes


PLAYS: dict[str, tuple[Callable[[App, Receive, Send], Awaitable[None]], Play]] = {
    "whole": (whole, to_the_end),
    "in pieces": (in_pieces, to_the_end),
    "busy": (busy, to_the_end),
    "an empty body": (nothing, to_the_end),
    "breaks off": (breaks_off, to_the_end),
    "goes on behind its end": (goes_on_behind_its_end, to_the_end),
    "aborted": (streams, aborted),
    "aborted before its answer": (silent, aborted_before_its_answer),
    "aborted while paused": (streams, aborted_while_paused),
    "refused at its head": (streams, refused_at_its_head),
    "refused in its body": (streams, refused_in_its_body),
    "a fault of ours": (streams, a_fault_of_ours),
    "nobody waits": (silent, nobody_waits),
    "closed": (streams, closed),
    "asked after the close": (whole, asked_after_the_close),
}


async def played(way: str, name: str) -> tuple[object, ...]:
    act, play = PLAYS[name]
    app, sink = App(act), Heard()
    async with asyncio.timeout(20), reached(way, app) as upstream:
        await play(upstream, sink, app)
        if app.scopes:
            await app.ended.wait()
        for _ in range(20):  # whatever else it says is not heard
            await asyncio.sleep(0)
    assert not app.cancelled, "an app that minds its client is never cancelled"
    return (*sink.seen, tuple(app.bodies))


@pytest.mark.parametrize("name", PLAYS)
async def test_a_sink_hears_the_same_both_ways(name: str, caplog: pytest.LogCaptureFixture) -> None:
    over_http = await played("http", name)
    assert await played("in-process", name) == over_http
    errors = [record for record in caplog.records if record.name == "kvparams_proxy.sidecar.inprocess"]
    assert bool(errors) is (name in ("breaks off", "a fault of ours"))


@pytest.mark.parametrize("way", WAYS)
async def test_what_the_app_is_asked(way: str) -> None:
    app, sink = App(whole), Heard()
    async with asyncio.timeout(10), reached(way, app) as upstream:
        post(upstream, sink, b'{"a":1}')
        await sink.over.wait()
        asked = Heard()
        upstream.exchange(upstream.get(b"/v1/models"), asked)
        await asked.over.wait()
    first, second = app.scopes
    assert (first["method"], first["path"], first["query_string"]) == ("POST", "/v1/x", b"")
    assert (second["method"], second["path"]) == ("GET", "/v1/models")
    headers = dict(first["headers"])
    assert len(headers) == len(first["headers"])
    expected = {b"x-request-id": b"r-1", b"content-length": b"7", b"content-type": b"application/json"}
    assert {name: headers[name] for name in expected} == expected
    assert b"host" in headers
    assert app.bodies == [b'{"a":1}', b""]


@pytest.mark.parametrize("way", WAYS)
async def test_a_paused_app_is_held_up_within_a_fixed_buffer(way: str) -> None:
    """It has 64 MiB to say; the control: it says them all once it may."""
    said, total = 0, 64 << 20

    async def chatter(app: App, receive: Receive, send: Send) -> None:
        nonlocal said
        await send(start())
        while said < total:
            await send(piece(b"z" * 65536))
            said += 65536
        await send(piece(b"", more=False))

    app, sink = App(chatter), Heard()
    async with asyncio.timeout(60), reached(way, app) as upstream:
        handle = post(upstream, sink)
        await sink.some.wait()
        handle.pause()
        assert await stops_changing(lambda: said, 0.2) < total // 2  # it is stuck
        heard = len(sink.body)
        await stays_true_for(0.05, lambda: len(sink.body) == heard)
        handle.resume()
        await sink.over.wait()
    assert len(sink.body) == total


async def test_an_app_that_does_not_mind_its_client_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inprocess, "_GRACE_S", 0.05)

    async def deaf(app: App, receive: Receive, send: Send) -> None:
        await send(start())
        await send(piece(b"x"))
        await asyncio.get_running_loop().create_future()

    app, sink = App(deaf), Heard()
    async with asyncio.timeout(10), reached("in-process", app) as upstream:
        handle = post(upstream, sink)
        await sink.some.wait()
        handle.discard()
        await app.ended.wait()
        await asyncio.sleep(0)
        assert upstream.open_connections == 0
    assert app.cancelled
    assert not sink.ends, "discard tells nobody"
    assert "cancelled" in caplog.text


async def test_a_call_given_up_before_it_began_is_never_seen() -> None:
    app, sink = App(whole), Heard()
    async with reached("in-process", app) as upstream:
        handle = post(upstream, sink)
        handle.abort(UpstreamError("the client has left"))
        await until(lambda: upstream.open_connections == 0)
        await stays_true_for(0.01, lambda: not app.scopes)
    assert not app.scopes
    (error,) = sink.ends
    assert error is not None
    assert (error.connected, error.sent) == (False, False)


@pytest.mark.parametrize(
    "messages",
    [
        [piece(b"x")],
        [start(), start()],
        [{"type": "http.response.start", "status": 200}],
    ],
    ids=["no status", "two", "no end"],
)
async def test_an_app_that_does_not_keep_to_asgi_has_failed(messages: list[Any]) -> None:
    async def wrong(app: App, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    app, sink = App(wrong), Heard()
    async with asyncio.timeout(10), reached("in-process", app) as upstream:
        post(upstream, sink)
        await sink.over.wait()
    assert sink.seen[0] == (UpstreamError, True, True)


async def test_the_engines_own_key_and_state_go_with_every_call() -> None:
    app, sink = App(whole), Heard()
    state = {"made": "by the lifespan"}
    upstream = InProcessUpstream(app, {"app": "the app", "state": state}, key=Secret("sesame"))
    assert upstream.has_own_key
    post(upstream, sink)
    await sink.over.wait()
    upstream.close()
    await upstream.wait_closed()
    (scope,) = app.scopes
    assert (b"authorization", b"Bearer sesame") in scope["headers"]
    assert scope["app"] == "the app"
    assert scope["state"] == state
    assert scope["state"] is not state, "what one request puts there is not for others"
