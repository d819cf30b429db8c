"""OpenTelemetry spans of requests that are over, and their export: needs the extra `tracing`.

Where to is said by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT, ...). The one rule: only requests that
are sampled cost anything here, a thread sends what they leave, and a collector that is not there holds up nobody.
"""

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes

from kvparams.lifecycle import Span
from kvparams.version import __version__
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.telemetry.account import Account

__all__ = ["SpanExport"]

_CLOSE_S: Final = 3.0
_WELL: Final = Status(StatusCode.UNSET)
_BADLY: Final = Status(StatusCode.ERROR)
_MODEL: Final = 200
"""Characters of a model's name, at most."""
_OPERATIONS: Final = {b"/v1/completions": "text_completion", b"/v1/chat/completions": "chat"}


class SpanExport:
    """A `kvparams_proxy.telemetry.account.Reader`: one span for a request, below it one for each leg and each wait."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        """`exporter` is by default OTLP over HTTP. Starts a thread."""
        self._processor = BatchSpanProcessor(exporter or OTLPSpanExporter())
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._resource = Resource.create({} if named else {"service.name": "kvparams-proxy"})
        self._scope = InstrumentationScope("kvparams_proxy", __version__)

    def ended(self, account: Account) -> None:
        """See `kvparams_proxy.telemetry.account.Reader`."""
        trace, life = account.trace, account.life
        if trace is None or not trace.sampled:
            return
        flags = TraceFlags(trace.flags)
        context = SpanContext(trace.trace_id, trace.span_id, is_remote=False, trace_flags=flags)
        parent = None
        if trace.parent_id is not None:
            parent = SpanContext(trace.trace_id, trace.parent_id, is_remote=True, trace_flags=flags)
        clock = _Clock(life.since_s, account.ended_s)
        legs = iter(trace.legs)
        for visit in _visits(life.spans, life.outcome == "ok"):
            if visit.queued:
                span_id, kind, name = trace.new_span_id(), SpanKind.INTERNAL, "queue"
            else:
                span_id, kind, name = next(legs, 0) or trace.new_span_id(), SpanKind.CLIENT, visit.begun[0]
            self._export(
                name,
                SpanContext(trace.trace_id, span_id, is_remote=False, trace_flags=flags),
                context,
                kind,
                (clock.ns(visit.begun[2]), clock.ns(visit.ended_s)),
                {} if visit.queued else {"kvparams.instance": visit.begun[1]},
                visit.well or life.outcome == "gone",
                None if visit.first_byte_s is None else clock.ns(visit.first_byte_s),
            )
        self._export(
            f"POST {account.endpoint.decode('latin-1')}",
            context,
            parent,
            SpanKind.SERVER,
            (clock.ns(life.begun_s), clock.ns(life.since_s)),
            _attributes(account),
            life.outcome not in ("failed", "midway"),
        )

    def refused(self, request_id: str, endpoint: bytes, error: ProxyError) -> None:
        """See `kvparams_proxy.telemetry.account.Reader`. Before it is executed a request is in no trace."""

    async def close(self) -> None:
        """Send what is left, for three seconds at most."""
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
        first_byte_ns: int | None = None,
    ) -> None:
        # A tracer would make the same object, twelve times as slowly: it expects to be there while a span runs.
        span = ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            () if first_byte_ns is None else (Event("first_byte", timestamp=first_byte_ns),),
            kind=kind,
            status=_WELL if well else _BADLY,
            start_time=times_ns[0],
            end_time=times_ns[1],
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)


class _Clock:
    """From the executor's seconds to nanoseconds since 1970, with the end of the request as the fixed point."""

    def __init__(self, end_s: float, since_1970_s: float) -> None:
        self._end_s = end_s
        self._end_ns = int(since_1970_s * 1e9)

    def ns(self, at_s: float) -> int:
        return self._end_ns - int((self._end_s - at_s) * 1e9)


class _Visit:
    """One leg, or one wait."""

    def __init__(self, begun: Span, ended_s: float, well: bool, first_byte_s: float | None = None) -> None:
        self.begun = begun
        self.ended_s = ended_s
        self.well = well
        self.first_byte_s = first_byte_s

    @property
    def queued(self) -> bool:
        return self.begun[0] == "queued"


def _visits(spans: list[Span], well: bool) -> Iterator[_Visit]:
    """A decode leg goes on after its first byte; what comes between legs takes no time. `well`: how it all ended."""
    for index, span in enumerate(spans[:-1]):
        state = span[0]
        after, _, ended_s = spans[index + 1]
        if state == "queued":
            yield _Visit(span, ended_s, after != "done")
        elif state == "prefill":
            yield _Visit(span, ended_s, after == "result")
        elif state == "decode" and after != "first_byte":
            yield _Visit(span, ended_s, False)
        elif state == "decode":
            end, _, end_s = spans[index + 2]
            yield _Visit(span, end_s, well and end == "done", ended_s)


def _attributes(account: Account) -> dict[str, str | int | list[str]]:
    facts = account.facts
    found: dict[str, str | int | list[str]] = {
        "http.request.method": "POST",
        "http.route": account.endpoint.decode("latin-1"),
        "gen_ai.operation.name": _OPERATIONS.get(account.endpoint, "generate_content"),
        "kvparams.request_id": facts.request_id,
        "kvparams.transfer_ids": [facts.transfer_id, *(account.further_transfers or ())],
        "kvparams.outcome": account.life.outcome or "",
        "kvparams.retries": account.retries,
    }
    optional: tuple[tuple[str, str | int | None], ...] = (
        ("http.response.status_code", account.status),
        ("error.type", account.code),
        ("gen_ai.request.model", None if facts.model is None else facts.model[:_MODEL]),
        ("gen_ai.usage.input_tokens", account.prompt_tokens),
        ("gen_ai.usage.output_tokens", account.completion_tokens),
    )
    return found | {name: value for name, value in optional if value is not None}
