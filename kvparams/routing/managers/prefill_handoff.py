"""From prefill's answer to what a decode engine is told: believed, leased, handed on.

No part of a prefill engine's answer is handed on before it was checked against the known facts about the engine.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from kvparams.codec import read_request
from kvparams.dialects.interface import BootstrapInfo, Dialect, HandoffMissing
from kvparams.instances import Instance
from kvparams.params import KVTransferParams, Mode
from kvparams.routing.managers.leg_documents import LegDocuments
from kvparams.routing.plan import ExecutionContext, KVLease, LegResult
from kvparams.signing.signer import EncodedNativeKeys
from kvparams.versions import downgrade_for_reader

__all__ = ["PrefillHandoff", "accept_prefill_result", "release_abandoned"]

_HANDED_ON: Final = ("producer", "prefix", "load_keys", "lease")
"""What a decode leg is told of prefill's result."""
_TTL: Final = {"ttl_ms"}


@dataclass(slots=True)
class PrefillHandoff:
    """KV that waits for a decode engine."""

    native: EncodedNativeKeys
    until_s: float
    """When its producer gives it up."""
    result: KVTransferParams | None
    """The prefill engine's own document, where it has answered with one."""
    answered_s: float

    def decode_members(self, decode: Instance, request_has: dict[str, object], now_s: float) -> dict[str, object]:
        """The members that this request's decode leg alone has: `request_has`, and what prefill says.

        Raises:
            LossyDowngrade: the engine cannot be told what it must understand.
        """
        if self.result is None:
            return request_has
        return request_has | _handed_on(self.result, decode.version, now_s - self.answered_s)


def accept_prefill_result(
    documents: LegDocuments,
    context: ExecutionContext,
    speech: Dialect,
    prefill: Instance,
    place: BootstrapInfo | None,
    answer: LegResult,
    request_id: str,
    transfer: str,
    attempt: int,
) -> PrefillHandoff:
    """Take prefill's answer; from now on the request holds a lease on its KV.

    Args:
        documents: of the manager.
        context: of the plan.
        speech: the dialect of `prefill`.
        prefill: who has answered.
        place: what its bootstrap server had said before the leg.
        answer: what it has answered.
        request_id: of the leg, as are the next two.
        transfer: its id.
        attempt: its number.

    Raises:
        HandoffMissing: decode could only recompute with this; what prefill may have left is seen to.
        HandoffRefused: it names an address that is not its own.
        InvalidParams: its own document breaks the protocol.
    """
    try:
        keys = speech.decode_keys(answer.kv_transfer_params, transfer, place)
        context.verify_handoff(prefill, keys)
        native = documents.native_from_engine(keys)
    except HandoffMissing:
        release_abandoned(context, speech, prefill, transfer, attempt)
        raise
    answered_s = context.now()
    lease = KVLease(prefill, answered_s + speech.lease_s, transfer, attempt, speech.release_request(native.text))
    context.hold_lease(lease)
    result = read_request(answer.kv_transfer_params, request_id=request_id)
    if result is not None:
        _check(result, request_id, transfer, attempt, speech.mode)
        if result.producer is not None and result.producer.address is not None:
            context.verify_handoff(prefill, {"address": result.producer.address})
        if result.lease is not None:
            lease = replace(lease, until_s=answered_s + result.lease.ttl_ms / 1000)
            context.hold_lease(lease)
    return PrefillHandoff(native, lease.until_s, result, answered_s)


def release_abandoned(
    context: ExecutionContext, speech: Dialect, prefill: Instance, transfer: str, attempt: int
) -> None:
    """A prefill that broke off may have left something behind."""
    abandon = speech.release_request(None)
    if abandon is not None:
        context.hold_lease(KVLease(prefill, context.now() + speech.lease_s, transfer, attempt, abandon))


def _check(result: KVTransferParams, request_id: str, transfer: str, attempt: int, mode: Mode) -> None:
    """Refuse a document that answers something else: its KV would be another prompt's.

    Raises:
        HandoffMissing: it does.
    """
    named = result.transfer
    if result.phase != "prefill_result" or result.mode != mode:
        raise HandoffMissing(f"the prefill engine answered with {result.phase}, {result.mode}")
    if result.request_id != request_id or named.id != transfer or named.attempt != attempt:
        raise HandoffMissing("the prefill engine answered with the document of another request or attempt")


def _handed_on(result: KVTransferParams, version: str, passed_s: float) -> dict[str, object]:
    """Returns the members of prefill's result that a decode engine of this version gets.

    It includes the members that it must understand, and the rest of the lease `passed_s` after the lease came.

    Raises:
        LossyDowngrade: it cannot be told what it must understand.
    """
    result = downgrade_for_reader(result, version)
    handed: dict[str, object] = {name: getattr(result, name) for name in _HANDED_ON if name in result.model_fields_set}
    lease = result.lease
    if lease is not None:
        left_ms = max(lease.ttl_ms - math.ceil(passed_s * 1000), 1)
        if lease.model_fields_set == _TTL and not lease.model_extra:  # nearly always; a copy takes far longer
            handed["lease"] = b'"lease":{"ttl_ms":%d}' % left_ms
        else:
            handed["lease"] = lease.model_copy(update={"ttl_ms": left_ms})
    critical = [path for path in result.must_understand or () if path.partition(".")[0] in handed]
    return {**handed, "must_understand": critical} if critical else handed
