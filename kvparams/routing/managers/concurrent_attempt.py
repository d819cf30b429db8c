"""Both legs at once: one try, of engines that meet.

The one rule: decode's answer is held until prefill is known to be good, which the executor sees to.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Final, NamedTuple

from pydantic_core import to_json

from kvparams import peer_reads
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.managers.leg_documents import LegDocuments, request_members
from kvparams.routing.managers.prefill_handoff import release_abandoned
from kvparams.routing.plan import AcquireInstance, ExecutionContext, KVLease, Leg, LegFailed, LegPair, StreamProgress

__all__ = ["AttemptState", "attempt_concurrently"]

_WHOLE: Final[Mapping[str, bytes | None]] = {"stream": b"false", "stream_options": None}
"""What changes of the client's body for a prefill that ends by itself, and whose answer is read whole."""


class AttemptState(NamedTuple):
    """How far a request has come in another plan."""

    transfer: str
    """Of the next try, as is the next: no earlier one had it."""
    attempt: int = 1
    failed: Sequence[str] = ()
    """Ids of instances that have failed it."""
    sent: StreamProgress | None = None
    """What the client has of the answer already."""


def attempt_concurrently(
    documents: LegDocuments,
    request: RequestFacts,
    context: ExecutionContext,
    prefill: Instance,
    decode: Instance | None,
    so_far: AttemptState,
) -> Generator[AcquireInstance | LegPair, object, AttemptState | None]:
    """Send both legs to engines whose connector lets them meet.

    Args:
        documents: of the manager.
        request: the request.
        context: of the plan.
        prefill: who has been chosen.
        decode: the same; None where that is to be done here.
        so_far: before this try.

    Returns:
        None if the client is answered; otherwise what the next try begins with, and nobody is chosen for it.

    Raises:
        LegFailed: there is no next try.
    """
    transfer, attempt, failed, sent = so_far
    speech = context.dialect(prefill)
    if decode is None:
        try:
            decode = yield AcquireInstance(Role.DECODE, failed, prefill)  # pyright: ignore[reportAssignmentType]
        except LegFailed:  # while it has waited for room, everybody left whom `prefill` may be paired with
            if not context.may_retry():
                raise
            context.release_instance(prefill)
            return so_far
    assert decode is not None
    keys = speech.decode_keys({}, transfer, None if speech.bootstrap is None else context.bootstrap_info(prefill))
    context.verify_handoff(prefill, keys)
    cut = _WHOLE if speech.carries_keys_in_body else context.one_token_changes()
    beside = {name: to_json(value) for name, value in keys.items()} if speech.carries_keys_in_body else {}
    told, known = documents.native_from_engine({} if beside else keys), request_members(request, sent)
    about = (request, transfer, attempt)
    asked = documents.native_from_text(speech.prefill_keys(transfer))
    source = context.peer_source(prefill)
    asks = known if source is None else {**known, **peer_reads.peer_source_members(source)}
    first = documents.leg_changes(asked, *about, "prefill", speech.mode, prefill, None, asks)
    second = documents.leg_changes(told, *about, "decode", speech.mode, prefill, decode, known)
    lease = KVLease(prefill, context.now() + speech.lease_s, transfer, attempt, speech.release_request(told.text))
    try:
        yield LegPair(
            Leg(prefill, {**cut, **beside, **first}, answers_client=False, resume_from=sent),
            Leg(decode, {**beside, **second}, answers_client=True, resume_from=sent),
            lease,
        )
    except GeneratorExit:  # the client has left
        release_abandoned(context, speech, prefill, transfer, attempt)
        raise
    except LegFailed as failure:
        if failure.may_have_acted:
            release_abandoned(context, speech, prefill, transfer, attempt)
        if not failure.retryable or (failure.response_started and failure.progress is None) or not context.may_retry():
            raise
        failed = [*failed, (failure.instance or decode).id]
        if not failure.response_started and failure.instance is not prefill:
            failed.append(prefill.id)  # decode cannot fetch what prefill does not give: it may be either
        return AttemptState(
            context.next_transfer(), attempt + 1, failed, failure.progress if failure.response_started else sent
        )
    return None
