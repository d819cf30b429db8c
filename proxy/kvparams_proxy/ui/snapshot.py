"""Builds what an operator sees from the parts of all workers. The page and `kvparams top` show the same snapshot.

This is pure: it reads no clock and no object of the proxy. Counts are those of /metrics. Rates and ratios are those of
the last seconds that somebody looked, and None until there are two looks.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypedDict, cast

from kvparams_proxy.ui.advice import advice_for
from kvparams_proxy.ui.engine_rows import (
    COLUMNS,
    EngineRow,
    EngineTotals,
    engine_row,
    merge_engines,
    rounded,
    totals_of,
)
from kvparams_proxy.ui.flow_rows import flow_rows
from kvparams_proxy.ui.public_names import former_engine_name
from kvparams_proxy.ui.worker_part import (
    ENDED_WORKERS,
    MOST_REQUESTS,
    EngineFacts,
    RequestRow,
    StoreFacts,
    WorkerPart,
    is_shown,
)

__all__ = ["ErrorRow", "Snapshot", "SnapshotBuilder", "hide_addresses"]

_WINDOW_S: Final = 10.0
"""Rates are those of so many seconds."""
_GOOD: Final = 0.75
_BAD: Final = 0.5
"""Shares of the tokens expected from a store that were there: from the first one on it is well."""
_PREFIXES: Final = 48


class ErrorRow(TypedDict):
    """Errors of one kind."""

    series: str
    kind: str
    count: int
    per_min: float | None
    meaning: str
    action: str


class Snapshot(TypedDict):
    """Describes the fleet and its requests at one moment."""

    format: int
    """Grows by one when a member changes its meaning."""
    version: str
    time: float
    """Since 1970."""
    status: str
    """`ok`, `degraded` or `unavailable`, as /health says it."""
    workers: int
    policy: str
    modes: list[dict[str, object]]
    roles: dict[str, dict[str, int]]
    exchange: dict[str, object] | None
    """The connection to other proxies; null without them."""
    columns: tuple[str, ...]
    """The names of the values of each engine."""
    engines: list[EngineRow]
    counters: dict[str, float]
    """By series, spelled as in /metrics."""
    rates: dict[str, float | None]
    """The same series, each second."""
    states: dict[str, float]
    requests: dict[str, list[RequestRow]]
    flows: list[dict[str, object]]
    stores: list[dict[str, object]]
    prefixes: list[list[str | int]] | None
    sampled: int
    errors: list[ErrorRow]


class _Look(NamedTuple):
    at_s: float
    counters: Mapping[str, float]
    engines: Mapping[str, EngineTotals]


class SnapshotBuilder:
    """Builds one snapshot after the other. It remembers the totals of the last seconds for rates."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._looks: deque[_Look] = deque()

    def build(
        self, parts: Sequence[Mapping[str, object]], now_s: float, epoch_s: float
    ) -> Generator[None, None, Snapshot]:
        """Builds the snapshot of this moment. Yields after every few milliseconds.

        Args:
            parts: the `WorkerPart` of each worker, the one that answers first, and counts of exited workers.
            now_s: on a clock that only goes forward.
            epoch_s: since 1970.
        """
        workers = [cast("WorkerPart", part) for part in parts if ENDED_WORKERS not in part]
        ended: dict[str, float] = {}
        for part in parts:
            for key, value in cast("Mapping[str, float]", part.get(ENDED_WORKERS, {})).items():
                ended[key] = ended.get(key, 0.0) + value
        first = workers[0]
        counters = _summed((part["counters"] for part in workers), ended)
        facts = yield from merge_engines(workers, ended)
        totals = {id: totals_of(each) for id, each in facts.items()}
        before = self._look(now_s, counters, totals)
        elapsed_s = 0.0 if before is None else now_s - before.at_s
        then: Mapping[str, EngineTotals] = {} if before is None else before.engines
        rates = _rates(before, elapsed_s, counters)
        engines = [engine_row(each, totals[id], then.get(id), elapsed_s) for id, each in facts.items()]
        yield
        return Snapshot(
            format=1,
            version=self._version,
            time=round(epoch_s, 3),
            status=_status(first["roles"], first["needed"]),
            workers=len(workers),
            policy=first["policy"],
            modes=first["modes"],
            roles=_roles(workers),
            exchange=first["exchange"],
            columns=COLUMNS,
            engines=engines,
            counters=counters,
            rates=rates,
            states=_added(part["states"] for part in workers),
            requests=_requests(workers),
            flows=flow_rows(workers, engines, _decode_rate(facts.values(), then, elapsed_s)),
            stores=_stores(workers),
            prefixes=_prefixes(workers),
            sampled=sum(part["sampled"] for part in workers),
            errors=_errors(counters, rates),
        )

    def forget(self) -> None:
        """Forgets earlier looks: nobody has looked for a while."""
        self._looks.clear()

    def _look(self, now_s: float, counters: Mapping[str, float], engines: Mapping[str, EngineTotals]) -> _Look | None:
        """Remembers this look. Returns the one that rates are counted from, or None."""
        looks = self._looks
        while len(looks) > 1 and looks[1].at_s <= now_s - _WINDOW_S:
            looks.popleft()
        before = looks[0] if looks else None
        looks.append(_Look(now_s, counters, engines))
        return before


def hide_addresses(snapshot: Snapshot, names: Mapping[str, str]) -> Snapshot:
    """Returns the snapshot with the names of engines for viewers; the same one if all of these are the ids.

    `names` has them by id. Of an engine that has left nobody knows whether its id contains an address: it gets another.
    """
    ids = {each.id for each in snapshot["engines"]}
    ids.update(id for rows in snapshot["requests"].values() for row in rows for id in _engine_ids(row))
    ids.discard("")
    names = {id: names.get(id) or former_engine_name(id) for id in ids}
    if all(id == name for id, name in names.items()):
        return snapshot
    shown = snapshot.copy()
    shown["engines"] = [each._replace(id=names.get(each.id, each.id)) for each in snapshot["engines"]]
    shown["requests"] = {kind: [_renamed(row, names) for row in rows] for kind, rows in snapshot["requests"].items()}
    return shown


def _engine_ids(row: RequestRow) -> Iterator[str]:
    """Yields the ids of engines that a row names; empty ones for states that are no engine's."""
    for _, id in row["route"]:
        yield id
    for _, who, _ in row["spans"]:
        yield cast("str", who)
    if (decision := row["decision"]) is not None:
        yield decision["chosen"]
        yield decision["source"] or ""
        for id, _ in decision["others"]:
            yield cast("str", id)


def _renamed(row: RequestRow, names: Mapping[str, str]) -> RequestRow:
    renamed = row.copy()
    renamed["route"] = [[role, names.get(id, id)] for role, id in row["route"]]
    renamed["spans"] = [[state, names.get(cast("str", who), who), at] for state, who, at in row["spans"]]
    if (decision := row["decision"]) is not None:
        source = decision["source"]
        renamed["decision"] = {
            **decision,
            "chosen": names.get(decision["chosen"], decision["chosen"]),
            "source": None if source is None else names.get(source, source),
            "others": [[names.get(cast("str", id), id), tokens] for id, tokens in decision["others"]],
        }
    return renamed


def _summed(several: Iterable[Mapping[str, float]], ended: Mapping[str, float]) -> dict[str, float]:
    found = _added(several)
    for key, value in ended.items():
        if is_shown(key.partition("{")[0]):
            found[key] = found.get(key, 0.0) + value
    return found


def _added(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in several:
        for key, value in one.items():
            found[key] = found.get(key, 0) + value
    return found


def _rates(before: _Look | None, elapsed_s: float, counters: Mapping[str, float]) -> dict[str, float | None]:
    """Returns the rates of all series but the buckets of histograms."""
    return {
        key: None
        if before is None or elapsed_s <= 0 or value < before.counters.get(key, 0)
        else rounded((value - before.counters.get(key, 0)) / elapsed_s)
        for key, value in counters.items()
        if "_bucket{" not in key
    }


def _roles(workers: Sequence[WorkerPart]) -> dict[str, dict[str, int]]:
    """Returns the counts of the first worker, with the legs that wait in all workers."""
    roles = {role: dict(counts) for role, counts in workers[0]["roles"].items()}
    for part in workers[1:]:
        for role, counts in part["roles"].items():
            if role in roles:
                roles[role]["waiting"] += counts["waiting"]
    return roles


def _status(roles: Mapping[str, Mapping[str, int]], needed: Iterable[str]) -> str:
    counts = [roles.get(role, {}) for role in needed]
    if any(not each.get("usable") for each in counts):
        return "unavailable"
    return "ok" if all(each.get("ready") for each in counts) else "degraded"


def _requests(workers: Sequence[WorkerPart]) -> dict[str, list[RequestRow]]:
    """Merges the requests of all workers: the oldest that run, the newest that have ended, and the slowest."""
    running = [row for part in workers for row in part["running"]]
    recent = [row for part in workers for row in part["recent"]]
    failed = [row for part in workers for row in part["failed"]]
    slow = [row for part in workers for row in part["slow"]]
    if len(workers) > 1:
        running.sort(key=lambda row: row["started"])
        for rows in (recent, failed):
            rows.sort(key=lambda row: -row["started"] - row["total_ms"] / 1000)
        slow.sort(key=lambda row: -row["total_ms"])
    found = {"running": running, "recent": recent, "failed": failed, "slow": slow}
    return {kind: rows[:MOST_REQUESTS] for kind, rows in found.items()}


def _decode_rate(engines: Iterable[EngineFacts], then: Mapping[str, EngineTotals], elapsed_s: float) -> float | None:
    """Returns the decode legs that end each second, or None without an earlier look."""
    if elapsed_s <= 0:
        return None
    ended = sum(each.legs - then[each.id].legs for each in engines if each.role == "decode" and each.id in then)
    return max(0.0, ended / elapsed_s)


def _stores(workers: Sequence[WorkerPart]) -> list[dict[str, object]]:
    found: dict[str, StoreFacts] = {}
    for part in workers:
        for values in part["stores"]:
            facts = StoreFacts._make(values)
            before = found.get(facts.name)
            found[facts.name] = (
                facts
                if before is None
                else before._replace(
                    fetches=before.fetches + facts.fetches,
                    expected_tokens=before.expected_tokens + facts.expected_tokens,
                    confirmed_tokens=before.confirmed_tokens + facts.confirmed_tokens,
                )
            )
    return [dict(**each._asdict(), health=_store_health(each)) for each in found.values()]


def _store_health(store: StoreFacts) -> str:
    if not store.expected_tokens:
        return "unknown"
    share = store.confirmed_tokens / store.expected_tokens
    return "ok" if share >= _GOOD else "degraded" if share >= _BAD else "failing"


def _prefixes(workers: Sequence[WorkerPart]) -> list[list[str | int]] | None:
    """Adds up the prefixes of all workers, which share the secret of their hashes."""
    if workers[0]["prefixes"] is None:
        return None
    found: dict[str, list[str | int]] = {}
    for part in workers:
        for label, parent, blocks, requests, hits in part["prefixes"] or ():
            before = found.get(str(label))
            if before is None:
                found[str(label)] = [label, parent, blocks, requests, hits]
            else:
                before[3] = int(before[3]) + int(requests)
                before[4] = int(before[4]) + int(hits)
    chosen = sorted(found.values(), key=lambda each: -int(each[3]))[:_PREFIXES]
    known = {each[0] for each in chosen}
    return [[label, parent if parent in known else "", *counts] for label, parent, *counts in chosen]


def _errors(counters: Mapping[str, float], rates: Mapping[str, float | None]) -> list[ErrorRow]:
    found: list[ErrorRow] = []
    for key, value in counters.items():
        name, _, labels = key.partition("{")
        words = dict(pair.split("=", 1) for pair in labels.rstrip("}").split(",") if "=" in pair)
        word = next(
            (words[label].strip('"') for label in ("kind", "status", "outcome", "reason") if label in words), ""
        )
        advice = advice_for(name, word) if value else None
        if advice is None:
            continue
        role = words.get("role", "").strip('"')
        kind = {"status": f"HTTP {word}", "reason": f"handoff: {word}"}.get(next(iter(words)), word)
        per_s = rates.get(key)
        found.append(
            ErrorRow(
                series=key,
                kind=f"{role} leg: {word}" if role else kind,
                count=int(value),
                per_min=None if per_s is None else rounded(60 * per_s),
                meaning=advice.meaning,
                action=advice.action,
            )
        )
    return sorted(found, key=lambda row: (-(row["per_min"] or 0.0), -row["count"]))
