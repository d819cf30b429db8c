"""The head of an HTTP request that may be served, and the ASGI scope that is made of it."""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

import httptools

__all__ = ["RequestHead"]


class RequestHead(NamedTuple):
    """The head of a request that may be served."""

    method: bytes
    url: bytes
    version: str
    headers: list[tuple[bytes, bytes]]

    def asgi_scope(self, transport: asyncio.Transport, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the ASGI scope, with a copy of `state`.

        Raises:
            HttpParserInvalidURLError, UnicodeError: the target is not valid.
        """
        parsed = httptools.parse_url(self.url)
        raw_path: bytes = parsed.path or b"/"
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self.version,
            "method": self.method.decode("ascii"),
            "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": parsed.query or b"",
            "root_path": "",
            "headers": self.headers,
            "server": _host_and_port(transport.get_extra_info("sockname")),
            "client": _host_and_port(transport.get_extra_info("peername")),
            "state": dict(state),
        }


def _host_and_port(name: object) -> tuple[str, int] | None:
    if not isinstance(name, tuple):
        return None
    host, port = cast("tuple[object, ...]", name)[:2]
    return str(host), int(cast("int", port))
