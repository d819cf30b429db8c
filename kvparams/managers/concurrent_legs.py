"""Both legs at once: engines that meet by a rendezvous, which each is told of before either has begun."""

from kvparams.managers.aggregated import Aggregated
from kvparams.managers.documents import Documents, known_of
from kvparams.managers.handover import drop
from kvparams.managers.options import Options
from kvparams.managers.prefill_then_decode import PrefillThenDecode, SoFar
from kvparams.plan import Choose, Context, KVLease, Leg, LegFailed, Pair, Plan, Sent
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
        documents = self._documents
        transfer, attempt = request.transfer_id, 1
        failed: list[str] = []
        sent: Sent | None = None
        while True:
            prefill: Instance = yield Choose(Role.PREFILL, failed, Role.DECODE)  # pyright: ignore[reportAssignmentType]
            speech = context.dialect(prefill)
            if speech.mode != "rendezvous" or not speech.splits(request):
                yield from self._in_order.legs(request, context, prefill, SoFar(transfer, attempt, failed, sent))
                return
            try:
                decode: Instance = yield Choose(Role.DECODE, failed, prefill)  # pyright: ignore[reportAssignmentType]
            except LegFailed:  # while it has waited for room, everybody left whom `prefill` may be paired with
                if not context.may_retry():
                    raise
                context.give_back(prefill)
                continue
            keys = speech.decode_keys({}, transfer, None if speech.bootstrap is None else context.place(prefill))
            context.pin(prefill, keys)
            told, known = documents.told(keys), known_of(request, sent)
            about = (request, transfer, attempt)
            asked = documents.asked(speech.prefill_keys(transfer))
            first = documents.leg(asked, *about, "prefill", speech.mode, prefill, None, known)
            second = documents.leg(told, *about, "decode", speech.mode, prefill, decode, known)
            lease = KVLease(prefill, context.now() + speech.lease_s, transfer, attempt, speech.abandon(told.text))
            try:
                yield Pair(
                    Leg(prefill, {**context.one_token(), **first}, answers_client=False, resumed=sent),
                    Leg(decode, second, answers_client=True, resumed=sent),
                    lease,
                )
            except GeneratorExit:  # the client has left
                drop(context, speech, prefill, transfer, attempt)
                raise
            except LegFailed as failure:
                if failure.claimed:
                    drop(context, speech, prefill, transfer, attempt)
                if not failure.another or (failure.begun and failure.sent is None) or not context.may_retry():
                    raise
                failed.append((failure.instance or decode).id)
                sent = failure.sent if failure.begun else sent
                transfer, attempt = context.next_transfer(), attempt + 1
            else:
                return
