"""Simulates an engine whose app runs in the proxy's own process: its connections are calls of an ASGI app.

The engine does not know. Its writes on a connection are the app's messages, and any fault of a connection is an app
that fails.
"""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, cast

import httptools
from starlette.types import Message, Receive, Scope, Send

from tests.system.simulation.legs import Link

if TYPE_CHECKING:
    from tests.system.simulation.engines import Engine
    from tests.system.simulation.network import Socket

__all__ = ["App"]


class App:
    """The app of an engine."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        engine = self._engine
        body: bytes = (await receive())["body"]
        if engine.world.now < engine.up_at:
            engine.world.lost(body)  # as on a connection: the proxy cannot tell how far its app came
            raise RuntimeError("it has crashed")
        call = _Call(engine, send)
        engine.links[call.link] = None
        lines = [b"%b: %b" % line for line in scope["headers"]]
        first = f"{scope['method']} {scope['path']} HTTP/1.1".encode()
        call.link.received(b"\r\n".join([first, *lines, b"", body]))
        leaving = asyncio.ensure_future(receive())
        leaving.add_done_callback(lambda _: call.left())
        try:
            await call.run()
        finally:
            leaving.cancel()
            call.link.closed()
        if call.broken:
            raise RuntimeError("it is broken")


class _Call:
    """One request: of a `Socket` what a `Link` uses."""

    def __init__(self, engine: "Engine", send: Send) -> None:
        self.protocol = self
        self.broken = False
        """Whether it has ended otherwise than with a complete answer, or the end of whoever had asked."""
        self.link = Link(engine, cast("Socket", self))
        self._engine = engine
        self._send = send
        self._at: Any = getattr(send, "__self__")  # noqa: B009  the proxy's side
        self._parser = httptools.HttpResponseParser(self)
        self._said: list[Message] = []
        self._over = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._turn = asyncio.Event()

    async def run(self) -> None:
        """To the end of the answer."""
        while not self._over:
            self._turn.clear()
            while self._said:
                await self._send(self._said.pop(0))
            await self._turn.wait()
        for message in self._said:
            await self._send(message)

    def left(self) -> None:
        """Whoever has asked waits no more. An engine that does nothing does not hear it; its kernel does."""
        self.link.closed()
        self._engine.world.loop.call_at(max(self._engine.thaws, self._engine.world.now), self._finish)

    # as a `Socket`

    def is_closing(self) -> bool:
        """Whether nobody hears what is sent now."""
        return self._over or self._at._sink is None

    def arrive(self, data: bytes) -> None:
        """The engine has sent that."""
        if self._over:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.reset()

    def end(self) -> None:
        """The engine has closed, in order: the end of an answer that says nowhere else how long it is."""
        names = {name for name, _ in self._headers}
        if self._headers and not names & {b"content-length", b"transfer-encoding"}:
            self.on_message_complete()
        else:
            self.reset()

    def reset(self) -> None:
        """The engine has gone."""
        self.broken = self.broken or not self._over
        self._finish()

    # for httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == 100:
            self._headers.clear()
        else:
            self._say({"type": "http.response.start", "status": status, "headers": self._headers})

    def on_body(self, data: bytes) -> None:
        self._say({"type": "http.response.body", "body": data, "more_body": True})

    def on_message_complete(self) -> None:
        if self._headers and not self._over:
            self._say({"type": "http.response.body"})
            self._finish()

    def _say(self, message: Message) -> None:
        """At once where that is possible: then the engine knows whether it was heard."""
        if self._over:
            return
        self._said.append(message)
        if len(self._said) == 1 and self._at._flowing.is_set():
            try:
                cast("Coroutine[Any, Any, None]", self._send(self._said.pop())).send(None)
            except StopIteration:
                return
            raise RuntimeError("an app that need not wait does")
        self._turn.set()

    def _finish(self) -> None:
        self._over = True
        self._turn.set()
