"""Owns a request from its first byte to the release of the last thing it holds.

A manager says which steps to take; this takes them, hands the answer to the client, and whatever happens gives back
load, KV and connections. Nothing here waits: engines, the queue and the client call back, so there is no task to lose
or to forget. The one rule: nobody else in the proxy starts, aborts or ends a leg.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter, time
from typing import TYPE_CHECKING, Final, cast

from kvparams.codec import kv_transfer_members
from kvparams.errors import JSONTextError
from kvparams.instances import Instance, Role
from kvparams.routing.managers.interface import DisaggregatedRequestManager
from kvparams.routing.plan import AcquireInstance, Leg, LegFailed, LegPair, LegResult
from kvparams.routing.request_lifecycle import RequestLifecycle, RequestOutcome
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.event_loop.step_runner import StepTask
from kvparams_proxy.execution.concurrent_prefill import ConcurrentPrefill
from kvparams_proxy.execution.engine_response import LONG_RESPONSE_BYTES, EngineResponse
from kvparams_proxy.execution.leg_outcomes import (
    EngineLegFailed,
    answered_status,
    classify_leg_outcome,
    client_error_for,
    failure_evidence,
)
from kvparams_proxy.execution.leg_requests import build_leg_request, make_stream_recorder
from kvparams_proxy.execution.plan_context import PlanContext
from kvparams_proxy.execution.prefix_cache_report import report_prefill_response
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.execution.response_corrector import ResponseCorrector, prompt_tokens_details
from kvparams_proxy.execution.response_document import embedded_error
from kvparams_proxy.execution.stream_relay import StreamRelay
from kvparams_proxy.requests.downstream import Downstream
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.requests.intake import ParsedRequest
from kvparams_proxy.telemetry.metrics import failure_kind
from kvparams_proxy.telemetry.request_record import RequestRecord
from kvparams_proxy.telemetry.tracing import TraceContext
from kvparams_proxy.upstream.interface import ExchangeHandle
from kvparams_proxy.upstream.types import (
    ResponseCollector,
    ResponseHead,
    ResponseSink,
    UpstreamError,
    UpstreamErrorResponse,
    UpstreamOverflow,
    UpstreamTimeout,
)

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = ["Execution"]

_log: Final = logging.getLogger(__name__)
_JSON: Final = b"content-type: application/json\r\n"
_ANSWERED: Final = LegResult({})
_SHUTTING_DOWN: Final = "the proxy is shutting down"
_RETRY_S: Final = 1
_COSTLY_BYTES: Final = 1 << 20
"""To put together a longer answer has taken milliseconds of this turn already."""
_LAST_WORD_S: Final = 0.5
"""For an engine that sees its client leave to close the connection, or to show that it had answered already; and to end
its response behind the last event of its stream."""


class RequestDeadline:
    """The limit of a whole request, beside that of its legs."""

    __slots__ = ("_execution",)

    def __init__(self, execution: "Execution") -> None:
        self._execution = execution

    def expire(self) -> None:
        """For the watch."""
        self._execution.on_request_timeout()


class Execution:
    """One request being executed. It watches the client and holds one exchange at a time, or two where both legs run at
    once."""

    __slots__ = (
        "_account",
        "_context",
        "_corrections",
        "_done",
        "_downstream",
        "_endpoint",
        "_exchange",
        "_gone",
        "_inbound",
        "_leg",
        "_leg_began",
        "_life",
        "_manager",
        "_paired",
        "_plan",
        "_reading",
        "_recorder",
        "_relay",
        "_resources",
        "_route",
        "_slow",
        "_total",
        "_waiting",
        "facts",
    )

    def __init__(
        self,
        resources: ExecutionResources,
        manager: DisaggregatedRequestManager,
        endpoint: APIEndpoint,
        inbound: ParsedRequest,
        upstream_headers: bytes,
        authorization: bytes | None,
        downstream: Downstream,
        done: Callable[[], None] | None = None,
        trace: TraceContext | None = None,
    ) -> None:
        """
        Args:
            resources: what executions share.
            manager: says what is done.
            endpoint: the engines' too.
            inbound: the client's request.
            upstream_headers: whole lines for all legs, X-Request-Id not among them.
            authorization: the client's, for engines that have no key of their own.
            downstream: the client.
            done: hears of the end.
            trace: gives each leg a traceparent of its own; then there is none among `upstream_headers`.
        """
        self._resources = resources
        self._manager = manager
        self._endpoint = endpoint
        self._inbound = inbound
        self.facts = inbound.facts
        """For the queue: see `kvparams_proxy.fleet.fleet.Waiter`."""
        self._downstream = downstream
        self._done = done
        self._exchange: ExchangeHandle | None = None
        self._leg: Leg | None = None
        self._paired: ConcurrentPrefill | None = None
        self._relay: StreamRelay | None = None
        self._reading: StepTask | None = None
        """Of the leg's answer, where that is long; of a prefill beside it, see `ConcurrentPrefill`."""
        self._leg_began = 0.0
        self._corrections = ResponseCorrector(
            inbound.facts.request_id, resources.engine_addresses, choices=endpoint.has_choices
        )
        self._recorder = make_stream_recorder(endpoint, inbound)
        self._gone = False
        self._slow = False
        self._total: RequestDeadline | None = None
        self._waiting: AcquireInstance | None = None
        self._route: list[Instance] = []
        life = self._life = RequestLifecycle(perf_counter)
        resources.metrics.request_began(life)
        account = self._account = RequestRecord(
            inbound.facts, endpoint.path.encode(), inbound.stream, life, self._route, trace
        )
        self._context = PlanContext(resources, endpoint, inbound, life, account, upstream_headers, authorization)
        self._plan = manager.legs(inbound.facts, self._context)
        resources.running_executions.add(self)

    def run(self) -> None:
        """Answer the client, in one way or another. Never raises for what engines or clients do."""
        resources = self._resources
        resources.retry_budget.record_request()
        self._downstream.watch(self)
        if self._gone:
            return
        if (limit_s := resources.settings.request_timeout_s) is not None:
            self._total = RequestDeadline(self)
            resources.deadlines.start(self._total, limit_s)
        try:
            resources.fleet.check_admission(self._manager.roles, self.facts)
        except Exception as error:  # noqa: BLE001  nobody waits for this turn who would answer the client
            self._refuse(client_error_for(error))
            return
        self._go(None)

    # the client, as `downstream.Watcher`

    def client_gone(self) -> None:
        """Abort whatever runs for it, now. Of a prefill leg that may just have ended, with KV that only its answer
        names, the answer is heard out if it is on its way: to give the KV back."""
        self._gone = True
        exchange, leg = self._exchange, self._leg
        read = self._reading is not None and leg is not None and leg.answers_client
        if exchange is None or self._paired is not None or read:
            self._finish("gone")
        elif leg is not None and self._leaves_kv(leg) and exchange.half_close():
            self._resources.deadlines.start(self, _LAST_WORD_S)
        else:
            exchange.abort(UpstreamError("the client has left"))

    def _leaves_kv(self, leg: Leg) -> bool:
        return not leg.answers_client and not self._reusable(leg)

    def client_slow(self) -> None:
        """Throttle the engine that writes for it."""
        if self._exchange is not None:
            self._exchange.pause()
        self._slow = True  # it is the client who is silent now
        self._resources.deadlines.start(self, self._resources.settings.client_timeout_s)

    def client_ready(self) -> None:
        """Let the engine go on. Where a prefill runs for what is left of the answer, the time-out is still its own."""
        self._slow = False
        leg = self._leg
        if self._exchange is not None and self._paired is None and leg is not None and leg.answers_client:
            self._exchange.resume()
            complete = self._relay is not None and self._relay.complete
            limit_s = _LAST_WORD_S if complete else self._resources.settings.decode_timeout_s
            self._resources.deadlines.start(self, limit_s)

    # the queue, as `fleet.Waiter`

    def granted(self, instance: Instance) -> None:
        """There is room. The plan goes on in a turn of its own: whoever made room is not done yet."""
        self._waiting = None
        self._life.loads.append(instance)
        self._resources.loop.call_soon(self._go, instance)

    def refused(self, error: ProxyError) -> None:
        """There was no room for too long, or nobody is left to wait for. Then another pair may be there."""
        step = self._waiting
        self._waiting = None
        failure = None if step is None else self._stranded(step, error)
        if failure is None:
            self._refuse(error)
        else:
            self._resources.deadlines.stop(self)  # what the KV's lease is, is of no interest any more
            self._resources.loop.call_soon(self._go, None, failure)  # in a turn of its own, as above

    # taking the plan's steps

    def _go(self, value: object, failure: LegFailed | None = None) -> None:
        """Take steps until there is something to wait for."""
        if self._life.state == "done":  # the client left between a grant and this turn
            return
        if failure is not None and (self._leg is not None or self._paired is not None):
            self._drop_other()
        try:
            step = self._plan.send(value) if failure is None else self._plan.throw(failure)
            while type(step) is AcquireInstance:
                try:
                    instance = self._resources.fleet.acquire(
                        step.role, self.facts, step.avoid, self, step.paired_with, step.prefer
                    )
                except ProxyError as error:
                    failure = self._stranded(step, error)
                    if failure is None:
                        raise
                    step = self._plan.throw(failure)
                    continue
                if instance is None:
                    self._wait(step)
                    return
                self._life.loads.append(instance)
                step = self._plan.send(instance)
            if type(step) is LegPair:
                self._start_pair(step)
            else:
                self._start(step)  # pyright: ignore[reportArgumentType]  a cast here is called twice a request
        except StopIteration:
            self._downstream.end()
            self._finish("ok")
        except Exception as error:  # noqa: BLE001  whatever it is, the client is answered and everything given back
            self._refuse(client_error_for(error))
        finally:
            if failure is not None:  # its frames hold it, and with it all that the request had
                failure.__traceback__ = None

    def _stranded(self, step: AcquireInstance, error: ProxyError) -> EngineLegFailed | None:
        """What the plan is told of a choice that found nobody, if it has chosen the other leg's engine already and
        should do so again."""
        if not isinstance(step.paired_with, Instance) or not self._context.should_fail_over(
            step.paired_with, step.avoid
        ):
            return None
        return EngineLegFailed(error, claimed=False)

    def _wait(self, step: AcquireInstance) -> None:
        """There is no room. Decode is not waited for longer than there is KV for it."""
        self._waiting = step
        self._life.enter("queued")
        lease = self._life.lease
        if lease is not None and step.role is Role.DECODE:
            self._resources.deadlines.start(self, lease.until_s - self._context.now())

    def _start_pair(self, pair: LegPair) -> None:
        resources, leg = self._resources, pair.prefill
        paired = self._paired = ConcurrentPrefill(pair, self._prefill_ended)
        self._route.append(leg.instance)
        self._life.enter("prefill", leg.instance.id)
        paired.exchange = self._send(leg, paired.make_sink(resources.settings.upstream_limits.answer_bytes), once=False)
        resources.deadlines.start(paired, resources.settings.prefill_timeout_s)
        self._start(pair.decode)

    def _start(self, leg: Leg) -> None:
        resources = self._resources
        inbound = self._inbound
        self._leg = leg
        self._route.append(leg.instance)
        self._leg_began = perf_counter()
        self._life.enter("decode" if leg.answers_client else "prefill", leg.instance.id)
        if not leg.changes:  # it computes everything: what a prefill that broke off may have left is for nobody
            self._context.abandon_kv(gone=False)
        limit_bytes = resources.settings.upstream_limits.answer_bytes
        limit_s = resources.settings.decode_timeout_s if leg.answers_client else resources.settings.prefill_timeout_s
        recorder = self._recorder
        if recorder is not None and leg.resume_from is not None:
            recorder.mark_resumed()
        if leg.answers_client and inbound.stream:
            lines = b"cache-control: no-cache\r\n" + self._answer_headers()
            endpoint = self._endpoint
            sink = self._relay = StreamRelay(
                self._downstream,
                lines,
                self._corrections,
                limit_bytes,
                self,
                resources.clock,
                endpoint,
                recorder,
                gated=self._paired is not None,
            )
        else:
            sink = ResponseCollector(limit_bytes, self._collected if self._paired is None else self._keep)
        if self._paired is not None:  # its prefill has the time-out until it has ended
            self._exchange = self._send(leg, sink, once=not self._reusable(leg))
            return
        claims = leg.answers_client and self._context.claim_kv()
        self._exchange = self._send(leg, sink, once=claims)
        if self._slow and leg.answers_client:  # a stream goes on for a client who has still to take what came before
            self._exchange.pause()
            limit_s = resources.settings.client_timeout_s
        resources.deadlines.start(self, limit_s)

    def _send(self, leg: Leg, sink: ResponseSink, *, once: bool) -> ExchangeHandle:
        path, body = build_leg_request(self._endpoint, self._inbound, leg, self._recorder)
        pool = self._resources.pools.for_member(
            self._resources.fleet.member(leg.instance)
        )  # what has its name may be another
        context = self._context
        headers = context.leg_headers if pool.has_own_key else context.leg_headers + context.client_authorization
        if self._account.trace_context is not None:
            headers += self._account.trace_context.leg_traceparent_header()
        return pool.exchange(pool.request(path, headers, body), sink, once=once)

    def _reusable(self, leg: Leg) -> bool:
        return self._resources.dialects[leg.instance.dialect].has_reusable_kv

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _end_leg(self) -> Leg:
        """The leg is over, however it went: its load is given back."""
        leg: Leg = self._leg  # pyright: ignore[reportAssignmentType]
        self._leg = self._relay = None
        self._stop_reading()
        resources = self._resources
        resources.deadlines.stop(self)
        self._exchange = None
        self._context.release_instance(leg.instance)
        resources.metrics.leg_ended(leg.instance, perf_counter() - self._leg_began)
        return leg

    def expire(self) -> None:
        """For the watch: the engine may have been silent for too long, or the client has taken nothing for too long, or
        the KV that a decode engine was to fetch is given up."""
        if self._slow:
            self._downstream.drop()
        elif self._waiting is not None:
            self._waiting = None
            self._resources.fleet.cancel_wait(self)
            self._go(None, LegFailed("the KV was given up before a decode engine had room", another=False))
        elif self._relay is not None and (left_s := self._left_s(self._relay)) > 0:
            self._resources.deadlines.start(self, left_s)
        elif self._exchange is not None:
            self._exchange.abort(UpstreamTimeout("said nothing for longer than the time-out of its leg"))

    def on_request_timeout(self) -> None:
        """For the watch: the request as a whole takes too long. No engine is to blame."""
        if self._slow:
            self._downstream.drop()
        else:
            limit_s = self._resources.settings.request_timeout_s
            said = f"the request took longer than {limit_s:g} s, which is the limit here (--request-timeout)"
            self._end_early(ProxyError(504, "timeout", said, code="request_timeout"))

    def _left_s(self, relay: StreamRelay) -> float:
        """Before the engine whose stream this is has been silent for too long: asked here, not at every event."""
        if relay.complete:
            return 0.0
        return relay.last_content_s + self._resources.settings.decode_timeout_s - self._resources.clock.time()

    # what becomes of a leg

    def _collected(self, head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
        """A leg whose answer is wanted whole has ended. One that went well is acted on beside others of its kind."""
        if error is not None or self._leg is None:
            self._whole(head, EngineResponse(raw), error)
        elif len(raw) > LONG_RESPONSE_BYTES and head.status == 200:
            self._read(raw, partial(self._whole, head))
        else:
            self._resources.response_batchers[self._leg.instance.role].schedule(
                partial(self._whole, head, EngineResponse(raw))
            )

    def _read(
        self, raw: bytes, then: Callable[[EngineResponse], None], paired: ConcurrentPrefill | None = None
    ) -> None:
        """Read a long answer, and go on with it unless its leg is given up meanwhile. `paired`: it is of that leg."""

        def keep(work: StepTask | None) -> None:
            if paired is None:
                self._reading = work
            else:
                paired.pending_parse = work

        def read(answer: EngineResponse) -> None:
            keep(None)
            then(answer)

        def failed(fault: Exception) -> None:
            keep(None)
            self._refuse(client_error_for(fault))

        steps = EngineResponse(raw).parse_in_steps(self.facts.request_id, self._resources.engine_addresses)
        work = self._resources.step_runner.run(steps, read, failed, at_once=len(raw) < _COSTLY_BYTES)
        if not work.is_finished:
            keep(work)

    def _keep(self, head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
        """The same of one beside which its prefill runs: if it went well, it is held until that has. What is no answer
        is not: its engine may never have met the prefill that would be waited for."""
        if error is None and head.status == 200:
            keep = partial(self._keep_answer, head)
            if len(raw) > LONG_RESPONSE_BYTES:
                self._read(raw, keep)
            else:
                keep(EngineResponse(raw))
        else:
            self._whole(head, EngineResponse(raw), error)

    def _keep_answer(self, head: ResponseHead, answer: EngineResponse) -> None:
        if self._paired is not None and answer.has_choice:
            self._paired.held_decode_response = head, answer
        else:
            self._whole(head, answer)

    def _prefill_ended(
        self, paired: ConcurrentPrefill, head: ResponseHead, raw: bytes, error: UpstreamError | None
    ) -> None:
        """A prefill leg has ended beside which its decode leg runs, or has run."""
        if error is None and head.status == 200 and len(raw) > LONG_RESPONSE_BYTES:
            self._read(raw, partial(self._prefill_answered, paired, head), paired)
        else:
            self._prefill_answered(paired, head, EngineResponse(raw), error)

    def _prefill_answered(
        self, paired: ConcurrentPrefill, head: ResponseHead, answer: EngineResponse, error: UpstreamError | None = None
    ) -> None:
        leg = paired.pair.prefill
        if self._resources.prefix_cache is not None and error is None and head.status == 200:
            self._report(self._resources.prefix_cache, leg, answer)
        self._end_paired(paired)
        try:
            if not self._failed(leg, head, answer.raw, error):
                self._whole_ended(leg, head, answer, paired)
        except Exception as fault:  # noqa: BLE001  as below
            self._refuse(client_error_for(fault))

    def _end_paired(self, paired: ConcurrentPrefill) -> None:
        """A prefill leg is over, however it went: its load is given back."""
        self._paired = None
        if paired.pending_parse is not None:
            paired.pending_parse.cancel()
        resources, instance = self._resources, paired.pair.prefill.instance
        resources.deadlines.stop(paired)
        self._context.release_instance(instance)
        resources.metrics.leg_ended(instance, perf_counter() - paired.began)

    def _drop_other(self) -> None:
        """One of two legs has failed: the other one is ended."""
        if self._paired is not None:
            exchange = self._paired.exchange
            self._end_paired(self._paired)
        else:
            exchange = self._exchange
            self._end_leg()
        if exchange is not None:
            exchange.discard()

    def _answer(self, paired: ConcurrentPrefill) -> None:
        """Prefill is good: decode's answer is held no longer."""
        self._context.hold_lease(paired.pair.kv)
        self._context.claim_kv()
        settings = self._resources.settings
        self._resources.deadlines.start(self, settings.client_timeout_s if self._slow else settings.decode_timeout_s)
        if paired.held_decode_response is not None:
            self._whole(*paired.held_decode_response)
        elif self._relay is not None:
            wrong = self._relay.release_held()
            if self._exchange is not None and wrong is not None:
                self._exchange.abort(wrong)
            elif self._exchange is not None and self._slow:  # as for a leg that begins then
                self._exchange.pause()
            elif self._exchange is not None:
                self._exchange.resume()

    def stream_held(self) -> None:
        """For the relay: decode answers, and prefill has not ended."""
        if self._exchange is not None:
            self._exchange.pause()

    def _whole(self, head: ResponseHead, answer: EngineResponse, error: UpstreamError | None = None) -> None:
        if self._life.state == "done":  # it was overdue between the end of its leg and this turn
            return
        if self._resources.prefix_cache is not None and error is None and head.status == 200 and self._leg is not None:
            self._report(self._resources.prefix_cache, self._leg, answer)
        leg = self._end_leg()
        try:
            if not self._failed(leg, head, answer.raw, error):
                self._whole_ended(leg, head, answer)
        except Exception as fault:  # noqa: BLE001  nobody else would answer the client
            self._refuse(client_error_for(fault))

    def _report(self, prefixes: "PrefixCacheModel", leg: Leg, answer: EngineResponse) -> None:
        """A leg has ended well; what a prefill engine had cached counts before its load is given back. One that goes on
        with a broken stream has another prompt than the one that was looked up."""
        if leg.instance.role is not Role.DECODE and leg.resume_from is None:
            report_prefill_response(prefixes, self._account, answer)

    def _report_stream(self, prefixes: "PrefixCacheModel") -> None:
        """The same of a stream, whose last event counts tokens if the client asked for that."""
        leg, account = self._leg, self._account
        if (
            leg is not None
            and leg.instance.role is Role.AGGREGATED
            and leg.resume_from is None
            and self._life.answering
        ):
            if self._corrections.usage is not None:
                account.record_usage(self._corrections.usage)
            account.decision = prefixes.record_report(self.facts, account.prompt_tokens, account.cached_tokens)

    def _whole_ended(
        self, leg: Leg, head: ResponseHead, answer: EngineResponse, paired: ConcurrentPrefill | None = None
    ) -> None:
        try:
            if leg.answers_client:
                outcome = self._send_whole(answer)
            else:
                document = answer.document
                if (reported := embedded_error(document)) is not None:
                    raise UpstreamErrorResponse(reported)
                if leg.resume_from is None:  # what the client is told is what its own prompt cost
                    self._corrections.prompt_tokens_details = prompt_tokens_details(document)
                    self._account.record_prefill(document)
                if paired is None:
                    self._life.enter("result", leg.instance.id)
                outcome = LegResult(kv_transfer_members(document.get("kv_transfer_params")))
        except UpstreamError as refused:
            self._failed(leg, head, b"", refused)
            return
        except JSONTextError:
            if self._gone:  # the engine has seen it, and ended in the middle of what it had to say
                self._finish("gone")
                return
            why = "the answer of a leg is not JSON"
            self._resources.fleet.record_failure(leg.instance, connected=True, why=why)
            self._resources.metrics.leg_failed(leg.instance, "garbage")
            message = f"the {leg.instance.role} engine's answer is not JSON"
            broken_off = EngineLegFailed(ProxyError(502, "upstream_error", message, code=f"{leg.instance.role}_failed"))
            broken_off.instance = leg.instance
            self._go(None, broken_off)
            return
        self._resources.fleet.record_success(leg.instance, self._context.kv_producer if leg.answers_client else None)
        if paired is not None:
            self._answer(paired)
        elif self._gone:
            self._last_word(outcome)
        else:
            self._go(outcome)

    def _last_word(self, answer: LegResult) -> None:
        """The client left as its prefill ended: the plan learns what is held for it, and takes no further step."""
        with suppress(Exception):  # whatever the answer is worth, nobody waits for it
            self._plan.send(answer)
        self._finish("gone")

    def stream_begun(self) -> None:
        """For the relay: the client is about to get its first byte."""
        again = self._life.answering
        self._life.enter("first_byte")
        if self._leg is not None:  # a stream may be long, and others wait for an engine that is on trial
            self._resources.fleet.record_first_byte(self._leg.instance, self._context.kv_producer)
            if self._leg.instance.role is Role.AGGREGATED and not again:
                self._resources.fleet.record_prompt_computed(self._leg.instance, self.facts)
        if again:
            self._resources.metrics.continuations += 1
            return
        self._resources.metrics.first_byte.observe(self._life.since_s - self._life.started_s)

    def stream_complete(self) -> None:
        """For the relay: the client has everything. An engine that does not end its response is not waited for."""
        if not self._slow:
            self._resources.deadlines.start(self, _LAST_WORD_S)

    def stream_ended(
        self, head: ResponseHead, whole: bytes, error: UpstreamError | None, sent_bytes: int, sent_events: int
    ) -> None:
        """For the relay: the leg has ended. `whole` is an answer that is no stream."""
        self._account.answer_bytes += sent_bytes
        self._account.stream_events += sent_events
        if error is None and head.status == 200 and len(whole) > LONG_RESPONSE_BYTES:
            self._relay = None
            self._read(whole, partial(self._whole, head))
            return
        if self._resources.prefix_cache is not None and error is None:
            self._report_stream(self._resources.prefix_cache)
        leg = self._end_leg()
        try:
            if self._failed(leg, head, whole, error):
                return
            if self._life.answering:
                self._resources.fleet.record_success(leg.instance)
                self._go(_ANSWERED)
            else:  # a whole document, from an endpoint that has no streams
                self._whole_ended(leg, head, EngineResponse(whole))
        except Exception as fault:  # noqa: BLE001  as above
            self._refuse(client_error_for(fault))

    def _failed(self, leg: Leg, head: ResponseHead, raw: bytes, error: UpstreamError | None) -> bool:
        """Whether the leg has failed; then the client's leaving or the plan has been seen to."""
        unseen = not error.sent if error is not None else 400 <= head.status < 500
        if leg.answers_client and unseen:  # no engine has it, or it was refused before it was scheduled
            self._context.kv_claimed = False
        well = error is None and head.status == 200
        if self._gone and (leg.answers_client or not well):
            self._finish("gone")
            return True
        if well:
            return False
        sent = self._recorder.progress() if self._recorder is not None and self._life.answering else None
        addresses, body = self._resources.engine_addresses, self._inbound.body
        pool = self._resources.pools.get(leg.instance.id)
        own_key = not self._context.client_authorization or pool is None or pool.has_own_key
        answering = self._life.answering
        failure = classify_leg_outcome(
            leg.instance, head, raw, error, addresses, body, own_key=own_key, begun=answering, sent=sent
        )
        if failure is None:
            return False
        failure.instance = leg.instance
        if leg.answers_client and self._context.kv_claimed:  # nobody else may fetch it, whether the client stays or not
            self._context.abandon_kv(gone=False)
        self._resources.metrics.leg_failed(leg.instance, failure_kind(head, error))
        # What an engine forbids may be this request alone (vLLM 0.32.0: scale-out endpoints); probes find wrong keys.
        status = answered_status(head, error)
        forbidden = status in (401, 403)
        limited = status == 429 and not own_key  # the client's key is, others' need not be
        full = isinstance(error, UpstreamOverflow)  # that is not broken
        other = pool is not None and pool.shared and (error is None or error.connected)  # the next one is not this one
        if failure.retryable and not (limited or full or other or forbidden):
            connected, busy = error is None or error.connected, failure.error.status in (429, 503)
            beside = None if busy else self._handed_over(leg, head)
            why = failure_evidence(head, error)
            self._resources.fleet.record_failure(leg.instance, connected=connected, busy=busy, why=why, beside=beside)
        ending = self._recorder.missing_ending() if self._recorder is not None and self._life.answering else None
        if ending is None:
            self._go(None, failure)
        else:  # it has failed behind its last token
            ending = self._corrections.correct_events(ending)
            self._downstream.body(ending)
            self._account.answer_bytes += len(ending)
            self._go(_ANSWERED)
        return True

    def _handed_over(self, leg: Leg, head: ResponseHead) -> Instance | None:
        """The prefill instance whose KV a failed leg was to fetch, if the leg has failed before its first byte: then
        that may be why."""
        begun = self._life.answering and (leg.resume_from is None or head.status == 200)
        if not leg.answers_client or begun:
            return None
        return self._context.kv_producer if self._paired is None else self._paired.pair.prefill.instance

    def _send_whole(self, answer: EngineResponse) -> LegResult:
        pieces = self._corrections.correct_response(answer)
        size = sum(map(len, pieces))
        self.stream_begun()
        self._downstream.head(200, _JSON + self._answer_headers(), size)
        if size > LONG_RESPONSE_BYTES:  # the head goes alone: it would be put together with the first piece
            self._downstream.body(b"")
        for piece in cast("Sequence[bytes]", pieces):
            self._downstream.body(piece)
        self._account.answer_bytes += size
        return _ANSWERED

    # the end

    def abort_for_shutdown(self) -> None:
        """Ends the request because the proxy shuts down: the client is told so, and what is held is given back."""
        self._end_early(
            ProxyError(503, "service_unavailable", _SHUTTING_DOWN, code="shutting_down", retry_after_s=_RETRY_S)
        )

    def _end_early(self, error: ProxyError) -> None:
        """Ends a request that runs for too long: with `error`, unless its client has the last event already."""
        if self._relay is not None and self._relay.complete and self._exchange is not None:
            self._exchange.abort(UpstreamTimeout("did not end its response"))  # to the relay its stream ended well
        else:
            self._refuse(error)

    def _refuse(self, error: ProxyError) -> None:
        """Answer with an error: in the stream, if the client has a part of it already."""
        if self._life.state == "done":
            return
        self._account.record_error(error)
        if error.status >= 500 or self._life.answering:
            self._log_failure(error)
        if self._life.answering:
            body = error.sse_event(sends_done_event=self._endpoint.sends_done_event)
        else:
            body = error.body()
            self._downstream.head(error.status, _JSON + error.headers() + self._answer_headers(), len(body))
        self._downstream.body(body)
        self._account.answer_bytes += len(body)
        self._downstream.end()
        self._finish("midway" if self._life.answering else "refused" if error.status < 500 else "failed")

    def _finish(self, outcome: RequestOutcome) -> None:
        """Give back whatever is still held. The one end of every request."""
        life = self._life
        if life.state == "done":
            return
        resources = self._resources
        resources.running_executions.discard(self)
        if self._waiting is not None:
            resources.fleet.cancel_wait(self)
        self._plan.close()
        if self._exchange is not None:  # it is overdue, or the proxy went wrong: the engine must not go on alone
            exchange, self._exchange = self._exchange, None
            exchange.discard()
        self._relay = None
        if self._paired is not None:
            self._drop_other()
        self._stop_reading()
        resources.deadlines.stop(self)
        if self._total is not None:
            resources.deadlines.stop(self._total)
            self._total = None
        while life.loads:
            resources.fleet.release(life.loads.pop(), self.facts)
        self._context.abandon_kv(gone=self._gone)
        life.finish(outcome)
        if self._corrections.usage is not None:
            split = any(instance.role is Role.PREFILL for instance in self._route)
            self._account.record_decode(self._corrections.usage, split=split)
        self._account.ended_s = time()
        resources.record_dispatcher.ended(self._account)
        if self._done is not None:
            self._done()
        if outcome == "ok" and self._route:
            self._context.record_answer(self._route)

    def _log_failure(self, error: ProxyError) -> None:
        route = " -> ".join(instance.id for instance in self._route) or "no engine"
        said = f"{error.message} ({error.detail[:500]!r})" if error.detail else error.message
        _log.warning("request %s (%s): %s", self.facts.request_id, route, said)

    def _answer_headers(self) -> bytes:
        lines = b"x-request-id: %b\r\n" % self.facts.request_id.encode()
        if not self._resources.settings.expose_route:
            return lines
        lines += b"".join(b"x-kvparams-%b: %b\r\n" % (i.role.encode(), i.id.encode()) for i in self._route)
        decision = self._account.decision
        return lines if decision is None else lines + b"x-kvparams-decision: %b\r\n" % decision.summary().encode()
