"""Answers every request with bytes that a test has chosen, when the test says so."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import cast

import httptools

__all__ = ["OK", "chunked", "scripted_server"]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def chunked(*chunks: bytes) -> bytes:
    """An HTTP answer whose body comes in exactly these chunks."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        + body
        + b"0\r\n\r\n"
    )


class _Connection(asyncio.Protocol):
    def __init__(self, answer: bytes | None, delay_s: Callable[[], float], close: bool) -> None:
        self._answer = answer
        self._delay_s = delay_s
        self._close = close
        self._parser = httptools.HttpRequestParser(self)
        self._transport = cast("asyncio.Transport", None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        asyncio.get_running_loop().call_later(self._delay_s(), self._reply)

    def _reply(self) -> None:
        if self._answer is not None:
            self._transport.write(self._answer)
        if self._close:
            self._transport.close()


@asynccontextmanager
async def scripted_server(
    answer: bytes | None, *, delay_s: Callable[[], float] = lambda: 0.0, close: bool = False
) -> AsyncGenerator[int]:
    """Serve `answer` (None: nothing at all) on the port yielded; `close` ends the connection after it."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(answer, delay_s, close), "127.0.0.1", 0)
    async with server:
        yield cast("tuple[str, int]", server.sockets[0].getsockname())[1]
