"""Tests the proxy in an engine's server: whose requests it takes, and that the app around it works on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from kvparams.instances import Instance, Role
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.secret import Secret
from kvparams_proxy.sidecar.middleware import DisaggregatedServerMixin
from tests.support.proxy.acting import Actor, answer_to
from tests.support.proxy.stage import BODY, COMPLETIONS, PROMPT
from tests.system.sidecar.acted import ActedApp
from tests.system.sidecar.serving import served

RIGHT = "".join(map(chr, answer_to(list(PROMPT.encode()), 8)))
KEY = Secret("engines-only")
SHOWN = {"authorization": "Bearer engines-only"}


def settings(remote: str) -> Settings:
    here = Instance("here", "1", Role.PREFILL, "http://127.0.0.1:9", "store")
    there = Instance("there", "1", Role.DECODE, remote, "store")
    return Settings((here, there), local_id="here", log_requests="off")


class Recorded(ActedApp):
    """Keeps which paths it was asked for."""

    def __init__(self) -> None:
        super().__init__("prefill")
        self.asked: list[tuple[str, str]] = []
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.asked.append((scope["method"], scope["path"]))
            self.scopes.append(scope)
        await super().__call__(scope, receive, send)


StartMixin = Callable[..., Awaitable[httpx.AsyncClient]]


@pytest.fixture
async def start() -> AsyncIterator[StartMixin]:
    async with AsyncExitStack() as stack:

        async def begin(app: ASGIApp, wrap: Callable[[Settings], ASGIApp] | None = None, **more: Any) -> Any:
            decode = Actor("decode")
            await decode.begin()
            stack.callback(decode.end)
            what = settings(decode.url)
            wrapped = DisaggregatedServerMixin(app, what, **more) if wrap is None else wrap(what)
            url = await stack.enter_async_context(served(wrapped))
            return await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20, trust_env=False))

        yield begin


async def test_clients_get_both_legs_and_other_proxies_one(start: StartMixin) -> None:
    app = Recorded()
    client = await start(app, key=KEY)
    got = await client.post(COMPLETIONS, json=BODY)
    assert got.json()["choices"][0]["text"] == RIGHT
    assert len(app.bodies) == 1
    assert b"authorization" in dict(app.scopes[-1]["headers"]), "its own legs carry the key as well"
    leg = {**BODY, "kv_transfer_params": {"mine": 1}}
    assert (await client.post(COMPLETIONS, json=leg, headers=SHOWN)).json() == {}
    assert app.releases == [{"mine": 1}], "the app has heard what a proxy says of KV"
    for wrong in ({"authorization": "Bearer engines-onlY"}, {"authorization": "Basic engines-only"}, {}):
        got = await client.post(COMPLETIONS, json=leg, headers=wrong)
        assert got.json()["choices"][0]["text"] == RIGHT
    assert app.releases == [{"mine": 1}], "and never what a client says"


@pytest.mark.parametrize("key", [None, KEY])
async def test_what_is_not_for_clients_is_refused_in_words(start: StartMixin, key: Secret | None) -> None:
    app = Recorded()
    client = await start(app, key=key, passed=("/v1/audio/",))
    for path in ("/v1/kvparams", "/v1/load_lora_adapter", "/sleep"):
        got = await client.post(path, json={}, headers=SHOWN if key is None else {})
        assert got.status_code == 404
        assert got.json()["error"]["message"] == f"POST {path} is not for clients here"
        assert ("POST", path) not in app.asked
    assert (await client.post("/v1/audio/speech", json={})).status_code == 200
    assert app.asked[-1] == ("POST", "/v1/audio/speech")
    if key is not None:
        assert (await client.post("/v1/kvparams", json={}, headers=SHOWN)).status_code == 200


async def test_clients_read_what_names_no_address(start: StartMixin) -> None:
    app = Recorded()
    client = await start(app, key=KEY, passed=("/v1/audio/",))
    shut = ("/server_info", "/kv_event_sources", "/openapi.json", "/v1/models/x", "/metrics/x")
    for path in shut:
        for method in ("GET", "HEAD"):
            assert (await client.request(method, path)).status_code == 404, path
        assert (await client.get(path)).json()["error"]["message"] == f"GET {path} is not for clients here"
        assert path not in {asked for _, asked in app.asked}
    assert (await client.get(COMPLETIONS)).status_code == 405
    for path in ("/v1/models", "/health", "/ping", "/version", "/metrics", "/v1/audio/voices"):
        assert (await client.get(path)).status_code == 200, path
        assert app.asked[-1] == ("GET", path)
    for path in shut:
        assert (await client.get(path, headers=SHOWN)).status_code == 200, "another proxy may"


@pytest.mark.parametrize(
    ("path", "shown", "heard"),
    [
        ("/v1/realtime", {}, ["websocket.close"]),
        ("/v1/realtime", {"authorization": "Bearer engines-onlY"}, ["websocket.close"]),
        ("/v1/realtime", SHOWN, ["websocket.accept", "websocket.send", "websocket.close"]),
        ("/v1/audio/live", {}, ["websocket.accept", "websocket.send", "websocket.close"]),
    ],
)
async def test_web_sockets_need_the_key_or_a_passed_path(path: str, shown: dict[str, str], heard: list[str]) -> None:
    async def talk(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("the engine")
        await socket.close()

    app = Starlette(routes=[WebSocketRoute("/v1/realtime", talk), WebSocketRoute("/v1/audio/live", talk)])
    ours = DisaggregatedServerMixin(app, settings("http://127.0.0.1:9"), key=KEY, passed=("/v1/audio/",))
    said = await connected(ours, path, shown)
    assert [message["type"] for message in said] == heard
    assert said[-1]["code"] == (1008 if len(heard) == 1 else 1000)
    assert (await connected(app, path, {}))[0]["type"] == "websocket.accept", "without us"


async def connected(app: ASGIApp, path: str, headers: dict[str, str]) -> list[Message]:
    """What an app says to a client that opens a web socket."""
    said: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        said.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "websocket", "path": path, "query_string": b"", "headers": raw, "subprotocols": []}
    await app(scope, receive, send)
    return said


async def test_its_own_pages_stand_under_kvparams(start: StartMixin) -> None:
    client = await start(Recorded())
    assert (await client.get("/kvparams/health")).json()["status"] == "ok"
    assert "kvparams_proxy_in_flight" in (await client.get("/kvparams/metrics")).text
    assert (await client.get("/metrics")).text.startswith('{"object":"list"'), "that one is the app's"


async def test_the_apps_lifespan_is_around_ours(start: StartMixin) -> None:
    """Ours begins when the app can answer, its probes are among what it answers; and ends before the app does."""
    seen: list[str] = []

    async def models(request: Request) -> Response:
        assert request.app is inner
        assert request.state.made == "by the lifespan"
        seen.append("models")
        return JSONResponse({"object": "list", "data": [{"id": "stub"}]})

    class Lifespan:
        async def __aenter__(self) -> dict[str, str]:
            seen.append("starts")
            return {"made": "by the lifespan"}

        async def __aexit__(self, *_: object) -> None:
            seen.append("ends")

    def wrap(what: Settings) -> ASGIApp:
        nonlocal inner
        middleware = Middleware(DisaggregatedServerMixin, what)
        inner = Starlette(
            routes=[Route("/v1/models", models)],
            middleware=[middleware],
            lifespan=lambda _: Lifespan(),  # pyright: ignore[reportArgumentType]
        )
        return inner

    inner = Starlette()
    decode = Actor("decode")
    await decode.begin()
    async with served(wrap(settings(decode.url))) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/kvparams/health")).json()["status"] == "ok"
        assert (await client.get("/v1/models")).status_code == 200
    decode.end()
    assert (seen[0], seen[-1]) == ("starts", "ends")
    assert seen.count("models") >= 2


async def test_a_server_that_starts_no_lifespan_is_told_so() -> None:
    app = DisaggregatedServerMixin(ActedApp("prefill"), settings("http://127.0.0.1:9"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        with pytest.raises(RuntimeError, match="has not started the app's lifespan"):
            await client.post(COMPLETIONS, json=BODY)


def test_settings_must_say_which_engine_it_is() -> None:
    here, there = settings("http://127.0.0.1:9").instances
    with pytest.raises(ValueError, match="do not say which instance"):
        DisaggregatedServerMixin(ActedApp("prefill"), Settings((here, there)))
    with pytest.raises(ValueError, match="no instance is called 'other'"):
        Settings((here, there), local_id="other")
    with pytest.raises(ValueError, match="beside a decode engine, the others have another role"):
        Settings((here, there, Instance("more", "1", Role.DECODE, "http://x:1", "store")), local_id="there")
    both = Instance("both", "1", Role.AGGREGATED, "http://x:1", "store")
    with pytest.raises(ValueError, match="role aggregated cannot split requests"):
        DisaggregatedServerMixin(ActedApp("prefill"), Settings((both, there), local_id="both"))


@pytest.mark.parametrize("piece", ["in one packet", "in two"])
async def test_a_request_in_the_body_of_an_upgrade_is_nobodys(start: StartMixin, piece: str) -> None:
    """uvicorn takes what follows such a head for the next request: it must not be served, in whatever packet it is."""
    engine = Recorded()
    client = await start(engine)
    inner = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    outer = inner.replace(
        b"content-length: 2", b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: %d" % len(inner)
    )
    head = outer[:-2]
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    said = b""
    if piece == "in one packet":
        writer.write(head + inner)
    else:
        writer.write(head)
        await writer.drain()
        said += await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)  # the head alone is refused
        writer.write(inner)
    async with asyncio.timeout(10):
        said += await reader.read()
    writer.close()
    assert said.startswith(b"HTTP/1.1 400 ")
    assert said.count(b"HTTP/1.1 ") == 1
    assert not [each for each in engine.asked if each[0] == "POST"]
    health = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)  # the control: a harmless one
    writer.write(health)
    async with asyncio.timeout(10):
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
