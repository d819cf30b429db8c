"""Runs a request: its sequences go to the engine, and their events become an answer.

Every sequence that was submitted to the engine is aborted when the client leaves, at once and on every path.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from reference_engine.answers import Answer, error_body, sse, usage
from reference_engine.ask import Ask, RequestError
from reference_engine.embeddings import Embedder
from reference_engine.engine import Engine
from reference_engine.handoff import Handoff
from reference_engine.kv import KVSharing
from reference_engine.metrics import Metrics
from reference_engine.sequence import Event, Sequence
from reference_engine.transfers import Transfers

__all__ = ["AnswerMaker", "Service", "answer"]

AnswerMaker = Callable[[Ask, str, str], Answer]
"""From a request, its id and the model's name."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    """A `Service` holds the objects that the app serves with."""

    engine: Engine
    sharing: KVSharing
    transfers: Transfers
    embedder: Embedder
    metrics: Metrics
    model_name: str
    max_model_len: int


async def answer(service: Service, request: Request, ask: Ask, make: AnswerMaker) -> Response:
    """Run a request, and answer it whole or as a stream.

    Raises:
        RequestError: its document cannot be followed, or the engine failed before the first token.
    """
    request_id: str = request.state.request_id
    handoff = service.sharing.read(ask.kv_transfer_params, request_id, ask.cache_salt, ask.prompts)
    if handoff.prefilling and ask.stream:
        raise RequestError("a prefill leg is answered in one piece: send stream: false", param="stream")
    events: asyncio.Queue[Event] = asyncio.Queue()
    sequences = _sequences(ask, handoff, service.sharing, events)
    running = _Running(service, sequences, events, handoff)
    made = make(ask, request_id, service.model_name)
    if ask.stream:
        return _EventStream(running, made, lambda: usage(sequences, ask.choices) if ask.include_usage else None)
    work = _whole(running, made, sequences, handoff, service.sharing)
    return await _unless_left(request.receive, work) or Response(b"", 499)


class _Running:
    """The sequences of one request while the engine works on them; those that have not ended on exit are aborted."""

    def __init__(
        self, service: Service, sequences: list[Sequence], events: asyncio.Queue[Event], handoff: Handoff
    ) -> None:
        self._engine, self._transfers = service.engine, service.transfers
        self._sequences, self._events = sequences, events
        self._params = handoff.params
        self._open = set(sequences)

    def __enter__(self) -> "_Running":
        for sequence in self._sequences:
            self._engine.submit(sequence)
        if self._params is not None:
            self._transfers.begin(self._params, self._sequences, self.cancel)
        return self

    def __exit__(self, *_: object) -> None:
        for sequence in self._open:
            self._engine.abort(sequence)
        if self._params is not None:
            self._transfers.answered(self._params)

    def cancel(self) -> None:
        """End the answer with an error; nothing once it has ended."""
        for sequence in self._open:
            self._events.put_nowait(Event(sequence, "", None, "error", "cancelled"))

    async def steps(self) -> AsyncIterator[list[Event]]:
        """Yields the new events, until every sequence has ended or one of them failed."""
        while self._open:
            events = [await self._events.get()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            for event in events:
                if event.finish not in (None, "error"):  # with an error the engine may go on: it is aborted
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
                text += b"".join(self._answer.chunk(event) for event in events if event.finish != "error")
                if failed is not None:
                    text += sse(error_body(_failure(failed)))
                if text:
                    await send({"type": "http.response.body", "body": text, "more_body": True})
        await send({"type": "http.response.body", "body": self._answer.closing(self._counted()), "more_body": False})


async def _whole(
    running: _Running, made: Answer, sequences: list[Sequence], handoff: Handoff, sharing: KVSharing
) -> JSONResponse:
    with running:
        async for events in running.steps():
            for event in events:
                if event.finish == "error":
                    raise _failure(event)
                made.take(event)
    counted = usage(sequences, made.ask.choices)
    sessions = [sequence.kv for sequence in sequences if sequence.kv is not None]
    return JSONResponse(made.whole(counted, sharing.result(handoff, sessions)))


def _sequences(ask: Ask, handoff: Handoff, sharing: KVSharing, events: asyncio.Queue[Event]) -> list[Sequence]:
    return [
        Sequence(
            prompt=prompt,
            index=index,
            deliver=events.put_nowait,
            sampling=replace(ask.sampling, seed=ask.seed_of(index)),
            limits=ask.limits,
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


def _failure(event: Event) -> RequestError:
    return RequestError(str(event.reason or "the engine failed"), status=500, kind="InternalServerError")
