"""Both legs at once: one try, of engines that meet.

The one rule: decode's answer is held until prefill is known to be good, which the executor sees to.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Final, NamedTuple

from pydantic_core import to_json

from kvparams import peers
from kvparams.managers.documents import Documents, known_of
from kvparams.managers.handover import drop
from kvparams.plan import Choose, Context, KVLease, Leg, LegFailed, Pair, Sent
from kvparams.scheduling import Instance, RequestFacts, Role

__all__ = ["SoFar", "meet"]

_WHOLE: Final[Mapping[str, bytes | None]] = {"stream": b"false", "stream_options": None}
"""What changes of the client's body for a prefill that ends by itself, and whose answer is read whole."""


class SoFar(NamedTuple):
    """How far a request has come in another plan."""

    transfer: str
    """Of the next try, as is the next: no earlier one had it."""
    attempt: int = 1
    failed: Sequence[str] = ()
    """Ids of instances that have failed it."""
    sent: Sent | None = None
    """What the client has of the answer already."""


def meet(
    documents: Documents,
    request: RequestFacts,
    context: Context,
    prefill: Instance,
    decode: Instance | None,
    so_far: SoFar,
) -> Generator[Choose | Pair, object, SoFar | None]:
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
            decode = yield Choose(Role.DECODE, failed, prefill)  # pyright: ignore[reportAssignmentType]
        except LegFailed:  # while it has waited for room, everybody left whom `prefill` may be paired with
            if not context.may_retry():
                raise
            context.give_back(prefill)
            return so_far
    assert decode is not None
    keys = speech.decode_keys({}, transfer, None if speech.bootstrap is None else context.place(prefill))
    context.pin(prefill, keys)
    cut = _WHOLE if speech.in_body else context.one_token()
    beside = {name: to_json(value) for name, value in keys.items()} if speech.in_body else {}
    told, known = documents.told({} if beside else keys), known_of(request, sent)
    about = (request, transfer, attempt)
    asked = documents.asked(speech.prefill_keys(transfer))
    source = context.source(prefill)
    asks = known if source is None else {**known, **peers.told(source)}
    first = documents.leg(asked, *about, "prefill", speech.mode, prefill, None, asks)
    second = documents.leg(told, *about, "decode", speech.mode, prefill, decode, known)
    lease = KVLease(prefill, context.now() + speech.lease_s, transfer, attempt, speech.abandon(told.text))
    try:
        yield Pair(
            Leg(prefill, {**cut, **beside, **first}, answers_client=False, resumed=sent),
            Leg(decode, {**beside, **second}, answers_client=True, resumed=sent),
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
        failed = [*failed, (failure.instance or decode).id]
        if not failure.begun and failure.instance is not prefill:
            failed.append(prefill.id)  # decode cannot fetch what prefill does not give: it may be either
        return SoFar(context.next_transfer(), attempt + 1, failed, failure.sent if failure.begun else sent)
    return None
