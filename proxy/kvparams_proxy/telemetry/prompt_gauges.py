"""Prometheus counts of the sources of token ids for routing. They exist only with `--tokenizer`."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams_proxy.tokenization.service import TokenIdSource, TokenService

__all__ = ["PromptGauges"]


class PromptGauges(Collector):
    """Collects the counts of token id sources at each scrape."""

    def __init__(self, tokens: TokenService) -> None:
        self._tokens = tokens

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        found = CounterMetricFamily(
            "kvparams_proxy_prompts", "Prompts with ids to route by, by where these came from.", labels=["source"]
        )
        for source in TokenIdSource:
            found.add_metric([source], self._tokens.found_counts[source])
        yield found
        missed = CounterMetricFamily(
            "kvparams_proxy_prompts_missed",
            "Prompts that went by bytes since their tokenizer or engine had no ids for them.",
            labels=["source"],
        )
        for source in (TokenIdSource.TOKENIZER, TokenIdSource.ENGINE):
            missed.add_metric([source], self._tokens.missed_counts[source])
        yield missed
