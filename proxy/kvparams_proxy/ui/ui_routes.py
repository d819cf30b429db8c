"""The routes of the live page: its files, which need no token, and its data, which need one.

Scripts and styles come from these routes alone, and nothing on the page is made of markup: see `_POLICY`.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.secret import Secret
from kvparams_proxy.ui.snapshot_feed import SnapshotFeed, Viewer

__all__ = ["ui_routes"]

_FOLDER: Final = Path(__file__).with_name("static")
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_SLOW_S: Final = 10.0
"""A viewer who takes nothing for so long is dropped."""


class _Tokens(NamedTuple):
    admin: Secret | None
    viewer: Secret | None

    def is_admin(self, request: Request) -> bool:
        """Returns whether the request shows the admin token rather than the viewer token. Both are always compared.

        Raises:
            ProxyError: it shows neither.
        """
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        shown = given.encode("latin-1") if scheme.lower() == "bearer" else b""
        is_admin = self.admin is not None and self.admin.matches(shown)
        is_viewer = self.viewer is not None and self.viewer.matches(shown)
        if not is_admin and not is_viewer:
            message = "the live page needs the viewer token or the admin token: send `Authorization: Bearer ...`"
            raise ProxyError(401, "invalid_request_error", message, code="invalid_viewer_token")
        return is_admin


def ui_routes(admin: Secret | None, viewer: Secret | None) -> list[Route]:
    """Returns the routes. They find the `SnapshotFeed` as `ui` in the state of the lifespan.

    Args:
        admin: the admin token.
        viewer: the token of people who may look and change nothing.
    """
    tokens = _Tokens(admin, viewer)
    if tokens == (None, None):
        return []
    files = _read_files()

    async def get_file(request: Request) -> Response:
        return _file_response(files.get(request.path_params.get("name", "index.html")))

    async def redirect(request: Request) -> Response:
        return RedirectResponse("ui" if request.url.path == "/" else "../ui", headers=_HEADERS)

    async def get_state(request: Request) -> Response:
        try:
            is_admin = tokens.is_admin(request)
            feed: SnapshotFeed = request.state.ui
            body = await feed.latest(is_admin=is_admin)
        except ProxyError as error:
            return _error_response(error)
        return Response(body, headers=_data_headers(is_admin=is_admin), media_type="application/json")

    return [
        Route("/", redirect, methods=["GET"]),
        Route("/ui", get_file, methods=["GET"]),
        Route("/ui/", redirect, methods=["GET"]),
        Route("/ui/state", get_state, methods=["GET"]),
        Route("/ui/events", _EventStream(tokens), methods=["GET"]),
        Route("/ui/{name}", get_file, methods=["GET"]),
    ]


class _File(NamedTuple):
    body: bytes
    content_type: str


def _read_files() -> Mapping[str, _File]:
    paths = (path for path in _FOLDER.iterdir() if path.suffix in _TYPES)
    return {path.name: _File(path.read_bytes(), _TYPES[path.suffix]) for path in paths}


def _file_response(file: _File | None) -> Response:
    if file is None:
        return _error_response(ProxyError(404, "not_found_error", "the live page has no such file"))
    headers = {**_HEADERS, "cache-control": "no-cache", "content-type": file.content_type}
    return Response(file.body, headers=headers)


def _error_response(error: ProxyError) -> Response:
    headers = {**_HEADERS, "cache-control": "no-store"}
    if error.status == 401:
        headers["www-authenticate"] = 'Bearer realm="kvparams ui"'
    return Response(error.body(), error.status, headers, "application/json")


def _data_headers(*, is_admin: bool) -> dict[str, str]:
    access = "admin" if is_admin else "viewer"
    return {**_HEADERS, "cache-control": "no-store", "x-kvparams-access": access}


class _EventStream:
    """An ASGI app that sends each snapshot as a server-sent event."""

    def __init__(self, tokens: _Tokens) -> None:
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        feed: SnapshotFeed = request.state.ui
        try:
            is_admin = self._tokens.is_admin(request)
            viewer = feed.join(is_admin=is_admin)
        except ProxyError as error:
            await _error_response(error)(scope, receive, send)
            return
        try:
            await _send_events(viewer, request.method == "HEAD", receive, send)
        finally:
            feed.leave(viewer)


async def _send_events(viewer: Viewer, bodiless: bool, receive: Receive, send: Send) -> None:
    headers = {**_data_headers(is_admin=viewer.is_admin), "content-type": "text/event-stream; charset=utf-8"}
    headers["x-accel-buffering"] = "no"  # nginx would keep events back
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": lines})
    if bodiless:
        await send({"type": "http.response.body", "body": b""})
        return
    leaving = asyncio.ensure_future(_wait_until_left(viewer, receive))
    try:
        while (snapshot := await viewer.next()) is not None:
            event = b"event: snapshot\ndata: " + snapshot + b"\n\n"
            async with asyncio.timeout(_SLOW_S):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        if not leaving.done():
            await send({"type": "http.response.body", "body": b""})
    except TimeoutError:
        return  # the server ends the connection of an answer that is not complete
    finally:
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving


async def _wait_until_left(viewer: Viewer, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    viewer.close()
