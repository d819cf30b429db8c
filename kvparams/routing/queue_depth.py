"""Reads an engine's load from its Prometheus metrics: the requests that it runs or queues, and how full its cache is.

Only the lines that are wanted are parsed; the rest of the text is skipped by searching for their names.
"""

import re
from math import isfinite
from typing import Final

__all__ = ["QueueDepthError", "parse_cache_usages", "parse_queue_depths"]

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
_USAGE: Final = re.compile(rb"(?:\{([^\n]{0,2048})\})?[ \t]+([0-9.eE+-]{1,32})")
"""Labels and value, behind the name."""
_MOST_SAMPLES: Final = 1024
_LONGEST_LINE: Final = 4096
_MOST_BYTES: Final = 256 << 10
"""Of all samples together, whose labels are searched: some 10 ms."""
_MOST_REQUESTS: Final = 1_000_000


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
            rank = _RANK.search(labels)
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
    for name in _USAGE_NAMES:
        at = -1
        for _ in range(_MOST_SAMPLES):
            at = text.find(name, at + 1)
            if at < 0:
                break
            sample = _USAGE.match(text, at + len(name))
            if sample is None or (at and text[at - 1] != 0x0A):  # a comment, or another name
                continue
            try:
                share = float(sample[2])
            except ValueError:
                continue
            if 0.0 <= share <= 1.0:
                named = _RANK.search(sample[1] or b"")
                key = "" if named is None else named[1].decode("utf-8", "replace")
                highest[key] = max(highest.get(key, share), share)
    return highest


def _count(value: bytes) -> float:
    words = value.split(maxsplit=2)
    try:
        count = float(words[0])
    except (IndexError, ValueError):
        raise QueueDepthError("a sample is not a number") from None
    if not isfinite(count) or count < 0:
        raise QueueDepthError("a sample is negative or not finite")
    return count
