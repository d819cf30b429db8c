"""Both legs at once: engines that meet by a rendezvous, which each is told of before either has begun."""

from kvparams.instances import RequestFacts, Role
from kvparams.routing.managers.aggregated import Aggregated
from kvparams.routing.managers.attempt_state import AttemptState
from kvparams.routing.managers.concurrent_attempt import attempt_concurrently
from kvparams.routing.managers.encode_step import encode_for_prefill
from kvparams.routing.managers.leg_documents import LegDocuments
from kvparams.routing.managers.manager_options import ManagerOptions
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import AcquireInstance, ExecutionContext, Plan, as_instance
from kvparams.signing.signer import Signer

__all__ = ["ConcurrentLegs"]


class ConcurrentLegs:
    """A `ConcurrentLegs` manager sends prefill and decode together.

    Decode waits for the KV in the engine, and its answer is held until prefill is known to be good.

    Either fails before the first byte: both again, with another instance in place of the one that failed. After it: on
    from what was sent. A connector whose engines do not meet has its legs one after the other.
    """

    roles = (Role.PREFILL, Role.DECODE)

    def __init__(self, signer: Signer | None = None, options: ManagerOptions | None = None) -> None:
        self._documents = LegDocuments(signer)
        self._in_order = PrefillThenDecode(signer)
        self._alone = Aggregated(role=Role.DECODE)

    def legs(self, request: RequestFacts, context: ExecutionContext) -> Plan:
        """See `DisaggregatedRequestManager.legs`."""
        if request.prompt_scored:
            yield from self._alone.legs(request, context)
            return
        state = AttemptState(request, context)
        state.encodings = yield from encode_for_prefill(request, context)
        is_answered = False
        while not is_answered:
            prefill = state.prefill = as_instance((yield AcquireInstance(Role.PREFILL, state.failed, Role.DECODE)))
            speech = context.dialect(prefill)
            if speech.mode != "rendezvous" or not speech.can_split(request):
                yield from self._in_order.legs(request, context, state)
                return
            is_answered = yield from attempt_concurrently(self._documents, state, prefill)
