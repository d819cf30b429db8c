"""Describes the ways of a snapshot: what goes from each group of prefill engines to each group of decode engines."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvparams_proxy.ui.engine_rows import EngineRow, rounded
from kvparams_proxy.ui.worker_part import WorkerPart

__all__ = ["flow_rows"]

_Way = tuple[str, str]


def flow_rows(
    workers: Iterable[WorkerPart], engines: Sequence[EngineRow], legs_per_s: float | None
) -> list[dict[str, object]]:
    """Divides rates among the ways between groups, as the last requests took them.

    Bytes are those that engines count themselves. With most connectors decode engines count what they fetch, with some
    prefill engines what they send.

    Args:
        workers: the parts of all workers.
        engines: the rows of the engines.
        legs_per_s: decode legs that end each second; None without an earlier look.
    """
    number: dict[_Way, int] = {}
    tokens: dict[_Way, int] = {}
    for part in workers:
        for source, target, requests, prompt_tokens in part["flows"]:
            way = (str(source), str(target))
            number[way] = number.get(way, 0) + int(requests)
            tokens[way] = tokens.get(way, 0) + int(prompt_tokens)
    total = sum(number.values())
    weights = {way: float(tokens[way] or count) for way, count in number.items()}
    sent = _divided(_transferred(engines, "prefill"), weights, lambda way: way[0])
    fetched = _divided(_transferred(engines, "decode"), weights, lambda way: way[1])
    return [
        {
            "from": way[0],
            "to": way[1],
            "share": round(count / total, 4),
            "per_s": None if legs_per_s is None else rounded(legs_per_s * count / total),
            "tokens_per_s": None if legs_per_s is None else rounded(legs_per_s * tokens[way] / total),
            "bytes_per_s": _added(sent.get(way), fetched.get(way)),
        }
        for way, count in sorted(number.items(), key=lambda each: (-each[1], each[0]))
    ]


def _transferred(engines: Iterable[EngineRow], role: str) -> dict[str, float]:
    """Returns the bytes each second of the groups of a role in which an engine counts them."""
    found: dict[str, float] = {}
    for each in engines:
        if each.role == role and each.transfer_bytes_per_s is not None:
            found[each.group] = found.get(each.group, 0.0) + each.transfer_bytes_per_s
    return found


def _divided(
    rates: Mapping[str, float], weights: Mapping[_Way, float], group_of: Callable[[_Way], str]
) -> dict[_Way, float]:
    """Divides the rate of each group among its ways."""
    totals: dict[str, float] = {}
    for way, weight in weights.items():
        totals[group_of(way)] = totals.get(group_of(way), 0.0) + weight
    return {
        way: rates[group_of(way)] * weight / totals[group_of(way)]
        for way, weight in weights.items()
        if group_of(way) in rates
    }


def _added(one: float | None, other: float | None) -> float | None:
    return None if one is None and other is None else rounded((one or 0.0) + (other or 0.0))
