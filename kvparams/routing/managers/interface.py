"""Defines the interface of a manager, which coordinates the legs of requests.

One manager serves all requests; the state of one of them lives in its plan.
"""

from typing import Protocol

from kvparams.instances import RequestFacts, Role
from kvparams.routing.plan import ExecutionContext, Plan

__all__ = ["DisaggregatedRequestManager"]


class DisaggregatedRequestManager(Protocol):
    """A `DisaggregatedRequestManager` coordinates the legs of requests in one way.

    Third parties register theirs in the entry-point group `kvparams.managers`: a callable as
    `kvparams.routing.managers.factory.ManagerFactory` says, as a rule the class itself.
    """

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles its legs need: a request is refused before its first leg where one of them is missing."""
        ...

    def legs(self, request: RequestFacts, context: ExecutionContext) -> Plan:
        """The plan of one request.

        Args:
            request: what is known about it.
            context: the executor.

        Raises (from the generator):
            LegFailed: a leg failed, and nothing else is tried.
            HandoffMissing: the prefill answer cannot be handed on; `HandoffRefused` where it must not.
            InvalidParams: the prefill engine's own document breaks the protocol.
            LossyDowngrade: the decode engine's version cannot say what prefill's result wants understood.
        """
        ...
