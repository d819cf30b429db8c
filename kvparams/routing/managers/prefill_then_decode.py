"""Prefill, then decode: the plan that most pairs of engines need, with what it does when one of them fails."""

from collections.abc import Generator
from typing import Final

from kvparams.dialects.interface import Dialect
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.peer_reads import peer_source_members
from kvparams.routing.managers.aggregated import Aggregated
from kvparams.routing.managers.attempt_state import AttemptState
from kvparams.routing.managers.concurrent_attempt import attempt_concurrently
from kvparams.routing.managers.encode_step import encode_for_prefill
from kvparams.routing.managers.leg_documents import LegDocuments, add_prompt_ids, request_members
from kvparams.routing.managers.manager_options import ManagerOptions
from kvparams.routing.managers.prefill_handoff import PrefillHandoff, accept_prefill_result, release_abandoned
from kvparams.routing.plan import AcquireInstance, ExecutionContext, Leg, LegFailed, Plan, as_instance, as_result
from kvparams.signing.signer import Signer

__all__ = ["PrefillThenDecode"]

_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE
"""By names of their own: in CPython 3.11 an attribute of an enumeration takes as long as a call."""


class PrefillThenDecode:
    """Prefill with one token, then decode with the client's own limits.

    Decode is chosen when prefill is done, or with `decode_first` before it: then its room is kept meanwhile.
    Prefill fails: another P. Decode fails before its first byte: another D with the same KV if that may be fetched
    again, is still leased, and there is a D left for this P; else prefill again, on another P: it may be the KV that
    decode has failed with. After it: on from what was sent, where the executor says from where.
    What the connector cannot carry (several answers over NIXL), and what needs the whole prompt computed where it is
    answered, one decode engine answers alone. Engines that wait for one another get both legs at once.
    """

    roles = (_PREFILL, _DECODE)

    def __init__(
        self,
        signer: Signer | None = None,
        options: ManagerOptions | None = None,
        *,
        decode_first: bool | None = None,
        decode_alone: bool = False,
    ) -> None:
        """Creates a manager.

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
        self._alone = Aggregated(role=_DECODE)

    def legs(self, request: RequestFacts, context: ExecutionContext, state: AttemptState | None = None) -> Plan:
        """Plans both legs of the request, as `DisaggregatedRequestManager.legs` describes.

        `state` is that of a plan that has begun elsewhere, which may hold a prefill instance.
        """
        state = state or AttemptState(request, context)
        while not (request.prompt_scored or (self._decode_alone and not context.has_candidates(_PREFILL))):
            if state.encodings is None:
                state.encodings = yield from encode_for_prefill(request, context)
            prefill = yield from self._choose(state)
            if prefill is None:
                continue
            speech = context.dialect(prefill)
            if not speech.can_split(request):
                state.release_prefill()
                state.release_decode()
                break
            if speech.sends_legs_together:
                if (yield from attempt_concurrently(self._documents, state, prefill)):
                    return
                continue
            members = request_members(request, state.sent)
            kv = yield from self._prefill(state, speech, prefill, members)
            if kv is not None:
                if (yield from self._decode(state, speech, prefill, kv, members)):
                    return
                state.begin_next()
        yield from self._alone.legs(request, context, state.sent)

    def _choose(self, state: AttemptState) -> Generator[AcquireInstance, object, Instance | None]:
        """Takes the instances that the prefill leg needs.

        Returns:
            The prefill instance; None where the choice begins anew.

        Raises:
            LegFailed: there is nobody, and no further attempt.
        """
        if state.decode is None and self._decode_first:
            state.decode = as_instance((yield AcquireInstance(_DECODE, state.failed, _PREFILL)))
        if state.prefill is None:
            try:
                state.prefill = as_instance((yield AcquireInstance(_PREFILL, state.failed, state.decode or _DECODE)))
            except LegFailed:  # while it has waited for room, everybody left whom `decode` may be paired with
                if state.decode is None or not state.context.may_retry():
                    raise
                state.release_decode()
        return state.prefill

    def _prefill(
        self, state: AttemptState, speech: Dialect, prefill: Instance, members: dict[str, object]
    ) -> Generator[Leg, object, PrefillHandoff | None]:
        """Runs the prefill leg. `members`: see `request_members`.

        Returns:
            The KV that waits for decode; None where the leg has failed and another attempt follows.

        Raises:
            LegFailed: it has failed, and no other attempt follows.
            HandoffMissing: see `accept_prefill_result`, as for whatever else it raises.
        """
        documents, context, request = self._documents, state.context, state.request
        transfer, attempt = state.transfer, state.attempt
        place = None if speech.bootstrap is None else context.bootstrap_info(prefill)
        source = context.peer_source(prefill)
        told = members if source is None else {**members, **peer_source_members(source)}
        asked = documents.native_from_text(add_prompt_ids(speech, speech.prefill_keys(transfer), request, state.sent))
        params = documents.leg_changes(asked, request, transfer, attempt, "prefill", speech.mode, prefill, None, told)
        changes = {**context.one_token_changes(), **params, **(state.encodings or {})}
        state.prefill = None  # its leg gives it back
        try:
            answer = as_result((yield Leg(prefill, changes, False, state.sent)))
        except GeneratorExit:  # the client has left
            release_abandoned(context, speech, prefill, transfer, attempt)
            raise
        except LegFailed as failure:
            if failure.may_have_acted:
                release_abandoned(context, speech, prefill, transfer, attempt)
            if not failure.retryable or not context.may_retry():
                raise
            state.failed.append(prefill.id)
            if state.decode is not None and context.should_fail_over(state.decode, state.failed):
                state.release_decode()
            state.begin_next()
            return None
        return accept_prefill_result(
            documents, context, speech, prefill, place, answer, request.request_id, transfer, attempt
        )

    def _decode(
        self,
        state: AttemptState,
        speech: Dialect,
        prefill: Instance,
        kv: PrefillHandoff,
        members: dict[str, object],
    ) -> Generator[AcquireInstance | Leg, object, bool]:
        """Runs decode legs with this KV until one has answered, or the KV is of no more use. `members`: as above.

        Returns:
            Whether the client is answered; otherwise prefill follows again.

        Raises:
            LegFailed: neither.
            LossyDowngrade: the decode engine cannot be told what it must understand.
        """
        context, request = state.context, state.request
        is_claimed = False  # then another leg is another attempt; one that never follows counts for none
        while True:
            if state.decode is None:
                try:
                    state.decode = as_instance((yield AcquireInstance(_DECODE, state.failed, prefill)))
                except LegFailed:  # it has waited for room for too long, or is in a group that is gone
                    if not context.may_retry():
                        raise
                    return False
            now_s, decode = context.now(), state.decode
            if now_s >= kv.until_s:  # the KV has been given up, by a moment
                state.release_decode()
                if not context.may_retry():
                    raise LegFailed("the KV expired before a decode engine had room", another=False)
                return False
            if is_claimed:
                state.begin_next()
            state.decode = None  # its leg gives it back
            native = kv.native
            if speech.prompt_ids_key is not None:
                native = self._documents.native_from_text(add_prompt_ids(speech, native.text, request, state.sent))
            params = self._documents.leg_changes(
                native,
                request,
                state.transfer,
                state.attempt,
                "decode",
                speech.mode,
                prefill,
                decode,
                kv.decode_members(decode, members, now_s),
            )
            try:
                yield Leg(decode, params, True, state.sent)
                return True
            except LegFailed as failure:
                if not self._may_try_another(state, speech, prefill, decode, failure):
                    return False
                is_claimed = failure.may_have_acted

    def _may_try_another(
        self, state: AttemptState, speech: Dialect, prefill: Instance, decode: Instance, failure: LegFailed
    ) -> bool:
        """Returns whether another decode instance may fetch the same KV after a failure.

        Otherwise prefill follows again.

        Raises:
            LegFailed: no other attempt follows.
        """
        if not state.may_retry(failure):
            raise failure
        state.failed.append(decode.id)
        if failure.response_started:
            state.sent = failure.progress
            return False
        is_fetched = failure.may_have_acted and not speech.has_reusable_kv
        if is_fetched or state.context.should_fail_over(prefill, state.failed):
            state.failed.append(prefill.id)
            return False
        return True
