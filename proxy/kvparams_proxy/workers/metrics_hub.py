"""The metrics of all workers, as the supervisor holds them.

Each worker sends its counters and histograms every second, and all its metrics at each scrape. The supervisor keeps the
last snapshot of each worker, and adds up those of workers that have exited. Every value that a scrape has shown is in
such a snapshot. So no counter goes backwards, however a worker exits.
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
from kvparams_proxy.telemetry.metric_snapshots import MetricSnapshot, decode_metric, encode_metric, spell_series

__all__ = ["MetricsHub", "WorkerGauges"]

_INSTANCE = "instance"
"""The label of instances. An instance that leaves the fleet leaves the metrics."""


class WorkerGauges(Collector):
    """Counts the workers of the proxy."""

    def __init__(self) -> None:
        self.ready = 0
        """Workers that accept connections now."""
        self.restarts = 0
        """Workers that were started because another one had exited unexpectedly."""

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        yield GaugeMetricFamily("kvparams_proxy_workers", "Worker processes that accept connections.", value=self.ready)
        text = "Worker processes that were started because another one had exited unexpectedly."
        yield CounterMetricFamily("kvparams_proxy_worker_restarts", text, value=self.restarts)


class MetricsHub:
    """Keeps the snapshots of all workers and merges them."""

    def __init__(self, *own: Collector) -> None:
        """`own` are the supervisor's own metrics. Those of its process are added to the workers' automatically."""
        self._own = CollectorRegistry()
        for collector in own:
            self._own.register(collector)
        ProcessCollector(registry=self._own)
        self._arriving: dict[int, dict[str, bytes]] = {}
        """Families of incomplete snapshots, by the serial number of the worker and the name of the family."""
        self._workers: dict[int, dict[str, bytes]] = {}
        """The last snapshot of each worker, still encoded: most are never read."""
        self._ended: dict[str, MetricSnapshot] = {}
        """The sums of the counters and histograms of all workers that have exited."""

    def receive(self, serial: int, payload: bytes) -> None:
        """Adds the payload of a `FrameKind.FAMILY` to the worker's incomplete snapshot."""
        name, _, data = payload.partition(b"\n")
        self._arriving.setdefault(serial, {})[name.decode()] = data

    def complete(self, serial: int, *, is_last: bool = False) -> None:
        """Completes the snapshot of a worker. Families that it lacks keep their last values.

        Args:
            serial: the worker's serial number.
            is_last: the app of the worker has closed, and no longer knows its instances. Series that the snapshot
                lacks keep their last values, too.
        """
        arrived, known = self._arriving.pop(serial, {}), self._workers.setdefault(serial, {})
        for name, data in arrived.items():
            if is_last and name in known:
                merged = overlay_snapshot(decode_metric(known[name]), decode_metric(data))
                known[name] = encode_metric(merged.metric())
            else:
                known[name] = data

    def end(self, serial: int) -> None:
        """Adds the counts of a worker that has exited to the sums. An incomplete snapshot is dropped."""
        self._arriving.pop(serial, None)
        for name, data in self._workers.pop(serial, {}).items():
            snapshot = decode_metric(data)
            if is_cumulative(snapshot):
                before = self._ended.get(name)
                self._ended[name] = snapshot if before is None else merge_snapshots((before, snapshot))

    def ended_counts(self) -> dict[str, float]:
        """Returns the counts of the workers that have exited, by series as /metrics spells it."""
        return {
            spell_series(sample.name, sample.labels): sample.value
            for snapshot in self._ended.values()
            for sample in snapshot.samples
        }

    def merged(self) -> Iterator[Metric]:
        """Merges the metrics of all workers, one family at a time."""
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
