"""Brings requests of an ASGI server to their handler: reads the body, and waits for the end of the answer."""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Final, cast

from starlette.types import Receive, Scope, Send

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.asgi_body import read_asgi_body
from kvparams_proxy.requests.body import RequestBody, declared_length
from kvparams_proxy.requests.downstream import ASGIDownstream
from kvparams_proxy.server.admission import Admission
from kvparams_proxy.server.request_handler import RequestHandler

__all__ = ["ASGIRequestHandler"]

_UPGRADE: Final = "this server drops the body of requests with an Upgrade header; send the request without it"
"""uvicorn 0.34 to 0.54 with httptools (uvicorn's issue 2722, httptools' 124)."""


class ASGIRequestHandler:
    """The ASGI app of an endpoint, for servers that offer no shorter way."""

    def __init__(self, path: str) -> None:
        """It is found under this path in the lifespan's state, however the client has spelled it."""
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generate: RequestHandler = scope["state"]["generate"][self._path]
        admission = generate.admit(scope["headers"])
        gathered = RequestBody(generate.max_bytes, generate.bodies)
        headers = dict(cast("Iterable[tuple[bytes, bytes]]", scope["headers"]))
        upgrade, length = b"upgrade" in headers, headers.get(b"content-length")
        body = b""
        try:
            if admission.error is None:
                body = await read_asgi_body(receive, gathered)
                if upgrade and length is not None and declared_length(length) != len(body):
                    raise ProxyError(400, "invalid_request_error", _UPGRADE)
        except ProxyError as error:
            admission.error = error.with_traceback(None)
        except ConnectionError:  # the client left while it was sending
            gathered.release()
            return
        try:
            # What follows an upgrade on its connection is nobody's request: it may be the body that was left out.
            await self._answer(generate, admission, body, ASGIDownstream(receive, send, closes=upgrade))
        finally:
            gathered.release()

    async def _answer(
        self, generate: RequestHandler, admission: Admission, body: bytes, downstream: ASGIDownstream
    ) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            generate.handle(admission, body, downstream, partial(_set, done))
            await done
            await downstream.finished()
        finally:
            downstream.close()
            if not done.done() or done.cancelled():  # the server has cancelled this task, and what it waited for
                downstream.drop()


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
