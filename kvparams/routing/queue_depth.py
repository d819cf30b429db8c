"""Reads an engine's load from its Prometheus metrics: requests, the use of its cache, and the KV bytes it moved.

Only the lines that are wanted are parsed; the rest of the text is skipped by searching for their names.
"""

import re
from collections.abc import Iterator
from math import inf, isfinite
from typing import Final, NamedTuple

__all__ = ["MovedBytes", "QueueDepthError", "parse_cache_usage", "parse_moved_bytes", "parse_queue_depth"]

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
_RANK: Final = re.compile(rb'(?:^|,)(?:engine|dp_rank)="([^"]*)"')
"""Data-parallel engines behind one address. Tensor-parallel ranks report the same requests again."""
_PRIORITY: Final = re.compile(rb'(?:^|,)priority="[^"]')
"""SGLang repeats each total by priority."""
_USAGE_NAMES: Final = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")
"""The share of the KV cache that is used, from 0 to 1, in the same places; `gpu_cache_usage_perc` until vLLM 0.10."""
_MOVED_NAMES: Final = (
    ((b"vllm:nixl_bytes_transferred_sum", 1), (b"sglang:kv_transfer_total_mb_sum", 1 << 20)),
    ((b"vllm:kvparams_bytes_loaded_total", 1), (b"reference_engine:kv_bytes_loaded_total", 1)),
    ((b"vllm:kvparams_bytes_saved_total", 1), (b"reference_engine:kv_bytes_saved_total", 1)),
)
"""The names for each member of `MovedBytes`, with their units in bytes.

vLLM 0.32 `kv_connector/v1/nixl/stats.py`: the side that moves the KV counts it, which is decode unless prefill pushes.
SGLang 0.5.23 `srt/observability/metrics_collector.py`: prefill counts. The others are connectors of this project."""
_MOST_SAMPLES: Final = 1024
_LONGEST_LINE: Final = 4096
_LONGEST_VALUE: Final = 64
"""Of a line: its value and its time."""
_MOST_BYTES: Final = 256 << 10
"""Of all samples together, whose labels are searched: some 10 ms."""
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


def parse_queue_depth(text: bytes | bytearray) -> int | None:
    """Returns the requests that an engine runs or queues, over all its data-parallel ranks.

    Args:
        text: metrics in Prometheus' text format. The time is linear in its length.

    Returns:
        The number, or None where the text has none of the names.

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
            rank = _RANK.search(labels)
            key = (name, b"" if rank is None else rank[1])
            found[key] = max(found.get(key, 0.0), _count(value))
    if not found:
        return None
    total = sum(found.values())
    if total > _MOST_REQUESTS:
        raise QueueDepthError("there are implausibly many requests")
    return round(total)


def parse_cache_usage(text: bytes | bytearray) -> float | None:
    """Returns the share of the KV cache that is used, the highest of all data-parallel ranks; None if it is not told.

    `text`: see `parse_queue_depth`.
    """
    shares = [share for name in _USAGE_NAMES for share in _values(text, name) if share <= 1.0]
    return max(shares, default=None)


def parse_moved_bytes(text: bytes | bytearray) -> MovedBytes | None:
    """Returns the KV bytes that an engine has moved, over all its ranks; None if it says nothing of them.

    `text`: see `parse_queue_depth`.
    """
    found: list[float | None] = []
    for names in _MOVED_NAMES:
        values = [unit * value for name, unit in names for value in _values(text, name)]
        total = sum(values)
        found.append(total if values and total <= _MOST_MOVED else None)
    return None if found == [None, None, None] else MovedBytes(*found)


def _values(text: bytes | bytearray, name: bytes) -> Iterator[float]:
    """Yields the values of the samples of this name that are numbers of 0 or more."""
    end = 0
    for _ in range(_MOST_SAMPLES):
        at = text.find(name, end)
        if at < 0:
            return
        end = at + len(name)
        line_end = text.find(b"\n", end, end + _LONGEST_LINE)
        if line_end < 0 and len(text) - end <= _LONGEST_LINE:
            line_end = len(text)
        if line_end < 0 or (at and text[at - 1] != 0x0A):  # a longer line, a comment, or another name
            continue
        rest, end = bytes(text[end:line_end]), line_end
        if rest[:1] not in (b"{", b" ", b"\t"):  # a longer name
            continue
        words = rest[-_LONGEST_VALUE:].rpartition(b"}")[2].split(maxsplit=1)
        try:
            value = float(words[0])
        except (IndexError, ValueError):
            continue
        if 0.0 <= value < inf:
            yield value


def _count(value: bytes) -> float:
    words = value.split(maxsplit=2)
    try:
        count = float(words[0])
    except (IndexError, ValueError):
        raise QueueDepthError("a sample is not a number") from None
    if not isfinite(count) or count < 0:
        raise QueueDepthError("a sample is negative or not finite")
    return count
