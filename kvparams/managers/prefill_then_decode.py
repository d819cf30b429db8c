"""Prefill, then decode: the plan that most pairs of engines need, with what it does when one of them fails."""

from kvparams.managers.aggregated import Aggregated
from kvparams.managers.documents import Documents, known_of
from kvparams.managers.handover import drop, handed_over
from kvparams.managers.meeting import SoFar, meet
from kvparams.managers.options import Options
from kvparams.peers import told
from kvparams.plan import Choose, Context, Leg, LegAnswer, LegFailed, Plan
from kvparams.scheduling import Instance, RequestFacts, Role
from kvparams.trust.signing import Signer

__all__ = ["PrefillThenDecode"]


class PrefillThenDecode:
    """Prefill with one token, then decode with the client's own limits.

    Decode is chosen when prefill is done, or with `decode_first` before it: then its room is kept meanwhile.
    Prefill fails: another P. Decode fails before its first byte: another D with the same KV if that may be fetched
    again, is still leased, and there is a D left for this P; else prefill again, on another P: it may be the KV that
    decode has failed with. After it: on from what was sent, where the executor says from where.
    What the connector cannot carry (several answers over NIXL), and what needs the whole prompt computed where it is
    answered, one decode engine answers alone. Engines that wait for one another get both legs at once.
    """

    roles = (Role.PREFILL, Role.DECODE)

    def __init__(
        self,
        signer: Signer | None = None,
        options: Options | None = None,
        *,
        decode_first: bool | None = None,
        decode_alone: bool = False,
    ) -> None:
        """
        Args:
            signer: signs the documents of all legs.
            options: the operator's.
            decode_first: see the class; an option where it is None.
            decode_alone: where nobody prefills, a decode engine does it all.
        """
        self._documents = Documents(signer)
        if decode_first is None:
            decode_first = options is not None and options.switch("decode_first", False)
        self._decode_first = decode_first
        self._decode_alone = decode_alone
        self._alone = Aggregated(role=Role.DECODE)

    def legs(
        self, request: RequestFacts, context: Context, prefill: Instance | None = None, so_far: SoFar | None = None
    ) -> Plan:
        """See `DisaggregatedRequestManager.legs`; `prefill`, where somebody has chosen it already; `so_far`, where legs
        of the request have failed before."""
        transfer, attempt, before, sent = so_far or SoFar(request.transfer_id)
        if request.prompt_scored:
            yield from self._alone.legs(request, context, sent)
            return
        documents = self._documents
        failed = [*before]
        decode: Instance | None = None
        while True:
            if self._decode_alone and not context.there(Role.PREFILL):
                yield from self._alone.legs(request, context, sent)
                return
            if decode is None and self._decode_first:
                decode = yield Choose(Role.DECODE, failed, Role.PREFILL)  # pyright: ignore[reportAssignmentType]
            if prefill is None:
                try:
                    prefill = yield Choose(Role.PREFILL, failed, decode or Role.DECODE)  # pyright: ignore[reportAssignmentType]
                except LegFailed:  # while it has waited for room, everybody left whom `decode` may be paired with
                    if decode is None or not context.may_retry():
                        raise
                    context.give_back(decode)
                    decode = None
                    continue
            assert prefill is not None
            speech = context.dialect(prefill)
            if not speech.splits(request):
                context.give_back(prefill)
                if decode is not None:
                    context.give_back(decode)
                yield from self._alone.legs(request, context, sent)
                return
            if speech.together:
                again = yield from meet(
                    documents, request, context, prefill, decode, SoFar(transfer, attempt, failed, sent)
                )
                if again is None:
                    return
                transfer, attempt, before, sent = again
                failed, prefill, decode = [*before], None, None
                continue
            place = None if speech.bootstrap is None else context.place(prefill)
            known = known_of(request, sent)
            asked = documents.asked(speech.prefill_keys(transfer))
            source = context.source(prefill)
            asks = known if source is None else {**known, **told(source)}
            params = documents.leg(asked, request, transfer, attempt, "prefill", speech.mode, prefill, None, asks)
            try:
                answer: LegAnswer = yield Leg(  # pyright: ignore[reportAssignmentType]
                    prefill, {**context.one_token(), **params}, answers_client=False, resumed=sent
                )
            except GeneratorExit:  # the client has left
                drop(context, speech, prefill, transfer, attempt)
                raise
            except LegFailed as failure:
                if failure.claimed:
                    drop(context, speech, prefill, transfer, attempt)
                if not failure.another or not context.may_retry():
                    raise
                failed.append(prefill.id)
                prefill = None
                if decode is not None and context.elsewhere(decode, failed):
                    context.give_back(decode)
                    decode = None
                transfer, attempt = context.next_transfer(), attempt + 1
                continue

            kv = handed_over(documents, context, speech, prefill, place, answer, request.request_id, transfer, attempt)
            while True:
                if decode is None:
                    try:
                        decode = yield Choose(Role.DECODE, failed, prefill)  # pyright: ignore[reportAssignmentType]
                    except LegFailed:  # it has waited for room for too long, or is in a group that is gone
                        if not context.may_retry():
                            raise
                        break
                assert decode is not None
                now_s = context.now()
                if now_s >= kv.until_s:  # the KV has been given up, by a moment
                    context.give_back(decode)
                    decode = None
                    if not context.may_retry():
                        raise LegFailed("the KV was given up before a decode engine had room", another=False)
                    break
                handed = kv.known(decode, known, now_s)
                params = documents.leg(
                    kv.native, request, transfer, attempt, "decode", speech.mode, prefill, decode, handed
                )
                running, decode = decode, None
                try:
                    yield Leg(running, params, answers_client=True, resumed=sent)
                except LegFailed as failure:
                    if not failure.another or (failure.begun and failure.sent is None) or not context.may_retry():
                        raise
                    failed.append(running.id)
                    if failure.begun:
                        sent = failure.sent
                        break
                    if (failure.claimed and not speech.reusable) or context.elsewhere(prefill, failed):
                        failed.append(prefill.id)
                        break
                    if failure.claimed:
                        transfer, attempt = context.next_transfer(), attempt + 1
                else:
                    return
            prefill = None
            transfer, attempt = context.next_transfer(), attempt + 1
