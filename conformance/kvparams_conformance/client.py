"""Sends one HTTP request, and reads the answer within bounds of size and time."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvparams_conformance.connection import Connection, ConnectionEnded, TooLong, WireError, encode_head
from kvparams_conformance.conversation import Reply

__all__ = ["Received", "exchange", "receive", "send_request"]

_MAX_REPLY_BYTES: Final = 8 << 20


@dataclass(slots=True)
class Received:
    """A `Received` holds what has come of an answer so far."""

    connection: Connection | None = None
    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytearray = field(default_factory=bytearray)
    ended: Literal["whole", "cut", "timeout", "too long"] = "cut"

    def reply(self, seconds: float) -> Reply:
        """Returns it as an answer."""
        return Reply(self.status, self.headers, bytes(self.body), self.ended, seconds)


async def send_request(
    host: str, port: int, method: str, path: str, body: bytes | None, headers: Sequence[tuple[str, str]]
) -> Connection:
    """Opens a connection and sends a request."""
    connection = await Connection.open(host, port)
    about_body = [] if body is None else [("content-type", "application/json"), ("content-length", str(len(body)))]
    head = encode_head(f"{method} {path} HTTP/1.1", [("host", f"{host}:{port}"), *about_body, *headers])
    await connection.send(head, body or b"")
    return connection


async def receive(connection: Connection, received: Received) -> None:
    """Reads an answer. What has come stands in `received` at any time."""
    head = await connection.read_head()
    if head is None:
        raise ConnectionEnded("closed without an answer")
    received.status, received.headers = head.status, head.headers
    async for part in connection.iterate_body(head, until_close=True):
        received.body += part
        if len(received.body) > _MAX_REPLY_BYTES:
            raise TooLong("the answer")
    received.ended = "whole"


async def exchange(
    host: str,
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Sequence[tuple[str, str]] = (),
    *,
    timeout_s: float,
) -> Reply:
    """Sends a request and returns the answer. Every fault is an answer that did not end whole; its status may be 0."""
    begun = time.monotonic()
    received = Received()
    try:
        async with asyncio.timeout(timeout_s):
            received.connection = await send_request(host, port, method, path, body, headers)
            await receive(received.connection, received)
    except TimeoutError:
        received.ended = "timeout"
    except TooLong:
        received.ended = "too long"
    except (WireError, OSError) as error:
        received.ended, received.body = "cut", received.body or bytearray(str(error).encode())
    finally:
        if received.connection is not None:
            await received.connection.close()
    return received.reply(time.monotonic() - begun)
