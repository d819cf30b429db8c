"""A stub OpenAI engine: one process that plays several prefill and decode engines, each on a port of its own.

The one rule: it counts truthfully. What it says it served (`GET /stats`) is what the proxy under test is judged by, so
a decode request counts as one with KV only if it carries what an engine would need to fetch that KV, and a client that
leaves is counted and leaves nothing live behind.

    python benchmarks/stub_engine.py --prefill 8100 --prefill 8101 --decode 8102 --decode 8103 [--itl-ms 20 ...]

Completions and chat, whole and streamed (`max_tokens` events and `[DONE]`). One line of JSON on stdout says which ports
are served (port 0 picks a free one). Also on every port: GET /health, /v1/models, /stats (all ports), /reset (counters
to zero), /set?ttft_ms=..&itl_ms=..&prefill_ms=.. (delays of all ports).
"""

import argparse
import asyncio
import json
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from typing import Literal, Self, cast
from urllib.parse import parse_qsl

import httptools
import uvloop

from benchmarks.stub_answers import SSE_HEAD, Ask, Writer, plain_answer, read_ask

__all__ = ["Counters", "Delays", "Engine", "StubEngines"]

Role = Literal["prefill", "decode"]

_MAX_BODY_BYTES = 64 << 20
_BURST_EVENTS = 8  # events per turn of the loop when there is no delay between tokens: other streams get theirs
_WRITE_BUFFER_BYTES = 64 << 10
_BACKLOG = 2048


@dataclass(slots=True)
class Delays:
    """How long the engines pretend to work; shared by all ports of a process."""

    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    prefill_ms: float = 0.0


@dataclass(slots=True)
class Counters:
    """What one port has served."""

    requests: int = 0
    streams: int = 0
    prefill: int = 0
    """Prefill legs: `do_remote_decode` true, or a kvparams document in phase prefill, mode store."""
    decode_with_kv: int = 0
    """Requests with `remote_block_ids` (a list) and `remote_engine_id` (a string)."""
    decode_with_keys: int = 0
    """Requests with a kvparams document that has `load_keys`."""
    with_kvparams: int = 0
    aborted: int = 0
    """Clients that left before their answer was complete."""
    live: int = 0
    max_live: int = 0

    def reset(self) -> None:
        """Back to zero, except for what is live."""
        live = self.live
        for each in fields(self):
            setattr(self, each.name, 0)
        self.live = self.max_live = live


@dataclass(slots=True)
class Engine:
    """One port: its role, what it counts and how it answers."""

    role: Role
    port: int
    delays: Delays
    writer: Writer
    counters: Counters = field(default_factory=Counters)

    @property
    def url(self) -> str:
        """The address a proxy is given."""
        return f"http://127.0.0.1:{self.port}"


class StubEngines:
    """The engines of one process. `async with await StubEngines.start(...)` serves until the block is left."""

    def __init__(self, delays: Delays, model: str, cached_tokens: int) -> None:
        self.delays = delays
        self.model = model
        self.engines: list[Engine] = []
        self.serials = count(1)
        self._cached_tokens = cached_tokens
        self._servers = AsyncExitStack()
        self._connections: set[_Connection] = set()

    @classmethod
    async def start(
        cls,
        *,
        prefill: Sequence[int],
        decode: Sequence[int],
        delays: Delays | None = None,
        model: str = "stub",
        cached_tokens: int = 0,
    ) -> Self:
        """Listen on these ports (0: any free one); every engine reports `cached_tokens` as found in its own cache."""
        stub = cls(delays or Delays(), model, cached_tokens)
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
            lambda: _Connection(self, engine, self._connections), sock=listener, backlog=_BACKLOG
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


class _Connection(asyncio.Protocol):
    """One client connection; one request at a time."""

    def __init__(self, stub: StubEngines, engine: Engine, register: set["_Connection"]) -> None:
        self._stub = stub
        self._engine = engine
        self._register = register
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._parts: list[bytes] = []
        self._size = 0
        self._ask: Ask | None = None
        self._serial = 0
        self._left = 0
        self._next_s = 0.0
        self._event = b""
        self._timer: asyncio.Handle | None = None
        self._paused = self._held = False
        self._keep_alive = True
        self._transport = cast("asyncio.Transport", None)

    # ---- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        # uvloop does this itself; asyncio does not if it was handed the listening socket, and then the second small
        # write of a stream waits 40 ms for the acknowledgement of the first.
        connection = cast("socket.socket", transport.get_extra_info("socket"))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._register.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._register.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._ask is not None:
            self._engine.counters.aborted += 1
            self._end()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._held:
            self._held = False
            self._step()

    def drop(self) -> None:
        """Close at once, whatever is in flight."""
        self._transport.abort()

    # ---- the parser

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._size += len(body)
        if self._size > _MAX_BODY_BYTES:
            self.drop()

    def on_message_complete(self) -> None:
        url, self._url = self._url, b""
        parts, self._parts, self._size = self._parts, [], 0
        if self._ask is not None or self._transport.is_closing():  # a pipelined request: no proxy sends one
            self.drop()
            return
        self._keep_alive = self._parser.should_keep_alive()
        if self._parser.get_method() == b"POST" and url in (b"/v1/completions", b"/v1/chat/completions"):
            self._begin(b"".join(parts), chat=url == b"/v1/chat/completions")
            return
        self._transport.write(self._stub.control(url.decode("latin-1")))
        if not self._keep_alive:
            self._transport.close()

    # ---- one request

    def _begin(self, body: bytes, *, chat: bool) -> None:
        ask = self._ask = read_ask(body, chat=chat)
        self._serial = next(self._stub.serials)
        counters = self._engine.counters
        counters.requests += 1
        counters.streams += ask.stream
        counters.prefill += ask.prefill
        counters.decode_with_kv += ask.nixl_decode and not ask.prefill
        counters.decode_with_keys += ask.store_keys_loaded and not ask.prefill
        counters.with_kvparams += ask.kvparams
        counters.live += 1
        counters.max_live = max(counters.max_live, counters.live)
        delays = self._engine.delays
        delay_ms = delays.prefill_ms if ask.prefill else delays.ttft_ms
        if delay_ms:
            self._timer = self._loop.call_later(delay_ms / 1e3, self._answer, ask)
        else:
            self._answer(ask)

    def _answer(self, ask: Ask) -> None:
        writer = self._engine.writer
        if not ask.stream:
            self._transport.write(writer.whole(ask, self._serial))
            self._end()
            return
        self._transport.write(SSE_HEAD)
        self._event = writer.event(ask, self._serial)
        self._left = ask.max_tokens
        self._next_s = self._loop.time()
        self._step()

    def _step(self) -> None:
        ask = self._ask
        if ask is None:
            return
        if self._paused:
            self._held = True
            return
        itl_s = self._engine.delays.itl_ms / 1e3
        events = min(1 if itl_s else _BURST_EVENTS, self._left)
        self._left -= events
        if self._left:
            self._transport.write(self._event * events)
            # From the planned time, not from now: a late timer must not make every later token late too.
            self._next_s += itl_s
            self._timer = self._loop.call_at(self._next_s, self._step) if itl_s else self._loop.call_soon(self._step)
            return
        self._transport.write(self._event * (events - 1) + self._engine.writer.stream_end(ask, self._serial))
        self._end()

    def _end(self) -> None:
        self._ask = self._timer = None
        self._engine.counters.live -= 1
        if not self._keep_alive:
            self._transport.close()


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
    parser.add_argument("--model", default="stub")
    arguments = parser.parse_args(argv)
    if not arguments.prefill and not arguments.decode:
        parser.error("give at least one --prefill PORT or --decode PORT")
    uvloop.run(_serve(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
