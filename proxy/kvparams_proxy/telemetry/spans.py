"""OpenTelemetry spans of requests that are over, and their export: needs the extra `tracing`.

What takes time (the request, each wait, each leg) is a span; every step of a request's life is an event on its span.
Attributes follow the semantic conventions for generative AI (`gen_ai.*`, OpenTelemetry 1.37, in development), without
prompts and answers.

Where to is said by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT, ...). Only sampled requests cost
anything here. A thread exports their spans, so a missing collector blocks nothing.
"""

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from time import time_ns
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes

from kvparams.routing.request_lifecycle import LifecycleState, StateSpan
from kvparams.version import __version__
from kvparams_proxy.telemetry.request_record import RefusedRequest, RequestRecord
from kvparams_proxy.telemetry.tracing import TraceContext

__all__ = ["RequestSpanExporter"]

_CLOSE_S: Final = 3.0
_WELL: Final = Status(StatusCode.UNSET)
_BADLY: Final = Status(StatusCode.ERROR)
_MODEL: Final = 200
"""Characters of a model's name, at most."""
_PROVIDER: Final = "kvparams"
"""None of the well-known ones: the engines are the operator's own."""
_OPERATIONS: Final = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}


class RequestSpanExporter:
    """Exports one span for each request, and below it one for each leg and each wait.

    A `kvparams_proxy.telemetry.request_record.RecordReader`.
    """

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        """`exporter` is by default OTLP over HTTP. Starts a thread."""
        self._processor = BatchSpanProcessor(exporter or OTLPSpanExporter())
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._resource = Resource.create({} if named else {"service.name": "kvparams-proxy"})
        self._scope = InstrumentationScope("kvparams_proxy", __version__)

    def ended(self, account: RequestRecord) -> None:
        """See `kvparams_proxy.telemetry.request_record.RecordReader`."""
        trace, life = account.trace_context, account.lifecycle
        if trace is None or not trace.sampled:
            return
        context, parent = _place(trace)
        clock = _SpanClock(life.since_s, account.ended_s)
        legs = iter(trace.legs)
        model = account.facts.model
        for visit in _visits(life.spans, life.outcome == "ok", account.is_encoded is True):
            if visit.queued:
                span_id, kind, name = trace.new_span_id(), SpanKind.INTERNAL, "queue"
            else:
                span_id, kind, name = next(legs, 0) or trace.new_span_id(), SpanKind.CLIENT, visit.begun[0]
            self._export(
                name,
                SpanContext(trace.trace_id, span_id, is_remote=False, trace_flags=context.trace_flags),
                context,
                kind,
                (clock.ns(visit.begun[2]), clock.ns(visit.ended_s)),
                {} if visit.queued else {**_generation(account.endpoint, model), "kvparams.instance": visit.begun[1]},
                visit.well or life.outcome == "gone",
                () if visit.first_byte_s is None else (_event("first_byte", "", clock.ns(visit.first_byte_s)),),
            )
        self._export(
            f"POST {account.endpoint}",
            context,
            parent,
            SpanKind.SERVER,
            (clock.ns(life.started_s), clock.ns(life.since_s)),
            _attributes(account),
            life.outcome not in ("failed", "midway"),
            [_event(state, who, clock.ns(at_s)) for state, who, at_s in life.spans],
        )

    def refused(self, refusal: RefusedRequest) -> None:
        """See `kvparams_proxy.telemetry.request_record.RecordReader`. Its span has no length: it never came to life."""
        trace, error = refusal.trace, refusal.error
        if trace is None or not trace.sampled:
            return
        context, parent = _place(trace)
        now_ns = time_ns()
        well = error.status < 500
        attributes = _known(refusal.endpoint, refusal.request_id, "refused" if well else "failed") | _present(
            error.status, error.name, refusal.model
        )
        self._export(
            f"POST {refusal.endpoint}",
            context,
            parent,
            SpanKind.SERVER,
            (now_ns, now_ns),
            attributes,
            well,
            (_event("done", "", now_ns),),
        )

    async def close(self) -> None:
        """Exports the remaining spans, for three seconds at most."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def shut_down() -> None:
            self._processor.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, name="trace-export-end", daemon=True).start()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await done.wait()
        except TimeoutError:
            pass

    def _export(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        times_ns: tuple[int, int],
        attributes: Attributes,
        well: bool,
        events: Sequence[Event] = (),
    ) -> None:
        # A tracer would make the same object, twelve times as slowly: it expects to be there while a span runs.
        span = ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            events,
            kind=kind,
            status=_WELL if well else _BADLY,
            start_time=times_ns[0],
            end_time=times_ns[1],
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)


class _SpanClock:
    """Converts the executor's seconds to nanoseconds since 1970, with the end of the request as the fixed point."""

    def __init__(self, end_s: float, since_1970_s: float) -> None:
        self._end_s = end_s
        self._end_ns = int(since_1970_s * 1e9)

    def ns(self, at_s: float) -> int:
        return self._end_ns - int((self._end_s - at_s) * 1e9)


class _SpanInterval:
    """The span of one leg or one wait."""

    def __init__(self, begun: StateSpan, ended_s: float, well: bool, first_byte_s: float | None = None) -> None:
        self.begun = begun
        self.ended_s = ended_s
        self.well = well
        self.first_byte_s = first_byte_s

    @property
    def queued(self) -> bool:
        return self.begun[0] == "queued"


def _visits(spans: list[StateSpan], well: bool, encoded: bool) -> Iterator[_SpanInterval]:
    """A decode leg goes on after its first byte; what comes between legs takes no time.

    `well`: how it all ended; `encoded`: whether the last encode leg ended well.
    """
    for index, span in enumerate(spans[:-1]):
        state = span[0]
        after, _, ended_s = spans[index + 1]
        if state == "queued":
            yield _SpanInterval(span, ended_s, after != "done")
        elif state == "encode":
            yield _SpanInterval(span, ended_s, encoded and after != "encode")
        elif state == "prefill":
            yield _SpanInterval(span, ended_s, after == "result")
        elif state == "decode" and after != "first_byte":
            yield _SpanInterval(span, ended_s, False)
        elif state == "decode":
            end, _, end_s = spans[index + 2]
            yield _SpanInterval(span, end_s, well and end == "done", ended_s)


def _place(trace: TraceContext) -> tuple[SpanContext, SpanContext | None]:
    """Returns the context of the request's span, and of its parent if the client has begun the trace."""
    flags = TraceFlags(trace.flags)
    context = SpanContext(trace.trace_id, trace.span_id, is_remote=False, trace_flags=flags)
    if trace.parent_id is None:
        return context, None
    return context, SpanContext(trace.trace_id, trace.parent_id, is_remote=True, trace_flags=flags)


def _event(state: LifecycleState, who: str, at_ns: int) -> Event:
    """A step to this state; `who` is the instance, if there is one."""
    return Event(state, {"kvparams.instance": who} if who else None, at_ns)


_Values = dict[str, str | int | bool | list[str]]


def _attributes(account: RequestRecord) -> _Values:
    facts = account.facts
    return {
        **_known(account.endpoint, facts.request_id, account.lifecycle.outcome or ""),
        "kvparams.transfer_ids": [facts.transfer_id, *(account.further_transfers or ())],
        "kvparams.retries": account.retries,
        "gen_ai.request.stream": account.stream,
        **_present(account.status, account.code, facts.model, account.prompt_tokens, account.completion_tokens),
        **({} if account.cached_tokens is None else {"gen_ai.usage.cache_read.input_tokens": account.cached_tokens}),
    }


def _generation(endpoint: str, model: str | None) -> _Values:
    """Returns what GenAI conventions want of each span of an operation; of legs, too."""
    found: _Values = {
        "gen_ai.operation.name": _OPERATIONS.get(endpoint, "generate_content"),
        "gen_ai.provider.name": _PROVIDER,
    }
    return found if model is None else {**found, "gen_ai.request.model": model[:_MODEL]}


def _known(endpoint: str, request_id: str, outcome: str) -> _Values:
    """Returns the attributes that every request has."""
    return {
        "http.request.method": "POST",
        "http.route": endpoint,
        **_generation(endpoint, None),
        "kvparams.request_id": request_id,
        "kvparams.outcome": outcome,
    }


def _present(
    status: int | None,
    code: str | None,
    model: str | None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
) -> _Values:
    """Returns the optional attributes that are known."""
    optional: tuple[tuple[str, str | int | None], ...] = (
        ("http.response.status_code", status),
        ("error.type", code),
        ("gen_ai.request.model", None if model is None else model[:_MODEL]),
        ("gen_ai.usage.input_tokens", prompt_tokens),
        ("gen_ai.usage.output_tokens", completion_tokens),
    )
    return {name: value for name, value in optional if value is not None}
