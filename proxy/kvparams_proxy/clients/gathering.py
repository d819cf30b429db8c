"""The body of a request, gathered from an ASGI server's messages."""

from starlette.types import Receive

from kvparams_proxy.clients.body import Body

__all__ = ["whole_body"]


async def whole_body(receive: Receive, body: Body) -> bytes:
    """Returns all of it. It stays in the budget of `body` until that is released.

    Raises:
        ProxyError: 413 or 503, see `Body.add`.
        ConnectionError: the client has left.
    """
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client has left")
        body.add(message.get("body", b""))
        if not message.get("more_body", False):
            return body.take()
