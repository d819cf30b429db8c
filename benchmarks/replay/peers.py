"""Other routers' ways to choose a prefill worker, modelled after their sources.

| model | source |
|---|---|
| `FewestRequests` | the fewest requests in flight |
| `LeastLoad` | least_load of smg@73da68ca9 `model_gateway/src/policies/`: queued tokens over one throughput for all |
| `SGLang` | sglang-router 0.3.2, smg@73da68ca9 `model_gateway/src/policies/cache_aware.rs`, its defaults |
| `VllmKvAware` | vllm-router 0.1.17 `src/policies/kv_aware.rs` |
| `LlmD` | llm-d-router@ebab68792 prefix, queue and kv-utilisation scorers, weights of its chart, approximate producer |
| `Dynamo` | ai-dynamo 1.6.1 KV router, `kv_router_args.py` defaults, prefill router of a disaggregated fleet |
| `Mooncake` | estimated time to first token, FAST'25 paper, algorithm 1: queue and prefill; an index fed by events |

Each is given its best case: loads without delay, an index fed by events that knows what is on its way, the true speed
where it has one to configure. Decode goes to the fewest answers, for all alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Final

from benchmarks.replay.beliefs import Belief, ByEvents, Routed
from benchmarks.replay.cache import matched
from benchmarks.replay.model import Leg
from benchmarks.replay.trace import BLOCK
from benchmarks.replay.world import Cost, World

__all__ = ["PEERS", "Dynamo", "FewestRequests", "LeastLoad", "LlmD", "Mooncake", "RoundRobin", "SGLang", "VllmKvAware"]


class Peer(ABC):
    """A `Peer` tracks the running legs, as all peers do."""

    def __init__(self, world: World) -> None:
        self.running = [0] * world.workers

    def place(self, leg: Leg, now: float) -> int:
        """The worker that `pick` says, counted."""
        worker = self.pick(leg, now)
        self.running[worker] += 1
        return worker

    @abstractmethod
    def pick(self, leg: Leg, now: float) -> int:
        """The worker."""

    def done(self, leg: Leg, now: float) -> None:
        """Counted back."""
        self.running[leg.worker] -= 1

    def event(self, worker: int, came: Sequence[int], went: Sequence[int]) -> None:  # noqa: B027  most take no notice
        """Ignores the event."""

    def decode(self, leg: Leg, running: Sequence[int]) -> int:
        """The fewest answers."""
        return min(range(len(running)), key=running.__getitem__)

    def least(self) -> int:
        """The first worker of those with the fewest requests."""
        return min(range(len(self.running)), key=self.running.__getitem__)


class RoundRobin(Peer):
    """Everyone in turn."""

    def pick(self, leg: Leg, now: float) -> int:
        """The next."""
        return leg.number % len(self.running)


class FewestRequests(Peer):
    """The fewest requests."""

    def pick(self, leg: Leg, now: float) -> int:
        """The least loaded."""
        return self.least()


class LeastLoad(Peer):
    """The fewest prompt tokens in flight: expected wait at one throughput for all."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._tokens = [0] * world.workers

    def pick(self, leg: Leg, now: float) -> int:
        """The least loaded."""
        worker = min(range(len(self._tokens)), key=self._tokens.__getitem__)
        self._tokens[worker] += leg.request.tokens
        return worker

    def done(self, leg: Leg, now: float) -> None:
        """Counted back."""
        super().done(leg, now)
        self._tokens[leg.worker] -= leg.request.tokens


class SGLang(Peer):
    """A tree of prompts, one worker to its deepest node; least load below a threshold, or when loads differ much."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._last: dict[int, int] = {}
        self._processed = [0] * world.workers

    def pick(self, leg: Leg, now: float) -> int:
        """Affinity, unless the fleet is imbalanced."""
        blocks = leg.request.blocks
        load = self.running
        least = min(range(len(load)), key=lambda w: (load[w], self._processed[w], w))
        most = max(load)
        worker = least
        if not (most - load[least] > 64 and most > 1.5 * load[least]):
            depth = matched(blocks, self._last)
            if depth / len(blocks) > 0.3:
                worker = self._last[blocks[depth - 1]]
        for block in blocks:
            self._last[block] = worker
        self._processed[worker] += 1
        return worker


class Indexed(Peer):
    """With an index of what each worker holds."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._beliefs: list[Belief] = [self.belief(world) for _ in range(world.workers)]

    def belief(self, world: World) -> Belief:
        """The index of one worker."""
        return ByEvents()

    def place(self, leg: Leg, now: float) -> int:
        """The worker that `pick` says, counted and indexed."""
        worker = super().place(leg, now)
        self._beliefs[worker].routed(leg)
        return worker

    def done(self, leg: Leg, now: float) -> None:
        """Counted back."""
        super().done(leg, now)
        self._beliefs[leg.worker].done(leg)

    def event(self, worker: int, came: Sequence[int], went: Sequence[int]) -> None:
        """Indexed."""
        self._beliefs[worker].event(came, went)

    def matches(self, leg: Leg) -> list[int]:
        """Blocks from the beginning that each worker is believed to hold."""
        return [belief.match(leg.request.blocks) for belief in self._beliefs]


class VllmKvAware(Indexed):
    """The longest prefix, the last of equals, whatever its load; the least loaded where nobody has any."""

    def pick(self, leg: Leg, now: float) -> int:
        """The longest prefix."""
        matches = self.matches(leg)
        longest = max(matches)
        return max(w for w, match in enumerate(matches) if match == longest) if longest else self.least()


class LlmD(Indexed):
    """A weighted sum of prefix share (3), free queue (2) and free KV memory (2); ties at random."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._capacity = world.blocks
        self._blocks = [0] * world.workers
        self._die = Random(world.seed)

    def belief(self, world: World) -> Belief:
        """Returns a belief in the routed blocks, as many as the engine says that it holds."""
        return Routed(world.blocks)

    def pick(self, leg: Leg, now: float) -> int:
        """The highest score."""
        waiting = [max(0, running - 1) for running in self.running]
        low, high = min(waiting), max(waiting)
        total = len(leg.request.blocks)
        scores = [
            2.0 * ((high - queue) / (high - low) if high > low else 1.0)
            + 2.0 * (1.0 - min(1.0, used / self._capacity))
            + 3.0 * match / total
            for queue, used, match in zip(waiting, self._blocks, self.matches(leg), strict=True)
        ]
        best = max(scores)
        worker = self._die.choice([w for w, score in enumerate(scores) if score == best])
        self._blocks[worker] += total
        return worker

    def done(self, leg: Leg, now: float) -> None:
        """Its memory is free."""
        super().done(leg, now)
        self._blocks[leg.worker] -= len(leg.request.blocks)


class Dynamo(Indexed):
    """The fewest blocks to prefill: those in flight there, and this prompt's less its overlap."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._active = [0] * world.workers
        self._of: dict[int, int] = {}

    def pick(self, leg: Leg, now: float) -> int:
        """The lowest cost."""
        total = len(leg.request.blocks)
        costs = [active + total - match for active, match in zip(self._active, self.matches(leg), strict=True)]
        worker = min(range(len(costs)), key=costs.__getitem__)
        self._of[leg.number] = costs[worker] - self._active[worker]
        self._active[worker] = costs[worker]
        return worker

    def done(self, leg: Leg, now: float) -> None:
        """Its blocks are prefilled."""
        super().done(leg, now)
        self._active[leg.worker] -= self._of.pop(leg.number)


class Mooncake(Indexed):
    """The least estimated time to first token: what is queued there, then what is left of this prompt.

    The estimates are by one configured curve; whenever a prefill ends, those of what is still queued are added up anew.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._cost = Cost()
        self._free_at = [0.0] * world.workers
        self._queued: list[dict[int, float]] = [{} for _ in range(world.workers)]

    def pick(self, leg: Leg, now: float) -> int:
        """The least estimate."""
        tokens = leg.request.tokens
        best, least = 0, (float("inf"), 0.0)
        for worker, match in enumerate(self.matches(leg)):
            begin = max(now, self._free_at[worker])
            end = begin + self._cost.seconds(max(1, tokens - match * BLOCK), tokens)
            if (end, begin) < least:
                best, least = worker, (end, begin)
        self._free_at[best] = least[0]
        self._queued[best][leg.number] = least[0] - least[1]
        return best

    def done(self, leg: Leg, now: float) -> None:
        """It is queued no more."""
        super().done(leg, now)
        del self._queued[leg.worker][leg.number]
        self._free_at[leg.worker] = now + sum(self._queued[leg.worker].values())


PEERS: Final[dict[str, type[Peer]]] = {
    "round robin": RoundRobin,
    "fewest requests": FewestRequests,
    "least load": LeastLoad,
    "SGLang": SGLang,
    "vllm-router kv": VllmKvAware,
    "llm-d": LlmD,
    "Dynamo": Dynamo,
    "Mooncake ETTFT": Mooncake,
}
