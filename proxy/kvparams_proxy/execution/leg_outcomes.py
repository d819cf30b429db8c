"""What a leg that went wrong means: for the plan (may another instance do better?) and for the client (in words).

The one rule: no I/O, and nothing about an engine but its role in what a client is told.
"""

import logging
import re
from typing import Final

from kvparams.dialects.interface import HandoffMissing
from kvparams.errors import InvalidParams, JSONTextError
from kvparams.instances import Instance
from kvparams.routing.handoff_verifier import HandoffRefused
from kvparams.routing.plan import LegFailed, StreamProgress
from kvparams.signing.canonical_json import NotCanonical
from kvparams.signing.signer import NoSigningKey
from kvparams.versions import LossyDowngrade
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.engine_errors import engine_error_response, reported_engine_error
from kvparams_proxy.upstream.types import (
    ResponseHead,
    UpstreamError,
    UpstreamErrorResponse,
    UpstreamOverflow,
    UpstreamTimeout,
)

__all__ = ["EngineLegFailed", "answered_status", "classify_leg_outcome", "client_error_for", "failure_evidence"]

_log: Final = logging.getLogger(__name__)
_RETRY_S: Final = 1
"""After which it is worth asking again where an engine was busy or gone, and has not said when."""
_LONGEST_RETRY_S: Final = 60
"""What an engine may say; the proxy's own queues say no more either."""
_SECONDS: Final = re.compile(rb"[0-9]{1,18}")


class EngineLegFailed(LegFailed):
    """With what the client is told if nothing else is tried."""

    def __init__(
        self,
        error: ProxyError,
        *,
        another: bool = True,
        claimed: bool = True,
        begun: bool = False,
        sent: StreamProgress | None = None,
    ) -> None:
        super().__init__(error.message, another=another, claimed=claimed, begun=begun, sent=sent)
        self.error = error


def classify_leg_outcome(
    instance: Instance,
    head: ResponseHead,
    raw: bytes,
    error: UpstreamError | None,
    addresses: EngineAddresses,
    body: bytes,
    *,
    own_key: bool = True,
    begun: bool = False,
    sent: StreamProgress | None = None,
) -> EngineLegFailed | None:
    """What a leg's end means; None where it went well.

    Args:
        instance: who ran it.
        head: of its answer; status 0 where none came.
        raw: an answer that was collected.
        error: why the exchange did not come to its end, if so.
        addresses: of the engines, which the client does not learn.
        body: the client's own words.
        own_key: whether the engine was shown a key of ours, or none, and not the client's.
        begun: whether the client has a part of the answer.
        sent: from where it could go on, where it could.
    """
    role = instance.role
    if error is None:
        if head.status == 200:
            return None
        refused = engine_error_response(role, head.status, raw, addresses, body, own_key=own_key)
        busy = _is_busy(role, head.status, head.retry_after, refused)
        # What is refused with a 4xx was never scheduled.
        return EngineLegFailed(
            refused,
            another=busy or refused.status >= 500,
            claimed=not busy or head.status >= 500,
            begun=begun,
            sent=sent,
        )
    if isinstance(error, UpstreamErrorResponse):
        status = answered_status(head, error)
        refused = reported_engine_error(role, status, error.error, addresses, body, own_key=own_key)
        busy = _is_busy(role, status, b"", refused)
        return EngineLegFailed(refused, another=busy or refused.status >= 500, begun=begun, sent=sent)
    if isinstance(error, UpstreamOverflow):
        said = f"the {role} engine is busy: {error.reason}; try again later"
        what = ProxyError(503, "service_unavailable", said, code=f"{role}_busy", retry_after_s=_RETRY_S)
        return EngineLegFailed(what, claimed=error.sent, begun=begun, sent=sent)
    if not error.connected:
        said = f"the {role} engine cannot be reached: {error.reason}"
        what = ProxyError(503, "service_unavailable", said, code=f"{role}_unreachable", retry_after_s=_RETRY_S)
        return EngineLegFailed(what, claimed=error.sent, begun=begun, sent=sent)
    if isinstance(error, UpstreamTimeout):
        what = ProxyError(504, "timeout", f"the {role} engine {error.reason}", code=f"{role}_timeout")
    else:
        said = f"the {role} leg failed: {error.reason}"
        what = ProxyError(502, "upstream_error", said, code=f"{role}_failed")
    return EngineLegFailed(what, begun=begun, sent=sent)


def answered_status(head: ResponseHead, error: UpstreamError | None) -> int:
    """Returns the status of an engine's answer, which may stand in its error instead of its head; 0 for no answer."""
    if error is None:
        return head.status
    if isinstance(error, UpstreamErrorResponse):
        code = error.error.get("code")
        return code if type(code) is int else 500
    return 0


def failure_evidence(head: ResponseHead, error: UpstreamError | None) -> str:
    """Returns how a leg failed, for the log: nothing that the engine or the client has said."""
    return f"a leg was answered {head.status}" if error is None else error.reason


def _is_busy(role: str, status: int, retry_after: bytes, refused: ProxyError) -> bool:
    """Whether an engine has said that it has no room now: another may have. Then `refused`, which is for the client,
    says so too, and when it is worth asking again. A date is not read: the engine's clock need not be ours."""
    if status == 503:
        refused.status, refused.kind, refused.code = 503, "service_unavailable", f"{role}_busy"
        refused.message = f"the {role} engine answered 503; try again later"
    elif refused.status == 429:
        if refused.kind == "invalid_request_error":
            refused.kind = "rate_limit_error"
    else:
        return False
    said = _SECONDS.fullmatch(retry_after.strip())
    refused.retry_after_s = max(1, min(_LONGEST_RETRY_S, int(said[0]))) if said else _RETRY_S
    return True


def client_error_for(error: Exception) -> ProxyError:
    """What a client is told when a plan has ended with this."""
    if isinstance(error, ProxyError):
        return error
    if isinstance(error, EngineLegFailed):
        return error.error
    if isinstance(error, LegFailed):
        return ProxyError(503, "service_unavailable", str(error), code="kv_expired", retry_after_s=_RETRY_S)
    if isinstance(error, HandoffRefused):
        refused = ProxyError(502, "upstream_error", str(error), code="handoff_refused")
        refused.detail = error.detail
        return refused
    if isinstance(error, HandoffMissing):
        return ProxyError(502, "upstream_error", str(error), code="handoff_missing")
    if isinstance(error, LossyDowngrade):
        said = f"what the prefill engine answered cannot be handed on to the decode engine: {error}"
        return ProxyError(502, "upstream_error", said, code="version_too_low")
    if isinstance(error, NoSigningKey):
        _log.error("%s", error)
        said = "what engines are told cannot be signed now; the proxy's log says why"
        return ProxyError(503, "service_unavailable", said, code="no_signing_key", retry_after_s=_RETRY_S)
    if isinstance(error, InvalidParams | JSONTextError | NotCanonical):
        said = "the prefill engine's answer is not what the protocol asks for"
        refused = ProxyError(502, "upstream_error", said, code="bad_prefill_answer")
        refused.detail = str(error)
        return refused
    _log.error("a request ended with a fault of the proxy", exc_info=error)
    return ProxyError(500, "internal_error", "the proxy failed; its log says why", code="internal_error")
