"""Runs the legs of one request, one at a time or two at once, and tells the plan's owner how each has ended.

Nothing here waits: engines and the client call back.

Each leg ends exactly once, and if one of two legs fails, the other is ended.
"""

from typing import Final, Protocol

from kvparams.instances import Instance, Role
from kvparams.routing.plan import Leg, LegFailed, LegPair, LegResult
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.client_errors import client_error_for
from kvparams_proxy.execution.client_response import ClientResponse
from kvparams_proxy.execution.engine_response import LONG_RESPONSE_BYTES, EngineResponse
from kvparams_proxy.execution.leg_settlement import LegSettlement
from kvparams_proxy.execution.plan_context import PlanContext
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.execution.running_leg import LEG_TIMEOUT_REASON, ConcurrentPrefill, RunningLeg
from kvparams_proxy.execution.stream_continuation import StreamRecorder
from kvparams_proxy.execution.stream_relay import StreamRelay
from kvparams_proxy.requests.downstream import Downstream
from kvparams_proxy.upstream.types import ResponseHead, ResponseSink, UpstreamError, UpstreamTimeout

__all__ = ["LegOwner", "LegRunner"]

_ENCODE: Final = Role.ENCODE
"""By a name of its own: in CPython 3.11 an attribute of an enumeration takes as long as a call."""
_LAST_WORD_S: Final = 0.5
"""The time for an engine that sees its client leave to close the connection, or to show that it had answered already;
and to end its response behind the last event of its stream."""


class LegOwner(Protocol):
    """The owner of the request, as its legs see it."""

    def expire(self) -> None:
        """Called when the time-out that `LegRunner` has started is over.

        If it belongs to a leg, the owner calls `LegRunner.expire`.
        """
        ...

    def resume_plan(self, value: object, failure: LegFailed | None = None) -> None:
        """Called when a leg has ended: the plan is sent `value`, or `failure` is raised in it."""
        ...

    def end_without_client(self, result: LegResult | None = None) -> None:
        """Called when the client has left and no leg runs for it. `result` is of a prefill that has ended since."""
        ...

    def fail(self, error: ProxyError) -> None:
        """Ends the request with this error."""
        ...


class LegRunner(LegSettlement):
    """Runs the legs of one request. A `StreamRelayObserver`."""

    __slots__ = (
        "_downstream",
        "_owner",
        "_prefill",
        "_route",
        "_running",
        "client_is_gone",
        "client_is_slow",
    )

    def __init__(
        self,
        owner: LegOwner,
        resources: ExecutionResources,
        context: PlanContext,
        downstream: Downstream,
        response: ClientResponse,
        recorder: StreamRecorder | None,
        route: list[Instance],
    ) -> None:
        """Creates the runner; no leg runs yet.

        Args:
            owner: hears how legs end.
            resources: what executions share.
            context: what the request is, and what it holds.
            downstream: the client, for streams.
            response: the response to it.
            recorder: remembers a stream that may have to be continued.
            route: the instances that were sent a leg; each new one is added.
        """
        super().__init__(resources, context, response, recorder)
        self._owner = owner
        self._downstream = downstream
        self._route = route
        self._running: RunningLeg | None = None
        """The leg that runs; of two, the decode leg."""
        self._prefill: ConcurrentPrefill | None = None
        """The prefill leg that runs beside it."""
        self.client_is_gone = False
        self.client_is_slow = False

    # starting legs

    def start_pair(self, pair: LegPair) -> None:
        """Sends two legs at once."""
        resources, context, leg = self._resources, self._context, pair.prefill
        prefill = self._prefill = ConcurrentPrefill(pair, resources, context, self._prefill_answered, self._fail)
        self._route.append(leg.instance)
        context.life.enter("prefill", leg.instance.id)
        prefill.exchange = context.send_leg(leg, prefill, self._recorder, False)
        resources.deadlines.start(prefill, resources.settings.prefill_timeout_s)
        self.start(pair.decode)

    def start(self, leg: Leg) -> None:
        """Sends one leg."""
        resources, context, recorder, prefill = self._resources, self._context, self._recorder, self._prefill
        instance, answers_client = leg.instance, leg.answers_client
        if prefill is None:
            on_answer, batcher = self._answered, resources.response_batchers[instance.role]
        else:
            on_answer, batcher = self._decode_answered, None
        running = self._running = RunningLeg(leg, resources, context, on_answer, self._fail, batcher)
        self._route.append(instance)
        state = "decode" if answers_client else "encode" if instance.role is _ENCODE else "prefill"
        context.life.enter(state, instance.id)
        if not leg.changes:  # it computes everything: what a prefill that broke off may have left is for nobody
            context.abandon_kv(gone=False)
        if recorder is not None and leg.resume_from is not None:
            recorder.mark_resumed()
        sink: ResponseSink = running
        if answers_client and context.inbound.stream:
            sink = running.relay = self._make_relay()
        if prefill is not None:  # it has the time-out until it has ended
            running.exchange = context.send_leg(leg, sink, recorder, not context.has_reusable_kv(leg))
            return
        settings = resources.settings
        if not answers_client:
            running.exchange = context.send_leg(leg, sink, recorder, False)
            limit_s = settings.prefill_timeout_s
            resources.deadlines.start(self._owner, limit_s if leg.limit_s is None else min(limit_s, leg.limit_s))
            return
        running.exchange = context.send_leg(leg, sink, recorder, context.claim_kv())
        limit_s = settings.decode_timeout_s
        if self.client_is_slow:  # the client has still to take what came before
            running.exchange.pause()
            limit_s = settings.client_timeout_s
        resources.deadlines.start(self._owner, limit_s)

    def _make_relay(self) -> StreamRelay:
        resources = self._resources
        return StreamRelay(
            self._downstream,
            b"cache-control: no-cache\r\n" + self._response.headers(),
            self._response,
            resources.settings.upstream_limits.answer_bytes,
            self,
            resources.clock,
            self._context.endpoint,
            self._recorder,
            gated=self._prefill is not None,
        )

    # the client and the clock

    def client_gone(self) -> None:
        """Aborts all legs that run for the client.

        If a prefill leg may just have ended, with KV that only its answer names, the answer is still read where it is
        on its way: to give the KV back.
        """
        self.client_is_gone = True
        running = self._running
        exchange = None if running is None else running.exchange
        if running is None or exchange is None or self._prefill is not None:
            self._owner.end_without_client()
            return
        leg = running.leg
        if leg.answers_client and running.is_being_read:
            self._owner.end_without_client()
        elif self._may_leave_kv(leg) and exchange.half_close():
            self._resources.deadlines.start(self._owner, _LAST_WORD_S)
        else:
            exchange.abort(UpstreamError("the client has left"))

    def _may_leave_kv(self, leg: Leg) -> bool:
        """Returns whether the engine of a leg that just ends may hold KV which only its answer names."""
        if leg.answers_client or leg.instance.role is _ENCODE:
            return False
        return not self._context.has_reusable_kv(leg)

    def client_slow(self) -> None:
        """Throttles the engine that writes for the client."""
        if self._running is not None:
            self._running.pause()
        self.client_is_slow = True  # it is the client who is silent now
        self._resources.deadlines.start(self._owner, self._resources.settings.client_timeout_s)

    def client_ready(self) -> None:
        """Lets the engine go on. Where a prefill runs for the rest of the answer, the time-out is still its own."""
        self.client_is_slow = False
        running = self._running
        if running is None or running.exchange is None or self._prefill is not None or not running.leg.answers_client:
            return
        running.exchange.resume()
        is_complete = running.relay is not None and running.relay.complete
        limit_s = _LAST_WORD_S if is_complete else self._resources.settings.decode_timeout_s
        self._resources.deadlines.start(self._owner, limit_s)

    def expire(self) -> None:
        """Ends a leg whose engine has been silent for too long."""
        running = self._running
        if running is None or running.exchange is None:
            return
        relay = running.relay
        if relay is not None and not relay.complete:  # asked here, not at every event
            resources = self._resources
            left_s = relay.last_content_s + resources.settings.decode_timeout_s - resources.clock.time()
            if left_s > 0:
                resources.deadlines.start(self._owner, left_s)
                return
        running.exchange.abort(UpstreamTimeout(LEG_TIMEOUT_REASON))

    # whole answers

    def _answered(self, head: ResponseHead, answer: EngineResponse, error: UpstreamError | None) -> None:
        """Handles the end of a leg and its complete answer, if there is one."""
        if self._context.life.state == "done":  # it was overdue between the end of its leg and this turn
            return
        if error is None and head.status == 200 and self._running is not None:
            self.report_response(self._running.leg, answer)
        self._settle(self._end_leg(), head, answer, error, None)

    def _decode_answered(self, head: ResponseHead, answer: EngineResponse, error: UpstreamError | None) -> None:
        """Handles the answer of a decode leg beside which its prefill leg runs.

        A valid answer is held until prefill has ended well. Anything else is not held: its engine may never have met
        the prefill that would be waited for.
        """
        if error is None and head.status == 200 and self._prefill is not None and answer.has_content:
            self._prefill.held_decode_response = head, answer
        else:
            self._answered(head, answer, error)

    def _settle(
        self,
        leg: Leg,
        head: ResponseHead,
        answer: EngineResponse,
        error: UpstreamError | None,
        prefill: ConcurrentPrefill | None,
    ) -> None:
        """Tells the owner what a leg was worth. `prefill`: the leg is the one beside which its decode leg runs."""
        try:
            told = self.settle(leg, head, answer, error, self.client_is_gone, self._prefill, prefill is not None)
            if prefill is not None and isinstance(told, LegResult):
                self._release_decode(prefill)
            else:
                self._tell(told)
        except Exception as fault:  # noqa: BLE001  nobody else would answer the client
            self._fail(fault)

    def _tell(self, told: LegResult | LegFailed | None) -> None:
        if isinstance(told, LegFailed):
            self._owner.resume_plan(None, told)
        elif told is None or self.client_is_gone:
            self._owner.end_without_client(told)
        else:
            self._owner.resume_plan(told)

    def _fail(self, fault: Exception) -> None:
        error = client_error_for(fault)
        if self._context.life.state != "done":
            self._owner.fail(error)

    # two legs

    def _prefill_answered(
        self, prefill: ConcurrentPrefill, head: ResponseHead, answer: EngineResponse, error: UpstreamError | None
    ) -> None:
        """Handles the end of a prefill leg beside which its decode leg runs, or has run."""
        if error is None and head.status == 200:
            self.report_response(prefill.leg, answer)
        self._end_prefill(prefill)
        self._settle(prefill.leg, head, answer, error, prefill)

    def _release_decode(self, prefill: ConcurrentPrefill) -> None:
        """Releases the held answer of decode after a successful prefill."""
        self._context.hold_lease(prefill.pair.kv)
        self._context.claim_kv()
        settings, running = self._resources.settings, self._running
        limit_s = settings.client_timeout_s if self.client_is_slow else settings.decode_timeout_s
        self._resources.deadlines.start(self._owner, limit_s)
        if prefill.held_decode_response is not None:
            self._answered(*prefill.held_decode_response, None)
        elif running is not None and running.relay is not None:
            wrong = running.relay.release_held()
            if wrong is not None:
                running.abort(wrong)
            elif self.client_is_slow:  # as for a leg that begins then
                running.pause()
            else:
                running.resume()

    def drop_other(self) -> None:
        """Ends the other leg after one of two legs has failed. Does nothing where no leg runs."""
        if self._prefill is not None:
            exchange = self._prefill.exchange
            self._end_prefill(self._prefill)
        elif self._running is not None:
            exchange = self._running.exchange
            self._end_leg()
        else:
            return
        if exchange is not None:
            exchange.discard()

    # the stream of the leg, as `StreamRelayObserver`

    def stream_held(self) -> None:
        """Decode answers, and prefill has not ended."""
        if self._running is not None:
            self._running.pause()

    def stream_begun(self) -> None:
        """Hears that the client is about to get its first byte."""
        self.begin_answer(None if self._running is None else self._running.leg)

    def stream_complete(self) -> None:
        """Hears that the client has everything. An engine that does not end its response is not waited for."""
        if not self.client_is_slow:
            self._resources.deadlines.start(self._owner, _LAST_WORD_S)

    def stream_ended(
        self, head: ResponseHead, whole: bytes, error: UpstreamError | None, sent_bytes: int, sent_events: int
    ) -> None:
        """Handles the end of a stream's leg. `whole` is an answer that is no stream."""
        account, running = self._context.account, self._running
        account.answer_bytes += sent_bytes
        account.stream_events += sent_events
        if error is None and head.status == 200 and len(whole) > LONG_RESPONSE_BYTES and running is not None:
            running.relay = None
            running.read(whole, head)
            return
        if error is None:
            self.report_stream(None if running is None else running.leg)
        leg = self._end_leg()
        if not self._context.life.answering:  # it may be a whole document, from an endpoint that has no streams
            self._settle(leg, head, EngineResponse(whole, self._context.answer_form), error, None)
            return
        try:
            self._tell(self.settle_stream(leg, head, whole, error, self.client_is_gone, self._prefill))
        except Exception as fault:  # noqa: BLE001  as above
            self._fail(fault)

    # ends

    def _end_leg(self) -> Leg:
        running, self._running = self._running, None
        assert running is not None
        self._resources.deadlines.stop(self._owner)
        running.end()
        return running.leg

    def _end_prefill(self, prefill: ConcurrentPrefill) -> None:
        self._prefill = None
        self._resources.deadlines.stop(prefill)
        prefill.end()

    def end_complete_stream(self) -> bool:
        """Ends a leg whose client has the last event already.

        To the relay its stream has ended well. Returns false where there is none.
        """
        running = self._running
        if running is None or running.exchange is None or running.relay is None or not running.relay.complete:
            return False
        running.exchange.abort(UpstreamTimeout("did not end its response"))
        return True

    def close(self) -> None:
        """Ends all running legs and drops the owner; the request is over."""
        if self._running is not None:
            self._running.discard()
            self._running = None
        if self._prefill is not None:
            self.drop_other()
        del self._owner  # it holds this object, and is not to wait for the garbage collector
