"""Keeps the last requests that have ended, so that an operator can look at one of them.

It has the facts of the request log, and when each state began. Nothing of a prompt or an answer is kept.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvparams.routing.request_lifecycle import StateSpan
from kvparams_proxy.telemetry.request_record import RefusedRequest, RequestRecord

__all__ = ["HistoryEntry", "RequestHistory"]

_MOST: Final = 1024


class HistoryEntry(NamedTuple):
    """The part of a `RequestRecord` that is kept."""

    request_id: str
    transfer_ids: Sequence[str]
    tenant: str
    model: str | None
    endpoint: str
    stream: bool
    spans: Sequence[StateSpan]
    outcome: str
    status: int | None
    code: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    retries: int
    answer_bytes: int
    ended_s: float
    """Since 1970."""
    trace_id: int | None
    """None where the request is not sampled."""


class RequestHistory:
    """The last requests by their ids. A `kvparams_proxy.telemetry.request_record.RecordReader`."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._requests: OrderedDict[str, HistoryEntry] = OrderedDict()

    def find(self, id: str) -> HistoryEntry | None:
        """Returns the last request with this request id, transfer id or trace id (32 hexadecimal digits)."""
        found = self._requests.get(id)
        if found is not None:
            return found
        trace_id = int(id, 16) if len(id) == 32 and all(digit in "0123456789abcdef" for digit in id) else None
        for request in reversed(self._requests.values()):
            if id in request.transfer_ids or (trace_id is not None and request.trace_id == trace_id):
                return request
        return None

    def ended(self, account: RequestRecord) -> None:
        """See `RecordReader`."""
        facts, life, trace = account.facts, account.lifecycle, account.trace_context
        requests = self._requests
        requests.pop(facts.request_id, None)
        requests[facts.request_id] = HistoryEntry(
            facts.request_id,
            (facts.transfer_id, *(account.further_transfers or ())),
            facts.tenant,
            facts.model,
            account.endpoint,
            account.stream,
            life.spans,
            life.outcome or "",
            account.status,
            account.code,
            account.prompt_tokens,
            account.cached_tokens,
            account.completion_tokens,
            account.retries,
            account.answer_bytes,
            account.ended_s,
            trace.trace_id if trace is not None and trace.sampled else None,
        )
        if len(requests) > self._most:
            requests.popitem(last=False)

    def refused(self, refusal: RefusedRequest) -> None:
        """See `RecordReader`. A request that was refused before its execution has no states to look at."""
