"""The HTTP side of the engine: a Starlette app that speaks OpenAI's API as vLLM does.

The one rule: whatever was submitted to the engine is aborted when the client leaves, at once and on every path.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reference_engine.answers import Answer, error_body, sse, usage
from reference_engine.engine import Engine
from reference_engine.kv import Handoff, KVSharing
from reference_engine.metrics import Metrics
from reference_engine.requests import Ask, RequestError, read_chat, read_completion, read_tokenize
from reference_engine.sequence import Event, Sequence

__all__ = ["Service", "create_app"]

_MAX_BODY_BYTES: Final = 16 << 20
_MAX_REQUEST_ID_CHARS: Final = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    """What the app serves."""

    engine: Engine
    sharing: KVSharing
    metrics: Metrics
    model_name: str
    max_model_len: int


def create_app(service: Service) -> Starlette:
    """The app; its lifespan starts and ends the engine."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        loop = asyncio.get_running_loop()
        service.engine.start(lambda events: loop.call_soon_threadsafe(_deliver, events) and None)
        try:
            yield
        finally:
            service.engine.close()
            service.sharing.close()

    async def completions(request: Request) -> Response:
        ask = read_completion(await _body(request), service.model_name, service.max_model_len)
        return await _answer(service, request, ask, "completion")

    async def chat(request: Request) -> Response:
        ask = read_chat(await _body(request), service.model_name, service.max_model_len)
        return await _answer(service, request, ask, "chat")

    async def tokenize(request: Request) -> Response:
        tokens = read_tokenize(await _body(request), service.model_name)
        return JSONResponse({"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens})

    async def models(_: Request) -> Response:
        card = {"id": service.model_name, "object": "model", "created": 0, "owned_by": "kvparams"}
        card |= {"root": service.model_name, "parent": None, "max_model_len": service.max_model_len}
        return JSONResponse({"object": "list", "data": [card]})

    async def health(_: Request) -> Response:
        sharing = service.sharing
        state = {"role": sharing.role, "id": sharing.instance.id, "incarnation": sharing.instance.incarnation}
        return JSONResponse(state, 200 if service.engine.alive else 503)

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        middleware=[Middleware(RequestIds)],
        exception_handlers={RequestError: _refuse, HTTPException: _no_such_route},
        lifespan=lifespan,
    )


class RequestIds:
    """Takes `X-Request-Id` from the client, or makes one, and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        usable = 0 < len(given) <= _MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()
        request_id = given if usable else uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class _Running:
    """The sequences of one request while the engine works on them; those that have not ended on exit are aborted."""

    def __init__(self, engine: Engine, sequences: list[Sequence], events: asyncio.Queue[Event]) -> None:
        self._engine, self._events = engine, events
        self._sequences = sequences
        self._open = set(sequences)

    def __enter__(self) -> "_Running":
        for sequence in self._sequences:
            self._engine.submit(sequence)
        return self

    def __exit__(self, *_: object) -> None:
        for sequence in self._open:
            self._engine.abort(sequence)

    async def steps(self) -> AsyncIterator[list[Event]]:
        """What has happened since the last time, until every sequence has ended or one of them failed."""
        while self._open:
            events = [await self._events.get()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            for event in events:
                if event.finish is not None:
                    self._open.discard(event.sequence)
            yield events
            if any(event.finish == "error" for event in events):
                return


class _EventStream(Response):
    """The answer as server-sent events. The status waits for the first token: an early failure is a proper error."""

    media_type = "text/event-stream"

    def __init__(self, running: _Running, answer: Answer, counted: Callable[[], dict[str, object] | None]) -> None:
        self.status_code, self.background = 200, None  # not the base class's: a body would set a content-length
        self.init_headers({"cache-control": "no-cache"})
        self._running, self._answer, self._counted = running, answer, counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, unless the client leaves."""
        await _unless_left(receive, self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        with self._running:
            async for events in self._running.steps():
                failed = next((event for event in events if event.finish == "error"), None)
                if failed is not None and not started:
                    await JSONResponse(error_body(_failure(failed)), 500)(scope, receive, send)
                    return
                text = b"" if started else self._answer.opening()
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                text += b"".join(self._answer.chunk(event) for event in events if event is not failed)
                if failed is not None:
                    text += sse(error_body(_failure(failed)))
                if text:
                    await send({"type": "http.response.body", "body": text, "more_body": True})
        await send({"type": "http.response.body", "body": self._answer.closing(self._counted()), "more_body": False})


async def _answer(service: Service, request: Request, ask: Ask, kind: Literal["completion", "chat"]) -> Response:
    request_id: str = request.state.request_id
    handoff = service.sharing.read(ask.kv_transfer_params, request_id, ask.cache_salt, ask.prompts)
    if handoff.prefilling and ask.stream:
        raise RequestError("a prefill leg is answered in one piece: send stream: false", param="stream")
    events: asyncio.Queue[Event] = asyncio.Queue()
    sequences = _sequences(ask, handoff, service.sharing, events)
    running = _Running(service.engine, sequences, events)
    answer = Answer(kind, request_id, service.model_name, len(sequences))
    if ask.stream:
        return _EventStream(running, answer, lambda: usage(sequences, ask.choices) if ask.include_usage else None)
    return await _unless_left(request.receive, _whole(running, answer, sequences, ask, handoff)) or Response(b"", 499)


async def _whole(
    running: _Running, answer: Answer, sequences: list[Sequence], ask: Ask, handoff: Handoff
) -> JSONResponse:
    with running:
        async for events in running.steps():
            for event in events:
                if event.finish == "error":
                    raise _failure(event)
                answer.take(event)
    counted = usage(sequences, ask.choices)
    sessions = [sequence.kv for sequence in sequences if sequence.kv is not None]
    return JSONResponse(answer.whole(counted, handoff.result(sessions)))


def _sequences(ask: Ask, handoff: Handoff, sharing: KVSharing, events: asyncio.Queue[Event]) -> list[Sequence]:
    return [
        Sequence(
            prompt=prompt,
            index=index,
            deliver=events.put_nowait,
            sampling=replace(ask.sampling, seed=ask.seed_of(index)),
            max_tokens=ask.max_tokens,
            min_tokens=ask.min_tokens,
            stop=ask.stop,
            ignore_eos=ask.ignore_eos,
            cache_root=handoff.cache_root,
            kv=sharing.session(prompt, handoff),
        )
        for index, prompt in enumerate(prompt for prompt in ask.prompts for _ in range(ask.choices))
    ]


async def _unless_left(receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None when the client left first; then the work was cancelled and has ended."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise RequestError(f"the body is longer than {_MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)


def _failure(event: Event) -> RequestError:
    return RequestError(event.reason or "the engine failed", status=500, kind="InternalServerError")


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error_body(error), error.status)


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(error_body(RequestError(message, status=error.status_code, kind=kind)), error.status_code)


def _deliver(events: list[Event]) -> None:
    for event in events:
        event.sequence.deliver(event)
