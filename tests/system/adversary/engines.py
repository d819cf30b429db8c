"""Runs engines that answer probes well and misbehave on command: raw bytes over loopback, one script per request.

A request names its case in `traceparent`, the one client header that the proxy passes on untouched, so that cases run
beside each other on the same engines. A request that names no case gets a good answer.
"""

import asyncio
import json
import re
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from demo.processes import free_port
from tests.support.waiting import until

__all__ = [
    "CLOSE",
    "DONE",
    "EVENT",
    "GOOD",
    "HALF_CLOSE",
    "HOLD",
    "NIXL",
    "READ",
    "RESET",
    "WELL",
    "Engine",
    "Pause",
    "Repeat",
    "Script",
    "Seen",
    "Step",
    "chunk",
    "chunked",
    "head",
    "sse",
    "trace_of",
    "whole",
]

Role = Literal["prefill", "decode"]

NIXL: Final[Mapping[str, Any]] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_block_ids": [[1, 2]],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}
GOOD: Final[Mapping[str, Any]] = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "stub",
    "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
EVENT: Final = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
DONE: Final = b"data: [DONE]\n\n"
MODELS: Final = b'{"object":"list","data":[{"id":"stub"}]}'
LONGEST_S: Final = 30.0
"""A script that runs for longer is ended."""
_TRACE: Final = re.compile(rb"\r\ntraceparent: *00-ad([0-9]{30})-", re.IGNORECASE)
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)


def trace_of(case: int) -> str:
    """Returns the `traceparent` that names a case."""
    return f"00-ad{case:030d}-00000000000000a1-01"


# what is sent


def head(status: str = "200 OK", *lines: str, kind: str | None = "application/json", version: str = "1.1") -> bytes:
    """Returns a status line and headers, up to the empty line."""
    given = [f"HTTP/{version} {status}", *([] if kind is None else [f"content-type: {kind}"]), *lines]
    return "\r\n".join(given).encode("latin-1") + b"\r\n\r\n"


def whole(body: bytes, status: str = "200 OK", *lines: str, kind: str | None = "application/json") -> bytes:
    """Returns an answer with its length."""
    return head(status, *lines, f"content-length: {len(body)}", kind=kind) + body


def chunk(data: bytes) -> bytes:
    """Returns one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(*pieces: bytes, status: str = "200 OK", kind: str | None = "application/json", end: bool = True) -> bytes:
    """Returns an answer in chunks."""
    body = b"".join(chunk(piece) for piece in pieces)
    return head(status, "transfer-encoding: chunked", kind=kind) + body + (b"0\r\n\r\n" if end else b"")


def sse(*events: bytes, end: bool = True, kind: str = "text/event-stream; charset=utf-8") -> bytes:
    """Returns a stream of server-sent events, one chunk for each."""
    return chunked(*events, kind=kind, end=end)


# scripts


@dataclass(frozen=True, slots=True)
class Pause:
    """Send nothing for some time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Repeat:
    """Send the same again and again, until the proxy leaves."""

    data: bytes
    every_s: float = 0.05
    times: int = 1 << 30


class Act:
    """Something else than sending. Compared by identity."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


CLOSE: Final = Act("CLOSE")
"""End the connection in order."""
RESET: Final = Act("RESET")
"""End it with a TCP reset."""
HALF_CLOSE: Final = Act("HALF_CLOSE")
"""Send no more, and wait until the proxy leaves."""
HOLD: Final = Act("HOLD")
"""Say nothing until the proxy leaves."""
READ: Final = Act("READ")
"""Read the body now. A script without it has it read before its first step."""
WELL: Final = Act("WELL")
"""Answer well, as what was asked."""

Step = bytes | Pause | Repeat | Act
Script = Sequence[Step]


@dataclass(slots=True)
class Seen:
    """One request, as an engine saw it."""

    role: str
    case: int | None
    release: bool = False
    """It only gave KV back."""
    left_s: float | None = None
    """On the loop's clock: when its connection was lost before its script had ended."""


class Engine:
    """One engine."""

    def __init__(self, role: Role, script: Callable[[int, Role], Script | None]) -> None:
        """`script` says what is done for a case, None for an answer that is well."""
        self.role: Final[Role] = role
        self.port = 0
        self.seen: list[Seen] = []
        self.running: list[int | None] = []
        """The cases whose scripts run now."""
        self._script = script
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen on a port that no client connects from."""
        for _ in range(100):
            self.port = free_port()
            with suppress(OSError):
                self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 18)
                return
        raise OSError("no port is free")

    async def stop(self) -> None:
        """Close everything."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()  # its script ends, and with it the task that asyncio has made
        await until(lambda: not self._writers, 5.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, TimeoutError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether another one may follow on its connection."""
        raw = await reader.readuntil(b"\r\n\r\n")
        if raw.startswith(b"GET "):
            writer.write(whole(MODELS))
            return True
        found, length = _TRACE.search(raw), _LENGTH.search(raw)
        seen = Seen(self.role, None if found is None else int(found[1]))
        self.seen.append(seen)
        script = None if seen.case is None else self._script(seen.case, self.role)
        rest = int(length[1]) if length else 0
        body = b""
        if script is None or READ not in script or raw.startswith(b"POST /v1/kvparams"):
            body = await reader.readexactly(rest)
            asked = _parsed(body)
            seen.release = raw.startswith(b"POST /v1/kvparams") or "kvparams" not in asked.get(
                "kv_transfer_params", {"kvparams": None}
            )
            if seen.release:
                writer.write(whole(b"{}"))
                return True
        self.running.append(seen.case)
        try:
            async with asyncio.timeout(LONGEST_S):
                for step in script or (WELL,):
                    if step is READ:
                        body = await reader.readexactly(rest)
                    elif not await self._step(step, body, reader, writer):
                        return False
        except ConnectionError:
            seen.left_s = asyncio.get_running_loop().time()
            raise
        finally:
            self.running.remove(seen.case)
        return True

    async def _step(self, step: Step, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One step; whether a further one may follow."""
        if isinstance(step, bytes):
            await _send(step, reader, writer)
        elif isinstance(step, Pause):
            await _wait(step.seconds, reader, writer)
        elif isinstance(step, Repeat):
            for _ in range(step.times):
                await _send(step.data, reader, writer)
                await _wait(step.every_s, reader, writer)
        elif step is WELL:
            await _send(self._well(_parsed(body)), reader, writer)
        elif step is RESET:
            connection: socket.socket = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        elif step is CLOSE:
            return False
        else:
            if step is HALF_CLOSE:
                writer.write_eof()
            await _wait(LONGEST_S, reader, writer)
        return True

    def _well(self, asked: dict[str, Any]) -> bytes:
        if self.role == "prefill":
            return whole(json.dumps({**GOOD, "kv_transfer_params": NIXL}).encode())
        if asked.get("stream"):
            return sse(EVENT, EVENT, DONE)
        return whole(json.dumps(GOOD).encode())


async def _send(data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Raises ConnectionResetError where the proxy has left."""
    if reader.at_eof() or writer.is_closing():
        raise ConnectionResetError
    writer.write(data)
    await writer.drain()


async def _wait(seconds: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Waits, and raises ConnectionResetError as soon as the proxy leaves. What it sends meanwhile is left unread."""

    def has_left() -> bool:
        return reader.at_eof() or reader.exception() is not None or writer.is_closing()

    if seconds <= 0:
        return
    with suppress(TimeoutError):
        await until(has_left, seconds, pause_s=0.02)
        raise ConnectionResetError


def _parsed(body: bytes) -> dict[str, Any]:
    """Parses a body; of a huge one only what engines look at here, so that their answers to probes are not late."""
    if len(body) <= 1 << 20:
        return json.loads(body)
    return {"stream": b'"stream":true' in body, "kv_transfer_params": {"kvparams": {}}}
