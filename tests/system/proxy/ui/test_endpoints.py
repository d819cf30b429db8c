"""Tests the live page's endpoints: who gets what, that nothing secret is among it, and that viewers are bounded."""

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvparams.instances import Role
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.secret import Secret
from kvparams_proxy.tokenization.tokenizer_choice import TokenizationMethod
from kvparams_proxy.ui import snapshot_feed, ui_routes
from kvparams_proxy.ui.snapshot_feed import MOST_VIEWERS
from tests.support.proxy.acting import Actor
from tests.support.proxy.fixtures import instance
from tests.support.proxy.fixtures import running as running_proxy
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

ADMIN, VIEWER = "admin-token-canary", "viewer-token-canary"
TOKENS: Mapping[str, object] = {"admin_token": Secret(ADMIN), "viewer_token": Secret(VIEWER)}
BODY: dict[str, Any] = {"model": "stub", "prompt": "canary-of-the-prompt " * 40, "max_tokens": 3}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


StartStubbed = Callable[..., Awaitable[Any]]


@pytest.fixture
def shown(stub: StubEngines, proxy: Any) -> StartStubbed:
    """Starts a proxy with both tokens before the stub engines."""

    async def start(**changes: object) -> Any:
        urls = {role: [each.url for each in stub.engines if each.role == role] for role in ("prefill", "decode")}
        return await proxy(urls["prefill"], urls["decode"], **{**TOKENS, **changes})

    return start


class Stream:
    """An open stream of events."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._events = response.aiter_lines()

    async def snapshot(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            async for line in self._events:
                if line.startswith("data: "):
                    return json.loads(line[6:])
        raise AssertionError("the stream has ended")

    async def ended(self) -> None:
        async with asyncio.timeout(10):
            async for _ in self._events:
                pass


async def open_stream(stack: AsyncExitStack, running: Any, token: str = VIEWER) -> Stream:
    response = await stack.enter_async_context(running.client.stream("GET", "/ui/events", headers=bearer(token)))
    return Stream(response)


# who gets what


@pytest.mark.parametrize("path", ["/", "/ui", "/ui/", "/ui/state", "/ui/events", "/ui/app.js"])
async def test_without_a_token_there_is_no_page(stubbed: Any, path: str) -> None:
    assert (await stubbed.client.get(path)).status_code == 404
    assert "--viewer-token-file" in (await stubbed.client.get("/ui")).json()["error"]["message"]


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", f"Basic {VIEWER}", f"Bearer {VIEWER}x", "Bearer é"]
)
@pytest.mark.parametrize("path", ["/ui/state", "/ui/events"])
async def test_data_needs_a_token_and_files_do_not(shown: StartStubbed, path: str, given: str | None) -> None:
    running = await shown()
    headers = [] if given is None else [(b"authorization", given.encode("latin-1"))]
    got = await running.client.get(path, headers=headers)
    assert got.status_code == 401
    assert got.headers["www-authenticate"].startswith("Bearer")
    assert got.json()["error"]["code"] == "invalid_viewer_token"
    assert VIEWER not in got.text
    assert (await running.client.get("/ui")).status_code == 200


@pytest.mark.parametrize(("token", "access"), [(VIEWER, "viewer"), (ADMIN, "admin")])
async def test_either_token_opens_the_page_and_only_one_the_admin_api(
    shown: StartStubbed, stack: AsyncExitStack, token: str, access: str
) -> None:
    running = await shown()
    got = await running.client.get("/ui/state", headers=bearer(token))
    assert got.status_code == 200
    assert got.headers["x-kvparams-access"] == access
    assert got.headers["cache-control"] == "no-store"
    stream = await open_stream(stack, running, token)
    assert stream.response.headers["content-type"].startswith("text/event-stream")
    assert (await stream.snapshot())["workers"] == 1
    expected = 200 if access == "admin" else 401
    assert (await running.client.get("/admin", headers=bearer(token))).status_code == expected
    assert (await running.client.post("/admin/instances/decode-0/drain", headers=bearer(token))).status_code == expected


async def test_one_token_is_enough(shown: StartStubbed) -> None:
    running = await shown(viewer_token=None)
    assert (await running.client.get("/ui/state", headers=bearer(ADMIN))).status_code == 200
    assert (await running.client.get("/ui/state", headers=bearer(VIEWER))).status_code == 401
    other = await shown(admin_token=None)
    assert (await other.client.get("/ui/state", headers=bearer(VIEWER))).status_code == 200
    assert (await other.client.get("/admin", headers=bearer(ADMIN))).status_code == 404


# files


def files() -> list[str]:
    return sorted(path.name for path in ui_routes._FOLDER.iterdir())  # pyright: ignore[reportPrivateUsage]


async def test_every_file_is_served_with_a_strict_policy(shown: StartStubbed) -> None:
    running = await shown()
    for path in ("/ui", *(f"/ui/{name}" for name in files())):
        got = await running.client.get(path)
        assert got.status_code == 200, path
        policy = dict(part.strip().split(" ", 1) for part in got.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["img-src"] == "'self' data:"
        assert "unsafe" not in got.headers["content-security-policy"]
        assert got.headers["x-content-type-options"] == "nosniff"
        assert got.headers["referrer-policy"] == "no-referrer"
    for path, place in (("/ui/", "../ui"), ("/", "ui")):
        redirect = await running.client.get(path)
        assert redirect.status_code == 307
        assert redirect.headers["location"] == place


@pytest.mark.parametrize(
    "name", ["../ui_routes.py", "..%2fui_routes.py", "%2e%2e/ui_routes.py", "app.js/", "nothing.js"]
)
async def test_nothing_else_is_served(shown: StartStubbed, name: str) -> None:
    running = await shown()
    assert (await running.client.get(f"/ui/{name}")).status_code in (404, 405)


def test_no_file_has_inline_script_or_style_or_makes_markup_of_data() -> None:
    for name in files():
        text = (ui_routes._FOLDER / name).read_text()  # pyright: ignore[reportPrivateUsage]
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert forbidden not in text, (name, forbidden)
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", text), name
        assert not re.search(
            r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w.]+\.\w+", re.sub(r"http://10\.0\.0\.7:8000", "", text)
        ), name


# what is in it


async def test_counts_are_those_of_metrics(shown: StartStubbed) -> None:
    running = await shown()
    for number in range(5):
        await running.client.post("/v1/completions", json={**BODY, "stream": number % 2 == 0})
    await running.client.post("/v1/completions", json={**BODY, "max_tokens": 0})
    snapshot = (await running.client.get("/ui/state", headers=bearer(VIEWER))).json()
    lines = (await running.client.get("/metrics")).text.splitlines()
    exposed = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    assert snapshot["counters"]['kvparams_proxy_requests_total{outcome="ok"}'] == 5
    assert snapshot["counters"] == {series: exposed[series] for series in snapshot["counters"]}
    columns = snapshot["columns"]
    for values in snapshot["engines"]:
        row = dict(zip(columns, values, strict=True))
        labels = f'{{instance="{row["id"]}",role="{row["role"]}"}}'
        for column, name in (("legs", "legs_total"), ("in_flight", "in_flight"), ("leases", "leases")):
            assert row[column] == exposed[f"kvparams_proxy_{name}{labels}"]
    assert sum(row[columns.index("legs")] for row in snapshot["engines"]) == 10


async def test_a_request_is_shown_with_its_steps_and_the_reasons(shown: StartStubbed) -> None:
    running = await shown(policy="cache_aware", tokenizers={None: TokenizationMethod.BYTES})
    for _ in range(3):
        await running.client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    snapshot = (await running.client.get("/ui/state", headers=bearer(VIEWER))).json()
    row = snapshot["requests"]["recent"][0]
    assert row["id"] == "mine"
    assert row["outcome"] == "ok"
    assert [state for state, _, _ in row["spans"]] == ["created", "prefill", "result", "decode", "first_byte", "done"]
    assert row["total_ms"] == row["spans"][-1][2]
    assert [role for role, _ in row["route"]] == ["prefill", "decode"]
    decision = row["decision"]
    assert decision["chosen"] == row["route"][0][1]
    assert decision["candidates"] == 2
    assert len(decision["others"]) == 1
    assert snapshot["requests"]["slow"]
    assert snapshot["prefixes"][0][2:4] == [2, 3]  # all three prompts have these blocks


async def test_a_running_request_is_shown_until_it_ends(stack: AsyncExitStack, proxy: Any) -> None:
    prefill, decode = Actor("prefill"), Actor("decode")
    for actor in (prefill, decode):
        await actor.begin()
        stack.callback(actor.end)
    decode.held = asyncio.Event()
    running = await proxy([prefill.url], [decode.url], **TOKENS)
    asked = asyncio.create_task(running.client.post("/v1/completions", json={"model": "stub", "prompt": "x"}))
    stream = await open_stream(stack, running)
    snapshot = await stream.snapshot()
    while not snapshot["states"]["decoding"]:
        snapshot = await stream.snapshot()
    (row,) = snapshot["requests"]["running"]
    assert row["outcome"] == ""
    assert row["spans"][-1][:2] == ["decode", "decode-0"]
    decode.held.set()
    assert (await asked).status_code == 200
    while snapshot["requests"]["running"]:
        snapshot = await stream.snapshot()
    assert snapshot["requests"]["recent"][0]["outcome"] == "ok"


async def test_nothing_secret_is_in_what_a_viewer_gets(stub: StubEngines, shown: StartStubbed) -> None:
    running = await shown(policy="cache_aware", tokenizers={None: TokenizationMethod.BYTES})
    ids = [70001 + number for number in range(300)]
    for body in (BODY, {**BODY, "prompt": ids}, {**BODY, "stream": True}, {**BODY, "max_tokens": 0}):
        for _ in range(2):
            await running.client.post("/v1/completions", json=body, headers=bearer("client-key-canary"))
    chat = {"model": "stub", "messages": [{"role": "user", "content": "canary-of-the-chat"}]}
    await running.client.post("/v1/chat/completions", json=chat)
    got = await running.client.get("/ui/state", headers=bearer(VIEWER))
    snapshot = got.json()
    assert snapshot["requests"]["recent"]
    assert snapshot["prefixes"]
    pages = [got.text]
    for path in ("/ui", "/ui/app.js", "/metrics"):
        pages.append((await running.client.get(path)).text)
    for text in pages:
        for canary in ("canary", "127.0.0.1"):
            assert canary not in text, canary
        for number in (*ids[:3], *(each.port for each in stub.engines)):  # not as part of a longer number or a hash
            assert not re.search(rf"(?<![0-9a-f.]){number}(?![0-9a-f])", text), number


# viewers


async def test_viewers_are_bounded(shown: StartStubbed, stack: AsyncExitStack) -> None:
    running = await shown()
    for _ in range(MOST_VIEWERS):
        await open_stream(stack, running)
    refused = await running.client.get("/ui/events", headers=bearer(ADMIN))
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "too_many_viewers"
    assert (await running.client.get("/ui/state", headers=bearer(VIEWER))).status_code == 200
    await stack.aclose()


async def test_the_place_of_a_viewer_who_leaves_is_free(shown: StartStubbed) -> None:
    running = await shown()
    for _ in range(MOST_VIEWERS + 4):
        async with AsyncExitStack() as one:
            stream = await open_stream(one, running)
            assert stream.response.status_code in (200, 503)

    async def is_free() -> bool:
        async with AsyncExitStack() as one:
            return (await open_stream(one, running)).response.status_code == 200

    await until(is_free)


async def test_a_viewer_who_reads_nothing_is_dropped_and_costs_no_memory(
    shown: StartStubbed, monkeypatch: pytest.MonkeyPatch, stack: AsyncExitStack
) -> None:
    monkeypatch.setattr(ui_routes, "_SLOW_S", 0.3)
    running = await shown()
    big = "x" * 8_000_000
    real = snapshot_feed._encode  # pyright: ignore[reportPrivateUsage]

    def encode(snapshot: dict[str, Any]) -> bytes:
        return real({**snapshot, "big": big})

    monkeypatch.setattr(snapshot_feed, "_encode", encode)
    other = await open_stream(stack, running)
    assert (await other.snapshot())["workers"] == 1
    before = await running.metric("kvparams_proxy_client_connections ")
    slow = socket.create_connection(("127.0.0.1", running.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    slow.sendall(f"GET /ui/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {VIEWER}\r\n\r\n".encode())

    async def is_there() -> bool:
        return await running.metric("kvparams_proxy_client_connections ") == before + 1

    await until(is_there)

    async def is_dropped() -> bool:
        return await running.metric("kvparams_proxy_client_connections ") == before

    await until(is_dropped, 15.0)
    assert (await other.snapshot())["workers"] == 1
    slow.close()


async def test_streams_end_when_the_proxy_stops(stub: StubEngines) -> None:
    engines = [instance(Role(each.role), each.url, "nixl", number) for number, each in enumerate(stub.engines)]
    settings = replace(Settings(tuple(engines)), admin_token=Secret(ADMIN))
    async with AsyncExitStack() as server, httpx.AsyncClient(trust_env=False, timeout=10) as client:
        served = await server.enter_async_context(running_proxy(settings, True))
        url = f"http://127.0.0.1:{served.port}/ui/events"
        async with client.stream("GET", url, headers=bearer(ADMIN)) as response:
            stream = Stream(response)
            assert (await stream.snapshot())["status"] == "ok"
            stopping = asyncio.create_task(server.aclose())  # it waits for ten seconds at most
            await stream.ended()
            await stopping
