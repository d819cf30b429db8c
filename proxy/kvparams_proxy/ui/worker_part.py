"""The part of a snapshot that one worker contributes. Workers of one proxy send it to each other as JSON."""

from typing import Final, NamedTuple, TypedDict

__all__ = [
    "ENDED_WORKERS",
    "MOST_REQUESTS",
    "DecisionRow",
    "EngineFacts",
    "RequestRow",
    "StoreFacts",
    "WorkerPart",
    "is_shown",
]

MOST_REQUESTS: Final = 16
"""Requests of each kind in a part, and in a snapshot."""
ENDED_WORKERS: Final = "ended"
"""The member of the supervisor's part: the counts of workers that have exited, by series, instead of a `WorkerPart`."""

_FAMILIES: Final = (
    *("requests", "refusals", "retries", "continuations", "leg_failures", "handoffs_refused"),
    *("time_to_first_byte_seconds", "time_per_output_token_seconds", "prompt_tokens", "completion_tokens"),
    *("stream_events", "cached_prompt_tokens", "answer_bytes"),
    *("prefix_cache_queries", "prefix_cache_predicted_hits", "prefix_cache_hits"),
)
_SAMPLES: Final = frozenset(
    f"kvparams_proxy_{name}_{suffix}" for name in _FAMILIES for suffix in ("total", "bucket", "count", "sum")
)


class EngineFacts(NamedTuple):
    """An engine, as one worker knows it. Totals are those of this worker since it started."""

    id: str
    public_id: str
    """The name for viewers: another one where `id` contains the address."""
    role: str
    group: str
    connector: str
    store: str
    state: str
    breaker: str
    in_flight: int
    """Legs of this worker."""
    tokens: int
    """Prompt tokens of these."""
    foreign: int
    """Legs of clients that no proxy here knows, as all workers estimate them."""
    leases: int
    wait_s: float
    legs: int
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    gaps: int
    gaps_s: float
    cache_usage: float | None
    """The share of its KV cache that is used, as the engine says."""
    cache_blocks: int | None
    """The blocks that it is believed to have; None where nobody looks at caches."""
    cache_capacity: int | None
    transferred: float | None
    """KV bytes between engines, as the engine says: see `kvparams.routing.engine_metrics.MovedBytes`."""
    loaded: float | None
    saved: float | None
    reason: str
    """The evidence for its state, in the words of the log; empty where the state is the first one."""
    since: float
    """When it came into this state, since 1970; 0 if it is unknown."""


class StoreFacts(NamedTuple):
    """A store, as the last requests of one worker have found it."""

    name: str
    engines: int
    ready: int
    fetches: int
    """Legs that were expected to fetch from it."""
    expected_tokens: int
    confirmed_tokens: int
    """Of these, found as the engines report."""


class DecisionRow(TypedDict):
    """The reasons for the engine of a prefill leg. Numbers of tokens are the engine's own."""

    chosen: str
    prompt_tokens: int
    cached: int
    fetched: int
    computed: int
    wait_ms: float
    fetch_ms: float
    compute_ms: float
    source: str | None
    others: list[list[str | int]]
    """The other candidates that were believed to have most: id and cached tokens."""
    candidates: int


class RequestRow(TypedDict):
    """A request. It holds no part of the prompt or the answer, no address and no key."""

    id: str
    tenant: str
    model: str
    endpoint: str
    stream: bool | None
    outcome: str
    """Empty while it runs."""
    status: int | None
    error: str | None
    route: list[list[str]]
    """Role and id of each engine."""
    started: float
    """Since 1970."""
    total_ms: float
    spans: list[list[str | float]]
    """State, engine, and when the state began, in milliseconds from the start."""
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    retries: int
    answer_bytes: int
    trace: str | None
    decision: DecisionRow | None


class WorkerPart(TypedDict):
    """The facts of one worker."""

    worker: int
    policy: str
    modes: list[dict[str, object]]
    needed: list[str]
    roles: dict[str, dict[str, int]]
    exchange: dict[str, object] | None
    engines: list[EngineFacts]
    counters: dict[str, float]
    """By series, spelled as in /metrics."""
    states: dict[str, int]
    """Requests that are pending, encoding, prefilling and decoding."""
    running: list[RequestRow]
    recent: list[RequestRow]
    failed: list[RequestRow]
    slow: list[RequestRow]
    flows: list[list[str | int]]
    """From group, to group, requests and their prompt tokens, of the last requests."""
    stores: list[StoreFacts]
    prefixes: list[list[str | int]] | None
    """Each a `HotPrefix`; None where nobody looks at caches."""
    sampled: int
    """The number of the last requests."""


def is_shown(name: str) -> bool:
    """Returns whether samples of this name are in a snapshot."""
    return name in _SAMPLES
