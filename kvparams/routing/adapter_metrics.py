"""Reads from an engine's Prometheus metrics how many LoRA adapters it can have loaded, and which have requests.

vLLM 0.32.0 `v1/metrics/loggers.py` publishes `vllm:lora_requests_info` once for each combination of adapters that it
has ever had; the value is the time, so the newest sample counts. Its labels `running_lora_adapters` and
`waiting_lora_adapters` both name every adapter with requests, whether they run or wait (`LoRARequestStates` fills both
with the same names). SGLang 0.5.23 publishes the number of slots alone.
"""

import re
from itertools import islice
from math import isfinite
from typing import Final, NamedTuple

from kvparams.routing.engine_samples import SampleError, compile_names, find_samples

__all__ = ["AdapterMetrics", "parse_adapter_metrics"]

_VLLM: Final = b"vllm:lora_requests_info{"
_SGLANG: Final = compile_names((b"sglang:lora_pool_slots_total",))
_LABEL: Final = re.compile(rb'(max_lora|running_lora_adapters|waiting_lora_adapters)="((?:[^"\\\n]|\\.)*)"')
_ESCAPES: Final = {b"\\\\": b"\\", b'\\"': b'"', b"\\n": b"\n"}
_SAMPLE: Final = re.compile(rb"\nvllm:lora_requests_info\{([^\n]{0,65536})\}[ \t]+([0-9.eE+]{1,32})")
"""Labels and value. It matches at the beginning of a line alone, so the time of a search is linear."""
_MOST_SAMPLES: Final = 24_000
"""A combination of adapters is a sample, and vLLM removes none. That is as many as a page of 2 MiB has; some 15 ms."""
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
        return _sglang_metrics(text)
    labels = {name: _unescape(value) for name, value in _LABEL.findall(newest)}
    names = (labels.get(name, b"") for name in (b"running_lora_adapters", b"waiting_lora_adapters"))
    return _metrics(labels.get(b"max_lora", b""), b",".join(names))


def _sglang_metrics(text: bytes | bytearray) -> AdapterMetrics | None:
    try:
        slots = next((each.value for each in find_samples(text, _SGLANG) if each.value is not None), None)
    except SampleError:
        return None
    return None if slots is None else _metrics(slots, b"")


def _newest_sample(text: bytes | bytearray) -> bytes | None:
    """Returns the labels of vLLM's sample with the highest value: it may stand anywhere."""
    if text.startswith(_VLLM):
        text = b"\n" + text
    newest: re.Match[bytes] | None = None
    newest_at = -1.0
    for found in islice(_SAMPLE.finditer(text), _MOST_SAMPLES):
        try:
            when = float(found[2])
        except ValueError:
            continue
        if isfinite(when) and when >= newest_at:
            newest, newest_at = found, when
    return None if newest is None else bytes(newest[1])


def _metrics(slots: bytes | float, names: bytes) -> AdapterMetrics | None:
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
