"""Describes the engines of a snapshot: what all workers know of each, and rates since an earlier look."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from operator import sub
from typing import Final, NamedTuple

from kvparams.routing.engine_metrics import MovedBytes
from kvparams_proxy.ui.worker_part import EngineFacts, WorkerPart

__all__ = ["COLUMNS", "EngineRow", "EngineTotals", "engine_row", "merge_engines", "rounded", "totals_of"]

_STATES: Final = ("ready", "draining", "not_ready", "broken")
"""From the best to the worst: the worst that a worker sees is shown."""
_BREAKERS: Final = ("closed", "half_open", "open")
_ENGINES_A_STEP: Final = 100
_UNKNOWN: Final = MovedBytes(None, None, None)


class EngineRow(NamedTuple):
    """An engine in a snapshot. All workers together."""

    id: str
    role: str
    group: str
    connector: str
    store: str
    state: str
    breaker: str
    in_flight: int
    """Requests of this proxy that run there."""
    foreign: int
    """The estimated number of requests of others."""
    tokens: int
    """Prompt tokens of `in_flight`."""
    leases: int
    """Transfers whose KV it holds and nobody has fetched."""
    wait_ms: float
    """Until a new prompt should begin to be computed."""
    legs: int
    """Requests that have ended there."""
    legs_per_s: float | None
    prompt_tokens_per_s: float | None
    answer_tokens_per_s: float | None
    itl_ms: float | None
    """The mean time between two tokens of a stream."""
    hit_ratio: float | None
    """The share of prompt tokens that its engine found in a cache."""
    cache_usage: float | None
    """The share of its KV cache that is used, from 0 to 1."""
    cache_is_estimate: bool
    """Whether this is an estimate of the proxy. Otherwise the engine says it."""
    transfer_bytes_per_s: float | None
    """KV that it fetches from other engines or sends to them, as it counts itself; None if it does not say."""
    load_bytes_per_s: float | None
    """KV that it loads from a store; None likewise."""
    save_bytes_per_s: float | None
    """KV that it saves to a store; None likewise."""
    reason: str
    """Why it is in its state, in the words of the log."""
    since: float
    """When it came into this state, since 1970; 0 if it is unknown."""


COLUMNS: Final = EngineRow._fields
"""The names of the values of an engine."""


class EngineTotals(NamedTuple):
    """The counts of an engine at one look."""

    legs: float
    prompt: float
    cached: float
    answer: float
    gaps: float
    gaps_s: float
    moved: MovedBytes
    """As the engine says."""

    def since(self, then: "EngineTotals | None") -> "EngineTotals | None":
        """Returns what is new; None without an earlier look, or if a count has gone back."""
        if then is None:
            return None
        counts = [*map(sub, self[:6], then[:6])]
        if min(counts) < 0:
            return None
        if self.moved is _UNKNOWN:
            return EngineTotals._make((*counts, _UNKNOWN))
        moved = MovedBytes._make(
            None if now is None or before is None or now < before else now - before
            for now, before in zip(self.moved, then.moved, strict=True)
        )
        return EngineTotals._make((*counts, moved))


def totals_of(engine: EngineFacts) -> EngineTotals:
    """Returns the totals of an engine."""
    moved = (engine.transferred, engine.loaded, engine.saved)
    return EngineTotals(
        engine.legs,
        engine.prompt_tokens,
        engine.cached_tokens,
        engine.answer_tokens,
        engine.gaps,
        engine.gaps_s,
        _UNKNOWN if moved == _UNKNOWN else MovedBytes._make(moved),
    )


def merge_engines(
    workers: Sequence[WorkerPart], ended: Mapping[str, float]
) -> Generator[None, None, dict[str, EngineFacts]]:
    """Merges what all workers know of each engine, in the order of the first one. Yields after every few milliseconds.

    16 workers that know 500 engines take some 20 ms.
    """
    known: dict[str, list[EngineFacts]] = {}
    for part in workers:
        for values in part["engines"]:
            # Those of other workers were JSON, which makes lists of them.
            is_made = isinstance(values, EngineFacts)  # pyright: ignore[reportUnnecessaryIsInstance]
            facts = values if is_made else EngineFacts._make(values)
            known.setdefault(facts.id, []).append(facts)
        yield
    found: dict[str, EngineFacts] = {}
    for number, (id, several) in enumerate(known.items(), 1):
        found[id] = several[0] if len(several) == 1 else _merged(several)
        if len(several) > 1 and not number % _ENGINES_A_STEP:
            yield
    if ended:
        for id, facts in found.items():
            legs = ended.get(f'kvparams_proxy_legs_total{{instance="{id}",role="{facts.role}"}}', 0.0)
            found[id] = facts._replace(legs=facts.legs + int(legs))
    return found


def _merged(several: Sequence[EngineFacts]) -> EngineFacts:
    """Merges what several workers know of one engine, all at once: with 16 workers and 500 engines, time matters."""
    worst = max(several, key=lambda each: _STATES.index(each.state))
    return worst._replace(
        breaker=max((each.breaker for each in several), key=_BREAKERS.index),
        in_flight=sum([each.in_flight for each in several]),
        tokens=sum([each.tokens for each in several]),
        foreign=max([each.foreign for each in several]),
        leases=sum([each.leases for each in several]),
        wait_s=max([each.wait_s for each in several]),
        legs=sum([each.legs for each in several]),
        prompt_tokens=sum([each.prompt_tokens for each in several]),
        cached_tokens=sum([each.cached_tokens for each in several]),
        answer_tokens=sum([each.answer_tokens for each in several]),
        gaps=sum([each.gaps for each in several]),
        gaps_s=sum([each.gaps_s for each in several]),
        cache_usage=next((each.cache_usage for each in several if each.cache_usage is not None), None),
        transferred=_latest([each.transferred for each in several]),
        loaded=_latest([each.loaded for each in several]),
        saved=_latest([each.saved for each in several]),
    )


def _latest(readings: Iterable[float | None]) -> float | None:
    """Returns the latest reading of a counter of an engine, which every worker reads; None if nobody has one."""
    return max((each for each in readings if each is not None), default=None)


def engine_row(engine: EngineFacts, totals: EngineTotals, then: EngineTotals | None, elapsed_s: float) -> EngineRow:
    """Returns the row of an engine.

    Args:
        engine: what is known of it now.
        totals: see `totals_of`.
        then: its totals at an earlier look; None without one.
        elapsed_s: the seconds since then.
    """
    new = totals.since(then) if elapsed_s > 0 else None
    of_prompts = new if new is not None and new.prompt else totals
    of_gaps = new if new is not None and new.gaps else totals

    def per_s(value: float | None) -> float | None:
        return None if new is None or value is None else rounded(value / elapsed_s)

    moved = _UNKNOWN if new is None else new.moved

    usage, is_estimate = engine.cache_usage, False
    if usage is None and engine.cache_capacity:
        usage, is_estimate = min(1.0, (engine.cache_blocks or 0) / engine.cache_capacity), True
    return EngineRow(
        engine.id,
        engine.role,
        engine.group,
        engine.connector,
        engine.store,
        engine.state,
        engine.breaker,
        engine.in_flight,
        engine.foreign,
        engine.tokens,
        engine.leases,
        round(1000 * engine.wait_s, 1),
        engine.legs,
        per_s(None if new is None else new.legs),
        per_s(None if new is None else new.prompt),
        per_s(None if new is None else new.answer),
        round(1000 * of_gaps.gaps_s / of_gaps.gaps, 2) if of_gaps.gaps else None,
        round(min(1.0, of_prompts.cached / of_prompts.prompt), 4) if of_prompts.prompt else None,
        None if usage is None else round(usage, 4),
        is_estimate,
        per_s(moved.transferred),
        per_s(moved.loaded),
        per_s(moved.saved),
        engine.reason,
        engine.since,
    )


def rounded(value: float) -> float:
    """Returns a rate with as many digits as are shown."""
    return round(value, 2)
