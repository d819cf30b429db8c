"""Provides an engine that keeps every request it gets, byte for byte, and answers as told."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Self

__all__ = ["Recorded", "RecordingEngine"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


@dataclass(slots=True)
class RecordingEngine:
    """Serves /health, /v1/models and completions of the model `m` on a loopback port."""

    status: int = 200
    prompt_tokens: int = 8
    cached_tokens: int = 0
    """Both are what it reports."""
    requests: list[Recorded] = field(default_factory=list[Recorded])
    running: int = 0
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Completions are answered once it is set."""
    port: int = 0
    _server: asyncio.Server | None = None
    _tasks: set["asyncio.Task[None] | None"] = field(default_factory=set["asyncio.Task[None] | None"])

    async def __aenter__(self) -> Self:
        self.go_on.set()
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def listen(self) -> None:
        """Begins to serve, on the port that it had before if it had one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Closes the port and all connections."""
        if self._server is not None:
            self._server.close()
        tasks = [task for task in self._tasks if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def record(self, request: Recorded) -> None:
        """Hears of a request before it is answered."""
        self.requests.append(request)

    async def compute(self, tokens: int) -> None:
        """Takes the time that the engine needs for these tokens of a prompt."""

    @property
    def url(self) -> str:
        """The engine's URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        """The engine as gateways name it."""
        return f"127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await _body(reader, headers)
                method, path, _ = first.split(" ")
                writer.write(await self._answer(method, path, headers, body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        if path == "/health":
            return _response(200, {})
        if path == "/v1/models":
            return _response(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})
        if method != "POST":
            return _response(404, {})
        self.record(Recorded(path, headers, body))
        details = {"cached_tokens": self.cached_tokens}
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 1, "prompt_tokens_details": details}
        self.running += 1
        try:
            await self.go_on.wait()
            await self.compute(self.prompt_tokens - self.cached_tokens)
        finally:
            self.running -= 1
        choices = [{"index": 0, "text": "x", "finish_reason": "length"}]
        return _response(self.status, {"id": "c", "model": "m", "choices": choices, "usage": usage})


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    pieces: list[bytes] = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(pieces)


def _response(status: int, document: dict[str, object]) -> bytes:
    body = json.dumps(document, separators=(",", ":")).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body
