"""Both legs at once: engines that meet by a rendezvous, which each is told of before either has begun."""

from kvparams.managers.aggregated import Aggregated
from kvparams.managers.documents import Documents
from kvparams.managers.meeting import SoFar, meet
from kvparams.managers.options import Options
from kvparams.managers.prefill_then_decode import PrefillThenDecode
from kvparams.plan import Choose, Context, Plan
from kvparams.scheduling import Instance, RequestFacts, Role
from kvparams.trust.signing import Signer

__all__ = ["ConcurrentLegs"]


class ConcurrentLegs:
    """Prefill and decode are sent together; decode waits for the KV in the engine, and its answer is held until prefill
    is known to be good.

    Either fails before the first byte: both again, with another instance in place of the one that failed. After it: on
    from what was sent. A connector whose engines do not meet has its legs one after the other.
    """

    roles = (Role.PREFILL, Role.DECODE)

    def __init__(self, signer: Signer | None = None, options: Options | None = None) -> None:
        self._documents = Documents(signer)
        self._in_order = PrefillThenDecode(signer)
        self._alone = Aggregated(role=Role.DECODE)

    def legs(self, request: RequestFacts, context: Context) -> Plan:
        """See `DisaggregatedRequestManager.legs`."""
        if request.prompt_scored:
            yield from self._alone.legs(request, context)
            return
        so_far: SoFar | None = SoFar(request.transfer_id)
        while so_far is not None:
            prefill: Instance = yield Choose(Role.PREFILL, so_far.failed, Role.DECODE)  # pyright: ignore[reportAssignmentType]
            speech = context.dialect(prefill)
            if speech.mode != "rendezvous" or not speech.splits(request):
                yield from self._in_order.legs(request, context, prefill, so_far)
                return
            so_far = yield from meet(self._documents, request, context, prefill, None, so_far)
