"""Turns requests into picks: the proxy's own intake, with a pick in place of an execution."""

from collections.abc import Callable
from typing import Final

from kvparams.instances import InstanceRestriction, RequestFacts, Role
from kvparams.routing.managers.aggregated import Aggregated
from kvparams.routing.managers.interface import DisaggregatedRequestManager
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.fleet.health import SPLIT_ROLES
from kvparams_proxy.picker.pick import Pick, PickOwner
from kvparams_proxy.requests.downstream import Downstream, DownstreamObserver
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.requests.intake import ParsedRequest
from kvparams_proxy.server.admission import Admission
from kvparams_proxy.server.request_handler import RequestHandler
from kvparams_proxy.telemetry.tracing import TraceContext

__all__ = ["PASSED_PATHS", "PickDownstream", "PickHandler", "pick_without_body"]

PASSED_PATHS: Final = frozenset(("/v1/models", "/health", "/version"))
"""What clients may read of an engine. Others tell addresses and settings (vLLM 0.32.0: /server_info)."""


class PickDownstream:
    """Receives what the intake says of a request, until it is picked or refused: a `Downstream`."""

    def __init__(self, owner: PickOwner, subset: frozenset[str] | None, priority: int | None = None) -> None:
        """Creates the receiver of one request.

        Args:
            owner: hears what was picked.
            subset: the ids of the instances to choose from; None where the data plane does not restrict the choice.
            priority: of the request's objective; None where it names none.
        """
        self.owner: Final = owner
        self._priority = priority
        self._subset = subset
        self.pick: Pick | None = None
        self.is_gone = False
        self._observer: DownstreamObserver | None = None

    def restrict(self, facts: RequestFacts, manager: DisaggregatedRequestManager) -> RequestFacts:
        """Returns the facts with the restriction of the data plane, which is about where requests are sent.

        Engines that compute a prompt for another one are not among its endpoints. The facts also have the priority of
        the request's objective.
        """
        if self._priority is not None:
            facts = facts._replace(priority=self._priority)
        if self._subset is None:
            return facts
        roles = [role for role in manager.roles if role is not Role.PREFILL] or manager.roles
        limit = InstanceRestriction(self._subset, is_required=True)
        return facts._replace(restrictions=dict.fromkeys(roles, limit))

    def refuse(self, error: ProxyError) -> None:
        """Hears that the request is refused before it is picked."""
        if not self.is_gone:
            self.owner.refused(error)

    def leave(self) -> None:
        """Ends the work for a client that has left."""
        self.is_gone = True
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.client_gone()

    # as `Downstream`

    def watch(self, watcher: DownstreamObserver) -> None:
        """See `Downstream.watch`."""
        self._observer = watcher
        if self.is_gone:
            watcher.client_gone()

    def head(self, status: int, headers: bytes, length: int | None) -> None:
        """See `Downstream.head`. An error comes by `refuse`; nothing else has a response here."""

    def body(self, data: bytes) -> None:
        """See `Downstream.body`."""

    def end(self) -> None:
        """See `Downstream.end`."""

    def drop(self) -> None:
        """See `Downstream.drop`: the proxy has failed."""
        self.refuse(ProxyError(500, "internal_error", "the picker failed; its log says why", code="internal_error"))


class PickHandler(RequestHandler):
    """Handles the requests of one endpoint: reads them as the proxy does, and picks."""

    def refuse(self, admission: Admission, error: ProxyError, downstream: Downstream) -> None:
        """Answers with an error in place of a pick."""
        self._tell(admission, error)
        if isinstance(downstream, PickDownstream):
            downstream.refuse(error)

    @property
    def finds_media(self) -> bool:
        """See `RequestHandler.finds_media`. It is False: whoever answers a picked request runs its encode leg."""
        return False

    def _restrict_to_state(self, inbound: ParsedRequest, previous: str) -> None:
        """Refuses a request that goes on from a response: engines choose their own ids behind a picker."""
        message = (
            "`previous_response_id` is not supported behind an endpoint picker, which cannot tell the engine that has "
            "the response; send the items of the conversation in `input`"
        )
        raise ProxyError(
            400, "invalid_request_error", message, param="previous_response_id", code="previous_response_unsupported"
        )

    def _execute(
        self,
        inbound: ParsedRequest,
        upstream: bytes,
        authorization: bytes | None,
        downstream: Downstream,
        done: Callable[[], None] | None,
        trace: TraceContext | None,
    ) -> None:
        """Picks for a request that is ready to be routed."""
        if not isinstance(downstream, PickDownstream) or downstream.is_gone:
            return
        manager = self.select_manager(inbound)
        inbound.facts = downstream.restrict(inbound.facts, manager)
        pick = Pick(self._resources, manager, self._endpoint, inbound, downstream.owner, trace)
        downstream.pick = pick
        pick.start()


def pick_without_body(
    resources: ExecutionResources, modes: ActiveModes, path: str, request_id: str, downstream: PickDownstream
) -> None:
    """Picks for a request of `PASSED_PATHS`: any engine that answers clients."""
    role = Role.DECODE if modes.roles & SPLIT_ROLES else Role.AGGREGATED
    manager = Aggregated(role=role)
    facts = downstream.restrict(RequestFacts(request_id, resources.new_id(), None, 1, 1, None, None), manager)
    inbound = ParsedRequest(facts, b"", {}, {}, stream=False)
    pick = Pick(resources, manager, APIEndpoint(path, "other", role), inbound, downstream.owner)
    downstream.pick = pick
    pick.start()
