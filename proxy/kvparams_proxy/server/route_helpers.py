"""Shared by the routes that are no generation: the client's key, and the response for an error."""

from starlette.requests import Request
from starlette.responses import Response

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.authentication import AuthenticatedClient, require_client

__all__ = ["authorization_header", "error_response", "require_client_of"]


def authorization_header(request: Request) -> bytes | None:
    """Returns the Authorization header of a request."""
    return next((value for name, value in request.headers.raw if name == b"authorization"), None)


def require_client_of(request: Request) -> AuthenticatedClient | None:
    """Returns whose key came with the request; None where clients need none.

    Raises:
        Unauthorized: they need one.
    """
    keys = request.state.keys
    return None if keys is None else require_client(keys, authorization_header(request))


def error_response(error: ProxyError, headers: dict[str, str] | None = None) -> Response:
    """Returns the response for an error, with its own headers and these."""
    own = dict(line.decode().split(": ", 1) for line in error.headers().split(b"\r\n") if line)
    return Response(error.body(), error.status, {**own, **(headers or {})}, "application/json")
