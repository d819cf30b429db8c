"""Prometheus counters of requests. `METRICS.md` lists all names; `proxy_gauges.py` has the gauges.

A request pays for additions only; labels and locks are needed only when metrics are scraped.
"""

from collections.abc import Iterable
from typing import Final, get_args

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams.instances import Instance, Role
from kvparams.routing.handoff_verifier import HANDOFF_REFUSAL_REASONS
from kvparams.routing.plan import KVLease
from kvparams.routing.request_lifecycle import TRANSITIONS, LifecycleState, RequestLifecycle, RequestOutcome
from kvparams_proxy.telemetry.histogram import FINE_SECONDS_BUCKETS, TOKENS_BUCKETS, Histogram
from kvparams_proxy.telemetry.instance_stats import InstanceStats, InstanceTotals
from kvparams_proxy.telemetry.request_record import RefusedRequest, RequestRecord
from kvparams_proxy.upstream.types import (
    ResponseHead,
    UpstreamError,
    UpstreamErrorResponse,
    UpstreamOverflow,
    UpstreamTimeout,
)

__all__ = ["FAILURE_KINDS", "Metrics", "failure_kind"]

FAILURE_KINDS: Final = ("busy", "unreachable", "timeout", "broken", "error", "refused", "garbage")
"""How a leg may fail: no connection was free; none was made; silence; cut off in the middle; a 5xx; a 4xx; an answer
that is no JSON."""

_UNSENT: Final = {"handoff_missing": "missing", "bad_prefill_answer": "invalid", "no_signing_key": "unsigned"}
"""Reasons, by the code of the error that a client got; those of `kvparams.routing.handoff_verifier` count where they
arise."""
_STARTS: Final[dict[Role, LifecycleState]] = {
    Role.ENCODE: "encode",
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
}
_FIRST_TOKEN: Final[dict[Role, tuple[LifecycleState, LifecycleState]]] = {
    Role.PREFILL: ("prefill", "result"),  # its one token and its answer are one
    Role.DECODE: ("decode", "first_byte"),
}


_FOLD_REQUESTS: Final = 1024


class Metrics(Collector):
    """Counters and histograms. A `kvparams_proxy.telemetry.request_record.RecordReader`."""

    def __init__(self) -> None:
        self.outcomes: dict[RequestOutcome, int] = dict.fromkeys(get_args(RequestOutcome), 0)
        """Requests by how they ended."""
        self.refusals: dict[int, int] = {}
        """Answers other than 200, by HTTP status."""
        self.legs = {role: Histogram() for role in Role}
        """From sending a leg's request to the end of its answer."""
        self.first_byte = Histogram()
        """From the complete request to the first byte of its answer, prefill included."""
        self.loop_lag = Histogram(FINE_SECONDS_BUCKETS)
        """How late the event loop is."""
        self.retries = 0
        """Further attempts that were allowed ..."""
        self.retries_denied = 0
        """... and those that were not: the request, or all together, had had enough."""
        self.encodings = {True: 0, False: 0}
        """Requests with media that were to be encoded by an encode engine, by whether one has done it."""
        self.continuations = 0
        """Streams that went on on another engine."""
        self.stripped: dict[str, int] = {"body": 0, "request_id": 0}
        """Requests from which something was taken that only a proxy may say, by where it stood."""
        self.handoffs_refused: dict[str, int] = dict.fromkeys((*HANDOFF_REFUSAL_REASONS, *_UNSENT.values()), 0)
        """What was not said to an engine, by reason."""
        self._ways = {(before, after): Histogram() for before in TRANSITIONS for after in TRANSITIONS[before]}
        self._live: set[RequestLifecycle] = set()
        self._legs_of: dict[str, InstanceStats] = {}
        """By the id of an instance."""
        self._failures = {(role, kind): 0 for role in Role for kind in FAILURE_KINDS}
        self._prompt = Histogram(TOKENS_BUCKETS)
        self._completion = Histogram(TOKENS_BUCKETS)
        self._events = Histogram(TOKENS_BUCKETS)
        self._per_token = Histogram(FINE_SECONDS_BUCKETS)
        self._unfolded = 0
        """Requests since the values of all histograms were counted."""
        self._cached_tokens = 0
        self._answer_bytes = 0

    # on the way of a request

    def request_began(self, life: RequestLifecycle) -> None:
        """Counts the beginning of a request; the durations are counted when it is over."""
        self._live.add(life)

    def leg_ended(self, instance: Instance, spent_s: float) -> None:
        """Counts the end of a leg, whatever its result."""
        self.legs[instance.role].observe(spent_s)
        tally = self._legs_of.get(instance.id) or self._tally(instance.id)
        tally.legs += 1
        tally.legs_s += spent_s

    def leg_failed(self, instance: Instance, kind: str) -> None:
        """Counts a failed leg. `kind` is one of `FAILURE_KINDS`."""
        self._failures[instance.role, kind] += 1

    def refused(self, refusal: RefusedRequest) -> None:
        """See `kvparams_proxy.telemetry.request_record.RecordReader`."""
        status = refusal.error.status
        self.outcomes["refused" if status < 500 else "failed"] += 1
        self.refusals[status] = self.refusals.get(status, 0) + 1

    def ended(self, account: RequestRecord) -> None:
        """See `kvparams_proxy.telemetry.request_record.RecordReader`."""
        life = account.lifecycle
        self._live.discard(life)
        ways = self._ways
        before, _, since_s = life.spans[0]
        tallies = self._legs_of
        last: InstanceStats | None = None
        for state, who, at_s in life.spans[1:]:
            spent_s = at_s - since_s
            ways[before, state].observe(spent_s)
            if who and state != "result":  # a leg on that instance begins
                last = tallies.get(who) or self._tally(who)
                last.waits += 1
                if before == "queued":
                    last.waits_s += spent_s
            elif who and last is not None and account.prompt_tokens is not None:
                last.prompts += 1
                last.prompt_tokens += account.prompt_tokens
                last.cached_tokens += account.cached_tokens or 0
            before, since_s = state, at_s
        if account.trace_context is not None and account.trace_context.sampled:
            self._add_exemplars(account, account.trace_context.trace_id)
        if life.outcome is not None:
            self.outcomes[life.outcome] += 1
        if account.is_encoded is not None:
            self.encodings[account.is_encoded] += 1
        if account.error_status:
            self.refusals[account.error_status] = self.refusals.get(account.error_status, 0) + 1
            if (reason := _UNSENT.get(account.code or "")) is not None:
                self.handoffs_refused[reason] += 1
        if account.prompt_tokens is not None:
            self._prompt.observe(account.prompt_tokens)
        if account.cached_tokens:
            self._cached_tokens += account.cached_tokens
        number, events = account.completion_tokens, account.stream_events
        if number is not None:
            self._completion.observe(number)
        if events:
            self._events.observe(events)
        length = events if number is None else number
        if length and last is not None and life.answering:
            last.answers += 1
            last.answer_tokens += length
            if account.stream and length > 1 and not account.retries and life.spans[-2][0] == "first_byte":
                gaps_s = life.since_s - life.spans[-2][2]
                last.gaps += length - 1
                last.gaps_s += gaps_s
                if number is not None:
                    self._per_token.observe(gaps_s / (length - 1))
        self._answer_bytes += account.answer_bytes
        self._unfolded += 1
        if self._unfolded == _FOLD_REQUESTS:
            self._fold()

    def _add_exemplars(self, account: RequestRecord, trace_id: int) -> None:
        """Names the trace of a request as an example of how long things took."""
        life, ended_s = account.lifecycle, account.ended_s
        first_s = next((at_s for state, _, at_s in life.spans if state == "first_byte"), None)
        if first_s is not None:
            self.first_byte.add_exemplar(first_s - life.started_s, trace_id, ended_s)
        before, _, since_s = life.spans[0]
        for state, _, at_s in life.spans[1:]:
            if (before, state) in _FIRST_TOKEN.values():
                self._ways[before, state].add_exemplar(at_s - since_s, trace_id, ended_s)
            before, since_s = state, at_s

    def _fold(self) -> None:
        """Counts what histograms have kept, so that they keep no more than a few values for each of so many requests.

        This takes a millisecond or two.
        """
        self._unfolded = 0
        some = (self.first_byte, self.loop_lag, self._prompt, self._completion, self._events, self._per_token)
        for histogram in (*some, *self.legs.values(), *self._ways.values()):
            histogram.fold()

    # when it is scraped

    def count_in_states(self, *states: LifecycleState) -> int:
        """Returns the number of requests in these states."""
        return sum(life.state in states for life in self._live)

    def held_leases(self) -> Iterable[KVLease]:
        """The leases of KV that engines hold for running requests."""
        for life in self._live:
            if life.lease is not None and life.lease.release_request is not None:
                yield life.lease

    def retain_instances(self, ids: Iterable[str]) -> None:
        """Forgets instances that are not among these."""
        known = set(ids)
        for id in [id for id in self._legs_of if id not in known]:
            del self._legs_of[id]

    def leg_count(self, id: str) -> int:
        """Returns the number of legs that have ended on an instance."""
        return self.instance_totals(id, 0).legs

    def instance_totals(self, id: str, running: int) -> InstanceTotals:
        """Returns the totals of an instance, on which `running` legs run now."""
        return (self._legs_of.get(id) or InstanceStats()).totals(running)

    def _tally(self, id: str) -> InstanceStats:
        """Creates the statistics of an instance that has none yet."""
        tally = self._legs_of[id] = InstanceStats()
        return tally

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        yield from self._requests()
        yield from self._times()
        yield from self._legs()
        yield from self._tokens()

    def _requests(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "kvparams_proxy_requests",
            "Requests by outcome: ok, refused (4xx), failed (5xx), midway (its stream broke), gone (its client left).",
            labels=["outcome"],
        )
        for outcome, number in self.outcomes.items():
            requests.add_metric([outcome], number)
        yield requests
        refusals = CounterMetricFamily(
            "kvparams_proxy_refusals", "Answers other than 200, by HTTP status.", labels=["status"]
        )
        for status, number in sorted(self.refusals.items()):
            refusals.add_metric([str(status)], number)
        yield refusals
        stripped = CounterMetricFamily(
            "kvparams_proxy_requests_stripped",
            "Requests that said what only a proxy may say: members of the body that were taken out, ids replaced.",
            labels=["where"],
        )
        for where, number in self.stripped.items():
            stripped.add_metric([where], number)
        yield stripped
        retries = CounterMetricFamily(
            "kvparams_proxy_retries",
            "Further attempts that requests needed, by whether they were allowed (their own limit, the budget).",
            labels=["allowed"],
        )
        retries.add_metric(["yes"], self.retries)
        retries.add_metric(["no"], self.retries_denied)
        yield retries
        encodings = CounterMetricFamily(
            "kvparams_proxy_encodings",
            "Requests with media that an encode engine was to encode, by whether one did (yes, no).",
            labels=["encoded"],
        )
        for is_encoded, number in self.encodings.items():
            encodings.add_metric(["yes" if is_encoded else "no"], number)
        yield encodings
        yield _counter(
            "continuations", "Streams that another engine went on with when theirs failed.", self.continuations
        )

    def _times(self) -> Iterable[Metric]:
        states = _seconds("state", "How long requests stay in each state; the count is how often.", "state")
        for state in TRANSITIONS:
            if state != "done":
                whole = Histogram()
                for (before, _), way in self._ways.items():
                    if before == state:
                        whole.add(way)
                whole.add_to(states, [state])
        yield states
        ways = CounterMetricFamily(
            "kvparams_proxy_transitions", "Steps of requests from one state to the next.", labels=["from", "to"]
        )
        for way, seconds in self._ways.items():
            if seconds.count:
                ways.add_metric(way, seconds.count)
        yield ways
        queue = _seconds("queue", "How long legs waited in the proxy for room: the queueing delay.", "role")
        for role, start in _STARTS.items():
            waited = Histogram()
            for (before, after), way in self._ways.items():
                if after == start and before == "queued":
                    waited.add(way)
                elif after == start:
                    waited.add_zeros(way.count)
            waited.add_to(queue, [role])
        yield queue
        leg_first = _seconds(
            "leg_time_to_first_token",
            "From sending a leg's request to its first token: prefill's only one, decode's first to the client.",
            "role",
        )
        for role, way in _FIRST_TOKEN.items():
            self._ways[way].add_to(leg_first, [role])
        yield leg_first
        first = _seconds("time_to_first_byte", "From the complete request to the first byte of its answer.")
        self.first_byte.add_to(first)
        yield first
        each = _seconds("time_per_output_token", "Of a stream after its first token, where the engine says how many.")
        self._per_token.add_to(each)
        yield each
        lag = _seconds("event_loop_lag", "How late the event loop was, looked at four times a second.")
        self.loop_lag.add_to(lag)
        yield lag

    def _legs(self) -> Iterable[Metric]:
        legs = _seconds("leg", "From sending a leg's request to the end of its answer.", "role")
        for role, seconds in self.legs.items():
            seconds.add_to(legs, [role])
        yield legs
        failures = CounterMetricFamily(
            "kvparams_proxy_leg_failures",
            "Legs that failed: busy, unreachable, timeout, broken (cut off), error (5xx), refused (4xx), garbage.",
            labels=["role", "kind"],
        )
        for (role, kind), number in self._failures.items():
            failures.add_metric([role, kind], number)
        yield failures
        refused = CounterMetricFamily(
            "kvparams_proxy_handoffs_refused",
            "What was not sent to an engine: an address that is not the other's own, a value out of bounds, an answer "
            "with too little in it or against the protocol, a document that could not be signed.",
            labels=["reason"],
        )
        for reason, number in self.handoffs_refused.items():
            refused.add_metric([reason], number)
        yield refused

    def _tokens(self) -> Iterable[Metric]:
        lengths = (
            ("prompt_tokens", "Length of prompts, as prefill says: prefill length.", self._prompt),
            ("completion_tokens", "Length of answers, where decode says it: decode length.", self._completion),
            (
                "stream_events",
                "Events with content of each stream, whatever decode says: about one for each token.",
                self._events,
            ),
        )
        for name, text, histogram in lengths:
            family = HistogramMetricFamily(f"kvparams_proxy_{name}", text, labels=())
            histogram.add_to(family)
            yield family
        yield _counter("cached_prompt_tokens", "Prompt tokens that prefill found in its cache.", self._cached_tokens)
        yield _counter("answer_bytes", "Bodies of answers, as sent to clients.", self._answer_bytes)


def failure_kind(head: ResponseHead, error: UpstreamError | None) -> str:
    """Classifies the end of a leg as one of `FAILURE_KINDS`."""
    if error is None:
        return "error" if head.status >= 500 else "refused"
    if isinstance(error, UpstreamErrorResponse):
        return "error"
    if isinstance(error, UpstreamOverflow):
        return "busy"
    if not error.connected:
        return "unreachable"
    return "timeout" if isinstance(error, UpstreamTimeout) else "broken"


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvparams_proxy_{name}", text, value=value)


def _seconds(name: str, text: str, *labels: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"kvparams_proxy_{name}_seconds", text, labels=labels, unit="seconds")
