"""Answers one ext_proc stream, which is one request: from its headers to the end of the response.

The body is held until the request is picked, within the proxy's own limits, and then goes back in chunks.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

from kvparams.instances import Instance
from kvparams.routing.plan import Leg
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.leg_requests import build_leg_request
from kvparams_proxy.ext_proc import messages as ext_proc
from kvparams_proxy.picker.context import PickerContext
from kvparams_proxy.picker.handlers import PASSED_PATHS, PickDownstream, PickHandler, pick_without_body
from kvparams_proxy.picker.pick import Destination, Pick, PickOwner, Response
from kvparams_proxy.picker.usage_reader import UsageReader
from kvparams_proxy.requests.authentication import require_client
from kvparams_proxy.requests.body import RequestBody
from kvparams_proxy.requests.forbidden_fields import is_forbidden_header
from kvparams_proxy.server.admission import Admission
from kvparams_proxy.upstream.types import join_body

__all__ = ["PickerStream"]

_WRONG_MODE: Final = (
    "the gateway does not show bodies of requests to the endpoint picker: set request_body_mode to "
    "FULL_DUPLEX_STREAMED or BUFFERED"
)
Write = Callable[[ext_proc.Message], Awaitable[None]]


class PickerStream:
    """Answers the messages of one stream."""

    def __init__(self, context: PickerContext, requests: AsyncIterator[ext_proc.Message], write: Write) -> None:
        """`requests` are the messages of the data plane; `write` sends one to it."""
        self._context = context
        self._requests = requests
        self._write = write
        self._outcome: asyncio.Future[Destination | ProxyError] = context.resources.loop.create_future()
        self._downstream: PickDownstream | None = None
        self._request_id = ""
        self._removed: list[str] = []
        self._usage: UsageReader | None = None
        self._endpoints: list[str] = []
        self._missing_bytes: int | None = None
        """Of a response whose length is known."""
        self._passes_chunks = False
        """Whether a body of a request that is not read is answered chunk by chunk."""
        self._is_answered = False
        """Whether the data plane was told what becomes of the request."""

    async def run(self) -> None:
        """Serves the stream until the data plane ends it, or the request is refused."""
        whole = False
        try:
            first = await anext(self._requests)
            if await self._request(first):
                await self._response()
            # A response that is shown has an end; of another one, its data plane does not tell whether it broke off.
            whole = self._usage is None
        except StopAsyncIteration:  # the client has left before its request was complete
            pass
        finally:
            self._end(whole=whole)

    # the request

    async def _request(self, first: ext_proc.Message) -> bool:
        """Answers the parts of the request. Returns whether a response follows that is of interest."""
        headers = ext_proc.header_pairs(first)
        pseudo = dict(headers[:8])
        method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"").partition(b"?")[0].decode("latin-1")
        mode, response_mode = ext_proc.body_mode(first)
        if response_mode == "duplex":
            self._usage = UsageReader()
        self._removed = sorted({name.decode("latin-1") for name, _ in headers if is_forbidden_header(name)})
        priority = self._context.objective_priority(headers)
        self._downstream = PickDownstream(PickOwner(self._picked, self._refused), self._subset(first), priority)
        handler = self._context.handlers.get(path) if method == b"POST" else None
        if handler is not None and mode in ("duplex", "buffered"):
            return await self._generating(handler, first, headers, buffered=mode == "buffered")
        admission = next(iter(self._context.handlers.values())).admit(headers)
        self._request_id = admission.request_id
        error = self._refusal(method, path, headers, has_mode=handler is None)
        if error is not None:
            await self._send_error(error)
            return False
        self._passes_chunks = mode == "duplex"
        pick_without_body(self._context.resources, self._context.modes, path, self._request_id, self._downstream)
        return await self._send_destination(None)

    def _refusal(
        self, method: bytes, path: str, headers: list[tuple[bytes, bytes]], *, has_mode: bool
    ) -> ProxyError | None:
        """Returns why a request is refused whose body is not read, or None."""
        if not has_mode:
            return ProxyError(500, "internal_error", _WRONG_MODE, code="body_not_shown")
        if method not in (b"GET", b"HEAD") or path not in PASSED_PATHS:
            said = f"{method[:16].decode('latin-1')} {path[:200]} is not served here"
            return ProxyError(404, "not_found_error", said)
        if self._context.keys is not None:
            try:
                require_client(self._context.keys, dict(headers).get(b"authorization"))
            except ProxyError as unauthorized:
                return unauthorized.with_traceback(None)
        return None

    def _subset(self, first: ext_proc.Message) -> frozenset[str] | None:
        hint = ext_proc.subset_hint(first)
        if hint is None:
            return None
        self._context.metrics.subsets += 1
        return self._context.endpoints.ids(hint)

    async def _generating(
        self, handler: PickHandler, first: ext_proc.Message, headers: list[tuple[bytes, bytes]], *, buffered: bool
    ) -> bool:
        """Reads the body of a request, has it picked, and answers."""
        admission = handler.admit(headers)
        self._request_id = admission.request_id
        downstream = self._downstream
        if downstream is None:
            return False
        if admission.error is not None:
            handler.refuse(admission, admission.error, downstream)
            return await self._send_destination(None)
        gathered = RequestBody(handler.max_bytes, handler.bodies)
        try:
            return await self._read_and_pick(handler, admission, first, gathered, buffered=buffered)
        except ProxyError as refused:
            handler.refuse(admission, refused, downstream)
            return await self._send_destination(None)
        finally:
            gathered.release()

    async def _read_and_pick(
        self,
        handler: PickHandler,
        admission: Admission,
        first: ext_proc.Message,
        gathered: RequestBody,
        *,
        buffered: bool,
    ) -> bool:
        """Reads the body and answers what was picked.

        Raises:
            ProxyError: there is no room for the body.
        """
        last, trailers = ext_proc.is_last(first), False
        to_body = buffered and not last
        if to_body:
            await self._write(ext_proc.pass_unchanged("request_headers"))
        while not (last or trailers):
            message = await anext(self._requests)
            kind = ext_proc.kind_of(message)
            if kind == "request_body":
                gathered.add(ext_proc.chunk(message))
                last = ext_proc.is_last(message) or buffered
            elif kind == "request_trailers":
                trailers = True
        body = gathered.join()
        if self._downstream is not None:
            handler.handle(admission, body, self._downstream)
        follows = await self._send_destination(body, buffered=buffered, to_body=to_body, ends=not trailers)
        if follows and trailers:
            await self._write(ext_proc.pass_unchanged("request_trailers"))
        return follows

    # what was picked

    def _picked(self, pick: Pick, destination: Destination) -> None:
        if not self._outcome.done():
            self._outcome.set_result(destination)

    def _refused(self, error: ProxyError) -> None:
        if not self._outcome.done():
            error.__traceback__ = error.__context__ = error.__cause__ = None  # their frames hold this stream
            self._outcome.set_result(error)

    async def _send_destination(
        self, body: bytes | None, *, buffered: bool = False, to_body: bool = False, ends: bool = True
    ) -> bool:
        """Waits for the pick and answers it. Returns whether the request goes to an engine.

        Args:
            body: the request's; None where there is none.
            buffered: whether the data plane keeps the body itself.
            to_body: whether the body is what is answered, and not the headers.
            ends: whether no trailers follow.
        """
        outcome = await self._outcome
        pick = None if self._downstream is None else self._downstream.pick
        if isinstance(outcome, ProxyError):
            await self._send_error(outcome)
            return False
        if pick is None:
            raise RuntimeError("a destination was picked without a pick")
        names = self._context.name_endpoints(pick, outcome)
        if not names:
            await self._send_error(self._context.unnamed_error())
            return False
        self._context.metrics.picks["picked"] += 1
        self._is_answered = True
        self._endpoints = names
        changed = None if body is None else _changed_body(pick, outcome.instance, body)
        pick.forget_body()
        headers = self._context.request_headers(pick, outcome)
        if changed is not None:
            headers["content-length"] = b"%d" % len(changed)
        answer = ext_proc.destination_answer(names, headers, self._removed + self._context.removed, to_body=to_body)
        if buffered:
            await self._write(ext_proc.buffered_body_answer(answer, changed) if to_body else answer)
            return True
        await self._write(answer)
        if body is not None:
            for piece in ext_proc.streamed_body(body if changed is None else changed, ends=ends):
                await self._write(piece)
        return True

    async def _send_error(self, error: ProxyError) -> None:
        self._context.metrics.picks["refused"] += 1
        self._is_answered = True
        await self._write(ext_proc.immediate_error(error, self._request_id))

    # the response

    async def _response(self) -> None:
        """Answers the parts of the response, which pass unchanged."""
        async for message in self._requests:
            kind = ext_proc.kind_of(message)
            if kind == "response_headers":
                self._record_response(message)
                await self._write(ext_proc.pass_unchanged(kind, {"x-request-id": self._request_id.encode()}))
            elif kind == "response_body":
                self._read_response(message)
                await self._write(ext_proc.pass_chunk(message))
            elif kind == "request_body" and self._passes_chunks:
                await self._write(ext_proc.pass_chunk(message))
            elif kind is not None:
                if kind == "response_trailers":
                    self._end_pick(whole=True)
                await self._write(ext_proc.pass_unchanged(kind))

    def _record_response(self, message: ext_proc.Message) -> None:
        pick = None if self._downstream is None else self._downstream.pick
        if pick is None:
            return
        headers = dict(ext_proc.header_pairs(message))
        status, maker = headers.get(b":status", b""), ext_proc.response_maker(message)
        if not status.isdigit():
            raise ext_proc.MalformedGatewayMessage("the headers of a response have no status")
        instance = self._context.count_served(ext_proc.served_endpoint(message), self._endpoints, maker)
        pick.answered(Response(int(status[:3]), instance, maker))
        length = headers.get(b"content-length", b"")
        if length.isdigit():  # no stream: its engine has done all its work
            self._missing_bytes = int(length)
            if self._usage is None:
                self._end_pick(whole=True)

    def _read_response(self, message: ext_proc.Message) -> None:
        """Reads a chunk of the response. The load is given back before a client can have the last byte."""
        data = ext_proc.chunk(message)
        if self._usage is not None:
            self._usage.feed(data)
        if self._missing_bytes is not None:
            self._missing_bytes -= len(data)
        if ext_proc.is_last(message) or self._missing_bytes == 0:
            self._end_pick(whole=True)

    # the end

    def _end(self, *, whole: bool) -> None:
        downstream = self._downstream
        if downstream is None:
            return
        downstream.leave()
        self._end_pick(whole=whole)
        self._downstream = None  # which knows this stream
        if not self._is_answered:
            self._context.metrics.picks["left"] += 1
        self._outcome.cancel()

    def _end_pick(self, *, whole: bool) -> None:
        """Gives back the load of the request. Called again, it does nothing."""
        pick = None if self._downstream is None else self._downstream.pick
        if pick is not None:
            pick.ended(None if self._usage is None else self._usage.usage(), whole=whole)


def _changed_body(pick: Pick, instance: Instance, body: bytes) -> bytes | None:
    """Returns the body that the engine gets, or None where it is the client's."""
    changes: Mapping[str, bytes | None] = pick.inbound.changes
    if pick.inbound.body is body and not changes:
        return None
    return join_body(build_leg_request(pick.endpoint, pick.inbound, Leg(instance, {}, True), None)[1])
