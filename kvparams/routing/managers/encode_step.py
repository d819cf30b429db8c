"""The step before prefill of a request with images, audio or video: an encode engine encodes them.

The step never fails a request. Without encodings the engine that computes the prompt encodes the media itself, as it
does where there is no encode engine: it gets the whole request in any case.
"""

from collections.abc import Generator, Mapping
from functools import partial
from typing import Final

from kvparams.dialects.ec import write_encodings
from kvparams.dialects.interface import HandoffMissing
from kvparams.instances import RequestFacts, Role
from kvparams.routing.handoff_verifier import HandoffRefused
from kvparams.routing.plan import AcquireInstance, ExecutionContext, Leg, LegFailed, as_instance, as_result

__all__ = ["encode_for_prefill", "encode_media"]

_MOST_ATTEMPTS: Final = 2
"""Encode legs of one request. Each costs the client time, and prefill can encode as well."""
_LONGEST_S: Final = 60.0
"""The most time for all of them: longer, an engine that computes the prompt does not wait for an encoding either (vLLM
0.32.0 distributed/ec_transfer/ec_connector/cpu/scheduler) ..."""
_SHARE: Final = 0.25
"""... and the most of what is left to the request: prefill and decode must have enough time without encodings."""
_FIRST_SHARE: Final = 0.6
"""The most of that for the first leg: an engine that says nothing leaves time for another one."""
_UNCHANGED: Final[Mapping[str, bytes | None]] = {}


def encode_for_prefill(
    request: RequestFacts, context: ExecutionContext
) -> Generator[AcquireInstance | Leg, object, Mapping[str, bytes | None]]:
    """Runs `encode_media` for a request that will have a prefill leg: decode engines are told of no encodings."""
    if not request.media or not context.can_split(request):
        return _UNCHANGED
    return (yield from encode_media(request, context))


def encode_media(
    request: RequestFacts, context: ExecutionContext
) -> Generator[AcquireInstance | Leg, object, Mapping[str, bytes | None]]:
    """Runs the encode leg of a request that has media, where there are encode engines.

    One leg has all media of the request: engines match encodings by their place in the whole prompt
    (`item_indices` of vLLM 0.32.0 distributed/ec_transfer/ec_connector/utils.py), and encode media of one request
    together.

    Returns:
        The changes to the client's body that tell the engine of the prompt where the encodings are. They are empty
        where there are none, and where the engines find them by the content of the media.
    """
    if not request.media or not context.has_candidates(Role.ENCODE):
        return _UNCHANGED
    left_s = context.time_left()
    until_s = context.now() + (_LONGEST_S if left_s is None else min(_LONGEST_S, left_s * _SHARE))
    failed: list[str] = []
    problem = ""
    while len(failed) < _MOST_ATTEMPTS and (limit_s := until_s - context.now()) > 0:
        try:
            instance = as_instance((yield AcquireInstance(Role.ENCODE, tuple(failed))))
        except LegFailed as failure:
            problem = problem or failure.evidence
            break
        if instance.id in failed:  # there is no other one
            context.release_instance(instance)
            break
        try:
            limit_s *= 1.0 if failed else _FIRST_SHARE
            leg = Leg(instance, context.encode_changes(instance), answers_client=False, limit_s=limit_s)
            said = as_result((yield leg)).ec_transfer_params
            text = write_encodings(said, partial(context.verify_handoff, instance))
        except LegFailed as failure:
            problem = failure.evidence
            if not failure.retryable:
                break
        except HandoffMissing as refused:
            problem = refused.detail if isinstance(refused, HandoffRefused) else str(refused)
        else:
            context.record_encoding(None)
            return {"ec_transfer_params": text} if said else _UNCHANGED
        failed.append(instance.id)
    context.record_encoding(problem or "it took too long, or no encode engine could be asked")
    return _UNCHANGED
