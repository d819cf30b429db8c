"""Provides a proxy before engines of each role that keep every request, and scripts of encode engines."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.proxy.fixtures import MODELS
from tests.system.proxy.test_legs import ANSWER, NIXL, answering

__all__ = [
    "CHAT_ANSWER",
    "ENCODED",
    "HANDED_ON",
    "HASH",
    "PEER",
    "PICTURE",
    "Script",
    "Site",
    "chat",
    "encoding",
    "failing",
    "site",
]

Script = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

HASH = "4d7721c50a37c90758c55ef5441692a3c3e0fd2ed36247bb0381d3fba3c0864d"
PEER = {"peer_host": "127.0.0.1", "peer_port": 5601, "size_bytes": 16_384, "shape": [16, 256]}
ENCODED: dict[str, Any] = {HASH: {"item_indices": [0], "metadata": {}, **PEER}}
HANDED_ON = {HASH: {"item_indices": [0], **PEER}}
"""What prefill is told of it."""
CHAT_ANSWER = {
    **ANSWER,
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}],
}
PICTURE = "data:image/png;base64," + "iVBORw0KGgo" * 100


def chat(url: str = PICTURE, **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "Who?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": "stub", "messages": [{"role": "user", "content": content}], "max_tokens": 64, **more}


class Site:
    """A proxy before an engine of each role, and the order in which they were asked."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.running: Any = None
        self.encoders: list[Any] = []

    def noting(self, who: str, script: Script) -> Script:
        async def note(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if b'"messages"' in body or b'"input"' in body or b'"prompt"' in body:
                self.order.append(who)
                self.bodies.append(json.loads(body))
            await script(body, reader, writer)

        return note


@pytest.fixture
def site(scripted: Any, proxy: Any) -> Any:
    """Start it: `await site(encode_script, ...)`. `models`: what prefill and decode engines list."""

    async def start(
        *encode: Script,
        answer: dict[str, Any] = CHAT_ANSWER,
        decoding: Script | None = None,
        models: bytes = MODELS,
        **changes: Any,
    ) -> Site:
        site = Site()
        prefill = await scripted(site.noting("prefill", answering(answer | {"kv_transfer_params": NIXL})))
        telling: Script = answering(answer | {"ec_transfer_params": ENCODED})
        decode = await scripted(site.noting("decode", decoding or telling))
        prefill.models = decode.models = models
        engines = [await scripted(site.noting(f"encode-{place}", each)) for place, each in enumerate(encode)]
        site.encoders = engines
        urls = [engine.url for engine in engines]
        site.running = await proxy([prefill.url], [decode.url], encode=urls, **changes)
        return site

    return start


def encoding(said: Any = ENCODED, answer: dict[str, Any] = CHAT_ANSWER) -> Script:
    return answering(answer | {"ec_transfer_params": said})


def failing(status: bytes = b"500 X") -> Script:
    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: 2\r\n\r\n{}" % status)

    return script
