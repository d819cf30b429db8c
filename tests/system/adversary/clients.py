"""Runs raw clients that send bytes at a pace, half-close, reset or never read, and parses their answers with llhttp."""

import asyncio
import json
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httptools

from tests.system.adversary.engines import trace_of

__all__ = ["Answer", "Client", "post"]

READ_BYTES: Final = 1 << 16


def post(
    case: int,
    body: dict[str, Any] | bytes,
    path: str = "/v1/completions",
    *lines: str,
    length: int | None = None,
) -> bytes:
    """Returns a sound request that names its case; `lines` are further headers."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = (
        f"POST {path} HTTP/1.1",
        "host: proxy",
        f"traceparent: {trace_of(case)}",
        "content-type: application/json",
        f"content-length: {len(raw) if length is None else length}",
        *lines,
    )
    return "\r\n".join(given).encode("latin-1") + b"\r\n\r\n" + raw


@dataclass(slots=True)
class Answer:
    """One answer, as far as it came."""

    status: int
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    complete: bool = False

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def code(self) -> str | None:
        """The code of the error in it: of its JSON, or of the last event of its stream."""
        raw = self.body
        if self.is_stream:
            last = raw.rstrip().rsplit(b"\ndata: ", 1)[-1].removeprefix(b"data: ")
            raw = last if last.startswith(b'{"error"') else b"{}"
        try:
            error = cast("dict[str, Any]", json.loads(raw)).get("error")
        except (ValueError, AttributeError):
            return None
        return str(cast("dict[str, Any]", error).get("code")) if isinstance(error, dict) else None

    @property
    def done(self) -> bool:
        """Whether its stream ended well."""
        return self.is_stream and self.body.rstrip().endswith((b"\ndata: [DONE]", b"\ndata:[DONE]"))


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.answers: list[Answer] = []
        self.closed = False
        """Whether the proxy has ended the connection."""
        self.broken: str | None = None
        """What was no HTTP."""
        self._parser = httptools.HttpResponseParser(self)

    @classmethod
    async def connect(cls, port: int, *, buffer_bytes: int | None = None) -> "Client":
        """Connects; `buffer_bytes` is the size of the buffer that the kernel fills for a client that does not read."""
        connection = socket.socket()
        connection.setblocking(False)
        if buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=buffer_bytes or READ_BYTES)
        return cls(reader, writer)

    async def send(self, data: bytes, *, piece: int | None = None, every_s: float = 0.0) -> None:
        """Sends all of it, in pieces at a pace; stops where the proxy has closed."""
        with suppress(ConnectionError):
            for at in range(0, len(data), piece or max(1, len(data))):
                self._writer.write(data[at : at + (piece or len(data))])
                await self._writer.drain()
                if every_s:
                    await asyncio.sleep(every_s)
                if self._reader.at_eof():
                    return

    def half_close(self) -> None:
        """Says that nothing more is sent."""
        with suppress(OSError):
            self._writer.write_eof()

    def reset(self) -> None:
        """Ends the connection with a TCP reset."""
        connection: socket.socket = self._writer.get_extra_info("socket")
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        """Ends the connection in order."""
        self._writer.close()

    async def read(self, within_s: float, *, answers: int = 1, bytes_at_least: int | None = None) -> None:
        """Reads until so many answers are complete or so many bytes of a body are there, the proxy has closed, or the
        time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.closed and self.broken is None:
                    if sum(answer.complete for answer in self.answers) >= answers:
                        return
                    if (
                        bytes_at_least is not None
                        and sum(len(answer.body) for answer in self.answers) >= bytes_at_least
                    ):
                        return
                    try:
                        data = await self._reader.read(READ_BYTES)
                    except ConnectionError:
                        data = b""
                    self._feed(data)

    def _feed(self, data: bytes) -> None:
        try:
            if data:
                self._parser.feed_data(data)
                return
        except httptools.HttpParserError as error:
            self.broken = str(error)
            return
        self.closed = True

    # httptools' callbacks

    def on_message_begin(self) -> None:
        self.answers.append(Answer(0))

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answers[-1].headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.answers[-1].status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.answers[-1].body += data

    def on_message_complete(self) -> None:
        answer = self.answers[-1]
        if answer.status < 200:  # 100 Continue is no answer
            self.answers.pop()
        else:
            answer.complete = True
