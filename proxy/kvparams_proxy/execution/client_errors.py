"""Translation of whatever ended a plan into the error that the client is told."""

import logging
from typing import Final

from kvparams.dialects.interface import HandoffMissing
from kvparams.errors import InvalidParams, JSONTextError
from kvparams.routing.handoff_verifier import HandoffRefused
from kvparams.routing.plan import LegFailed
from kvparams.signing.canonical_json import NotCanonical
from kvparams.signing.signer import NoSigningKey
from kvparams.versions import LossyDowngrade
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.leg_outcomes import EngineLegFailed

__all__ = ["client_error_for"]

_log: Final = logging.getLogger(__name__)
_RETRY_S: Final = 1
"""After which it is worth asking again."""


def client_error_for(error: Exception) -> ProxyError:
    """Returns the error that a client is told when a plan has ended with this exception."""
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
        said = f"the prefill engine's answer cannot be passed on to the decode engine: {error}"
        return ProxyError(502, "upstream_error", said, code="version_too_low")
    if isinstance(error, NoSigningKey):
        _log.error("%s", error)
        said = "the proxy cannot sign documents now; its log says why"
        return ProxyError(503, "service_unavailable", said, code="no_signing_key", retry_after_s=_RETRY_S)
    if isinstance(error, InvalidParams | JSONTextError | NotCanonical):
        said = "the prefill engine's answer breaks the protocol"
        refused = ProxyError(502, "upstream_error", said, code="bad_prefill_answer")
        refused.detail = str(error)
        return refused
    _log.error("a request ended with a fault of the proxy", exc_info=error)
    return ProxyError(500, "internal_error", "the proxy failed; its log says why", code="internal_error")
