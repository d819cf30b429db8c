"""Prometheus metrics of the endpoint picker, beside those that it shares with the proxy."""

from collections import Counter
from collections.abc import Iterable
from typing import Final, Literal, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["PickerMetrics"]

_PICKS: Final = ("picked", "refused", "left")
Server = Literal["primary", "fallback", "unlisted", "unreached", "gateway", "unknown"]
_SERVED: Final[tuple[Server, ...]] = get_args(Server)


class PickerMetrics(Collector):
    """Counts what the picker decides, and what the data plane makes of it."""

    def __init__(self) -> None:
        self.picks: Final[Counter[Literal["picked", "refused", "left"]]] = Counter()
        self.served: Final[Counter[Server]] = Counter()
        self.subsets = 0
        """Requests whose choice the data plane restricted."""
        self.partners = 0
        """Requests that were sent to a sidecar with the prefill engine that it is to use."""
        self.streams = 0
        """Requests that run now."""
        self.faults = 0
        """Streams that ended with a fault of the picker."""

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        picks = CounterMetricFamily(
            "kvparams_picker_picks", "Requests by result: picked, refused, left (before the choice).", labels=["result"]
        )
        for result in _PICKS:
            picks.add_metric([result], self.picks[result])
        yield picks
        served = CounterMetricFamily(
            "kvparams_picker_served",
            "Responses by the endpoint that made them: the first one named (primary), a further one (fallback), one "
            "that was not named (unlisted), none (unreached), the gateway for other reasons (gateway), one that the "
            "data plane does not tell (unknown).",
            labels=["endpoint"],
        )
        for endpoint in _SERVED:
            served.add_metric([endpoint], self.served[endpoint])
        yield served
        for name, text, value in (
            ("subsets", "Requests whose choice the data plane restricted to a subset of endpoints.", self.subsets),
            ("partners", "Requests that were sent with the prefill engine that a sidecar is to use.", self.partners),
            ("faults", "Requests that ended with a fault of the picker.", self.faults),
        ):
            yield CounterMetricFamily(f"kvparams_picker_{name}", text, value=value)
        yield GaugeMetricFamily("kvparams_picker_streams", "Requests that run now.", value=self.streams)
