"""Serves an `Actor` as an ASGI app in this process, in place of a socket."""

import asyncio
import json
from contextlib import suppress
from typing import Any, Literal

from starlette.types import Message, Receive, Scope, Send

from tests.support.proxy.acting import MODELS, Actor

__all__ = ["FAULTS", "ActedApp", "AppFault"]

AppFault = Literal["raises", "ends", "500", "garbage", "silent"]
FAULTS: tuple[AppFault, ...] = ("raises", "ends", "500", "garbage", "silent")
"""What an app may do wrong; the first two are what a lost connection is elsewhere."""


class ActedApp(Actor):
    """See the module; `goes_wrong` is for `faults` legs."""

    goes_wrong: AppFault = "raises"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one scope; it knows no lifespan."""
        if scope["type"] != "http":
            raise RuntimeError("only http")
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["method"] == "GET":
            await _say(send, 200, MODELS)
            return
        asked = json.loads(body)
        if scope["path"] == "/v1/kvparams" or "kvparams" not in asked.get("kv_transfer_params", {}):
            self.releases.append(asked.get("kv_transfer_params", {}))
            await _say(send, 200, b"{}")
            return
        self.bodies.append(body)
        self.open += 1
        leaving = asyncio.ensure_future(_left(receive))
        try:
            acting = asyncio.ensure_future(self._act(asked, leaving, send))
            await asyncio.wait((acting, leaving), return_when=asyncio.FIRST_COMPLETED)
            acting.cancel()
            with suppress(asyncio.CancelledError):
                await acting
        finally:
            leaving.cancel()
            self.open -= 1

    async def _act(self, asked: dict[str, Any], leaving: "asyncio.Future[None]", send: Send) -> None:
        if self.faults > 0:
            self.faults -= 1
            if self.goes_wrong == "raises":
                raise RuntimeError("on purpose")
            if self.goes_wrong == "silent":
                await leaving
            elif self.goes_wrong != "ends":
                await _say(send, 500 if self.goes_wrong == "500" else 200, b"<html>oops</html>")
            return
        if self.held is not None:
            await self.held.wait()
        if not asked.get("stream"):
            await _say(send, 200, json.dumps(self._answer(asked)).encode())
            return
        await send(_start(200, b"text/event-stream"))
        for number, event in enumerate(self._events(asked)):
            if number == self.breaks_after:
                raise RuntimeError("in the middle of a stream")
            raw = event if isinstance(event, bytes) else json.dumps(event).encode()
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % raw, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, kind: bytes) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


async def _say(send: Send, status: int, body: bytes) -> None:
    await send(_start(status, b"application/json"))
    await send({"type": "http.response.body", "body": body})
