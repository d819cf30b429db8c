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

from kvparams.codec import carrier
from kvparams.errors import JSONTextError
from kvparams.lifecycle import Lifecycle, Outcome
from kvparams.managers.interface import DisaggregatedRequestManager
from kvparams.plan import Choose, Leg, LegAnswer, LegFailed, Pair
from kvparams.scheduling import Instance, Role
from kvparams_proxy.clients.downstream import Downstream
from kvparams_proxy.clients.endpoints import Endpoint
from kvparams_proxy.clients.intake import Inbound
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.answers import LONG_BYTES, Answer
from kvparams_proxy.execution.context import PlanContext
from kvparams_proxy.execution.corrections import Corrections, prompt_details
from kvparams_proxy.execution.failures import BrokenLeg, answered_status, broken, evidence, refusal
from kvparams_proxy.execution.legs import leg_request, recorder_for
from kvparams_proxy.execution.paired import Paired
from kvparams_proxy.execution.privacy import error_in
from kvparams_proxy.execution.relay import Relay
from kvparams_proxy.execution.reports import report
from kvparams_proxy.execution.resources import Resources
from kvparams_proxy.steprunner import Work
from kvparams_proxy.telemetry.account import Account
from kvparams_proxy.telemetry.metrics import failure_kind
from kvparams_proxy.telemetry.tracing import Trace
from kvparams_proxy.upstream.interface import Handle
from kvparams_proxy.upstream.terms import (
    Collect,
    Head,
    Sink,
    UpstreamError,
    UpstreamFull,
    UpstreamRefusal,
    UpstreamTimeout,
)

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefixes import Prefixes

__all__ = ["Execution"]

_log: Final = logging.getLogger(__name__)
_JSON: Final = b"content-type: application/json\r\n"
_ANSWERED: Final = LegAnswer({})
_SHUTTING_DOWN: Final = "the proxy is shutting down"
_RETRY_S: Final = 1
_COSTLY_BYTES: Final = 1 << 20
"""To put together a longer answer has taken milliseconds of this turn already."""
_LAST_WORD_S: Final = 0.5
"""For an engine that sees its client leave to close the connection, or to show that it had answered already; and to end
its response behind the last event of its stream."""


class Total:
    """The limit of a whole request, beside that of its legs."""

    __slots__ = ("_execution",)

    def __init__(self, execution: "Execution") -> None:
        self._execution = execution

    def expire(self) -> None:
        """For the watch."""
        self._execution.overdue()


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
        resources: Resources,
        manager: DisaggregatedRequestManager,
        endpoint: Endpoint,
        inbound: Inbound,
        upstream_headers: bytes,
        authorization: bytes | None,
        downstream: Downstream,
        done: Callable[[], None] | None = None,
        trace: Trace | None = None,
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
        self._exchange: Handle | None = None
        self._leg: Leg | None = None
        self._paired: Paired | None = None
        self._relay: Relay | None = None
        self._reading: Work | None = None
        """Of the leg's answer, where that is long; of a prefill beside it, see `Paired`."""
        self._leg_began = 0.0
        self._corrections = Corrections(inbound.facts.request_id, resources.addresses, choices=endpoint.choices)
        self._recorder = recorder_for(endpoint, inbound)
        self._gone = False
        self._slow = False
        self._total: Total | None = None
        self._waiting: Choose | None = None
        self._route: list[Instance] = []
        life = self._life = Lifecycle(perf_counter)
        resources.metrics.began(life)
        account = self._account = Account(
            inbound.facts, endpoint.path.encode(), inbound.stream, life, self._route, trace
        )
        self._context = PlanContext(resources, endpoint, inbound, life, account, upstream_headers, authorization)
        self._plan = manager.legs(inbound.facts, self._context)
        resources.running.add(self)

    def run(self) -> None:
        """Answer the client, in one way or another. Never raises for what engines or clients do."""
        resources = self._resources
        resources.retries.request()
        self._downstream.watch(self)
        if self._gone:
            return
        if (limit_s := resources.settings.request_timeout_s) is not None:
            self._total = Total(self)
            resources.watch.start(self._total, limit_s)
        try:
            resources.fleet.require(self._manager.roles, self.facts)
        except Exception as error:  # noqa: BLE001  nobody waits for this turn who would answer the client
            self._refuse(refusal(error))
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
        elif leg is not None and self._leaves_kv(leg) and exchange.end_sending():
            self._resources.watch.start(self, _LAST_WORD_S)
        else:
            exchange.abort(UpstreamError("the client has left"))

    def _leaves_kv(self, leg: Leg) -> bool:
        return not leg.answers_client and not self._reusable(leg)

    def client_slow(self) -> None:
        """Throttle the engine that writes for it."""
        if self._exchange is not None:
            self._exchange.pause()
        self._slow = True  # it is the client who is silent now
        self._resources.watch.start(self, self._resources.settings.client_timeout_s)

    def client_ready(self) -> None:
        """Let the engine go on. Where a prefill runs for what is left of the answer, the time-out is still its own."""
        self._slow = False
        leg = self._leg
        if self._exchange is not None and self._paired is None and leg is not None and leg.answers_client:
            self._exchange.resume()
            complete = self._relay is not None and self._relay.complete
            limit_s = _LAST_WORD_S if complete else self._resources.settings.decode_timeout_s
            self._resources.watch.start(self, limit_s)

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
            self._resources.watch.stop(self)  # what the KV's lease is, is of no interest any more
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
            while type(step) is Choose:
                try:
                    instance = self._resources.fleet.acquire(
                        step.role, self.facts, step.avoid, self, step.beside, step.near
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
            if type(step) is Pair:
                self._start_pair(step)
            else:
                self._start(step)  # pyright: ignore[reportArgumentType]  a cast here is called twice a request
        except StopIteration:
            self._downstream.end()
            self._finish("ok")
        except Exception as error:  # noqa: BLE001  whatever it is, the client is answered and everything given back
            self._refuse(refusal(error))
        finally:
            if failure is not None:  # its frames hold it, and with it all that the request had
                failure.__traceback__ = None

    def _stranded(self, step: Choose, error: ProxyError) -> BrokenLeg | None:
        """What the plan is told of a choice that found nobody, if it has chosen the other leg's engine already and
        should do so again."""
        if not isinstance(step.beside, Instance) or not self._context.elsewhere(step.beside, step.avoid):
            return None
        return BrokenLeg(error, claimed=False)

    def _wait(self, step: Choose) -> None:
        """There is no room. Decode is not waited for longer than there is KV for it."""
        self._waiting = step
        self._life.enter("queued")
        lease = self._life.lease
        if lease is not None and step.role is Role.DECODE:
            self._resources.watch.start(self, lease.until_s - self._context.now())

    def _start_pair(self, pair: Pair) -> None:
        resources, leg = self._resources, pair.prefill
        paired = self._paired = Paired(pair, self._prefill_ended)
        self._route.append(leg.instance)
        self._life.enter("prefill", leg.instance.id)
        paired.exchange = self._send(leg, paired.sink(resources.settings.upstream.answer_bytes), once=False)
        resources.watch.start(paired, resources.settings.prefill_timeout_s)
        self._start(pair.decode)

    def _start(self, leg: Leg) -> None:
        resources = self._resources
        inbound = self._inbound
        self._leg = leg
        self._route.append(leg.instance)
        self._leg_began = perf_counter()
        self._life.enter("decode" if leg.answers_client else "prefill", leg.instance.id)
        if not leg.changes:  # it computes everything: what a prefill that broke off may have left is for nobody
            self._context.abandon(gone=False)
        limit_bytes = resources.settings.upstream.answer_bytes
        limit_s = resources.settings.decode_timeout_s if leg.answers_client else resources.settings.prefill_timeout_s
        recorder = self._recorder
        if recorder is not None and leg.resumed is not None:
            recorder.resume()
        if leg.answers_client and inbound.stream:
            lines = b"cache-control: no-cache\r\n" + self._answer_headers()
            endpoint = self._endpoint
            sink = self._relay = Relay(
                self._downstream,
                lines,
                self._corrections,
                limit_bytes,
                self,
                resources.clock,
                recorder,
                done=endpoint.done,
                choices=endpoint.choices,
                gated=self._paired is not None,
                streams=endpoint.streams,
            )
        else:
            sink = Collect(limit_bytes, self._collected if self._paired is None else self._keep)
        if self._paired is not None:  # its prefill has the time-out until it has ended
            self._exchange = self._send(leg, sink, once=not self._reusable(leg))
            return
        claims = leg.answers_client and self._context.claim()
        self._exchange = self._send(leg, sink, once=claims)
        if self._slow and leg.answers_client:  # a stream goes on for a client who has still to take what came before
            self._exchange.pause()
            limit_s = resources.settings.client_timeout_s
        resources.watch.start(self, limit_s)

    def _send(self, leg: Leg, sink: Sink, *, once: bool) -> Handle:
        path, body = leg_request(self._endpoint, self._inbound, leg, self._recorder)
        pool = self._resources.pools.of(self._resources.fleet.member(leg.instance))  # what has its name may be another
        context = self._context
        headers = context.lines if pool.keyed else context.lines + context.credentials
        if self._account.trace is not None:
            headers += self._account.trace.leg()
        return pool.exchange(pool.request(path, headers, body), sink, once=once)

    def _reusable(self, leg: Leg) -> bool:
        return self._resources.dialects[leg.instance.dialect].reusable

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
        resources.watch.stop(self)
        self._exchange = None
        self._context.give_back(leg.instance)
        resources.metrics.leg_ended(leg.instance, perf_counter() - self._leg_began)
        return leg

    def expire(self) -> None:
        """For the watch: the engine may have been silent for too long, or the client has taken nothing for too long, or
        the KV that a decode engine was to fetch is given up."""
        if self._slow:
            self._downstream.drop()
        elif self._waiting is not None:
            self._waiting = None
            self._resources.fleet.give_up(self)
            self._go(None, LegFailed("the KV was given up before a decode engine had room", another=False))
        elif self._relay is not None and (left_s := self._left_s(self._relay)) > 0:
            self._resources.watch.start(self, left_s)
        elif self._exchange is not None:
            self._exchange.abort(UpstreamTimeout("said nothing for longer than the time-out of its leg"))

    def overdue(self) -> None:
        """For the watch: the request as a whole takes too long. No engine is to blame."""
        if self._slow:
            self._downstream.drop()
        else:
            limit_s = self._resources.settings.request_timeout_s
            said = f"the request took longer than {limit_s:g} s, which is the limit here (--request-timeout)"
            self._end_early(ProxyError(504, "timeout", said, code="request_timeout"))

    def _left_s(self, relay: Relay) -> float:
        """Before the engine whose stream this is has been silent for too long: asked here, not at every event."""
        if relay.complete:
            return 0.0
        return relay.heard_s + self._resources.settings.decode_timeout_s - self._resources.clock.time()

    # what becomes of a leg

    def _collected(self, head: Head, raw: bytes, error: UpstreamError | None) -> None:
        """A leg whose answer is wanted whole has ended. One that went well is acted on beside others of its kind."""
        if error is not None or self._leg is None:
            self._whole(head, Answer(raw), error)
        elif len(raw) > LONG_BYTES and head.status == 200:
            self._read(raw, partial(self._whole, head))
        else:
            self._resources.answered[self._leg.instance.role].soon(partial(self._whole, head, Answer(raw)))

    def _read(self, raw: bytes, then: Callable[[Answer], None], paired: Paired | None = None) -> None:
        """Read a long answer, and go on with it unless its leg is given up meanwhile. `paired`: it is of that leg."""

        def keep(work: Work | None) -> None:
            if paired is None:
                self._reading = work
            else:
                paired.reading = work

        def read(answer: Answer) -> None:
            keep(None)
            then(answer)

        def failed(fault: Exception) -> None:
            keep(None)
            self._refuse(refusal(fault))

        steps = Answer(raw).read(self.facts.request_id, self._resources.addresses)
        work = self._resources.steps.run(steps, read, failed, at_once=len(raw) < _COSTLY_BYTES)
        if not work.over:
            keep(work)

    def _keep(self, head: Head, raw: bytes, error: UpstreamError | None) -> None:
        """The same of one beside which its prefill runs: if it went well, it is held until that has. What is no answer
        is not: its engine may never have met the prefill that would be waited for."""
        if error is None and head.status == 200:
            keep = partial(self._keep_answer, head)
            if len(raw) > LONG_BYTES:
                self._read(raw, keep)
            else:
                keep(Answer(raw))
        else:
            self._whole(head, Answer(raw), error)

    def _keep_answer(self, head: Head, answer: Answer) -> None:
        if self._paired is not None and answer.has_choice:
            self._paired.kept = head, answer
        else:
            self._whole(head, answer)

    def _prefill_ended(self, paired: Paired, head: Head, raw: bytes, error: UpstreamError | None) -> None:
        """A prefill leg has ended beside which its decode leg runs, or has run."""
        if error is None and head.status == 200 and len(raw) > LONG_BYTES:
            self._read(raw, partial(self._prefill_answered, paired, head), paired)
        else:
            self._prefill_answered(paired, head, Answer(raw), error)

    def _prefill_answered(self, paired: Paired, head: Head, answer: Answer, error: UpstreamError | None = None) -> None:
        leg = paired.pair.prefill
        if self._resources.prefixes is not None and error is None and head.status == 200:
            self._report(self._resources.prefixes, leg, answer)
        self._end_paired(paired)
        try:
            if not self._failed(leg, head, answer.raw, error):
                self._whole_ended(leg, head, answer, paired)
        except Exception as fault:  # noqa: BLE001  as below
            self._refuse(refusal(fault))

    def _end_paired(self, paired: Paired) -> None:
        """A prefill leg is over, however it went: its load is given back."""
        self._paired = None
        if paired.reading is not None:
            paired.reading.cancel()
        resources, instance = self._resources, paired.pair.prefill.instance
        resources.watch.stop(paired)
        self._context.give_back(instance)
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

    def _answer(self, paired: Paired) -> None:
        """Prefill is good: decode's answer is held no longer."""
        self._context.hold(paired.pair.kv)
        self._context.claim()
        settings = self._resources.settings
        self._resources.watch.start(self, settings.client_timeout_s if self._slow else settings.decode_timeout_s)
        if paired.kept is not None:
            self._whole(*paired.kept)
        elif self._relay is not None:
            wrong = self._relay.release()
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

    def _whole(self, head: Head, answer: Answer, error: UpstreamError | None = None) -> None:
        if self._life.state == "done":  # it was overdue between the end of its leg and this turn
            return
        if self._resources.prefixes is not None and error is None and head.status == 200 and self._leg is not None:
            self._report(self._resources.prefixes, self._leg, answer)
        leg = self._end_leg()
        try:
            if not self._failed(leg, head, answer.raw, error):
                self._whole_ended(leg, head, answer)
        except Exception as fault:  # noqa: BLE001  nobody else would answer the client
            self._refuse(refusal(fault))

    def _report(self, prefixes: "Prefixes", leg: Leg, answer: Answer) -> None:
        """A leg has ended well; what a prefill engine had cached counts before its load is given back. One that goes on
        with a broken stream has another prompt than the one that was looked up."""
        if leg.instance.role is not Role.DECODE and leg.resumed is None:
            report(prefixes, self._account, answer)

    def _report_stream(self, prefixes: "Prefixes") -> None:
        """The same of a stream, whose last event counts tokens if the client asked for that."""
        leg, account = self._leg, self._account
        if leg is not None and leg.instance.role is Role.AGGREGATED and leg.resumed is None and self._life.answering:
            if self._corrections.usage is not None:
                account.counted(self._corrections.usage)
            account.decision = prefixes.reported(self.facts, account.prompt_tokens, account.cached_tokens)

    def _whole_ended(self, leg: Leg, head: Head, answer: Answer, paired: Paired | None = None) -> None:
        try:
            if leg.answers_client:
                outcome = self._send_whole(answer)
            else:
                document = answer.document
                if (reported := error_in(document)) is not None:
                    raise UpstreamRefusal(reported)
                if leg.resumed is None:  # what the client is told is what its own prompt cost
                    self._corrections.prompt_tokens_details = prompt_details(document)
                    self._account.prefilled(document)
                if paired is None:
                    self._life.enter("result", leg.instance.id)
                outcome = LegAnswer(carrier(document.get("kv_transfer_params")))
        except UpstreamError as refused:
            self._failed(leg, head, b"", refused)
            return
        except JSONTextError:
            if self._gone:  # the engine has seen it, and ended in the middle of what it had to say
                self._finish("gone")
                return
            why = "the answer of a leg is not JSON"
            self._resources.fleet.failed(leg.instance, connected=True, why=why)
            self._resources.metrics.leg_failed(leg.instance, "garbage")
            message = f"the {leg.instance.role} engine's answer is not JSON"
            broken_off = BrokenLeg(ProxyError(502, "upstream_error", message, code=f"{leg.instance.role}_failed"))
            broken_off.instance = leg.instance
            self._go(None, broken_off)
            return
        self._resources.fleet.succeeded(leg.instance, self._context.producer if leg.answers_client else None)
        if paired is not None:
            self._answer(paired)
        elif self._gone:
            self._last_word(outcome)
        else:
            self._go(outcome)

    def _last_word(self, answer: LegAnswer) -> None:
        """The client left as its prefill ended: the plan learns what is held for it, and takes no further step."""
        with suppress(Exception):  # whatever the answer is worth, nobody waits for it
            self._plan.send(answer)
        self._finish("gone")

    def stream_begun(self) -> None:
        """For the relay: the client is about to get its first byte."""
        again = self._life.answering
        self._life.enter("first_byte")
        if self._leg is not None:  # a stream may be long, and others wait for an engine that is on trial
            self._resources.fleet.heard(self._leg.instance, self._context.producer)
            if self._leg.instance.role is Role.AGGREGATED and not again:
                self._resources.fleet.computed(self._leg.instance, self.facts)
        if again:
            self._resources.metrics.continuations += 1
            return
        self._resources.metrics.first_byte.observe(self._life.since_s - self._life.begun_s)

    def stream_complete(self) -> None:
        """For the relay: the client has everything. An engine that does not end its response is not waited for."""
        if not self._slow:
            self._resources.watch.start(self, _LAST_WORD_S)

    def stream_ended(
        self, head: Head, whole: bytes, error: UpstreamError | None, sent_bytes: int, sent_events: int
    ) -> None:
        """For the relay: the leg has ended. `whole` is an answer that is no stream."""
        self._account.answer_bytes += sent_bytes
        self._account.stream_events += sent_events
        if error is None and head.status == 200 and len(whole) > LONG_BYTES:
            self._relay = None
            self._read(whole, partial(self._whole, head))
            return
        if self._resources.prefixes is not None and error is None:
            self._report_stream(self._resources.prefixes)
        leg = self._end_leg()
        try:
            if self._failed(leg, head, whole, error):
                return
            if self._life.answering:
                self._resources.fleet.succeeded(leg.instance)
                self._go(_ANSWERED)
            else:  # a whole document, from an endpoint that has no streams
                self._whole_ended(leg, head, Answer(whole))
        except Exception as fault:  # noqa: BLE001  as above
            self._refuse(refusal(fault))

    def _failed(self, leg: Leg, head: Head, raw: bytes, error: UpstreamError | None) -> bool:
        """Whether the leg has failed; then the client's leaving or the plan has been seen to."""
        unseen = not error.sent if error is not None else 400 <= head.status < 500
        if leg.answers_client and unseen:  # no engine has it, or it was refused before it was scheduled
            self._context.claimed = False
        well = error is None and head.status == 200
        if self._gone and (leg.answers_client or not well):
            self._finish("gone")
            return True
        if well:
            return False
        sent = self._recorder.sent() if self._recorder is not None and self._life.answering else None
        addresses, body = self._resources.addresses, self._inbound.body
        pool = self._resources.pools.get(leg.instance.id)
        own_key = not self._context.credentials or pool is None or pool.keyed
        answering = self._life.answering
        failure = broken(leg.instance, head, raw, error, addresses, body, own_key=own_key, begun=answering, sent=sent)
        if failure is None:
            return False
        failure.instance = leg.instance
        if leg.answers_client and self._context.claimed:  # nobody else may fetch it, whether the client stays or not
            self._context.abandon(gone=False)
        self._resources.metrics.leg_failed(leg.instance, failure_kind(head, error))
        # What an engine forbids may be this request alone (vLLM 0.32.0: scale-out endpoints); probes find wrong keys.
        status = answered_status(head, error)
        forbidden = status in (401, 403)
        limited = status == 429 and not own_key  # the client's key is, others' need not be
        full = isinstance(error, UpstreamFull)  # that is not broken
        other = pool is not None and pool.shared and (error is None or error.connected)  # the next one is not this one
        if failure.another and not (limited or full or other or forbidden):
            connected, busy = error is None or error.connected, failure.error.status in (429, 503)
            beside = None if busy else self._handed_over(leg, head)
            why = evidence(head, error)
            self._resources.fleet.failed(leg.instance, connected=connected, busy=busy, why=why, beside=beside)
        ending = self._recorder.ending() if self._recorder is not None and self._life.answering else None
        if ending is None:
            self._go(None, failure)
        else:  # it has failed behind its last token
            ending = self._corrections.events(ending)
            self._downstream.body(ending)
            self._account.answer_bytes += len(ending)
            self._go(_ANSWERED)
        return True

    def _handed_over(self, leg: Leg, head: Head) -> Instance | None:
        """The prefill instance whose KV a failed leg was to fetch, if the leg has failed before its first byte: then
        that may be why."""
        begun = self._life.answering and (leg.resumed is None or head.status == 200)
        if not leg.answers_client or begun:
            return None
        return self._context.producer if self._paired is None else self._paired.pair.prefill.instance

    def _send_whole(self, answer: Answer) -> LegAnswer:
        pieces = self._corrections.pieces(answer)
        size = sum(map(len, pieces))
        self.stream_begun()
        self._downstream.head(200, _JSON + self._answer_headers(), size)
        if size > LONG_BYTES:  # the head goes alone: it would be put together with the first piece
            self._downstream.body(b"")
        for piece in cast("Sequence[bytes]", pieces):
            self._downstream.body(piece)
        self._account.answer_bytes += size
        return _ANSWERED

    # the end

    def cut(self) -> None:
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
        self._account.refused(error)
        if error.status >= 500 or self._life.answering:
            self._log_failure(error)
        if self._life.answering:
            body = error.event(self._endpoint)
        else:
            body = error.body()
            self._downstream.head(error.status, _JSON + error.headers() + self._answer_headers(), len(body))
        self._downstream.body(body)
        self._account.answer_bytes += len(body)
        self._downstream.end()
        self._finish("midway" if self._life.answering else "refused" if error.status < 500 else "failed")

    def _finish(self, outcome: Outcome) -> None:
        """Give back whatever is still held. The one end of every request."""
        life = self._life
        if life.state == "done":
            return
        resources = self._resources
        resources.running.discard(self)
        if self._waiting is not None:
            resources.fleet.give_up(self)
        self._plan.close()
        if self._exchange is not None:  # it is overdue, or the proxy went wrong: the engine must not go on alone
            exchange, self._exchange = self._exchange, None
            exchange.discard()
        self._relay = None
        if self._paired is not None:
            self._drop_other()
        self._stop_reading()
        resources.watch.stop(self)
        if self._total is not None:
            resources.watch.stop(self._total)
            self._total = None
        while life.loads:
            resources.fleet.release(life.loads.pop(), self.facts)
        self._context.abandon(gone=self._gone)
        life.leave(outcome)
        if self._corrections.usage is not None:
            split = any(instance.role is Role.PREFILL for instance in self._route)
            self._account.decoded(self._corrections.usage, split=split)
        self._account.ended_s = time()
        resources.ledger.ended(self._account)
        if self._done is not None:
            self._done()
        if outcome == "ok" and self._route:
            self._context.answered(self._route)

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
        return lines if decision is None else lines + b"x-kvparams-decision: %b\r\n" % decision.words().encode()
