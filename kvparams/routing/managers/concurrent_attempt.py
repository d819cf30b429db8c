"""Both legs at once: one attempt, of engines that meet.

The executor holds decode's answer until prefill is known to be good.
"""

from collections.abc import Generator, Mapping
from typing import Final

from pydantic_core import to_json

from kvparams.instances import Instance, Role
from kvparams.peer_reads import peer_source_members
from kvparams.routing.managers.attempt_state import AttemptState
from kvparams.routing.managers.leg_documents import LegDocuments, request_members
from kvparams.routing.managers.prefill_handoff import release_abandoned
from kvparams.routing.plan import AcquireInstance, KVLease, Leg, LegFailed, LegPair, as_instance

__all__ = ["attempt_concurrently"]

_WHOLE: Final[Mapping[str, bytes | None]] = {"stream": b"false", "stream_options": None}
"""Changes to the client's body for a prefill that ends by itself, and whose answer is read whole."""


def attempt_concurrently(
    documents: LegDocuments, state: AttemptState, prefill: Instance
) -> Generator[AcquireInstance | LegPair, object, bool]:
    """Sends both legs to engines whose connector lets them meet. A decode instance is chosen if none is held.

    Args:
        documents: those of the manager.
        state: that of the plan. If another attempt follows, it is ready for that, and holds no instance.
        prefill: the prefill instance that is held.

    Returns:
        Whether the client is answered; otherwise another attempt follows.

    Raises:
        LegFailed: neither.
    """
    context, decode = state.context, state.decode
    if decode is None:
        try:
            decode = as_instance((yield AcquireInstance(Role.DECODE, state.failed, prefill)))
        except LegFailed:  # while it has waited for room, everybody left whom `prefill` may be paired with
            if not context.may_retry():
                raise
            state.release_prefill()
            return False
    state.prefill = state.decode = None  # their legs give them back
    speech = context.dialect(prefill)
    transfer, attempt = state.transfer, state.attempt
    try:
        yield _leg_pair(documents, state, prefill, decode)
    except GeneratorExit:  # the client has left
        release_abandoned(context, speech, prefill, transfer, attempt)
        raise
    except LegFailed as failure:
        if failure.may_have_acted:
            release_abandoned(context, speech, prefill, transfer, attempt)
        if not state.may_retry(failure):
            raise
        state.failed.append((failure.instance or decode).id)
        if failure.response_started:
            state.sent = failure.progress
        elif failure.instance is not prefill:
            state.failed.append(prefill.id)  # decode cannot fetch what prefill does not give: it may be either
        state.begin_next()
        return False
    return True


def _leg_pair(documents: LegDocuments, state: AttemptState, prefill: Instance, decode: Instance) -> LegPair:
    """Returns the two legs, and what is held for the request from when prefill has ended.

    Raises:
        HandoffRefused: see `ExecutionContext.verify_handoff`.
        LossyDowngrade: an engine cannot be told what it must understand.
    """
    request, context, transfer, attempt = state.request, state.context, state.transfer, state.attempt
    speech = context.dialect(prefill)
    keys = speech.decode_keys({}, transfer, None if speech.bootstrap is None else context.bootstrap_info(prefill))
    context.verify_handoff(prefill, keys)
    in_body = speech.carries_keys_in_body
    cut = _WHOLE if in_body else context.one_token_changes()
    beside = {name: to_json(value) for name, value in keys.items()} if in_body else {}
    told = documents.native_from_engine({} if in_body else keys)
    asked = documents.native_from_text(speech.prefill_keys(transfer))
    members = request_members(request, state.sent)
    source = context.peer_source(prefill)
    prefill_members = members if source is None else {**members, **peer_source_members(source)}
    about = (request, transfer, attempt)
    first = documents.leg_changes(asked, *about, "prefill", speech.mode, prefill, None, prefill_members)
    second = documents.leg_changes(told, *about, "decode", speech.mode, prefill, decode, members)
    lease = KVLease(prefill, context.now() + speech.lease_s, transfer, attempt, speech.release_request(told.text))
    changes = {**cut, **beside, **first, **(state.encodings or {})}
    return LegPair(
        Leg(prefill, changes, answers_client=False, resume_from=state.sent),
        Leg(decode, {**beside, **second}, answers_client=True, resume_from=state.sent),
        lease,
    )
