"""The metrics of all workers, as the supervisor holds them.

A worker sends its counters and histograms every second, and everything when somebody asks for metrics. The supervisor
keeps the last snapshot of each, so that what an ended worker has counted is still there. Whatever was shown once is in
such a snapshot: no counter ever goes backwards, however a worker ends.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from kvparams_proxy.telemetry.metric_merge import (
    is_cumulative,
    label_value,
    merge_snapshots,
    overlay_snapshot,
    retain_labels,
)
from kvparams_proxy.telemetry.metric_snapshots import MetricSnapshot, decode_metric, encode_metric

__all__ = ["MetricsHub", "WorkerGauges"]

_INSTANCE = "instance"
"""The label of instances. Those that leave the fleet leave the metrics."""


class WorkerGauges(Collector):
    """Counts the workers of the proxy."""

    def __init__(self) -> None:
        self.ready = 0
        """Workers that take requests now."""
        self.restarts = 0
        """Workers that were started in the place of one that had ended unasked."""

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        yield GaugeMetricFamily("kvparams_proxy_workers", "Worker processes that take requests.", value=self.ready)
        text = "Workers that were started because one had ended unasked."
        yield CounterMetricFamily("kvparams_proxy_worker_restarts", text, value=self.restarts)


class MetricsHub:
    """Collects the snapshots of workers and merges them."""

    def __init__(self, *own: Collector) -> None:
        """`own` is shown beside what workers have, and the supervisor's process counts as one of theirs."""
        self._own = CollectorRegistry()
        for collector in own:
            self._own.register(collector)
        ProcessCollector(registry=self._own)
        self._arriving: dict[int, dict[str, bytes]] = {}
        """By the serial number of a worker and the name of a family: parts of a snapshot that is not whole yet."""
        self._workers: dict[int, dict[str, bytes]] = {}
        """The last snapshots, which are decoded only when somebody asks."""
        self._ended: dict[str, MetricSnapshot] = {}
        """Counters and histograms of all workers that have ended."""

    def receive(self, serial: int, payload: bytes) -> None:
        """Takes the payload of a `FrameKind.FAMILY`."""
        name, _, data = payload.partition(b"\n")
        self._arriving.setdefault(serial, {})[name.decode()] = data

    def complete(self, serial: int, *, is_last: bool = False) -> None:
        """Puts a snapshot into effect; families that it lacks stay as they were.

        Args:
            serial: the worker's.
            is_last: the worker has ended its work, and may no longer know what it knew: series stay as well.
        """
        arrived, known = self._arriving.pop(serial, {}), self._workers.setdefault(serial, {})
        for name, data in arrived.items():
            if is_last and name in known:
                merged = overlay_snapshot(decode_metric(known[name]), decode_metric(data))
                known[name] = encode_metric(merged.metric())
            else:
                known[name] = data

    def end(self, serial: int) -> None:
        """Keeps what a worker has counted: its process has ended. What had arrived of another snapshot is dropped."""
        self._arriving.pop(serial, None)
        for name, data in self._workers.pop(serial, {}).items():
            snapshot = decode_metric(data)
            if is_cumulative(snapshot):
                before = self._ended.get(name)
                self._ended[name] = snapshot if before is None else merge_snapshots((before, snapshot))

    def merged(self) -> Iterator[Metric]:
        """Collects one metric family of all workers after the other."""
        own = {metric.name: decode_metric(encode_metric(metric)) for metric in self._own.collect()}
        names = dict.fromkeys(name for worker in self._workers.values() for name in worker)
        for name in dict.fromkeys((*names, *self._ended, *own)):
            living = [decode_metric(worker[name]) for worker in list(self._workers.values()) if name in worker]
            ended = self._ended.get(name)
            if ended is not None and living:
                seen = (label_value(sample, _INSTANCE) for snapshot in living for sample in snapshot.samples)
                ended = self._ended[name] = retain_labels(ended, _INSTANCE, {id for id in seen if id is not None})
            parts = [*living, *(part for part in (ended, own.get(name)) if part is not None)]
            if parts:
                yield merge_snapshots(parts).metric()
