"""The floor under any proxy in this language: both legs of a request, and nothing else.

It does no work that the two legs do not force on it. It checks nothing, corrects nothing, hides nothing and does not
survive errors; it splices bytes whose form it knows, and the decode engine's bytes go to the client as they come. It
exists so that a proxy's CPU per request can be told as a ratio, in the same run on the same machine.

    python benchmarks/floor_relay.py --port 8200 --prefill 8100 --prefill 8101 --decode 8102 --decode 8103
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Protocol, cast

import httptools
import uvloop

__all__ = ["Engine", "LegClient", "Upstream", "decode_body", "main", "ports_parser", "prefill_body"]

_PREFILL_END = b',"max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true}}'
_PARAMS = b'"kv_transfer_params":'
_BACKLOG = 2048


def prefill_body(body: bytes) -> bytes:
    """Returns the prefill leg's body for a request's body less its last byte: the last of two equal members counts."""
    return body + _PREFILL_END


def decode_body(body: bytes, answer: bytes) -> bytes:
    """Returns the decode leg's body: the KV params are the last member of the prefill leg's answer."""
    return b"%b,%b}" % (body, answer[answer.rindex(_PARAMS) : -1])


class LegClient(Protocol):
    """A `LegClient` is the client that a leg is sent for."""

    path: bytes
    upstream: "Upstream | None"
    """The connection that carries the leg."""
    task: asyncio.Task[None] | None

    def relayed(self, data: bytes) -> None:
        """Takes bytes of a relayed answer."""
        ...

    def ended(self, answer: bytes) -> None:
        """Takes a whole answer; it is empty if it was relayed."""
        ...

    def failed(self) -> None:
        """Is told that the connection to the engine is lost."""
        ...


class Engine:
    """An `Engine` is an engine with the idle connections to it."""

    def __init__(self, port: int, new_upstream: "Callable[[Engine], Upstream] | None" = None) -> None:
        self.port = port
        self.idle: list[Upstream] = []
        self._new_upstream = new_upstream or Upstream

    def send(self, client: LegClient, body: bytes, *, relay: bool) -> None:
        """Sends a leg; with `relay` its answer is passed on as it comes."""
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        wire = head % (client.path, len(body)) + body
        if self.idle:
            self.idle.pop().send(client, wire, relay)
        else:
            client.task = asyncio.get_running_loop().create_task(self._open(client, wire, relay))

    async def _open(self, client: LegClient, wire: bytes, relay: bool) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: self._new_upstream(self), "127.0.0.1", self.port)
        upstream.send(client, wire, relay)


class Upstream(asyncio.Protocol):
    """A connection to an engine, in use by one leg at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpResponseParser(self)
        self._transport = cast("asyncio.Transport", None)
        self._client: LegClient | None = None
        self._relay = False
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, client: LegClient, wire: bytes, relay: bool) -> None:
        """Sends a leg on this connection."""
        self._client = client
        self._relay = relay
        client.upstream = self
        self._transport.write(wire)

    def data_received(self, data: bytes) -> None:
        if self._relay and self._client is not None:
            self._client.relayed(data)
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._relay:
            self._body.append(body)

    def on_message_complete(self) -> None:
        client, self._client = self._client, None
        body, self._body = self._body, []
        self._engine.idle.append(self)
        if client is not None:
            client.upstream = None
            client.ended(b"".join(body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._engine.idle:
            self._engine.idle.remove(self)
        if self._client is not None:
            self._client.failed()

    def drop(self) -> None:
        """Closes the connection at once."""
        self._client = None
        self._transport.abort()


class _Client(asyncio.Protocol):
    """A client's connection; one request at a time."""

    def __init__(self, prefill: Iterator[Engine], decode: Iterator[Engine]) -> None:
        self._prefill = prefill
        self._decode = decode
        self._parser = httptools.HttpRequestParser(self)
        self._parts: list[bytes] = []
        self._body = b""
        self.path = b""
        self.upstream: Upstream | None = None
        self.task: asyncio.Task[None] | None = None
        self.transport = cast("asyncio.Transport", None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.path = url

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            return
        self._body, self._parts = b"".join(self._parts)[:-1], []
        next(self._prefill).send(self, prefill_body(self._body), relay=False)

    def relayed(self, data: bytes) -> None:
        self.transport.write(data)

    def ended(self, answer: bytes) -> None:
        if answer:
            next(self._decode).send(self, decode_body(self._body, answer), relay=True)

    def failed(self) -> None:
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.upstream is not None:
            self.upstream.drop()


async def _serve(port: int, prefill: Sequence[int], decode: Sequence[int]) -> None:
    prefills = cycle([Engine(each) for each in prefill])
    decodes = cycle([Engine(each) for each in decode])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Client(prefills, decodes), "127.0.0.1", port, backlog=_BACKLOG)
    async with server:
        await server.serve_forever()


def ports_parser(description: str) -> argparse.ArgumentParser:
    """Returns the parser of a floor's command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", type=int, action="append", required=True, metavar="PORT")
    parser.add_argument("--decode", type=int, action="append", required=True, metavar="PORT")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Relay until killed."""
    arguments = ports_parser("The least a proxy can do: two legs, nothing else.").parse_args(argv)
    uvloop.run(_serve(arguments.port, arguments.prefill, arguments.decode))
    return 0


if __name__ == "__main__":
    sys.exit(main())
