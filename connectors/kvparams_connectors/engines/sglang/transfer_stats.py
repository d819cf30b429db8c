"""Counts what the backend does, and hands SGLang the part that it asks for.

SGLang has four histograms for a storage backend (`StorageMetrics`, srt/observability/metrics_collector.py of 0.5.23:
pages and bandwidth of each read and each write) and no place for anything else, so the rest is for the log and for
whoever holds the backend. What is handed to SGLang is handed out once, and bounded if nobody asks.
"""

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

__all__ = ["HiCacheStats", "TransferSample"]

_KEPT: Final = 1024
_GIGA: Final = 1e9


@dataclass(frozen=True, slots=True)
class TransferSample:
    """A `TransferSample` is a read or a write of several pages."""

    pages: int
    nbytes: int
    """That were moved; pages that were there already are not."""
    seconds: float


class HiCacheStats:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reads: deque[TransferSample] = deque(maxlen=_KEPT)
        self._writes: deque[TransferSample] = deque(maxlen=_KEPT)

    @property
    def counts(self) -> Mapping[str, int]:
        """By name, until now: `pages_loaded`, `pages_saved`, `pages_refused.REASON`, `store_failures.CODE`."""
        with self._lock:
            return dict(self._counts)

    def add(self, name: str, number: int = 1) -> None:
        """Count something."""
        if number:
            with self._lock:
                self._counts[name] += number

    def read(self, transfer: TransferSample) -> None:
        """Pages were read."""
        with self._lock:
            self._reads.append(transfer)

    def wrote(self, transfer: TransferSample) -> None:
        """Pages were written."""
        with self._lock:
            self._writes.append(transfer)

    def for_sglang(self) -> object:
        """Returns what is new, as SGLang wants it."""
        metrics: Any = import_module("sglang.srt.observability.metrics_collector").StorageMetrics()
        with self._lock:
            reads, writes = list(self._reads), list(self._writes)
            self._reads.clear()
            self._writes.clear()
        metrics.prefetch_pgs += [one.pages for one in reads]
        metrics.backup_pgs += [one.pages for one in writes]
        metrics.prefetch_bandwidth += [one.nbytes / one.seconds / _GIGA for one in reads if one.nbytes]
        metrics.backup_bandwidth += [one.nbytes / one.seconds / _GIGA for one in writes if one.nbytes]
        return metrics
