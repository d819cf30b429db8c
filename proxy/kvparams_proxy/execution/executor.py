"""Owns a request from its first byte to the release of the last thing it holds.

A manager says which steps to take. `Execution` takes them: it chooses instances, has legs run (`leg_runner.py`), and
gives back load, KV and connections whatever happens. Nothing here waits: engines, the queue and the client call back.

Nothing else in the proxy starts, aborts or ends a leg.
"""

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter, time
from typing import Final

from kvparams.instances import Instance, Role
from kvparams.routing.managers.interface import DisaggregatedRequestManager
from kvparams.routing.plan import AcquireInstance, Leg, LegFailed, LegPair, LegResult
from kvparams.routing.request_lifecycle import RequestLifecycle, RequestOutcome
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.client_errors import client_error_for
from kvparams_proxy.execution.client_response import ClientResponse
from kvparams_proxy.execution.decode_picker import DecodePicker, DecodeQuestion
from kvparams_proxy.execution.leg_outcomes import EngineLegFailed
from kvparams_proxy.execution.leg_requests import make_stream_recorder
from kvparams_proxy.execution.leg_runner import LegRunner
from kvparams_proxy.execution.plan_context import PlanContext
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.requests.downstream import Downstream
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.requests.intake import ParsedRequest
from kvparams_proxy.telemetry.request_record import RequestRecord
from kvparams_proxy.telemetry.tracing import TraceContext

__all__ = ["Execution"]

_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE
_ENCODE: Final = Role.ENCODE
"""By names of their own: in CPython 3.11 an attribute of an enumeration takes as long as a call."""
_SHUTTING_DOWN: Final = "the proxy is shutting down"
_RETRY_S: Final = 1


class RequestDeadline:
    """The time limit of a whole request, beside those of its legs."""

    __slots__ = ("_execution",)

    def __init__(self, execution: "Execution") -> None:
        self._execution = execution

    def expire(self) -> None:
        """Ends the request; `Deadlines` calls it."""
        self._execution.on_request_timeout()


class Execution:
    """Executes one request. It is the `DownstreamObserver` of its client and the `LegOwner` of its legs."""

    __slots__ = (
        "_account",
        "_avoid",
        "_context",
        "_deadline",
        "_done",
        "_downstream",
        "_legs",
        "_life",
        "_manager",
        "_plan",
        "_resources",
        "_response",
        "_route",
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
        """Creates the execution; `run` starts it.

        Args:
            resources: what executions share.
            manager: makes the plan.
            endpoint: the path of the request, and of its legs.
            inbound: the client's request.
            upstream_headers: whole lines for all legs, X-Request-Id not among them.
            authorization: the client's, for engines that have no key of their own.
            downstream: the client.
            done: hears of the end.
            trace: gives each leg a traceparent of its own; then there is none among `upstream_headers`.
        """
        facts = inbound.facts
        self._resources = resources
        self._manager = manager
        self.facts = facts
        """For the queue: see `kvparams_proxy.fleet.leg_queue.LegWaiter`."""
        self._downstream = downstream
        self._done = done
        self._deadline: RequestDeadline | None = None
        self._waiting: AcquireInstance | None = None
        self._avoid: tuple[str, ...] | None = None
        """The decode instances that an external picker has not chosen; None before it was asked."""
        route: list[Instance] = []
        self._route = route
        life = self._life = RequestLifecycle(perf_counter)
        resources.metrics.request_began(life)
        account = self._account = RequestRecord(facts, endpoint.path, inbound.stream, life, route, trace)
        context = self._context = PlanContext(
            resources, endpoint, inbound, life, account, upstream_headers, authorization
        )
        response = self._response = ClientResponse(
            downstream, endpoint, account, resources.engine_addresses, resources.settings.expose_route
        )
        recorder = None if inbound.document is None else make_stream_recorder(endpoint, inbound)
        self._legs = LegRunner(self, resources, context, downstream, response, recorder, route)
        self._plan = manager.legs(facts, context)
        resources.running_executions.add(self)

    @property
    def record(self) -> RequestRecord:
        """See `RunningExecution.record`."""
        return self._account

    def run(self) -> None:
        """Answers the client, in one way or another. Never raises for what engines or clients do."""
        if self._life.state == "done":  # the proxy was told to shut down before this turn
            return
        resources = self._resources
        resources.retry_budget.record_request()
        self._downstream.watch(self)
        if self._legs.client_is_gone:
            return
        if (limit_s := resources.settings.request_timeout_s) is not None:
            self._deadline = RequestDeadline(self)
            resources.deadlines.start(self._deadline, limit_s)
            self._context.ends_at_s = self._context.now() + limit_s
        try:
            resources.fleet.check_admission(self._manager.roles, self.facts)
        except Exception as error:  # noqa: BLE001  nobody waits for this turn who would answer the client
            self.fail(client_error_for(error))
            return
        self.resume_plan(None)

    # the client, as `DownstreamObserver`

    def client_gone(self) -> None:
        """See `LegRunner.client_gone`."""
        self._legs.client_gone()

    def client_slow(self) -> None:
        """See `LegRunner.client_slow`."""
        self._legs.client_slow()

    def client_ready(self) -> None:
        """See `LegRunner.client_ready`."""
        self._legs.client_ready()

    # the queue, as `LegWaiter`

    def granted(self, instance: Instance) -> None:
        """Continues the plan with the granted instance.

        This takes a turn of its own, since the caller is not finished yet.
        """
        self._waiting = None
        self._life.loads.append(instance)
        self._resources.loop.call_soon(self.resume_plan, instance)

    def refused(self, error: ProxyError) -> None:
        """Tells the plan that no room was found in time, or that no instance is left. Another pair may be available."""
        step = self._waiting
        self._waiting = None
        failure = None if step is None else self._stranded(step, error)
        if failure is None:
            self.fail(error)
        else:
            self._resources.deadlines.stop(self)  # what the KV's lease is, is of no interest any more
            self._resources.loop.call_soon(self.resume_plan, None, failure)  # in a turn of its own, as above

    # taking the plan's steps

    def resume_plan(
        self, value: object, failure: LegFailed | None = None, step: AcquireInstance | Leg | LegPair | None = None
    ) -> None:
        """Takes steps until there is something to wait for: of two legs that ran, the other one is ended first.

        `step`: the plan's step that has waited, if the plan is to be told nothing first.
        """
        if self._life.state == "done":  # the client left between a grant and this turn
            return
        if failure is not None:
            self._legs.drop_other()
        try:
            if step is None:
                step = self._plan.send(value) if failure is None else self._plan.throw(failure)
            while type(step) is AcquireInstance:
                avoid = step.avoid
                if step.role is _DECODE and self._resources.decode_picker is not None:
                    if self._avoid is None and self._ask_picker(self._resources.decode_picker, step):
                        return
                    avoid = avoid or self._avoid or ()  # once an engine has failed, the fleet chooses the next one
                if self._context.without_model:
                    avoid = (*avoid, *self._context.without_model)
                try:
                    instance = self._resources.fleet.acquire(
                        step.role, self.facts, avoid, self, step.paired_with, step.prefer
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
                self._legs.start_pair(step)
            else:
                self._legs.start(step)
        except StopIteration:
            self._downstream.end()
            self._finish("ok")
        except Exception as error:  # noqa: BLE001  whatever it is, the client is answered and everything given back
            self.fail(client_error_for(error))
        finally:
            if failure is not None:  # its frames hold it, and with it all that the request had
                failure.__traceback__ = None

    def _ask_picker(self, picker: DecodePicker, step: AcquireInstance) -> bool:
        """Asks an external picker for the decode instance, once. Returns whether its answer is waited for."""
        self._avoid = ()
        beside = step.paired_with if isinstance(step.paired_with, Instance) else None
        candidates = self._resources.fleet.candidates(step.role, self.facts, beside)
        if len(candidates) < 2:
            return False
        inbound = self._context.inbound
        question = DecodeQuestion(self._context.endpoint.path, self.facts.request_id, inbound.body, candidates)

        def answered(chosen: Instance | None) -> None:
            if chosen is not None:
                self._avoid = tuple(each.id for each in candidates if each is not chosen)
            self.resume_plan(None, None, step)

        picker.ask(question, answered)
        return True

    def _stranded(self, step: AcquireInstance, error: ProxyError) -> EngineLegFailed | None:
        """Returns the failure for the plan when no instance was available, or None.

        The plan goes on without an encode instance. Otherwise it fails over only if it has already chosen the other
        leg's engine and should choose it again.
        """
        if step.role is _ENCODE:
            failure = EngineLegFailed(error, claimed=False)
            failure.evidence = error.message  # the fleet's own
            return failure
        if not isinstance(step.paired_with, Instance) or not self._context.should_fail_over(
            step.paired_with, step.avoid
        ):
            return None
        return EngineLegFailed(error, claimed=False)

    def _wait(self, step: AcquireInstance) -> None:
        """Waits for room. A wait for decode is no longer than the lease of its KV."""
        self._waiting = step
        self._life.enter("queued")
        lease = self._life.lease
        if lease is not None and step.role is Role.DECODE:
            self._resources.deadlines.start(self, lease.until_s - self._context.now())

    # time-outs

    def expire(self) -> None:
        """Handles a time-out of the leg.

        The engine or the client may have been silent for too long, or the KV that a decode engine was to fetch is given
        up.
        """
        if self._legs.client_is_slow:
            self._downstream.drop()
        elif self._waiting is not None:
            self._waiting = None
            self._resources.fleet.cancel_wait(self)
            self.resume_plan(None, LegFailed("the KV expired before a decode engine had room", another=False))
        else:
            self._legs.expire()

    def on_request_timeout(self) -> None:
        """Ends a request that takes too long as a whole; no engine is to blame."""
        if self._legs.client_is_slow:
            self._downstream.drop()
        else:
            limit_s = self._resources.settings.request_timeout_s
            said = f"the request took longer than the limit of {limit_s:g} s (--request-timeout)"
            self._end_early(ProxyError(504, "timeout", said, code="request_timeout"))

    # the end

    def abort_for_shutdown(self) -> None:
        """Ends the request because the proxy shuts down: the client is told so, and what is held is given back."""
        self._end_early(
            ProxyError(503, "service_unavailable", _SHUTTING_DOWN, code="shutting_down", retry_after_s=_RETRY_S)
        )

    def _end_early(self, error: ProxyError) -> None:
        """Ends a request that runs for too long: with `error`, unless its client has the last event already."""
        if not self._legs.end_complete_stream():
            self.fail(error)

    def end_without_client(self, result: LegResult | None = None) -> None:
        """Ends a request whose client has left.

        The plan learns of KV held by a prefill leg that has ended since, and takes no further step.
        """
        if result is not None:
            with suppress(Exception):  # whatever the answer is worth, nobody waits for it
                self._plan.send(result)
        self._finish("gone")

    def fail(self, error: ProxyError) -> None:
        """Answers with an error: in the stream, if the client has a part of it already."""
        if self._life.state != "done":
            self._finish(self._response.send_error(error))

    def _finish(self, outcome: RequestOutcome) -> None:
        """Gives back whatever is still held. Every request ends here."""
        life = self._life
        if life.state == "done":
            return
        resources = self._resources
        resources.running_executions.discard(self)
        if self._waiting is not None:
            resources.fleet.cancel_wait(self)
        self._plan.close()
        self._legs.close()
        resources.deadlines.stop(self)
        if self._deadline is not None:
            resources.deadlines.stop(self._deadline)
            self._deadline = None
        while life.loads:
            resources.fleet.release(life.loads.pop(), self.facts)
        self._context.abandon_kv(gone=self._legs.client_is_gone)
        life.finish(outcome)
        if (usage := self._response.usage) is not None:
            split = _PREFILL in [instance.role for instance in self._route]
            self._account.record_decode(usage, split=split)
        self._account.ended_s = time()
        resources.record_dispatcher.ended(self._account)
        if self._done is not None:
            self._done()
        if outcome == "ok" and self._route:
            self._context.record_answer(self._route)
