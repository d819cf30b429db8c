"""Reads the engines' counters that prove the demo's claims: external KV, computed prompt tokens, refused pages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["REFERENCE", "VLLM", "Counts"]


@dataclass(frozen=True, slots=True)
class Counts:
    """The counters of a kind of engine, by name as `scrape` gives them."""

    loaded_metric: str
    """KV that an engine had from outside."""
    computed_metric: str
    """Prompt tokens that it computed itself."""
    refused_metric: str
    """Stored pages that it refused, by reason."""
    loaded_label: str
    """A label of the first, where it counts several things; so for the next."""
    computed_label: str
    per_unit: int
    """Of the first in a unit."""
    unit: str
    most_computed: int
    """Tokens of a prompt that decode computes at most although it was handed all of them."""
    later: bool
    """What a store did is counted behind the answer, when the engine does something else."""
    delivered_metric: str
    """Prompt tokens that a store has delivered, where the first one counts what it offered."""
    layers: int
    """Of the model that these engines serve in the demo."""

    def loaded(self, counters: Mapping[str, float]) -> float:
        """Returns how much KV came from outside, in units."""
        return _sum(counters, self.loaded_metric, self.loaded_label) / self.per_unit

    def computed(self, counters: Mapping[str, float]) -> int:
        """Returns how many prompt tokens were computed."""
        return int(_sum(counters, self.computed_metric, self.computed_label))

    def undelivered(self, counters: Mapping[str, float]) -> int:
        """Returns how many prompt tokens the engine counted on a store for, and computed after all."""
        if not self.delivered_metric or not any(name.startswith(self.delivered_metric) for name in counters):
            return 0
        return int(self.loaded(counters) - _sum(counters, self.delivered_metric, ""))

    def refused(self, counters: Mapping[str, float]) -> dict[str, int]:
        """Returns how many pages were refused, by the counter's name with its labels."""
        return {name: int(count) for name, count in counters.items() if name.startswith(self.refused_metric)}


def _sum(counters: Mapping[str, float], metric: str, label: str) -> float:
    return sum(count for name, count in counters.items() if name.startswith(metric) and label in name)


REFERENCE: Final = Counts(
    loaded_metric="reference_engine:kv_bytes_loaded_total",
    computed_metric="reference_engine:prompt_tokens_total",
    refused_metric="reference_engine:pages_refused_total",
    loaded_label="",
    computed_label='source="computed"',
    per_unit=1024,
    unit="KiB",
    most_computed=1,
    later=False,
    delivered_metric="",
    layers=3,
)
VLLM: Final = Counts(
    loaded_metric="vllm:prompt_tokens_by_source_total",
    computed_metric="vllm:prompt_tokens_by_source_total",
    refused_metric="vllm:kvparams_pages_refused_total",
    loaded_label='source="external_kv_transfer"',
    computed_label='source="local_compute"',
    per_unit=1,
    unit="tok",
    most_computed=32,  # our connector leaves out loads of less than a block
    later=True,
    delivered_metric="vllm:kvparams_tokens_loaded_total",
    layers=2,
)
"""Source: vLLM 0.32.0 v1/metrics/loggers.py, which counts by what connectors offer, not by what they load."""
