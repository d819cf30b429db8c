"""Prometheus gauges of the prefix cache model and its accuracy. They exist only where the policy uses the model.

Queries and hits are counted in tokens, as vLLM counts its own (`vllm:prefix_cache_queries`, `vllm:prefix_cache_hits`).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = ["PrefixCacheGauges"]


class PrefixCacheGauges(Collector):
    """Collects the gauges of the prefix cache model at each scrape."""

    def __init__(self, prefixes: "PrefixCacheModel") -> None:
        self._prefixes = prefixes

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        seen = self._prefixes.prediction_stats
        for name, text, value in (
            (
                "queries",
                "Prompt tokens that were looked up, each time a prefill leg was given away.",
                seen.queried_tokens,
            ),
            ("predicted_hits", "Of these, expected to be cached where the leg went.", seen.predicted_tokens),
            ("hits", "Of these, cached there as the engine reports.", seen.hit_tokens),
            ("zero_matches", "Prompts of which no candidate was expected to have anything.", seen.zero_matches),
        ):
            yield CounterMetricFamily(f"kvparams_proxy_prefix_cache_{name}", text, value=value)
        accuracy = GaugeMetricFamily(
            "kvparams_proxy_prefix_cache_accuracy",
            "The share of the tokens expected to be cached that were, over the last 256 legs with such tokens.",
        )
        if seen.accuracy is not None:
            accuracy.add_metric([], seen.accuracy)
        yield accuracy
        alarm = "1: what is expected to be cached no longer is (accuracy below 0.5, and not above 0.75 since)."
        yield GaugeMetricFamily("kvparams_proxy_prefix_cache_alarm", alarm, value=seen.alarmed)
        blocks = "Blocks of 64 tokens (128 where proxies share a fleet) that some engine is believed to have."
        yield GaugeMetricFamily("kvparams_proxy_prefix_cache_blocks", blocks, value=self._prefixes.blocks)
