"""Relays between the proxy and an engine, and cuts streams in the middle of a byte sequence.

It cuts only answers that are streams, and only when it is told to; everything else passes unchanged.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

__all__ = ["cutting"]


@asynccontextmanager
async def cutting(port: int, after: Callable[[], int | None]) -> AsyncGenerator[int]:
    """A port that leads to `port`. `after` says for each stream how many of its bytes pass; None: all."""
    tasks: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        asking = asyncio.create_task(_carry(reader, back))
        try:
            await _answers(there, writer, after)
        finally:
            asking.cancel()
            for one in (writer, back):
                one.transport.abort()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(relay(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
        writer.transport.abort()


async def _answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, after: Callable[[], int | None]) -> None:
    left: int | None = None
    with suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            if b"text/event-stream" in piece:
                left = after()
            if left is None:
                writer.write(piece)
            elif len(piece) < left:
                writer.write(piece)
                left -= len(piece)
            else:
                writer.write(piece[:left])
                await writer.drain()
                await asyncio.sleep(0.01)  # what was written arrives before the end does
                return
