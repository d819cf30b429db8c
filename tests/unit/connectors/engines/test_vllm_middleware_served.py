"""Tests `KVParamsMiddleware` on a real uvicorn, around a Starlette application that checks keys as vLLM does."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvparams_connectors.engines.vllm.middleware import KVParamsMiddleware
from tests.support.waiting import until

OURS = {"kv_connector": "KVParamsConnector", "kv_connector_extra_config": {"store": "memory://"}}
NIXL: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {}}
WITH_KEY = "Authorization: Bearer key\r\n"


class RequireKey:
    """Answers 401 without a read, as vLLM's `AuthenticationMiddleware` does."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (b"authorization", b"Bearer key") not in scope["headers"]:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class Served:
    """The application, and what it has seen."""

    def __init__(self, transfer: dict[str, Any]) -> None:
        self.seen: list[Any] = []
        self.has_begun = False
        self.app = Starlette(
            routes=[Route("/v1/completions", self._complete, methods=["POST"])],
            middleware=[Middleware(KVParamsMiddleware), Middleware(RequireKey)],
            lifespan=self._lifespan,
        )
        told = SimpleNamespace(kv_load_failure_policy="fail", **transfer)
        self.app.state.vllm_config = SimpleNamespace(kv_transfer_config=told)
        config = uvicorn.Config(self.app, port=0, ws="none", log_config=None, timeout_graceful_shutdown=5)
        self.server = uvicorn.Server(config)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        self.has_begun = True
        yield

    async def _complete(self, request: Request) -> Response:
        self.seen.append(await request.json())
        return JSONResponse({"ok": True})

    async def ask(self, head: str, text: bytes) -> tuple[int, Any]:
        """Returns status and body of the answer to what is sent, which may lack its end."""
        port = self.server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            line = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            writer.write(f"{line}{head}Connection: close\r\n\r\n".encode() + text)
            async with asyncio.timeout(20):
                answer = await reader.read()
        finally:
            writer.close()
        start, _, content = answer.partition(b"\r\n\r\n")
        return int(start.split()[1]), json.loads(content)


@asynccontextmanager
async def serving() -> AsyncGenerator[Served]:
    one = Served(OURS)
    task = asyncio.create_task(one.server.serve())
    try:
        await until(lambda: one.server.started or task.done(), 20.0)
        yield one
    finally:
        one.server.should_exit = True
        async with asyncio.timeout(20):
            await task


async def test_an_engine_without_our_connector_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    one = Served(NIXL)
    with caplog.at_level(logging.ERROR, "uvicorn.error"):
        async with asyncio.timeout(20):
            with suppress(SystemExit):  # of uvicorn 0.50 and newer
                await one.server.serve()
    assert not one.server.started
    assert not one.has_begun
    assert "needs --kv-transfer-config with kv_connector KVParamsConnector" in caplog.text


async def test_the_engine_starts_with_its_own_lifespan_and_a_key_comes_before_the_body() -> None:
    async with serving() as one:
        assert one.has_begun
        begun = b'{"kv_transfer_params": '
        assert await one.ask("Content-Length: 1000000000\r\n", begun) == (401, {"error": "Unauthorized"})
        good = json.dumps({"prompt": "p", "kv_transfer_params": '{"x": 1}'}).encode()
        assert (await one.ask(f"{WITH_KEY}Content-Length: {len(good)}\r\n", good)) == (200, {"ok": True})
        assert one.seen == [{"prompt": "p", "kv_transfer_params": {"x": 1}}]


async def test_a_refusal_is_the_only_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as one:
        wrong = b'{"kv_transfer_params": {"kvparams": {}}}'
        with caplog.at_level(logging.ERROR):
            status, answer = await one.ask(f"{WITH_KEY}Content-Length: {len(wrong)}\r\n", wrong)
            chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(wrong), wrong)
            assert (await one.ask(f"{WITH_KEY}Transfer-Encoding: chunked\r\n", chunked))[0] == status
        assert (status, answer["error"]["param"]) == (400, "kv_transfer_params.kvparams.version")
        assert one.seen == []
        assert not caplog.records
