"""Reads and writes HTTP/1.1 messages over one connection, within bounds of size and time.

The kit reads hostile peers: every read has a byte limit, and every caller gives a deadline.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

__all__ = ["Connection", "ConnectionEnded", "Head", "TooLong", "WireError", "encode_head"]

_CHUNK_BYTES: Final = 64 << 10
_MAX_HEAD_BYTES: Final = 64 << 10
_MAX_BUFFER_BYTES: Final = 256 << 10
"""The pump stops reading while this much is unread, so that a peer that floods waits."""
_STATUS: Final = re.compile(r"[0-9]{3}")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_CHUNK_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,15}")


class WireError(Exception):
    """The peer sent what is no HTTP/1.1 message."""


class TooLong(WireError):
    """The peer sent more than the reader accepts."""


class ConnectionEnded(WireError):
    """The peer closed the connection before the message was complete."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request or of a response."""

    start: str
    headers: tuple[tuple[str, str], ...]
    """Names in lower case, in the order in which they came."""

    def get(self, name: str) -> str | None:
        """Returns the value of the first header of this name."""
        return next((value for found, value in self.headers if found == name), None)

    @property
    def status(self) -> int:
        """Returns the status of a response."""
        parts = self.start.split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not _STATUS.fullmatch(parts[1]):
            raise WireError(f"not a status line: {self.start[:80]!r}")
        return int(parts[1])


class Connection:
    """A `Connection` has a task that reads ahead, and so notices at once that the peer has closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._buffer = bytearray()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.closed: Final = asyncio.Event()
        """Set once the peer has closed its side."""
        self._pump = asyncio.create_task(self._read_ahead())

    @classmethod
    async def open(cls, host: str, port: int) -> Self:
        """Connects to a server."""
        return cls(*await asyncio.open_connection(host, port))

    async def _read_ahead(self) -> None:
        with suppress(OSError):
            while data := await self._reader.read(_CHUNK_BYTES):
                self._buffer += data
                self._changed.set()
                if len(self._buffer) > _MAX_BUFFER_BYTES:
                    self._room.clear()
                    await self._room.wait()
        self.closed.set()
        self._changed.set()

    async def _more(self) -> None:
        """Waits until there are more bytes. Raises ConnectionEnded if none will come."""
        if self.closed.is_set():
            raise ConnectionEnded("the connection was closed in the middle of a message")
        self._changed.clear()
        self._room.set()
        await self._changed.wait()

    def _take(self, count: int) -> bytes:
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        if len(self._buffer) <= _MAX_BUFFER_BYTES:
            self._room.set()
        return data

    async def read_head(self) -> Head | None:
        """Reads the head of a message; None if the peer closes before its first byte."""
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise TooLong(f"a head of more than {_MAX_HEAD_BYTES} bytes")
            if not self._buffer and self.closed.is_set():
                return None
            try:
                await self._more()
            except ConnectionEnded:
                if not self._buffer:
                    return None
                raise
        lines = self._take(end + 4)[:-4].decode("latin-1").split("\r\n")
        headers: list[tuple[str, str]] = []
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise WireError(f"not a header: {line[:80]!r}")
            headers.append((name.lower(), value.strip(" \t")))
        return Head(lines[0], tuple(headers))

    async def read_body(self, head: Head, max_bytes: int, *, until_close: bool = False) -> bytes:
        """Reads the body of a message. `until_close`: a response without a length ends with the connection."""
        body = bytearray()
        async for part in self.iterate_body(head, until_close=until_close):
            body += part
            if len(body) > max_bytes:
                raise TooLong(f"a body of more than {max_bytes} bytes")
        return bytes(body)

    async def iterate_body(self, head: Head, *, until_close: bool = False) -> AsyncGenerator[bytes]:
        """Yields the parts of a body as they come."""
        if (head.get("transfer-encoding") or "").lower() == "chunked":
            while size := await self._read_chunk_size():
                async for part in self._read_exactly(size):
                    yield part
                await self._read_line()
            while await self._read_line():
                pass
        elif (length := head.get("content-length")) is not None:
            if not _LENGTH.fullmatch(length):
                raise WireError(f"a content-length of {length[:80]!r}")
            async for part in self._read_exactly(int(length)):
                yield part
        elif until_close:
            while True:
                if self._buffer:
                    yield self._take(len(self._buffer))
                    continue
                try:
                    await self._more()
                except ConnectionEnded:
                    return

    async def _read_exactly(self, count: int) -> AsyncGenerator[bytes]:
        while count:
            while not self._buffer:
                await self._more()
            part = self._take(min(count, len(self._buffer)))
            count -= len(part)
            yield part

    async def _read_line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _CHUNK_BYTES:
                raise TooLong("a line of a chunked body is too long")
            await self._more()
        return self._take(end + 2)[:-2]

    async def _read_chunk_size(self) -> int:
        line = (await self._read_line()).partition(b";")[0].strip()
        if not _CHUNK_SIZE.fullmatch(line):  # `int` would take signs and underscores as well
            raise WireError(f"a chunk size of {line[:40]!r}")
        return int(line, 16)

    async def send(self, *parts: bytes) -> None:
        """Sends bytes. An error means that the peer has closed."""
        try:
            self._writer.writelines(parts)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise ConnectionEnded(str(error)) from None

    async def close(self, *, reset: bool = False) -> None:
        """Closes the connection; with `reset`, what is queued is dropped."""
        self._pump.cancel()
        if reset:
            self._writer.transport.abort()
            return
        with suppress(OSError, RuntimeError):
            self._writer.close()


def encode_head(start: str, headers: Sequence[tuple[str, str]]) -> bytes:
    """Returns the bytes of a head."""
    return "".join([f"{start}\r\n", *(f"{name}: {value}\r\n" for name, value in headers), "\r\n"]).encode("latin-1")
