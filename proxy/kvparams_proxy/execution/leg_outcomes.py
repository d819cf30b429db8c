"""Classification of how a leg ended: may another instance do better, is the engine to blame, what does the client hear.

Everything here is a function of its arguments: no I/O, no clock. A client is told nothing of an engine but its role.
"""

import re
from typing import Final, NamedTuple

from kvparams.instances import Instance
from kvparams.routing.plan import LegFailed, StreamProgress
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.engine_errors import engine_error_response, is_model_missing, reported_engine_error
from kvparams_proxy.upstream.types import (
    ResponseHead,
    UpstreamError,
    UpstreamErrorResponse,
    UpstreamOverflow,
    UpstreamTimeout,
)

__all__ = ["EngineLegFailed", "LegEnd", "LegOutcome", "classify_leg_outcome", "invalid_response_failure"]

_RETRY_S: Final = 1
"""After which it is worth asking again where an engine was busy or gone, and has not said when."""
_LONGEST_RETRY_S: Final = 60
"""What an engine may say; the proxy's own queues say no more either."""
_PATIENT_S: Final = 10.0
"""An engine that does not answer within less than this may be well: the plan has given the leg little time."""
_SECONDS: Final = re.compile(rb"[0-9]{1,18}")


class EngineLegFailed(LegFailed):
    """A failed leg, with what the client is told if nothing else is tried."""

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


class LegEnd(NamedTuple):
    """The end of one leg's exchange, and the credentials that the engine was shown."""

    instance: Instance
    head: ResponseHead
    """Its status is 0 where no answer came."""
    raw: bytes
    """The answer, where it was collected."""
    error: UpstreamError | None
    """Why the exchange did not come to its end, if so."""
    own_key: bool = True
    """Whether the engine was shown a key of the operator's, or none, and not the client's."""
    shared: bool = False
    """Whether several engines are behind the instance: the next leg may reach another one."""
    limit_s: float | None = None
    """The plan's own limit of time for the leg, where it had one."""

    @property
    def status(self) -> int:
        """The status of the engine's answer, which may stand in its error instead of its head; 0 for no answer."""
        if self.error is None:
            return self.head.status
        if isinstance(self.error, UpstreamErrorResponse):
            code = self.error.error.get("code")
            return code if type(code) is int else 500
        return 0

    def says_model_missing(self, model: str) -> bool:
        """Returns whether the engine seems to say that it does not know this model, or LoRA adapter.

        That is no evidence: engines repeat a client's input when they refuse it.
        """
        return self.error is None and is_model_missing(self.head.status, self.raw, model)

    @property
    def kv_untouched(self) -> bool:
        """True if the engine cannot have fetched the KV that the leg named, which is still with its producer.

        It was not sent the leg, or refused it before anything was scheduled.
        """
        return 400 <= self.head.status < 500 if self.error is None else not self.error.sent


class LegOutcome(NamedTuple):
    """The meaning of a leg's end for the plan and for the fleet."""

    failure: EngineLegFailed | None = None
    """What the plan is told; `retryable` says whether another instance may do better. None where the leg went well."""
    blames_instance: bool = False
    """Whether the failure counts against the instance's breaker."""
    is_busy: bool = False
    """Whether the instance has no room now, which is no defect."""
    evidence: str = ""
    """How the leg failed, for the log: nothing that the engine or the client has said."""


_SUCCESS: Final = LegOutcome()


def classify_leg_outcome(
    end: LegEnd,
    addresses: EngineAddresses,
    body: bytes,
    *,
    begun: bool = False,
    sent: StreamProgress | None = None,
    others_serve: bool = False,
) -> LegOutcome:
    """Returns what the end of a leg means.

    Args:
        end: how it ended.
        addresses: those of the engines, which the client does not learn.
        body: the client's own request: what stands in it is no secret.
        begun: whether the client has a part of the answer.
        sent: from where another engine could go on with the answer, where one could.
        others_serve: whether the engine seems to know the model no more (`LegEnd.says_model_missing`), and others may.
    """
    head, error = end.head, end.error
    if error is None and head.status == 200:
        return _SUCCESS
    failure = _failure(end, addresses, body, begun, sent)
    failure.instance = end.instance
    failure.evidence = f"a leg was answered {head.status}" if error is None else error.reason
    if others_serve:
        failure.retryable, failure.may_have_acted = True, False
        return LegOutcome(failure)
    return LegOutcome(
        failure,
        blames_instance=failure.retryable and not _is_excused(end),
        is_busy=failure.error.status in (429, 503),
        evidence=failure.evidence,
    )


def invalid_response_failure(instance: Instance) -> EngineLegFailed:
    """Returns the failure of a leg whose answer has status 200 and is not JSON."""
    role = instance.role
    said = f"the {role} engine's answer is not JSON"
    failure = EngineLegFailed(ProxyError(502, "upstream_error", said, code=f"{role}_failed"))
    failure.instance, failure.evidence = instance, said
    return failure


def _is_excused(end: LegEnd) -> bool:
    """Returns whether a failure that another instance might not have is no fault of this one."""
    status, error = end.status, end.error
    # What an engine forbids may be this request alone (vLLM 0.32.0: scale-out endpoints); probes find wrong keys.
    is_forbidden = status in (401, 403)
    is_limited = status == 429 and not end.own_key  # the client's key is, others' need not be
    is_full = isinstance(error, UpstreamOverflow)  # that is not broken
    is_another = end.shared and (error is None or error.connected)  # the next one is not this one
    is_hurried = isinstance(error, UpstreamTimeout) and end.limit_s is not None and end.limit_s < _PATIENT_S
    return is_forbidden or is_limited or is_full or is_another or is_hurried


def _failure(
    end: LegEnd, addresses: EngineAddresses, body: bytes, begun: bool, sent: StreamProgress | None
) -> EngineLegFailed:
    """Returns what the plan is told of a leg that has failed."""
    role, head, error, own_key = end.instance.role, end.head, end.error, end.own_key
    if error is None:
        refused = engine_error_response(role, head.status, end.raw, addresses, body, own_key=own_key)
        busy = _report_busy(role, head.status, head.retry_after, refused)
        # What is refused with a 4xx was never scheduled.
        return EngineLegFailed(
            refused,
            another=busy or refused.status >= 500,
            claimed=not busy or head.status >= 500,
            begun=begun,
            sent=sent,
        )
    if isinstance(error, UpstreamErrorResponse):
        refused = reported_engine_error(role, end.status, error.error, addresses, body, own_key=own_key)
        busy = _report_busy(role, end.status, b"", refused)
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
        said = f"the request to the {role} engine failed: {error.reason}"
        what = ProxyError(502, "upstream_error", said, code=f"{role}_failed")
    return EngineLegFailed(what, begun=begun, sent=sent)


def _report_busy(role: str, status: int, retry_after: bytes, refused: ProxyError) -> bool:
    """Returns whether an engine has said that it has no room now: another may have.

    Then `refused`, which is for the client, is made to say so too, and when it is worth asking again. A date in
    `retry_after` is not read: the engine's clock need not be this machine's.
    """
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
