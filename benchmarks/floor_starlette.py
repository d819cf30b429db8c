"""The floor under a proxy that is a Starlette application: both legs of a request, spliced, and nothing else.

It is `floor_relay.py` with Starlette on uvicorn towards the client, as most Python proxies have it. The connections to
engines are those of `floor_relay.py`, so the difference between the two is the price of the framework.

    python benchmarks/floor_starlette.py --port 8200 --prefill 8100 --prefill 8101 --decode 8102 --decode 8103
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from itertools import cycle

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.floor_relay import Engine, LegClient, Upstream, decode_body, ports_parser, prefill_body

__all__ = ["main"]

_BACKLOG = 2048


class _PartsUpstream(Upstream):
    """Passes on parts of an answer's body instead of the bytes on the wire."""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if self._relay and self._client is not None:
            self._client.relayed(body)
        else:
            super().on_body(body)


class _Leg(LegClient):
    """A leg whose answer a coroutine waits for."""

    def __init__(self, path: bytes) -> None:
        self.path = path
        self.upstream: Upstream | None = None
        self.task: asyncio.Task[None] | None = None
        self._parts: list[bytes] = []
        self._over = False
        self._changed = asyncio.Event()

    def relayed(self, data: bytes) -> None:
        self._parts.append(data)
        self._changed.set()

    def ended(self, answer: bytes) -> None:
        if answer:
            self._parts.append(answer)
        self._over = True
        self._changed.set()

    def failed(self) -> None:
        self.ended(b"")

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields what has arrived, together, until the answer has ended."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            parts, self._parts = self._parts, []
            if parts:
                yield b"".join(parts)
            if self._over:
                return

    async def whole(self) -> bytes:
        """Returns the whole answer."""
        return b"".join([part async for part in self.parts()])


def _application(prefill: Sequence[int], decode: Sequence[int]) -> Starlette:
    prefills = cycle([Engine(each, _PartsUpstream) for each in prefill])
    decodes = cycle([Engine(each, _PartsUpstream) for each in decode])

    async def complete(request: Request) -> Response:
        path = request.url.path.encode()
        body = (await request.body())[:-1]
        leg = _Leg(path)
        next(prefills).send(leg, prefill_body(body), relay=False)
        answer = await leg.whole()
        leg = _Leg(path)
        next(decodes).send(leg, decode_body(body, answer), relay=True)
        if b'"stream": true' in body[-100:]:  # where the bench's requests have it
            return StreamingResponse(leg.parts(), media_type="text/event-stream")
        return Response(await leg.whole(), media_type="application/json")

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(routes=[*(Route(path, complete, methods=["POST"]) for path in paths), Route("/health", health)])


def main(argv: Sequence[str] | None = None) -> int:
    """Relay until killed."""
    arguments = ports_parser("The least a Starlette proxy can do: two legs, nothing else.").parse_args(argv)
    uvicorn.run(
        _application(arguments.prefill, arguments.decode),
        port=arguments.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        backlog=_BACKLOG,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
