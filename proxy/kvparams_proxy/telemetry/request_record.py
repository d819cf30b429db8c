"""Record of one request: filled while it runs, and read once at its end by metrics, request log and traces.

A record contains no part of the prompt or the answer, no address and no key.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

from kvparams.instances import Instance, RequestFacts
from kvparams.routing.request_lifecycle import RequestLifecycle
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.telemetry.tracing import TraceContext

if TYPE_CHECKING:
    from kvparams_proxy.fleet.routing_decision import RoutingDecision

__all__ = ["RecordReader", "RefusedRequest", "RequestRecord"]

_MOST_TOKENS: Final = 1 << 40
"""More than this is no number of tokens, whatever an engine says."""


class RequestRecord:
    """The record of one request."""

    __slots__ = (
        "answer_bytes",
        "cached_tokens",
        "code",
        "completion_tokens",
        "decision",
        "ended_s",
        "endpoint",
        "error_status",
        "facts",
        "further_transfers",
        "is_encoded",
        "lifecycle",
        "prompt_tokens",
        "retries",
        "route",
        "stream",
        "stream_events",
        "trace_context",
    )

    def __init__(
        self,
        facts: RequestFacts,
        endpoint: str,
        stream: bool,
        life: RequestLifecycle,
        route: Sequence[Instance],
        trace: TraceContext | None,
    ) -> None:
        """`route` is the executor's own list, to which it goes on adding."""
        self.facts = facts
        self.endpoint = endpoint
        """The path, as it is served here."""
        self.stream = stream
        self.lifecycle = life
        self.route = route
        self.trace_context = trace
        self.further_transfers: list[str] | None = None
        """Ids of its transfers after the first one."""
        self.is_encoded: bool | None = None
        """Whether an encode engine has encoded its media; None where none was asked."""
        self.error_status = 0
        """The HTTP status of an error it was answered with; 0 where there was none."""
        self.code: str | None = None
        """Which error it ended with, before its first byte or after."""
        self.retries = 0
        self.ended_s = 0.0
        """When it was over, since 1970."""
        self.answer_bytes = 0
        """Of the answer's body."""
        self.stream_events = 0
        """Events with content that a client got: about one for each token, whatever the engine says of its tokens."""
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        """Of the prompt, as whoever computed it says."""
        self.decision: RoutingDecision | None = None
        """Why its prefill leg went where it did; None where nobody looked at caches."""
        self.completion_tokens: int | None = None
        """As decode says; a stream whose client has not asked for usage does not say it."""

    @property
    def status(self) -> int | None:
        """The HTTP status of the answer; None where the client left without one."""
        return self.error_status or (200 if self.lifecycle.answering else None)

    @property
    def engine_prompt_tokens(self) -> int | None:
        """The engine's length of a prompt that was routed by other ids than the engine's own; None otherwise."""
        return None if self.facts.token_ids is not None else self.prompt_tokens

    def record_prefill(self, answer: Mapping[str, object]) -> None:
        """Records that the engine of the prompt has answered."""
        usage = answer.get("usage")
        if isinstance(usage, dict):
            self.record_usage(cast("dict[str, object]", usage))

    def record_usage(self, usage: Mapping[str, object]) -> None:
        """Records the usage that the engine of the prompt reports."""
        self.prompt_tokens, cached = _prompt_counts(usage)
        if cached is not None:
            self.cached_tokens = cached

    def record_decode(self, usage: Mapping[str, object], *, split: bool) -> None:
        """Records the usage that the answering engine reports; the last call counts.

        Without `split` that engine has computed the prompt as well.
        """
        self.completion_tokens = _tokens(usage.get("completion_tokens", usage.get("output_tokens")))
        if not split:
            self.record_usage(usage)
        elif self.prompt_tokens is None:
            self.prompt_tokens, _ = _prompt_counts(usage)

    def record_error(self, error: ProxyError) -> None:
        """Records an error that the client is told of."""
        if not self.lifecycle.answering:
            self.error_status = error.status
        self.code = error.name

    def add_transfer(self, transfer_id: str) -> str:
        """Records a further transfer."""
        if self.further_transfers is None:
            self.further_transfers = []
        self.further_transfers.append(transfer_id)
        return transfer_id


class RefusedRequest(NamedTuple):
    """A request that was answered with an error before it began to be executed, as far as it is known."""

    request_id: str
    """Empty where it has none yet."""
    endpoint: str
    """The path, as it is served here."""
    error: ProxyError
    tenant: str = ""
    """Empty where it is nobody's that is known here."""
    model: str | None = None
    """As the client has written it."""
    trace: TraceContext | None = None


class RecordReader(Protocol):
    """Reads the records of all requests that are over."""

    def ended(self, account: RequestRecord) -> None:
        """Reads the record of a request that has ended: it does not change any more.

        Takes a few microseconds, never raises, never waits.
        """
        ...

    def refused(self, refusal: RefusedRequest) -> None:
        """Reads a request that was answered with an error before its execution."""
        ...


def _prompt_counts(usage: Mapping[str, object]) -> tuple[int | None, int | None]:
    """Returns the tokens of the prompt and those that were cached, as far as a usage of any API says.

    `/v1/messages` counts cached tokens beside `input_tokens`; `/v1/responses` counts them among these.
    """
    if "input_tokens" not in usage:
        return _tokens(usage.get("prompt_tokens")), _cached(usage.get("prompt_tokens_details"))
    rest = _tokens(usage["input_tokens"])
    if "total_tokens" in usage:
        return rest, _cached(usage.get("input_tokens_details"))
    read = _tokens(usage.get("cache_read_input_tokens"))
    created = _tokens(usage.get("cache_creation_input_tokens"))
    return None if rest is None else rest + (read or 0) + (created or 0), read


def _cached(details: object) -> int | None:
    return _tokens(cast("dict[str, object]", details).get("cached_tokens")) if isinstance(details, dict) else None


def _tokens(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _MOST_TOKENS else None
