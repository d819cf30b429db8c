"""Reads an engine's load from its Prometheus metrics: requests, the use of its cache, and the KV bytes it moved.

Only the lines that are wanted are parsed; the rest of the text is skipped by searching for their names.
"""

import re
from collections.abc import Iterable
from math import isfinite
from typing import Final, NamedTuple

from kvparams.routing.engine_samples import RANK_LABEL, compile_names, find_samples

__all__ = [
    "MovedBytes",
    "QueueDepthError",
    "add_moved_bytes",
    "parse_cache_usages",
    "parse_moved_bytes",
    "parse_queue_depths",
]

_NAMES: Final = (
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
_USAGE: Final = compile_names((b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage"))
"""The share of the KV cache that is used, from 0 to 1, in the same places; `gpu_cache_usage_perc` until vLLM 0.10."""
_MOVED_NAMES: Final = (
    ((b"vllm:nixl_bytes_transferred_sum", 1), (b"sglang:kv_transfer_total_mb_sum", 1 << 20)),
    ((b"vllm:kvparams_bytes_loaded_total", 1), (b"reference_engine:kv_bytes_loaded_total", 1)),
    ((b"vllm:kvparams_bytes_saved_total", 1), (b"reference_engine:kv_bytes_saved_total", 1)),
)
"""The names for each member of `MovedBytes`, with their units in bytes.

vLLM 0.32 `kv_connector/v1/nixl/stats.py`: the side that moves the KV counts it, which is decode unless prefill pushes.
SGLang 0.5.23 `srt/observability/metrics_collector.py`: prefill counts. The others are connectors of this project."""
_MOVED_PLACES: Final = {name: (place, unit) for place, names in enumerate(_MOVED_NAMES) for name, unit in names}
_MOVED: Final = compile_names(_MOVED_PLACES)
_MOST_SAMPLES: Final = 1024
_LONGEST_LINE: Final = 4096
_MOST_BYTES: Final = 256 << 10
"""The longest text of all samples together, whose labels are searched."""
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


class QueueDepthError(ValueError):
    """The metrics have the wanted names, and no plausible numbers with them."""


def parse_queue_depths(text: bytes | bytearray) -> dict[str, int]:
    """Returns the requests that each data-parallel rank of an engine runs or queues.

    Args:
        text: metrics in Prometheus' text format. The time is linear in its length.

    Returns:
        The numbers by rank, of which an engine without ranks has one: the empty text, or `0` in vLLM. Nothing where
        the text has none of the names.

    Raises:
        QueueDepthError: a number is missing, negative, not finite or implausibly high, or there are too many.
    """
    found: dict[tuple[bytes, bytes], float] = {}
    samples = nbytes = 0
    for name in _NAMES:
        end = 0
        while (at := text.find(name, end)) >= 0:
            samples += 1
            if samples > _MOST_SAMPLES:
                raise QueueDepthError(f"there are more than {_MOST_SAMPLES} samples")
            end = text.find(b"\n", at, at + _LONGEST_LINE)
            if end < 0:
                if len(text) - at > _LONGEST_LINE:
                    raise QueueDepthError(f"a sample is longer than {_LONGEST_LINE} bytes")
                end = len(text)
            nbytes += end - at
            if nbytes > _MOST_BYTES:
                raise QueueDepthError(f"the samples have more than {_MOST_BYTES} bytes")
            if at and text[at - 1] != 0x0A:  # a comment, or the end of a longer name
                continue
            rest = bytes(text[at + len(name) : end])
            if rest[:1] not in (b"{", b" ", b"\t"):  # a longer name
                continue
            labels, _, value = rest[1:].rpartition(b"}") if rest[:1] == b"{" else (b"", b"", rest)
            if _PRIORITY.search(labels):
                continue
            # Tensor-parallel ranks report the same requests again.
            rank = RANK_LABEL.search(labels)
            key = (name, b"" if rank is None else rank[1])
            found[key] = max(found.get(key, 0.0), _count(value))
    if sum(found.values()) > _MOST_REQUESTS:
        raise QueueDepthError("there are implausibly many requests")
    depths: dict[str, float] = {}
    for (_, named), count in found.items():
        key = named.decode("utf-8", "replace")
        depths[key] = depths.get(key, 0.0) + count
    return {key: round(count) for key, count in depths.items()}


def parse_cache_usages(text: bytes | bytearray) -> dict[str, float]:
    """Returns the share of the KV cache that is used, by data-parallel rank: see `parse_queue_depths`."""
    highest: dict[str, float] = {}
    for _, rank, share in find_samples(text, _USAGE):
        if share <= 1.0:
            highest[rank] = max(highest.get(rank, share), share)
    return highest


def parse_moved_bytes(text: bytes | bytearray) -> dict[str, MovedBytes]:
    """Returns the KV bytes that have been moved, by data-parallel rank: see `parse_queue_depths`."""
    totals: dict[str, list[float | None]] = {}
    for name, rank, value in find_samples(text, _MOVED):
        place, unit = _MOVED_PLACES[name]
        found = totals.setdefault(rank, [None] * len(_MOVED_NAMES))
        found[place] = (found[place] or 0.0) + unit * value
    moved = {rank: MovedBytes._make(map(_plausible, found)) for rank, found in totals.items()}
    return {rank: each for rank, each in moved.items() if any(value is not None for value in each)}


def add_moved_bytes(all_moved: Iterable[MovedBytes]) -> MovedBytes:
    """Returns what several ranks have moved together."""
    found: list[float | None] = []
    for each in zip(*all_moved, strict=True):
        known = [value for value in each if value is not None]
        found.append(_plausible(sum(known)) if known else None)
    return MovedBytes._make(found)


def _plausible(moved: float | None) -> float | None:
    return None if moved is None or moved > _MOST_MOVED else moved


def _count(value: bytes) -> float:
    words = value.split(maxsplit=2)
    try:
        count = float(words[0])
    except (IndexError, ValueError):
        raise QueueDepthError("a sample is not a number") from None
    if not isfinite(count) or count < 0:
        raise QueueDepthError("a sample is negative or not finite")
    return count
