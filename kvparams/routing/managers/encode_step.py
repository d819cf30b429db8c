"""The step before prefill of a request with images, audio or video: an encode engine encodes them.

The step never fails a request. Without encodings the engine that computes the prompt encodes the media itself, as it
does where there is no encode engine: it gets the whole request in any case.
"""

from collections.abc import Generator, Mapping
from typing import Final

from kvparams.dialects.ec import write_encodings
from kvparams.dialects.interface import HandoffMissing
from kvparams.instances import RequestFacts, Role
from kvparams.routing.handoff_verifier import HandoffRefused
from kvparams.routing.plan import AcquireInstance, ExecutionContext, Leg, LegFailed, as_instance, as_result

__all__ = ["encode_media"]

_MOST_ATTEMPTS: Final = 2
"""Encode legs of one request. Each costs the client time, and prefill can encode as well."""
_UNCHANGED: Final[Mapping[str, bytes | None]] = {}


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
    failed: list[str] = []
    problem = ""
    while len(failed) < _MOST_ATTEMPTS:
        try:
            instance = as_instance((yield AcquireInstance(Role.ENCODE, tuple(failed))))
        except LegFailed as failure:
            problem = problem or str(failure)
            break
        if instance.id in failed:  # there is no other one
            context.release_instance(instance)
            break
        try:
            answer = as_result((yield Leg(instance, context.encode_changes(), answers_client=False)))
            text = write_encodings(answer.ec_transfer_params)
            context.verify_handoff(instance, answer.ec_transfer_params)
        except LegFailed as failure:
            problem = str(failure)
            if not failure.retryable:
                break
        except HandoffMissing as refused:
            problem = refused.detail if isinstance(refused, HandoffRefused) else str(refused)
        else:
            context.record_encoding(None)
            return {"ec_transfer_params": text} if answer.ec_transfer_params else _UNCHANGED
        failed.append(instance.id)
    context.record_encoding(problem)
    return _UNCHANGED
