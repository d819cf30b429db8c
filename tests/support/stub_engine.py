"""Runs a stub OpenAI engine: one process that plays several prefill and decode engines, each on its own port.

Tests judge the proxy by the stub's counts (`GET /stats`). So a decode request counts as one with KV only if it carries
what an engine would need to fetch that KV. A client that leaves is counted and leaves nothing live behind.

    python tests/support/stub_engine.py --prefill 8100 --prefill 8101 --decode 8102 --decode 8103 [--itl-ms 20 ...]

It serves completions and chat, whole and streamed (`max_tokens` events and `[DONE]`). One line of JSON on stdout says
which ports are served (port 0 picks a free one). Also on every port: GET /health, /v1/models, /stats (all ports),
/metrics (what a file has), /reset (counters to zero), /set?ttft_ms=..&itl_ms=..&prefill_ms=.. (delays of all ports).
"""

import argparse
import asyncio
import json
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, fields
from itertools import count
from pathlib import Path
from typing import Self, cast
from urllib.parse import parse_qsl

import uvloop

from tests.support.stub_answers import Writer, plain_answer
from tests.support.stub_connection import Connection, Counters, Delays, Engine, Role

__all__ = ["Counters", "Delays", "Engine", "StubEngines"]

_BACKLOG = 2048


class StubEngines:
    """The engines of one process. `async with await StubEngines.start(...)` serves until the block is left."""

    def __init__(self, delays: Delays, model: str, cached_tokens: int, metrics: bytes | None) -> None:
        self.delays = delays
        self.model = model
        self.engines: list[Engine] = []
        self._serials = count(1)
        self._cached_tokens = cached_tokens
        self._metrics = metrics
        self._servers = AsyncExitStack()
        self._connections: set[Connection] = set()

    @classmethod
    async def start(
        cls,
        *,
        prefill: Sequence[int],
        decode: Sequence[int],
        delays: Delays | None = None,
        model: str = "stub",
        cached_tokens: int = 0,
        metrics: bytes | None = None,
    ) -> Self:
        """Listen on these ports (0: any free one); every engine reports `cached_tokens` as found in its own cache."""
        stub = cls(delays or Delays(), model, cached_tokens, metrics)
        try:
            for port in prefill:
                await stub._listen("prefill", port)
            for port in decode:
                await stub._listen("decode", port)
        except BaseException:
            await stub.close()
            raise
        return stub

    async def _listen(self, role: Role, port: int) -> None:
        listener = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        real_port = cast("tuple[str, int]", listener.getsockname())[1]
        writer = Writer(
            model=self.model.encode(),
            engine_id=b"engine-%d" % real_port,
            side_channel_port=real_port + 1000,
            cached_tokens=self._cached_tokens,
        )
        engine = Engine(role, real_port, self.delays, writer)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(engine, self._serials, self.control, self._connections), sock=listener, backlog=_BACKLOG
        )
        self.engines.append(engine)
        await self._servers.enter_async_context(server)

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        for connection in tuple(self._connections):
            connection.drop()
        await self._servers.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def control(self, target: str) -> bytes:
        """The HTTP answer to anything that is not a completion."""
        path, _, query = target.partition("?")
        if path == "/health":
            return plain_answer(b"200 OK", b"ok", b"text/plain")
        if path == "/v1/models":
            model = {"id": self.model, "object": "model", "created": 1790000000, "owned_by": "stub"}
            return _json_answer({"object": "list", "data": [model]})
        if path == "/metrics" and self._metrics is not None:
            return plain_answer(b"200 OK", self._metrics, b"text/plain")
        if path == "/stats":
            return _json_answer({str(each.port): {"role": each.role, **asdict(each.counters)} for each in self.engines})
        if path == "/reset":
            for engine in self.engines:
                engine.counters.reset()
            return _json_answer({})
        if path == "/set":
            return self._set_delays(query)
        return plain_answer(b"404 Not Found", b'{"error":{"message":"no such path","code":404}}')

    def _set_delays(self, query: str) -> bytes:
        known = [each.name for each in fields(Delays)]
        for name, value in parse_qsl(query):
            if name not in known or not value.replace(".", "", 1).isdigit():
                return plain_answer(b"400 Bad Request", f"unknown setting {name}={value}; known: {known}".encode())
            setattr(self.delays, name, float(value))
        return _json_answer(asdict(self.delays))


def _json_answer(document: object) -> bytes:
    return plain_answer(b"200 OK", json.dumps(document).encode())


async def _serve(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    delays = Delays(ttft_ms=arguments.ttft_ms, itl_ms=arguments.itl_ms, prefill_ms=arguments.prefill_ms)
    stub = await StubEngines.start(
        prefill=arguments.prefill,
        decode=arguments.decode,
        delays=delays,
        model=arguments.model,
        cached_tokens=arguments.cached_tokens,
        metrics=None if arguments.metrics is None else arguments.metrics.read_bytes(),
    )
    async with stub:
        print(json.dumps({role: [e.port for e in stub.engines if e.role == role] for role in ("prefill", "decode")}))
        sys.stdout.flush()
        await stop.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description="A stub OpenAI engine: several prefill and decode ports, one process.")
    parser.add_argument("--prefill", type=int, action="append", default=[], metavar="PORT")
    parser.add_argument("--decode", type=int, action="append", default=[], metavar="PORT")
    parser.add_argument("--ttft-ms", type=float, default=0.0, help="before the first token of a decode answer")
    parser.add_argument("--itl-ms", type=float, default=0.0, help="between the tokens of a stream")
    parser.add_argument("--prefill-ms", type=float, default=0.0, help="before a prefill answer")
    parser.add_argument("--cached-tokens", type=int, default=0, help="what every engine reports as found in its cache")
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="what GET /metrics answers; otherwise 404")
    parser.add_argument("--model", default="stub")
    arguments = parser.parse_args(argv)
    if not arguments.prefill and not arguments.decode:
        parser.error("give at least one --prefill PORT or --decode PORT")
    uvloop.run(_serve(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
