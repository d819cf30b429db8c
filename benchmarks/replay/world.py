"""Defines the replayed fleet: its size, its speed, and its failures."""

from dataclasses import dataclass, field
from math import exp
from random import Random

__all__ = ["Cost", "Store", "World"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that a prefill takes."""

    fixed_s: float = 0.02
    tokens_per_s: float = 8000.0
    pair_s: float = 0.0
    """For each pair of tokens that attend to each other: what makes long prompts cost more than their length."""

    def seconds(self, new: int, context: int) -> float:
        """To compute the last `new` of `context` tokens."""
        return self.fixed_s + new / self.tokens_per_s + self.pair_s * new * (context - 0.5 * new)


@dataclass(frozen=True, slots=True)
class Store:
    """A store of KV beside the workers. What is computed is written to it; reads and writes share what it carries."""

    blocks: int
    link_tokens_per_s: float
    """What one worker fetches alone."""
    tokens_per_s: float
    """What the store carries altogether."""


@dataclass(frozen=True, slots=True)
class World:
    """A fleet. What happens by chance is the same for every policy: it hangs on the request or the event."""

    blocks: int
    """Of 512 tokens in each prefill worker's cache."""
    workers: int = 8
    """Of prefill, and as many of decode."""
    pool: bool = False
    """Whether all prefill workers share one cache of as much as theirs together, at no cost: what none can reach."""
    cost: Cost = field(default_factory=Cost)
    slowness: tuple[float, ...] = ()
    """A factor on the seconds of each worker, in turn; empty is 1 for all."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a factor on each request's seconds."""
    event_delay_s: float = 0.0
    events_lost: float = 0.0
    """The share of events about caches that never arrive."""
    store: Store | None = None
    adapter_slots: int = 6
    """LoRA adapters that a prefill worker can have loaded."""
    adapter_load_s: float = 0.5
    """The seconds that loading one takes, while the worker does nothing else: LoRAX issue 433 has 0.5 to 1 s."""
    seed: int = 7

    def factors(self, count: int) -> list[float]:
        """The factor of noise for each request, 1 in the mean."""
        if not self.noise:
            return [1.0] * count
        die = Random(self.seed)
        return [exp(die.gauss(-0.5 * self.noise * self.noise, self.noise)) for _ in range(count)]
