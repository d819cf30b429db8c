"""Chooses where one request goes: it runs a manager's plan as far as its first leg, which the data plane then sends.

Policies, prefix cache model, admission and queue are the proxy's own: `Fleet` decides. A pick counts the load of its
instances until the data plane says that the response has ended.
"""

from collections.abc import Callable
from time import perf_counter, time
from typing import Final, NamedTuple

from kvparams.instances import Instance, InstanceRestriction, RequestFacts, Role
from kvparams.routing.managers.interface import DisaggregatedRequestManager
from kvparams.routing.plan import AcquireInstance, Leg, LegPair
from kvparams.routing.request_lifecycle import RequestLifecycle, RequestOutcome
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.client_errors import client_error_for
from kvparams_proxy.execution.plan_context import PlanContext
from kvparams_proxy.execution.prefix_cache_report import report_stream_usage
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.ext_proc.messages import ResponseMaker
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.requests.intake import ParsedRequest
from kvparams_proxy.telemetry.request_record import RequestRecord
from kvparams_proxy.telemetry.tracing import TraceContext

__all__ = ["Destination", "Pick", "PickOwner", "Response"]

_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE
_BUSY: Final = (429, 503)
_SHED: Final = "the engines are busy, and requests of this priority do not wait; try again later"
_RETRY_S: Final = 1


class Destination(NamedTuple):
    """The engines that were chosen for a request."""

    instance: Instance
    """Where the request goes."""
    partner: Instance | None
    """Who computes its prompt, where that is another engine."""


class Response(NamedTuple):
    """The beginning of a response, as the data plane reports it."""

    status: int
    served: Instance | None
    """Who has answered; None where the data plane does not say it."""
    maker: ResponseMaker
    """Who has made the response."""


class PickOwner(NamedTuple):
    """The callbacks of a pick. Exactly one is called, once, unless the pick is closed before."""

    picked: Callable[["Pick", Destination], None]
    refused: Callable[[ProxyError], None]


class Pick:
    """The choice for one request, and the load that it counts for. It is the `LegWaiter` of its legs."""

    __slots__ = (
        "_account",
        "_context",
        "_destination",
        "_loads",
        "_owner",
        "_plan",
        "_prefill",
        "_resources",
        "_route",
        "_waits",
        "endpoint",
        "facts",
        "inbound",
    )

    def __init__(
        self,
        resources: ExecutionResources,
        manager: DisaggregatedRequestManager,
        endpoint: APIEndpoint,
        inbound: ParsedRequest,
        owner: PickOwner,
        trace: TraceContext | None = None,
    ) -> None:
        """Creates the pick; `start` begins it. `manager` makes the plan."""
        self._resources = resources
        self._owner = owner
        self.endpoint: Final = endpoint
        self.inbound: Final = inbound
        self.facts: RequestFacts = inbound.facts
        """See `kvparams_proxy.fleet.leg_queue.LegWaiter`."""
        life = RequestLifecycle(perf_counter)
        self._route: list[Instance] = []
        self._account = RequestRecord(inbound.facts, endpoint.path, inbound.stream, life, self._route, trace)
        self._context = PlanContext(resources, endpoint, inbound, life, self._account, b"", None)
        self._plan = manager.legs(inbound.facts, self._context)
        self._waits = False
        self._prefill: Instance | None = None
        """The instance of a prefill leg whose decode instance is still to be chosen."""
        self._destination: Destination | None = None
        self._loads: dict[Instance, RequestFacts] = {}
        """The instances whose load counts, and the facts that they were acquired with."""
        resources.metrics.request_began(life)

    @property
    def trace_context(self) -> TraceContext | None:
        """Returns the request's place in a trace, where traces are wanted."""
        return self._account.trace_context

    def start(self) -> None:
        """Begins to choose."""
        self._advance(None)

    # the queue, as `LegWaiter`

    def granted(self, instance: Instance) -> None:
        """See `LegWaiter.granted`. The plan goes on in a turn of its own, since the caller is not finished yet."""
        self._waits = False
        self._loads[instance] = self.facts
        self._resources.loop.call_soon(self._advance, instance)

    def refused(self, error: ProxyError) -> None:
        """See `LegWaiter.refused`."""
        self._waits = False
        self._refuse(error)

    def forget_body(self) -> None:
        """Forgets the body, which nothing needs once the data plane has it: a response may take long."""
        self.inbound.body = b""
        self.inbound.document = None
        self.inbound.member_spans = {}
        self.inbound.changes = {}
        self.inbound.sampling_spans = None

    # the response, as the data plane reports it

    def alternatives(self, count: int) -> list[Instance]:
        """Returns up to `count` other instances that the data plane may try if it does not reach the chosen one."""
        destination = self._destination
        if destination is None or not count:
            return []
        return self._resources.fleet.alternatives(destination.instance, self.facts, destination.partner)[:count]

    def answered(self, response: Response) -> None:
        """Records the head of the response."""
        life, fleet, destination = self._account.lifecycle, self._resources.fleet, self._destination
        if destination is None or life.state != "decode":
            return
        if response.served is not None and response.served is not destination.instance:
            destination = self._move(destination, response.served)
        instance, partner = destination
        from_engine = response.maker == "engine"
        if response.maker == "nobody" or (from_engine and (response.status >= 500 or response.status == 429)):
            self._account.error_status = response.status
            what = f"answered {response.status}" if from_engine else "was not reached by the gateway"
            fleet.record_failure(
                instance, connected=True, busy=from_engine and response.status in _BUSY, why=f"it {what}"
            )
            return
        if response.status >= 400 or not from_engine:
            self._account.error_status = response.status
            return
        life.enter("first_byte")
        self._resources.metrics.first_byte.observe(life.since_s - life.started_s)
        fleet.record_first_byte(instance)
        if partner is not None:  # a sidecar answers when the prompt is computed
            self._release_prefill(partner)
        elif instance.role is Role.AGGREGATED:
            fleet.record_prompt_computed(instance, self.facts)

    def ended(self, usage: dict[str, object] | None, *, whole: bool) -> None:
        """Records the end of the response, or of the request before it.

        Args:
            usage: as the engine reports it, where the data plane shows bodies of responses.
            whole: whether the response has come to its end.
        """
        life, account, destination = self._account.lifecycle, self._account, self._destination
        if life.state == "done":
            return
        outcome: RequestOutcome = "gone"
        if account.error_status:
            outcome = "refused" if account.error_status < 500 else "failed"
        elif life.answering and whole and destination is not None:
            outcome = "ok"
            if usage is not None:
                account.record_decode(usage, split=destination.partner is not None)
            prefixes = self._resources.prefix_cache
            if prefixes is not None and destination.instance.role is not _DECODE:
                report_stream_usage(prefixes, account, None)
            self._resources.fleet.record_success(destination.instance)
            self._context.record_answer(self._route)
        self._finish(outcome)

    # inside

    def _advance(self, value: Instance | None) -> None:
        """Takes the steps of the plan until it is known where the request goes, or it has to wait."""
        if self._account.lifecycle.state == "done":  # its client left between a grant and this turn
            return
        try:
            if value is not None and self._prefill is not None:
                self._pick(Destination(value, self._prefill))
                return
            step = self._plan.send(value)
            while type(step) is AcquireInstance:
                instance = self._acquire(step)
                if instance is None:
                    return
                step = self._plan.send(instance)
            if type(step) is LegPair:
                self._pick(Destination(step.decode.instance, step.prefill.instance))
            elif type(step) is Leg and step.answers_client:
                self._pick(Destination(step.instance, None))
            elif type(step) is Leg:
                self._pick_decode(step.instance)
        except Exception as error:  # noqa: BLE001  whatever it is, the data plane is answered and everything given back
            self._refuse(client_error_for(error))

    def _pick_decode(self, prefill: Instance) -> None:
        """Picks the decode instance of a plan whose prefill leg begins."""
        decode = next((each for each in self._loads if each.role is _DECODE), None)
        if decode is None:
            self._prefill = prefill
            decode = self._acquire(AcquireInstance(_DECODE, (), prefill))
        if decode is not None:
            self._pick(Destination(decode, prefill))

    def _acquire(self, step: AcquireInstance) -> Instance | None:
        """Takes an instance, or begins to wait.

        Raises:
            ProxyError: see `Fleet.acquire`.
        """
        found = self._resources.fleet.acquire(step.role, self.facts, step.avoid, self, step.paired_with, step.prefer)
        if found is None:
            if self.facts.priority < 0:
                self._resources.fleet.cancel_wait(self)
                raise ProxyError(429, "rate_limit_error", _SHED, code="shed", retry_after_s=_RETRY_S)
            self._waits = True
            self._account.lifecycle.enter("queued")
        else:
            self._loads[found] = self.facts
        return found

    def _pick(self, destination: Destination) -> None:
        self._close_plan()
        self._destination = destination
        route = [each for each in (destination.partner, destination.instance) if each is not None]
        for other in [each for each in self._loads if each not in route]:
            self._release(other)
        self._route[:] = route
        self._account.lifecycle.enter("decode", destination.instance.id)
        self._owner.picked(self, destination)

    def _move(self, destination: Destination, served: Instance) -> Destination:
        """Moves the load to the instance that has answered in place of the chosen one."""
        resources, chosen = self._resources, destination.instance
        resources.fleet.record_failure(chosen, connected=True, why="the gateway had to try another endpoint")
        self._release(chosen)
        role = served.role
        self.facts = self.facts._replace(
            restrictions={**self.facts.restrictions, role: InstanceRestriction(frozenset((served.id,)), True)}
        )
        try:
            found = resources.fleet.acquire(role, self.facts, (), self)
        except ProxyError:
            found = None
        if found is None:
            resources.fleet.cancel_wait(self)
        else:
            self._loads[found] = self.facts
        self._destination = destination._replace(instance=served)
        self._route[-1] = served
        return self._destination

    def _release_prefill(self, partner: Instance) -> None:
        """Ends the prefill leg: its prompt is computed."""
        prefixes = self._resources.prefix_cache
        if prefixes is not None:
            self._account.decision = prefixes.record_report(self.facts, None, None)
        self._resources.fleet.record_success(partner)
        self._release(partner)

    def _release(self, instance: Instance) -> None:
        facts = self._loads.pop(instance, None)
        if facts is not None:
            self._resources.fleet.release(instance, facts)

    def _refuse(self, error: ProxyError) -> None:
        if self._account.lifecycle.state == "done":
            return
        self._account.record_error(error)
        self._finish("refused" if error.status < 500 else "failed")
        self._owner.refused(error)

    def _close_plan(self) -> None:
        """Closes the plan. KV that it would have released was never computed."""
        self._plan.close()
        self._account.lifecycle.lease = None

    def _finish(self, outcome: RequestOutcome) -> None:
        if self._waits:
            self._waits = False
            self._resources.fleet.cancel_wait(self)
        self._close_plan()
        for instance in list(self._loads):
            self._release(instance)
        self._account.lifecycle.finish(outcome)
        self._account.ended_s = time()
        self._resources.record_dispatcher.ended(self._account)
