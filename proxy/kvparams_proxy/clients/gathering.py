"""The body of a request, gathered from an ASGI server's messages."""

from starlette.types import Receive

from kvparams_proxy.errors import ProxyError

__all__ = ["whole_body"]


async def whole_body(receive: Receive, limit_bytes: int) -> bytes:
    """All of it.

    Raises:
        ProxyError: 413, it is larger than `limit_bytes`.
        ConnectionError: the client has left.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client has left")
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise ProxyError(413, "invalid_request_error", f"the body is larger than {limit_bytes} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
