"""Says what the errors that the metrics count mean for an operator, and what to do."""

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["ADVICE", "ErrorAdvice", "advice_for"]


class ErrorAdvice(NamedTuple):
    """The meaning of an error, and what to do."""

    meaning: str
    action: str


_LEG_FAILURES: Final = {
    "busy": ErrorAdvice(
        "no connection to the engine was free",
        "The engine has more requests than connections. Limit them (--prefill-requests, --decode-requests) or add "
        "engines.",
    ),
    "unreachable": ErrorAdvice(
        "no connection to the engine could be made",
        "See whether the engine runs and the network lets the proxy through: kvparams proxy --check asks all engines.",
    ),
    "timeout": ErrorAdvice(
        "the engine was silent for too long",
        "Look at the engine's own log and queue. --prefill-timeout and --decode-timeout are the limits.",
    ),
    "broken": ErrorAdvice(
        "the engine closed the connection in the middle of its answer",
        "The engine has crashed or restarted: its log says why. --continuation lets streams go on elsewhere.",
    ),
    "error": ErrorAdvice("the engine answered with a 5xx", "The engine's log has the error."),
    "refused": ErrorAdvice(
        "the engine answered with a 4xx",
        "The request does not suit the engine, for example its length or its model. The client got the answer.",
    ),
    "garbage": ErrorAdvice(
        "the engine's answer was not JSON",
        "Something else than the engine answers at this URL, or a proxy in between changes answers.",
    ),
}
_REFUSALS: Final = {
    "400": ErrorAdvice("requests that are not valid", "Nothing: the answers tell clients what is wrong."),
    "401": ErrorAdvice("requests without a valid API key", "Give clients keys: kvparams keys create."),
    "404": ErrorAdvice("requests for a model that no engine serves", "Compare the clients' model with /v1/models."),
    "413": ErrorAdvice("bodies that are too large", "Raise --max-body-bytes if they are legitimate."),
    "429": ErrorAdvice(
        "requests over the limit of their tenant, or that engines refused as too many",
        "Raise --queue-per-tenant, or let clients slow down.",
    ),
    "500": ErrorAdvice("faults of the proxy", "Its log has the traceback; please report it."),
    "502": ErrorAdvice(
        "legs that failed on all engines that were tried",
        "See the failed legs in this table and the failed requests: they name the engines.",
    ),
    "503": ErrorAdvice(
        "requests for which there was no engine, or no room",
        "See which role has no ready engine or a long queue; add engines, or raise --queue and --queue-wait.",
    ),
    "504": ErrorAdvice(
        "requests that took too long",
        "See the slowest requests. --prefill-timeout, --decode-timeout and --request-timeout are the limits.",
    ),
}
_HANDOFF: Final = ErrorAdvice(
    "what a prefill engine answered could not be handed to a decode engine",
    "Compare the engines' connector and addresses in the fleet file: kvparams doctor asks the engines.",
)
_OUTCOMES: Final = {
    "midway": ErrorAdvice(
        "streams that ended with an error after their first byte",
        "Their decode engine failed. --continuation lets streams go on on another engine.",
    ),
    "gone": ErrorAdvice(
        "clients that left before the end of their answer",
        "Clients cancel, or their time-out is shorter than the answer takes: compare with the slowest requests.",
    ),
}
ADVICE: Final[Mapping[str, Mapping[str, ErrorAdvice]]] = {
    "kvparams_proxy_leg_failures_total": _LEG_FAILURES,
    "kvparams_proxy_refusals_total": _REFUSALS,
    "kvparams_proxy_requests_total": _OUTCOMES,
}
"""By the name of a counter, and the value of its label `kind`, `status` or `outcome`."""
_UNKNOWN: Final = ErrorAdvice("answers with this status", "The failed requests name the error.")


def advice_for(name: str, word: str) -> ErrorAdvice | None:
    """Returns the advice for a series, or None where it counts no errors."""
    if name == "kvparams_proxy_handoffs_refused_total":
        return _HANDOFF
    known = ADVICE.get(name)
    if known is None or (name == "kvparams_proxy_requests_total" and word not in known):
        return None
    return known.get(word, _UNKNOWN)
