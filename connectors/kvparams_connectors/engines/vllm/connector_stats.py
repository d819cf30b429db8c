"""Carries what the connector counts to vLLM's log and its /metrics.

vLLM carries a dictionary from each half, adds them up by `aggregate`, and hands the sum to `TransferCountsMetrics`.
Every number is a change since the last report, so that sums over ranks and steps stay true.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvparams_connectors.engines.vllm.counters import COUNTER_HELP, FAILED_PREFIX, REFUSED_PREFIX, UNTRUSTED_PREFIX

if TYPE_CHECKING:  # vLLM's own classes, as far as they matter here

    class KVConnectorStats:
        """vllm/distributed/kv_transfer/kv_connector/v1/metrics.py."""

        data: dict[str, Any]

        def __init__(self, data: dict[str, Any]) -> None: ...

    class KVConnectorPromMetrics:
        """Stands for the class of the same file."""

        _counter_cls: Any
        per_engine_labelvalues: dict[int, list[object]]

        def __init__(
            self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
        ) -> None: ...

    class KVConnectorWorkerMetadata:
        """vllm/distributed/kv_transfer/kv_connector/v1/base.py."""

else:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["TransferCounts", "TransferCountsMetrics", "WorkerMetadata", "count_changes"]

_PREFIX: Final = "vllm:kvparams_"


def count_changes(reported: dict[str, int], now: Mapping[str, int]) -> "TransferCounts | None":
    """Returns what is new; `reported` is brought up to now."""
    new = {name: count - reported.get(name, 0) for name, count in now.items() if count != reported.get(name, 0)}
    reported.update(now)
    return TransferCounts(data=new) if new else None


class TransferCounts(KVConnectorStats):
    """Numbers by name."""

    def reset(self) -> None:
        """Start again from nothing."""
        self.data = {}

    def aggregate(self, other: "TransferCounts") -> "TransferCounts":
        """Both together."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: as they are."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Returns whether nothing happened."""
        return not self.data


class WorkerMetadata(KVConnectorWorkerMetadata):
    """Describes what a worker tells the scheduler after a step."""

    def __init__(self, loads: list[tuple[int, float]], copied: list[int]) -> None:
        """Takes the results of one step.

        Args:
            loads: bytes and seconds of each load that has ended.
            copied: the numbers of save orders that no longer need their blocks; every rank names each number once.
        """
        self.loads: Final = loads
        self.copied: Final = copied

    def aggregate(self, other: "WorkerMetadata") -> "WorkerMetadata":
        """Merges the metadata of several ranks."""
        return WorkerMetadata(self.loads + other.loads, self.copied + other.copied)


class TransferCountsMetrics(KVConnectorPromMetrics):
    """Counters in vLLM's /metrics: `vllm:kvparams_pages_loaded_total` and so on."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=_PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in COUNTER_HELP.items()
        }
        self._refused = self._counter_cls(
            name=_PREFIX + "pages_refused",
            documentation="Pages that were read and not used, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._failed = self._counter_cls(
            name=_PREFIX + "store_failures",
            documentation="What the store answered other than yes or no, by code.",
            labelnames=[*labelnames, "code"],
        )
        self._untrusted = self._counter_cls(
            name=_PREFIX + "requests_untrusted",
            documentation="Requests whose document was not acted on, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        for labels in self.per_engine_labelvalues.values():
            for counter in self._counters.values():
                counter.labels(*labels)

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        """Add what is new."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name.startswith(REFUSED_PREFIX):
                self._refused.labels(*labels, name.removeprefix(REFUSED_PREFIX)).inc(count)
            elif name.startswith(FAILED_PREFIX):
                self._failed.labels(*labels, name.removeprefix(FAILED_PREFIX)).inc(count)
            elif name.startswith(UNTRUSTED_PREFIX):
                self._untrusted.labels(*labels, name.removeprefix(UNTRUSTED_PREFIX)).inc(count)
            elif name in self._counters:
                self._counters[name].labels(*labels).inc(count)
