"""Reads an engine's load from its Prometheus metrics: requests, the use of its cache, and the KV bytes it moved."""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvparams.routing.engine_samples import EngineSample, SampleError, compile_names, find_samples

__all__ = ["EngineMetrics", "MovedBytes", "add_moved_bytes", "parse_engine_metrics"]

_DEPTHS: Final = (
    b"vllm:num_requests_running",
    b"vllm:num_requests_waiting",
    b"sglang:num_running_reqs",
    b"sglang:num_queue_reqs",
    b"sglang:num_prefill_bootstrap_queue_reqs",
    b"sglang:num_prefill_inflight_queue_reqs",
    b"sglang:num_decode_prealloc_queue_reqs",
    b"sglang:num_decode_transfer_queue_reqs",
)
"""The queues that a request passes through one after the other: vLLM 0.32 `v1/metrics/loggers.py`, SGLang 0.5.23
`srt/observability/metrics_collector.py`."""
_PRIORITY: Final = re.compile(rb'(?:^|,)priority="[^"]')
"""SGLang repeats each total by priority."""
_USAGES: Final = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")
"""The share of the KV cache that is used, from 0 to 1, in the same places; `gpu_cache_usage_perc` until vLLM 0.10."""
_MOVED: Final = (
    ((b"vllm:nixl_bytes_transferred_sum", 1), (b"sglang:kv_transfer_total_mb_sum", 1 << 20)),
    ((b"vllm:kvparams_bytes_loaded_total", 1), (b"reference_engine:kv_bytes_loaded_total", 1)),
    ((b"vllm:kvparams_bytes_saved_total", 1), (b"reference_engine:kv_bytes_saved_total", 1)),
)
"""The names for each member of `MovedBytes`, with their units in bytes.

vLLM 0.32 `kv_connector/v1/nixl/stats.py`: the side that moves the KV counts it, which is decode unless prefill pushes.
SGLang 0.5.23 `srt/observability/metrics_collector.py`: prefill counts. The others are connectors of this project."""
_MOVED_PLACES: Final = {name: (place, unit) for place, names in enumerate(_MOVED) for name, unit in names}
_NAMES: Final = compile_names((*_DEPTHS, *_USAGES, *_MOVED_PLACES))
_MOST_REQUESTS: Final = 1_000_000
_MOST_MOVED: Final = 1e18
"""Bytes: more are implausible."""


class MovedBytes(NamedTuple):
    """The KV bytes that an engine has moved since it started; None where it does not say."""

    transferred: float | None
    """Between engines."""
    loaded: float | None
    """From a store."""
    saved: float | None
    """To a store."""


class EngineMetrics(NamedTuple):
    """The load of an engine, by data-parallel rank.

    An engine without ranks has one figure: of the rank with the empty name, or of `0` in vLLM. Where the engine does
    not say something, there is no figure.
    """

    queue_depths: dict[str, int]
    """The requests that each rank runs or queues."""
    cache_usages: dict[str, float]
    """The share of the KV cache that is used."""
    moved: dict[str, MovedBytes]
    fault: str | None
    """Why the queue depths that are said cannot be believed; then there are none."""


def parse_engine_metrics(text: bytes | bytearray) -> EngineMetrics:
    """Returns what an engine says of its load.

    Args:
        text: metrics in Prometheus' text format. The time is linear in its length.
    """
    depths: dict[tuple[bytes, str], float] = {}
    usages: dict[str, float] = {}
    moved: dict[str, list[float | None]] = {}
    fault: str | None = None
    try:
        for sample in find_samples(text, _NAMES):
            if sample.name in _DEPTHS:
                fault = _add_depth(depths, sample) or fault
            elif sample.value is None:
                continue
            elif sample.name in _USAGES:
                rank = sample.rank
                if sample.value <= 1.0:
                    usages[rank] = max(usages.get(rank, 0.0), sample.value)
            else:
                place, unit = _MOVED_PLACES[sample.name]
                found = moved.setdefault(sample.rank, [None] * len(_MOVED))
                found[place] = (found[place] or 0.0) + unit * sample.value
    except SampleError as error:
        fault = str(error)
    if sum(depths.values()) > _MOST_REQUESTS:
        fault = "there are implausibly many requests"
    return EngineMetrics({} if fault else _by_rank(depths), usages, _plausible_moved(moved), fault)


def add_moved_bytes(all_moved: Iterable[MovedBytes]) -> MovedBytes:
    """Returns what several ranks have moved together."""
    found: list[float | None] = []
    for each in zip(*all_moved, strict=True):
        known = [value for value in each if value is not None]
        found.append(_plausible(sum(known)) if known else None)
    return MovedBytes._make(found)


def _add_depth(depths: dict[tuple[bytes, str], float], sample: EngineSample) -> str | None:
    """Adds the number of requests in one queue. Returns what is wrong with it, if anything is."""
    if sample.value is None:
        return "a number of requests is no number, negative or not finite"
    if not _PRIORITY.search(sample.labels):
        # Tensor-parallel ranks report the same requests again.
        key = (sample.name, sample.rank)
        depths[key] = max(depths.get(key, 0.0), sample.value)
    return None


def _by_rank(depths: dict[tuple[bytes, str], float]) -> dict[str, int]:
    found: dict[str, float] = {}
    for (_, rank), count in depths.items():
        found[rank] = found.get(rank, 0.0) + count
    return {rank: round(count) for rank, count in found.items()}


def _plausible_moved(totals: dict[str, list[float | None]]) -> dict[str, MovedBytes]:
    moved = {rank: MovedBytes._make(map(_plausible, found)) for rank, found in totals.items()}
    return {rank: each for rank, each in moved.items() if any(value is not None for value in each)}


def _plausible(moved: float | None) -> float | None:
    return None if moved is None or moved > _MOST_MOVED else moved
