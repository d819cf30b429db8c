"""Keeps the last requests that have ended, and of the last minutes those that failed or took longest.

A request costs one tuple and an append. Nothing of its prompt or its answer is kept: see `RequestRecord`.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappush, heapreplace
from itertools import count
from time import time
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kvparams.instances import Instance
from kvparams.routing.request_lifecycle import StateSpan
from kvparams_proxy.telemetry.request_record import RefusedRequest, RequestRecord
from kvparams_proxy.telemetry.tracing import TraceContext

if TYPE_CHECKING:
    from kvparams_proxy.fleet.routing_decision import RoutingDecision

__all__ = ["PREFIX_BLOCKS", "EndedRequest", "RecentRequests"]

PREFIX_BLOCKS: Final = tuple(1 << power for power in range(12))
"""How many blocks the prefixes have whose hashes are kept."""

_RECENT: Final = 512
"""Requests of which flows and hot prefixes are counted."""
_FAILED: Final = 32
_SLOWEST: Final = 16
_WINDOW_S: Final = 60.0
"""The slowest requests are those of this window and of the one before."""


class EndedRequest(NamedTuple):
    """The part of a `RequestRecord` that is shown after the request has ended."""

    request_id: str
    transfer_ids: Sequence[str]
    tenant: str
    model: str | None
    endpoint: str
    stream: bool | None
    spans: Sequence[StateSpan]
    """Empty for a request that was refused before its execution."""
    outcome: str
    status: int | None
    code: str | None
    route: Sequence[Instance]
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    retries: int
    answer_bytes: int
    ended_s: float
    """Since 1970."""
    trace: TraceContext | None
    decision: "RoutingDecision | None"
    """Without the hashes of the prompt's blocks, which may be many."""
    prefix_hashes: Sequence[int]
    """Those of the prefixes of `PREFIX_BLOCKS`, as far as the prompt has these; empty where no hashes are known."""
    knows_ids: bool
    """Whether the decision was made by the engine's own token ids."""

    @property
    def trace_id(self) -> str | None:
        """The id of its trace, as 32 hexadecimal digits; None where the request is not sampled."""
        return f"{self.trace.trace_id:032x}" if self.trace is not None and self.trace.sampled else None

    @classmethod
    def of(cls, account: RequestRecord) -> Self:
        """Returns the part of a record that is shown."""
        facts, life, decision = account.facts, account.lifecycle, account.decision
        hashes: list[int] = []
        if decision is not None and (all_hashes := decision.hashes) is not None:
            hashes = [int(all_hashes[blocks - 1]) for blocks in PREFIX_BLOCKS if blocks <= len(all_hashes)]
            decision = decision._replace(hashes=None)
        return cls(
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
            account.route,
            account.prompt_tokens,
            account.cached_tokens,
            account.completion_tokens,
            account.retries,
            account.answer_bytes,
            account.ended_s,
            account.trace_context,
            decision,
            hashes,
            facts.token_ids is not None,
        )


_SlowRequest = tuple[float, int, EndedRequest]
"""How long it took, a serial number that decides between equals, and the request."""


class RecentRequests:
    """The last requests that have ended. A `kvparams_proxy.telemetry.request_record.RecordReader`."""

    def __init__(self) -> None:
        self.recent: Final[deque[EndedRequest]] = deque(maxlen=_RECENT)
        """The last ones, the newest at the end."""
        self.failed: Final[deque[EndedRequest]] = deque(maxlen=_FAILED)
        """The last ones whose outcome is not `ok`, the newest at the end."""
        self._slowest: list[_SlowRequest] = []
        """Those of this window: a heap, the fastest of them first."""
        self._slowest_before: list[_SlowRequest] = []
        self._window_until_s = 0.0
        self._serials = count()

    def ended(self, account: RequestRecord) -> None:
        """See `RecordReader`."""
        request = EndedRequest.of(account)
        spans = request.spans
        self.recent.append(request)
        if request.outcome != "ok":
            self.failed.append(request)
        spent_s = spans[-1][2] - spans[0][2]
        if account.ended_s >= self._window_until_s:
            self._turn_window(account.ended_s)
        slowest = self._slowest
        if len(slowest) < _SLOWEST:
            heappush(slowest, (spent_s, next(self._serials), request))
        elif spent_s > slowest[0][0]:
            heapreplace(slowest, (spent_s, next(self._serials), request))

    def refused(self, refusal: RefusedRequest) -> None:
        """See `RecordReader`."""
        error = refusal.error
        outcome = "refused" if error.status < 500 else "failed"
        asked = (refusal.request_id, (), refusal.tenant, refusal.model, refusal.endpoint, None, ())
        nothing = (None, None, None, 0, 0)
        self.failed.append(
            EndedRequest(
                *asked,
                outcome,
                error.status,
                error.name,
                (),
                *nothing,
                time(),
                refusal.trace,
                None,
                (),
                knows_ids=False,
            )
        )

    def find(self, id: str) -> EndedRequest | None:
        """Returns the last request with this request id, transfer id or trace id (32 hexadecimal digits).

        A request that was refused before its execution has no states to look at, and is not found.
        """
        slow = [request for _, _, request in (*self._slowest, *self._slowest_before)]
        for request in (*reversed(self.recent), *reversed(self.failed), *slow):
            if request.spans and (id == request.request_id or id in request.transfer_ids or id == request.trace_id):
                return request
        return None

    def slowest(self, now_s: float) -> list[EndedRequest]:
        """Returns the requests of the last one or two minutes that took longest, the slowest first.

        `now_s`: since 1970.
        """
        if now_s >= self._window_until_s:
            self._turn_window(now_s)
        found = sorted((*self._slowest, *self._slowest_before), reverse=True)
        return [request for _, _, request in found[:_SLOWEST]]

    def _turn_window(self, now_s: float) -> None:
        is_next = now_s < self._window_until_s + _WINDOW_S
        self._slowest_before = self._slowest if is_next else []
        self._slowest = []
        self._window_until_s = now_s + _WINDOW_S
