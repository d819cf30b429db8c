"""Describes requests for a snapshot: when each state began, which engines ran it, and why these."""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvparams.instances import Instance
from kvparams_proxy.telemetry.recent_requests import EndedRequest
from kvparams_proxy.telemetry.request_record import RequestRecord
from kvparams_proxy.ui.worker_part import DecisionRow, RequestRow

if TYPE_CHECKING:
    from kvparams_proxy.fleet.routing_decision import RoutingDecision
    from kvparams_proxy.telemetry.tracing import TraceContext

__all__ = ["describe_ended", "describe_running"]

_TEXT: Final = 128
"""Characters of what a client chooses."""
_OTHERS: Final = 7
_SPANS: Final = 32


def describe_ended(request: EndedRequest) -> RequestRow:
    """Describes a request that has ended."""
    spans = request.spans
    spent_s = spans[-1][2] - spans[0][2] if spans else 0.0
    return RequestRow(
        id=request.request_id[:_TEXT],
        tenant=request.tenant[:_TEXT],
        model=(request.model or "")[:_TEXT],
        endpoint=request.endpoint,
        stream=request.stream,
        outcome=request.outcome,
        status=request.status,
        error=request.code and request.code[:_TEXT],
        route=_route(request.route),
        started=round(request.ended_s - spent_s, 3),
        total_ms=round(1000 * spent_s, 2),
        spans=_spans(spans),
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        completion_tokens=request.completion_tokens,
        retries=request.retries,
        answer_bytes=request.answer_bytes,
        trace=_trace(request.trace),
        decision=_decision(request.decision, None if request.knows_ids else request.prompt_tokens),
    )


def describe_running(record: RequestRecord, now_s: float, epoch_s: float) -> RequestRow:
    """Describes a request that runs.

    Args:
        record: its record.
        now_s: now, on the clock of its life cycle.
        epoch_s: the same moment since 1970.
    """
    life = record.lifecycle
    row = describe_ended(EndedRequest.of(record))
    spent_s = now_s - life.started_s
    row["started"] = round(epoch_s - spent_s, 3)
    row["total_ms"] = round(1000 * spent_s, 2)
    return row


def _route(route: Sequence[Instance]) -> list[list[str]]:
    return [[instance.role.value, instance.id] for instance in route]


def _spans(spans: Sequence[tuple[str, str, float]]) -> list[list[str | float]]:
    """Returns the first states. Only a request that was retried again and again has more."""
    if not spans:
        return []
    began_s = spans[0][2]
    return [[state, who, round(1000 * (at_s - began_s), 2)] for state, who, at_s in spans[:_SPANS]]


def _trace(trace: "TraceContext | None") -> str | None:
    return f"{trace.trace_id:032x}" if trace is not None and trace.sampled else None


def _decision(decision: "RoutingDecision | None", engine_prompt_tokens: int | None) -> DecisionRow | None:
    if decision is None:
        return None
    expected, cached = decision.expected, decision.cached_tokens
    convert: Callable[[int], int] = partial(decision.in_engine_tokens, engine_prompt_tokens=engine_prompt_tokens)
    chosen = decision.chosen
    alike = (each for each in cached if each is not chosen and each.role is chosen.role)
    others = nsmallest(_OTHERS, alike, key=lambda each: (-cached[each], each.id))
    if len(others) < _OTHERS:  # those without anything, too
        rest = (each for each in decision.candidates if each is not chosen and each not in cached)
        others += islice(rest, _OTHERS - len(others))
    return DecisionRow(
        chosen=chosen.id,
        prompt_tokens=convert(decision.prompt_tokens),
        cached=convert(expected.cached_tokens),
        fetched=convert(expected.fetched_tokens),
        computed=convert(expected.computed_tokens),
        wait_ms=round(1000 * expected.wait_s, 2),
        fetch_ms=round(1000 * expected.fetch_s, 2),
        compute_ms=round(1000 * expected.compute_s, 2),
        source=None if decision.source is None else decision.source.id,
        others=[[each.id, convert(cached.get(each, 0))] for each in others],
        candidates=len(decision.candidates),
    )
