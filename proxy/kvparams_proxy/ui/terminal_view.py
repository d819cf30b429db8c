"""Shows a snapshot in a terminal, for `kvparams top`. It needs the package rich."""

from collections.abc import Callable, Mapping, Sequence
from time import localtime, strftime
from typing import Any, Final, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvparams.errors import printable
from kvparams_proxy.ui.engine_rows import EngineRow
from kvparams_proxy.ui.quantiles import QUANTILE_FAMILIES, quantile

__all__ = ["PANELS", "SORTS", "ViewState", "render"]

PANELS: Final = ("engines", "requests", "errors")
_STATES: Final = {
    "ok": "green",
    "ready": "green",
    "degraded": "yellow",
    "draining": "yellow",
    "half_open": "yellow",
    "refused": "yellow",
    "gone": "yellow",
    "unavailable": "red",
    "broken": "red",
    "not_ready": "red",
    "open": "red",
    "failed": "red",
    "midway": "red",
}
_UNHEALTHY: Final = ("broken", "not_ready")
_WORST_FIRST: Final = ("broken", "not_ready", "draining", "ready")
_NONE: Final = "-"
_SPARE_LINES: Final = 7
"""Lines of the screen that are no row."""


def _running(row: EngineRow) -> float:
    return row.in_flight + row.foreign


def _speed(row: EngineRow) -> float:
    return (row.prompt_tokens_per_s if row.role == "prefill" else row.answer_tokens_per_s) or 0.0


SORTS: Final[Mapping[str, Callable[[EngineRow], Any]]] = {
    "state": lambda row: -_WORST_FIRST.index(row.state),
    "running": _running,
    "requests": lambda row: row.legs_per_s or 0.0,
    "tokens": _speed,
    "cache": lambda row: row.cache_usage or 0.0,
    "hits": lambda row: row.hit_ratio or 0.0,
    "queue": lambda row: row.wait_ms,
    "ended": lambda row: row.legs,
    "id": lambda row: row.id,
}
"""The orders of engines by name. All begin with the highest, `id` apart."""


class ViewState(NamedTuple):
    """The choices of whoever looks, and the state of the connection."""

    url: str
    panel: str = "engines"
    sort: str = "state"
    is_reversed: bool = False
    is_paused: bool = False
    problem: str = ""
    """Why the snapshot is an old one; empty if it is not."""


def render(
    snapshot: Mapping[str, Any], view: ViewState, height: int | None, before: Mapping[str, float] | None = None
) -> RenderableType:
    """Returns what the terminal shows.

    Args:
        snapshot: as `/ui/state` answers it.
        view: the choices.
        height: the lines there are; None shows all rows, and no keys.
        before: counters of an earlier snapshot, from which on quantiles count.
    """
    rows = 10_000 if height is None else max(1, height - _SPARE_LINES)
    panel = {"engines": _engines, "requests": _requests, "errors": _errors}[view.panel](snapshot, view, rows)
    parts: list[RenderableType] = [_title(snapshot, view), _figures(snapshot, before), Text(""), panel]
    if height is not None:
        parts.append(_keys(view))
    return Group(*parts)


def _title(snapshot: Mapping[str, Any], view: ViewState) -> Text:
    status = str(snapshot["status"])
    modes = ", ".join(str(mode["use"]) for mode in snapshot["modes"])
    text = Text.assemble(("kvparams top", "bold"), "  ", view.url, "  ", (status, f"bold {_STATES.get(status, '')}"))
    states = [EngineRow._make(values).state for values in snapshot["engines"]]
    if unhealthy := sum(state in _UNHEALTHY for state in states):
        text.append(f"  {unhealthy} of {len(states)} engines unhealthy", style="bold red")
    text.append(f"  {modes} · {snapshot['policy']} · {_number(snapshot['workers'])} worker")
    text.append("s" if snapshot["workers"] != 1 else "")
    text.append(strftime("  %H:%M:%S", localtime(snapshot["time"])))
    if view.problem:
        text.append(f"  reconnecting: {view.problem}", style="bold yellow")
    elif view.is_paused:
        text.append("  paused", style="bold yellow")
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _figures(snapshot: Mapping[str, Any], before: Mapping[str, float] | None) -> Text:
    counters, rates, states = snapshot["counters"], snapshot["rates"], snapshot["states"]
    text = Text(no_wrap=True, overflow="ellipsis")

    def add(name: str, value: str, style: str = "bold") -> None:
        text.append(f"{name} ", style="dim")
        text.append(value, style=style)
        text.append("   ")

    add("requests/s", _rate(_total(rates, "requests_total")))
    encoding = f"{states['encoding']} encode, " if states["encoding"] else ""
    add(
        "under way",
        f"{states['pending']} wait, {encoding}{states['prefilling']} prefill, {states['decoding']} decode",
    )
    for name, label in (("ttft", "TTFT"), ("itl", "ITL")):
        family = QUANTILE_FAMILIES[name]
        add(label, " / ".join(_ms(quantile(family, share, counters, before)) for share in (0.5, 0.95)))
    prompt = rates.get("kvparams_proxy_prompt_tokens_sum")
    cached = rates.get("kvparams_proxy_cached_prompt_tokens_total")
    add("prompt tokens/s", _rate(prompt))
    add("cached", _percent(min(1.0, cached / prompt) if prompt and cached is not None else None))
    bad = sum(_outcome(counters, outcome) for outcome in ("refused", "failed", "midway"))
    add("errors", _number(bad), "bold red" if _outcome(counters, "failed") else "bold")
    return text


def _engines(snapshot: Mapping[str, Any], view: ViewState, rows: int) -> Table:
    table = _table()
    table.add_column("ENGINE", no_wrap=True, overflow="ellipsis", min_width=8)
    table.add_column("ROLE", no_wrap=True)
    table.add_column("GROUP", no_wrap=True, overflow="ellipsis")
    table.add_column("STATE", no_wrap=True)
    for name in ("RUN", "REQ/S", "TOK/S", "ITL", "QUEUE", "CACHE", "HITS", "ENDED"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("BREAKER, REASON", no_wrap=True, overflow="ellipsis")
    engines = [EngineRow._make(values) for values in snapshot["engines"]]
    engines.sort(key=lambda row: row.id)
    engines.sort(key=SORTS[view.sort], reverse=(view.sort != "id") is not view.is_reversed)
    for row in engines[:rows]:
        table.add_row(
            printable(row.id),
            row.role,
            printable(row.group),
            _state(row.state),
            _number(_running(row)),
            _rate(row.legs_per_s),
            _rate(_speed(row) if row.legs_per_s is not None else None),
            _ms(None if row.itl_ms is None else row.itl_ms / 1000),
            _NONE if row.role == "decode" else _ms(row.wait_ms / 1000),
            ("~" if row.cache_is_estimate and row.cache_usage is not None else "") + _percent(row.cache_usage),
            _percent(row.hit_ratio),
            _number(row.legs),
            _breaker(row, snapshot["time"]),
        )
    if len(engines) > rows:
        table.caption = f"{len(engines) - rows} more; the order decides which are shown"
    return table


def _breaker(row: EngineRow, now_s: float) -> Text:
    """Returns the state of the breaker, or the reason why an engine is unhealthy, with the time since then."""
    if row.state in _UNHEALTHY and row.reason:
        since = f"{_duration(now_s - row.since)}: " if row.since else ""
        return Text(f"{since}{printable(row.reason)}", style=_STATES[row.state])
    return _state(row.breaker) if row.breaker != "closed" else Text("closed", style="dim")


def _duration(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _requests(snapshot: Mapping[str, Any], view: ViewState, rows: int) -> Table:
    table = _table()
    table.add_column("REQUEST", no_wrap=True, overflow="ellipsis", min_width=12)
    table.add_column("OUTCOME", no_wrap=True)
    for name in ("TOTAL", "QUEUE", "PREFILL", "FIRST", "DECODE", "CACHED"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ROUTE", no_wrap=True, overflow="ellipsis", ratio=1)
    requests = snapshot["requests"]
    worst = (*requests["failed"][: rows // 4], *requests["slow"][: rows // 3])
    each_once = {(row["id"], row["started"]): row for row in (*worst, *requests["running"], *requests["recent"])}
    for row in list(each_once.values())[:rows]:
        spent = _spent(row)
        route = " → ".join(printable(str(id)) for _, id in row["route"]) or printable(str(row["error"] or ""))
        cached = _NONE if row["cached_tokens"] is None else f"{row['cached_tokens']}/{row['prompt_tokens']}"
        table.add_row(
            printable(str(row["id"])),
            _state(row["outcome"] or "running"),
            _ms(row["total_ms"] / 1000 if row["spans"] else None),
            *(_ms(spent.get(state)) for state in ("queued", "prefill", "decode", "first_byte")),
            cached,
            route,
        )
    table.caption = "failed, slowest, running and recent ones"
    return table


def _errors(snapshot: Mapping[str, Any], view: ViewState, rows: int) -> Table:
    table = _table()
    table.add_column("ERROR", no_wrap=True)
    table.add_column("COUNT", justify="right")
    table.add_column("/MIN", justify="right")
    table.add_column("MEANING AND WHAT TO DO", ratio=1)
    for row in snapshot["errors"][: max(1, rows // 3)]:
        meaning = str(row["meaning"])
        text = f"{meaning[:1].upper()}{meaning[1:]}. {row['action']}"
        table.add_row(printable(str(row["kind"])), _number(row["count"]), _rate(row["per_min"]), text)
    if not snapshot["errors"]:
        table.caption = "no errors since the start"
    return table


def _keys(view: ViewState) -> Text:
    order = f"{view.sort}{' reversed' if view.is_reversed else ''}"
    text = Text(no_wrap=True, overflow="ellipsis", style="dim")
    pause = "go on" if view.is_paused else "pause"
    text.append(f"q quit   tab {view.panel}   s order: {order}   r reverse   p {pause}")
    return text


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), header_style="bold", caption_justify="left")


def _state(state: str) -> Text:
    return Text(state.replace("_", " "), style=_STATES.get(state, ""))


def _spent(row: Mapping[str, Any]) -> Mapping[str, float]:
    """Returns the seconds in each state."""
    spans: Sequence[Sequence[Any]] = row["spans"]
    spent: dict[str, float] = {}
    for number, (state, _, at_ms) in enumerate(spans):
        end_ms = spans[number + 1][2] if number + 1 < len(spans) else row["total_ms"]
        spent[state] = spent.get(state, 0.0) + (end_ms - at_ms) / 1000
    return spent


def _total(values: Mapping[str, float | None], name: str) -> float | None:
    found = [value for key, value in values.items() if key.startswith(f"kvparams_proxy_{name}") and value is not None]
    return sum(found) if found else None


def _outcome(counters: Mapping[str, float], outcome: str) -> float:
    return counters.get(f'kvparams_proxy_requests_total{{outcome="{outcome}"}}', 0.0)


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _rate(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.0f} %"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return _NONE
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
