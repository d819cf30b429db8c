"""The body of a request, gathered from an ASGI server's messages."""

from starlette.types import Receive

from kvparams_proxy.requests.body import RequestBody

__all__ = ["read_asgi_body"]


async def read_asgi_body(receive: Receive, body: RequestBody) -> bytes:
    """Returns all of it. It stays in the budget of `body` until that is released.

    Raises:
        ProxyError: 413 or 503, see `RequestBody.add`.
        ConnectionError: the client has left.
    """
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client has left")
        body.add(message.get("body", b""))
        if not message.get("more_body", False):
            return body.join()
