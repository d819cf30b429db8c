"""Snapshots of Prometheus metrics, which are sent from one process to another as JSON."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from prometheus_client.core import Exemplar, GaugeMetricFamily, Metric

__all__ = [
    "Labels",
    "MeanGaugeFamily",
    "MetricSample",
    "MetricSnapshot",
    "decode_metric",
    "encode_metric",
    "spell_series",
]

Labels = tuple[str, ...]
"""The names and values of labels, alternating."""


class MeanGaugeFamily(GaugeMetricFamily):
    """A gauge family of means. It keeps the number of observations behind each, by which means are merged."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, documentation, labels=labels)
        self.weights: list[float] = []
        """The number of observations of each sample."""

    def add_mean(self, labels: Sequence[str], total: float, number: int) -> None:
        """Adds the mean of `number` observations. Without observations it adds nothing."""
        if number:
            self.add_metric(labels, total / number)
            self.weights.append(number)


class MetricSample(NamedTuple):
    """A value of a metric."""

    name: str
    labels: Labels
    value: float
    weight: float = 1.0
    """The number of observations, if the value is a mean."""
    exemplar: Exemplar | None = None


class MetricSnapshot(NamedTuple):
    """The values of one metric family at one time."""

    name: str
    documentation: str
    type: str
    unit: str
    samples: list[MetricSample]

    def metric(self) -> Metric:
        """Converts it into a metric of the Prometheus client library."""
        metric = Metric(self.name, self.documentation, self.type, self.unit)
        for name, labels, value, _, exemplar in self.samples:
            metric.add_sample(name, dict(zip(labels[::2], labels[1::2], strict=True)), value, exemplar=exemplar)
        return metric


def encode_metric(metric: Metric) -> bytes:
    """Encodes a metric family for `decode_metric`."""
    weights: Sequence[float] = metric.weights if isinstance(metric, MeanGaugeFamily) else ()
    samples: list[list[object]] = []
    for number, sample in enumerate(metric.samples):
        flat: list[object] = [sample.name, [text for label in sample.labels.items() for text in label], sample.value]
        if weights:
            flat.append(weights[number])
        elif sample.exemplar is not None:
            flat += [1.0, [sample.exemplar.labels, sample.exemplar.value, sample.exemplar.timestamp]]
        samples.append(flat)
    return json.dumps([metric.name, metric.documentation, metric.type, metric.unit, samples]).encode()


def decode_metric(data: bytes) -> MetricSnapshot:
    """Decodes the output of `encode_metric`."""
    name, text, kind, unit, samples = cast("tuple[str, str, str, str, list[list[object]]]", json.loads(data))
    return MetricSnapshot(name, text, kind, unit, [_sample(*flat) for flat in samples])


def _sample(name: object, labels: object, value: object, weight: object = 1.0, exemplar: object = None) -> MetricSample:
    return MetricSample(
        cast("str", name),
        tuple(cast("list[str]", labels)),
        cast("float", value),
        cast("float", weight),
        None if exemplar is None else Exemplar(*cast("list[Any]", exemplar)),
    )


def spell_series(name: str, labels: Labels) -> str:
    """Returns the name of a series as /metrics spells it. No value of a label needs escaping."""
    pairs = sorted(zip(labels[::2], labels[1::2], strict=True))
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in pairs) + "}" if pairs else name
