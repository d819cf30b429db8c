"""Holds one engine of the stub, and one client's connection to it.

`live` goes up when a request has been read and comes down exactly once, when its answer is written or its client is
gone. A client that does not read stops its stream; nothing is written ahead without bound.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol, cast

import httptools

from tests.support.stub_answers import SSE_HEAD, Ask, Writer, read_ask

__all__ = ["Connection", "Counters", "Delays", "Engine", "Observer", "Role", "Work"]

Role = Literal["prefill", "decode"]

_MAX_BODY_BYTES = 64 << 20
_BURST_EVENTS = 8  # events per turn of the loop when there is no delay between tokens: other streams get theirs
_WRITE_BUFFER_BYTES = 64 << 10


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


class Observer(Protocol):
    """Hears of every completion on one port; a measurement that needs more than counters."""

    def began(self, engine: "Engine", serial: int, body: bytes) -> None:
        """It was read."""
        ...

    def ended(self, engine: "Engine", serial: int, *, lost: bool) -> None:
        """Its answer is written, or its client is gone (`lost`)."""
        ...


class Work(Protocol):
    """What one engine has to do, where that hangs on what is asked and on what it did before."""

    def begun(self, ask: Ask, body: bytes, now_s: float) -> tuple[Ask, float]:
        """A completion was read; what is known of it now, and in how many seconds its answer begins."""
        ...


@dataclass(slots=True)
class Engine:
    """One port: its role, what it counts and how it answers."""

    role: Role
    port: int
    delays: Delays
    writer: Writer
    counters: Counters = field(default_factory=Counters)
    observer: Observer | None = None
    work: Work | None = None
    """In place of `delays`, up to the first token."""

    @property
    def url(self) -> str:
        """The address a proxy is given."""
        return f"http://127.0.0.1:{self.port}"


class Connection(asyncio.Protocol):
    """One client connection; one request at a time."""

    def __init__(
        self, engine: Engine, serials: Iterator[int], control: Callable[[str], bytes], register: set["Connection"]
    ) -> None:
        """`control` answers what is no completion; the connection is in `register` while it is open."""
        self._engine = engine
        self._serials = serials
        self._control = control
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
            self._end(lost=True)

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
        self._transport.write(self._control(url.decode("latin-1")))
        if not self._keep_alive:
            self._transport.close()

    # ---- one request

    def _begin(self, body: bytes, *, chat: bool) -> None:
        ask = read_ask(body, chat=chat)
        delays = self._engine.delays
        delay_s = (delays.prefill_ms if ask.prefill else delays.ttft_ms) / 1e3
        if self._engine.work is not None:
            ask, delay_s = self._engine.work.begun(ask, body, self._loop.time())
        self._ask = ask
        self._serial = next(self._serials)
        if self._engine.observer is not None:
            self._engine.observer.began(self._engine, self._serial, body)
        counters = self._engine.counters
        counters.requests += 1
        counters.streams += ask.stream
        counters.prefill += ask.prefill
        counters.decode_with_kv += ask.nixl_decode and not ask.prefill
        counters.decode_with_keys += ask.store_keys_loaded and not ask.prefill
        counters.with_kvparams += ask.kvparams
        counters.live += 1
        counters.max_live = max(counters.max_live, counters.live)
        if delay_s:
            self._timer = self._loop.call_later(delay_s, self._answer, ask)
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

    def _end(self, *, lost: bool = False) -> None:
        self._ask = self._timer = None
        self._engine.counters.live -= 1
        if self._engine.observer is not None:
            self._engine.observer.ended(self._engine, self._serial, lost=lost)
        if not self._keep_alive:
            self._transport.close()
