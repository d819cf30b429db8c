"""Reads from an engine's Prometheus metrics how many LoRA adapters it can have loaded, and which have requests.

vLLM 0.32.0 `v1/metrics/loggers.py` publishes `vllm:lora_requests_info` once for each combination of adapters that it
has ever had; the value is the time, so the newest sample counts. Its labels `running_lora_adapters` and
`waiting_lora_adapters` both name every adapter with requests, whether they run or wait (`LoRARequestStates` fills both
with the same names). SGLang 0.5.23 publishes the number of slots alone.
"""

import re
from math import isfinite
from typing import Final, NamedTuple

__all__ = ["AdapterMetrics", "parse_adapter_metrics"]

_VLLM: Final = b"vllm:lora_requests_info{"
_SGLANG: Final = b"\nsglang:lora_pool_slots_total"
_VALUE: Final = re.compile(rb"(?:\{[^\n]{0,2048}\})?[ \t]+([0-9.eE+-]{1,32})")
"""Labels and value, behind the name."""
_LABEL: Final = re.compile(rb'(max_lora|running_lora_adapters|waiting_lora_adapters)="((?:[^"\\\n]|\\.)*)"')
_ESCAPES: Final = {b"\\\\": b"\\", b'\\"': b'"', b"\\n": b"\n"}
_MOST_SAMPLES: Final = 4096
"""A combination of adapters is a sample: of more, nothing is read."""
_LONGEST_LINE: Final = 64 << 10
_MOST_SLOTS: Final = 1_000_000


class AdapterMetrics(NamedTuple):
    """An `AdapterMetrics` is what an engine says of its adapter slots."""

    slots: int
    active: frozenset[str]
    """Adapters that have requests, running or waiting."""


def parse_adapter_metrics(text: bytes | bytearray) -> AdapterMetrics | None:
    """Returns what an engine says of its adapter slots, or None if it says nothing that can be believed.

    `text` is in Prometheus' text format. The time is linear in its length.
    """
    newest = _newest_sample(text)
    if newest is None:
        at = text.find(_SGLANG)  # behind the comments that say what it is
        found = None if at < 0 else _VALUE.match(text, at + len(_SGLANG))
        return None if found is None else _metrics(found[1], b"")
    labels = {name: _unescape(value) for name, value in _LABEL.findall(newest)}
    names = (labels.get(name, b"") for name in (b"running_lora_adapters", b"waiting_lora_adapters"))
    return _metrics(labels.get(b"max_lora", b""), b",".join(names))


def _newest_sample(text: bytes | bytearray) -> bytes | None:
    """Returns the labels of vLLM's sample with the highest value."""
    newest, newest_at, end = None, -1.0, 0
    for _ in range(_MOST_SAMPLES):
        at = text.find(_VLLM, end)
        if at < 0:
            return newest
        end = text.find(b"\n", at)
        end = len(text) if end < 0 else end
        if end - at > _LONGEST_LINE or (at and text[at - 1] != 0x0A):  # a comment, or the end of a longer name
            continue
        labels, _, value = bytes(text[at + len(_VLLM) : end]).rpartition(b"}")
        try:
            when = float(value.split(maxsplit=1)[0])
        except (IndexError, ValueError):
            continue
        if isfinite(when) and when >= newest_at:
            newest, newest_at = labels, when
    return None


def _metrics(slots: bytes, names: bytes) -> AdapterMetrics | None:
    try:
        count = float(slots)
        active = frozenset(filter(None, names.decode().split(",")))
    except ValueError:  # or no UTF-8
        return None
    if not 1 <= count <= _MOST_SLOTS:
        return None
    return AdapterMetrics(int(count), active)


def _unescape(value: bytes) -> bytes:
    return re.sub(rb"\\.", lambda found: _ESCAPES.get(found[0], found[0]), value)
