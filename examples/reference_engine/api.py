"""The HTTP side of the engine: a Starlette app that speaks OpenAI's API as vLLM does.

An endpoint reads a body and passes it on; other modules do the work.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvparams.versions import SUPPORTED_VERSIONS
from reference_engine.agent_answers import MessagesAnswer, ResponsesAnswer, anthropic_error
from reference_engine.agent_requests import read_count, read_messages, read_responses
from reference_engine.answer_shapes import Chat, Completion, Generated
from reference_engine.answers import error_body
from reference_engine.ask import Ask, RequestError
from reference_engine.requests import (
    read_chat,
    read_completion,
    read_control,
    read_embeddings,
    read_generate,
    read_tokenize,
)
from reference_engine.sequence import Event
from reference_engine.serving import AnswerMaker, Service, answer
from reference_engine.stored_responses import StoredResponses

__all__ = ["create_app"]

_MAX_BODY_BYTES: Final = 16 << 20
_MAX_REQUEST_ID_CHARS: Final = 256

_Reader = Callable[[bytes, str, int], Ask]


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

    def generating(read: _Reader, make: AnswerMaker) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            ask = read(await _body(request), service.model_name, service.max_model_len)
            return await answer(service, request, ask, make)

        return endpoint

    async def embeddings(request: Request) -> Response:
        inputs, base64 = read_embeddings(await _body(request), service.model_name, service.max_model_len)
        made = await asyncio.to_thread(service.embedder.answer, inputs, service.model_name, base64=base64)
        return JSONResponse(made)

    stored = StoredResponses()

    def with_stored(raw: bytes, model: str, max_model_len: int) -> Ask:
        return read_responses(raw, model, max_model_len, stored)

    def answer_stored(ask: Ask, request_id: str, model: str) -> ResponsesAnswer:
        return ResponsesAnswer(ask, request_id, model, stored)

    async def stored_response(request: Request) -> Response:
        return JSONResponse(stored.response(request.path_params["response_id"]))

    async def count_tokens(request: Request) -> Response:
        return JSONResponse({"input_tokens": read_count(await _body(request), service.model_name)})

    async def control(request: Request) -> Response:
        params = service.sharing.read_control(read_control(await _body(request), service.model_name))
        if params.phase == "cancel":
            service.transfers.cancel(params)
        else:
            await service.transfers.release(params)
        return JSONResponse({})

    async def tokenize(request: Request) -> Response:
        tokens = read_tokenize(await _body(request), service.model_name)
        return JSONResponse({"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens})

    async def models(_: Request) -> Response:
        card = {"id": service.model_name, "object": "model", "created": 0, "owned_by": "kvparams"}
        card |= {"root": service.model_name, "parent": None, "max_model_len": service.max_model_len}
        return JSONResponse({"object": "list", "data": [card], "kvparams_versions": SUPPORTED_VERSIONS})

    async def health(_: Request) -> Response:
        sharing = service.sharing
        state = {"role": sharing.role, "id": sharing.instance.id, "incarnation": sharing.instance.incarnation}
        return JSONResponse(state, 200 if service.engine.alive and sharing.ready else 503)

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(
        routes=[
            Route("/v1/completions", generating(read_completion, Completion), methods=["POST"]),
            Route("/v1/chat/completions", generating(read_chat, Chat), methods=["POST"]),
            Route("/inference/v1/generate", generating(read_generate, Generated), methods=["POST"]),
            Route("/v1/messages", generating(read_messages, MessagesAnswer), methods=["POST"]),
            Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
            Route("/v1/responses", generating(with_stored, answer_stored), methods=["POST"]),
            Route("/v1/responses/{response_id}", stored_response),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/v1/kvparams", control, methods=["POST"]),
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


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise RequestError(f"the body is longer than {_MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if request.url.path.startswith("/v1/messages"):
        return JSONResponse(anthropic_error(error), error.status)
    return JSONResponse(error_body(error), error.status)


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(error_body(RequestError(message, status=error.status_code, kind=kind)), error.status_code)


def _deliver(events: list[Event]) -> None:
    for event in events:
        event.sequence.deliver(event)
