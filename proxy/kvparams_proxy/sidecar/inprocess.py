"""The way to an engine whose ASGI app runs in this process: an `Upstream` without a socket.

To whoever listens its answers look like those that come over HTTP. An app is first told by `http.disconnect` that
nobody waits any more. Its task is cancelled only where that is harmless: many servers abort the computation for a
request on the disconnect, and never on a cancellation.
"""

import asyncio
import logging
from collections.abc import Mapping, MutableMapping
from contextvars import Context, copy_context
from typing import Any, Final, cast

from starlette.types import ASGIApp, Message, Scope

from kvparams_proxy.secret import Secret
from kvparams_proxy.upstream.types import (
    MAX_BYTES_PER_TURN,
    ResponseHead,
    ResponseSink,
    UpstreamBody,
    UpstreamError,
    UpstreamRequest,
    describe_error,
    join_body,
)

__all__ = ["InProcessExchange", "InProcessUpstream"]

_log: Final = logging.getLogger(__name__)
_GRACE_S: Final = 5.0
"""For an app to end once nobody waits for its answer; then its task is cancelled."""
_CLOSING_S: Final = 2 * _GRACE_S
_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}
"""As uvicorn says it: so that frameworks listen for the client's leaving."""
_MESSAGE_BYTES: Final = 512
"""What a message counts for beside its body, where an app never waits: one that is empty takes time, too."""
_HERE: Final = ("127.0.0.1", 0)


class InProcessUpstream:
    """The app of one engine, as an upstream. See `kvparams_proxy.upstream.interface.Upstream`."""

    def __init__(self, app: ASGIApp, base: Mapping[str, Any], *, key: Secret | None = None) -> None:
        """Creates the upstream; the app is not called yet.

        Args:
            app: what answers.
            base: what its requests have in their scope beside what is theirs: `app`, and `state` from its lifespan.
            key: the engine's own; it goes with every request.
        """
        self._app = app
        self._base = base
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        """Of every call: that of whoever happens to make it is another request's."""
        self.has_own_key: Final = key is not None
        """See `Upstream.has_own_key`."""
        self.shared: Final = False
        """See `Upstream.shared`."""
        self._own = b"" if key is None else key.authorization_header()
        self.peer_addresses: Final[tuple[str, ...]] = ()
        """See `Upstream.peer_addresses`: an app has no address, what is its own is declared."""
        self._calls: set[InProcessExchange] = set()
        self._closed = False

    def request(self, path: bytes, headers: bytes, body: UpstreamBody) -> UpstreamRequest:
        """Builds a POST request. `headers` are whole lines, each ending in CRLF."""
        body = join_body(body)
        head = b"POST %b\r\ncontent-type: application/json\r\naccept: */*\r\n%b%bcontent-length: %d\r\n"
        return head % (path, self._own, headers, len(body)), body

    def get(self, path: bytes, headers: bytes = b"") -> UpstreamRequest:
        """Builds a GET request."""
        return b"GET %b\r\naccept: */*\r\n%b" % (path, self._own), b""

    def exchange(self, request: UpstreamRequest, sink: ResponseSink, *, once: bool = False) -> "InProcessExchange":
        """Runs `request` and passes its response to `sink`.

        It is never sent twice, whatever `once` says: nothing gets lost here.
        """
        call = InProcessExchange(self, self._loop, sink)
        if self._closed:
            self._loop.call_soon(call.finish, UpstreamError("the engine has been removed", connected=False))
            return call
        self._calls.add(call)
        call.begin(self._app, self._scope(request[0]), join_body(request[1]), self._context.copy())
        return call

    def forget(self, call: "InProcessExchange") -> None:
        """Forgets a call whose app has ended."""
        self._calls.discard(call)

    @property
    def open_connections(self) -> int:
        """The number of calls that the app has not ended."""
        return len(self._calls)

    def close(self) -> None:
        """Ends running calls, which are told that they were cut off, and refuses new ones."""
        self._closed = True
        for call in self._calls:
            self._loop.call_soon(call.abort, UpstreamError("the engine has been removed"))

    async def wait_closed(self) -> None:
        """Waits, within bounds, until the app has ended its calls after `close`."""
        tasks = [call.task for call in self._calls if call.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSING_S)

    def _scope(self, head: bytes) -> Scope:
        line, *lines = head.split(b"\r\n")
        method, path = line.split(b" ")
        headers = [(name.lower(), value) for name, _, value in (each.partition(b": ") for each in lines if each)]
        scope: Scope = {
            **self._base,
            "type": "http",
            "asgi": _ASGI,
            "http_version": "1.1",
            "method": method.decode(),
            "scheme": "http",
            "path": path.decode(),
            "raw_path": path,
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), *headers],
            "client": _HERE,
            "server": _HERE,
            "extensions": {},
        }
        if "state" in scope:
            scope["state"] = dict(cast("Mapping[str, Any]", scope["state"]))
        return scope


class InProcessExchange:
    """A request to the app and its response. See `kvparams_proxy.upstream.interface.ExchangeHandle`."""

    __slots__ = (
        "_begun",
        "_body",
        "_bytes",
        "_flowing",
        "_head",
        "_left",
        "_loop",
        "_owner",
        "_sink",
        "_timer",
        "task",
    )

    def __init__(self, owner: InProcessUpstream, loop: asyncio.AbstractEventLoop, sink: ResponseSink) -> None:
        self._owner = owner
        self._loop = loop
        self._sink: ResponseSink | None = sink
        self._body: bytes | None = None
        self._head: ResponseHead | None = None
        self._begun = False
        self._bytes = 0
        self._left = asyncio.Event()
        """Nobody waits any more: the app may hear that."""
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        """The app's."""

    # what the owner calls

    def begin(self, app: ASGIApp, scope: Scope, body: bytes, context: Context) -> None:
        """Starts the app in a task of its own: the sink is not called before this returns."""
        self._body = body
        self.task = self._loop.create_task(self._run(app, scope), context=context)
        self.task.add_done_callback(self._ended)

    def finish(self, error: UpstreamError | None) -> None:
        """Ends the exchange: the answer has ended, or will not come. The app may still run."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_done(error)

    # what whoever owns the leg calls: see `ExchangeHandle`

    def abort(self, error: UpstreamError) -> None:
        """See `ExchangeHandle.abort`."""
        sink = self._sink
        if sink is not None:
            error.connected = error.sent = self._begun
            self.discard()
            sink.on_done(error)

    def discard(self) -> None:
        """See `ExchangeHandle.discard`."""
        sink, self._sink = self._sink, None
        if sink is None or self.task is None:
            return
        if not self._begun:
            self.task.cancel()
            return
        self._leave()
        self._timer = self._loop.call_later(_GRACE_S, self._give_up)

    def half_close(self) -> bool:
        """See `ExchangeHandle.half_close`."""
        if self._sink is None or not self._begun:
            return False
        self._leave()
        return True

    def pause(self) -> None:
        """See `ExchangeHandle.pause`: the app waits in `send`."""
        self._flowing.clear()

    def resume(self) -> None:
        """See `ExchangeHandle.resume`."""
        self._flowing.set()

    # the app

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        self._begun = True
        await app(scope, self._receive, self._send)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._left.set()
        self._owner.forget(self)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._sink is not None:
            _log.error("the engine's app failed", exc_info=error)
        self.finish(UpstreamError("the engine's app ended before its answer was complete"))

    async def _receive(self) -> MutableMapping[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        body = message.get("body", b"")
        at = 0
        while len(body) - at > MAX_BYTES_PER_TURN and self._sink is not None:
            piece = body[at : at + MAX_BYTES_PER_TURN]
            await self._deliver({**message, "body": piece, "more_body": True}, MAX_BYTES_PER_TURN)
            at += MAX_BYTES_PER_TURN
        await self._deliver({**message, "body": body[at:]} if at else message, len(body) - at)

    async def _deliver(self, message: Message, size: int) -> None:
        self._bytes += size + _MESSAGE_BYTES
        if self._bytes > MAX_BYTES_PER_TURN:
            self._bytes = 0
            await asyncio.sleep(0)
        while not self._flowing.is_set() and not self._left.is_set():
            await self._flowing.wait()
        if self._sink is None:  # nobody listens: as on a connection that the client has closed
            return
        try:
            self._take(self._sink, message)
        except UpstreamError as error:  # the sink has seen enough
            self._fail(error)
        except ValueError as error:
            self._fail(UpstreamError(f"the engine's answer is not usable ({describe_error(error)})"))
        except Exception:  # noqa: BLE001  a fault of the proxy: still, this call ends and the app is told
            _log.exception("an answer could not be taken")
            self._fail(UpstreamError("the proxy failed; its log says why"))

    def _take(self, sink: ResponseSink, message: Message) -> None:
        """Handles a message of the app.

        Raises:
            ValueError: the app does not keep to ASGI, or the sink does not want what came.
        """
        kind: str = message["type"]
        if kind == "http.response.start":
            if self._head is not None:
                raise ValueError("it begins twice")
            self._head = _head(message)
            sink.on_head(self._head)
        elif kind == "http.response.body":
            if self._head is None:
                raise ValueError("it has no status")
            if body := cast("bytes", message.get("body", b"")):
                sink.on_body(bytes(body))
            if not message.get("more_body", False):
                self._left.set()  # as servers do: whoever listens for the client hears that this is over
                self.finish(None)

    def _fail(self, error: UpstreamError) -> None:
        sink = self._sink
        self.discard()
        if sink is not None:
            sink.on_done(error)

    def _leave(self) -> None:
        self._left.set()
        self._flowing.set()

    def _give_up(self) -> None:
        if self.task is not None:
            _log.warning("the engine's app did not end %g s after its client had left: cancelled", _GRACE_S)
            self.task.cancel()


def _head(message: Message) -> ResponseHead:
    head = ResponseHead(status=int(message["status"]), framed=True)  # the app says where its answer ends
    for name, value in cast("list[tuple[bytes, bytes]]", message.get("headers", [])):
        name = name.lower()
        if name == b"content-type":
            head.content_type = value
        elif name == b"retry-after":
            head.retry_after = value
    return head
