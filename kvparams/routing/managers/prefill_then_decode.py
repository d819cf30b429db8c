"""Prefill, then decode: the plan that most pairs of engines need, with what it does when one of them fails."""

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.peer_reads import peer_source_members
from kvparams.routing.managers.aggregated import Aggregated
from kvparams.routing.managers.concurrent_attempt import AttemptState, attempt_concurrently
from kvparams.routing.managers.leg_documents import LegDocuments, request_members
from kvparams.routing.managers.manager_options import ManagerOptions
from kvparams.routing.managers.prefill_handoff import accept_prefill_result, release_abandoned
from kvparams.routing.plan import AcquireInstance, ExecutionContext, Leg, LegFailed, LegResult, Plan
from kvparams.signing.signer import Signer

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
        options: ManagerOptions | None = None,
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
        self._documents = LegDocuments(signer)
        if decode_first is None:
            decode_first = options is not None and options.read_bool("decode_first", False)
        self._decode_first = decode_first
        self._decode_alone = decode_alone
        self._alone = Aggregated(role=Role.DECODE)

    def legs(
        self,
        request: RequestFacts,
        context: ExecutionContext,
        prefill: Instance | None = None,
        so_far: AttemptState | None = None,
    ) -> Plan:
        """See `DisaggregatedRequestManager.legs`; `prefill`, where somebody has chosen it already; `so_far`, where legs
        of the request have failed before."""
        transfer, attempt, before, sent = so_far or AttemptState(request.transfer_id)
        if request.prompt_scored:
            yield from self._alone.legs(request, context, sent)
            return
        documents = self._documents
        failed = [*before]
        decode: Instance | None = None
        while True:
            if self._decode_alone and not context.has_candidates(Role.PREFILL):
                yield from self._alone.legs(request, context, sent)
                return
            if decode is None and self._decode_first:
                decode = yield AcquireInstance(Role.DECODE, failed, Role.PREFILL)  # pyright: ignore[reportAssignmentType]
            if prefill is None:
                try:
                    prefill = yield AcquireInstance(Role.PREFILL, failed, decode or Role.DECODE)  # pyright: ignore[reportAssignmentType]
                except LegFailed:  # while it has waited for room, everybody left whom `decode` may be paired with
                    if decode is None or not context.may_retry():
                        raise
                    context.release_instance(decode)
                    decode = None
                    continue
            assert prefill is not None
            speech = context.dialect(prefill)
            if not speech.can_split(request):
                context.release_instance(prefill)
                if decode is not None:
                    context.release_instance(decode)
                yield from self._alone.legs(request, context, sent)
                return
            if speech.sends_legs_together:
                again = yield from attempt_concurrently(
                    documents, request, context, prefill, decode, AttemptState(transfer, attempt, failed, sent)
                )
                if again is None:
                    return
                transfer, attempt, before, sent = again
                failed, prefill, decode = [*before], None, None
                continue
            place = None if speech.bootstrap is None else context.bootstrap_info(prefill)
            known = request_members(request, sent)
            asked = documents.native_from_text(speech.prefill_keys(transfer))
            source = context.peer_source(prefill)
            asks = known if source is None else {**known, **peer_source_members(source)}
            params = documents.leg_changes(
                asked, request, transfer, attempt, "prefill", speech.mode, prefill, None, asks
            )
            try:
                answer: LegResult = yield Leg(  # pyright: ignore[reportAssignmentType]
                    prefill, {**context.one_token_changes(), **params}, answers_client=False, resume_from=sent
                )
            except GeneratorExit:  # the client has left
                release_abandoned(context, speech, prefill, transfer, attempt)
                raise
            except LegFailed as failure:
                if failure.may_have_acted:
                    release_abandoned(context, speech, prefill, transfer, attempt)
                if not failure.retryable or not context.may_retry():
                    raise
                failed.append(prefill.id)
                prefill = None
                if decode is not None and context.should_fail_over(decode, failed):
                    context.release_instance(decode)
                    decode = None
                transfer, attempt = context.next_transfer(), attempt + 1
                continue

            kv = accept_prefill_result(
                documents, context, speech, prefill, place, answer, request.request_id, transfer, attempt
            )
            while True:
                if decode is None:
                    try:
                        decode = yield AcquireInstance(Role.DECODE, failed, prefill)  # pyright: ignore[reportAssignmentType]
                    except LegFailed:  # it has waited for room for too long, or is in a group that is gone
                        if not context.may_retry():
                            raise
                        break
                assert decode is not None
                now_s = context.now()
                if now_s >= kv.until_s:  # the KV has been given up, by a moment
                    context.release_instance(decode)
                    decode = None
                    if not context.may_retry():
                        raise LegFailed("the KV was given up before a decode engine had room", another=False)
                    break
                handed = kv.decode_members(decode, known, now_s)
                params = documents.leg_changes(
                    kv.native, request, transfer, attempt, "decode", speech.mode, prefill, decode, handed
                )
                running, decode = decode, None
                try:
                    yield Leg(running, params, answers_client=True, resume_from=sent)
                except LegFailed as failure:
                    if (
                        not failure.retryable
                        or (failure.response_started and failure.progress is None)
                        or not context.may_retry()
                    ):
                        raise
                    failed.append(running.id)
                    if failure.response_started:
                        sent = failure.progress
                        break
                    if (failure.may_have_acted and not speech.has_reusable_kv) or context.should_fail_over(
                        prefill, failed
                    ):
                        failed.append(prefill.id)
                        break
                    if failure.may_have_acted:
                        transfer, attempt = context.next_transfer(), attempt + 1
                else:
                    return
            prefill = None
            transfer, attempt = context.next_transfer(), attempt + 1
