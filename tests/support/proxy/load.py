"""Runs clients that send requests without a pause, and records the result of each request."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

__all__ = ["Answer", "Connection", "Load", "loaded"]

_BODY = json.dumps({"model": "stub", "prompt": "x", "max_tokens": 2}).encode()
_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (len(_BODY), _BODY)
)


@dataclass
class Answer:
    """A whole answer."""

    status: int
    worker: str
    """Names the process that gave it: the part of request ids that all of one process share."""
    closes: bool


class Connection:
    """A connection that is kept."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.worker: str | None = None
        """Which process answers on it, once one has."""

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self) -> None:
        """Sends a request."""
        self._writer.write(_REQUEST)

    async def receive(self) -> Answer:
        """Waits for the answer.

        Raises:
            ConnectionError, asyncio.IncompleteReadError: there is none, or a part of one.
        """
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        await self._reader.readexactly(int(fields["content-length"]))
        self.worker = fields["x-request-id"].split("-")[0]
        return Answer(int(head.split()[1]), self.worker, fields.get("connection") == "close")

    async def ask(self) -> Answer:
        self.send()
        return await self.receive()

    def close(self) -> None:
        self._writer.close()


@dataclass
class Load:
    """What became of all requests."""

    port: int
    statuses: Counter[int] = field(default_factory=Counter[int])
    workers: Counter[str] = field(default_factory=Counter[str])
    """Answers, by the process that gave them."""
    lost: list[str | None] = field(default_factory=list[str | None])
    """Requests that were sent and got no whole answer, by the process that answered on the connection before."""
    refused = 0
    """Connections that were not made."""
    closed = 0
    """Connections that ended with an answer that said so."""
    is_over = False

    @property
    def answers(self) -> int:
        return self.statuses.total()

    async def client(self) -> None:
        """Asks on a connection for as long as it is kept, and then on another."""
        connection: Connection | None = None
        while not self.is_over:
            if connection is None:
                try:
                    connection = await Connection.open(self.port)
                except OSError:
                    self.refused += 1
                    await asyncio.sleep(0.01)
                    continue
            try:
                answer = await connection.ask()
            except (ConnectionError, asyncio.IncompleteReadError):
                self.lost.append(connection.worker)
                connection.close()
                connection = None
                continue
            self.statuses[answer.status] += 1
            self.workers[answer.worker] += 1
            if answer.closes:
                self.closed += 1
                connection.close()
                connection = None
        if connection is not None:
            connection.close()


@asynccontextmanager
async def loaded(port: int, clients: int) -> AsyncGenerator[Load]:
    """Asks from so many clients at a time; at the end all answers are awaited."""
    load = Load(port)
    tasks = [asyncio.create_task(load.client()) for _ in range(clients)]
    try:
        yield load
        load.is_over = True
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
