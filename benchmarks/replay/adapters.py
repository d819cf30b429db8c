"""Traces with LoRA adapters, and the ways to route them: by adapter, blind to it, and one worker for each adapter.

The policies are the proxy's own, with a model of its books. "the proxy" and "4 proxies" are real fleets and exchanges
(`replicas`) with `cache_aware`; those that are apart share nothing, and read no metrics either.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

import xxhash

from benchmarks.replay.model import Leg, Outcome, Router, replay
from benchmarks.replay.ours import Ours
from benchmarks.replay.parts import speed_for
from benchmarks.replay.peers import Peer
from benchmarks.replay.replicas import Replicas
from benchmarks.replay.trace import BLOCK, Request
from benchmarks.replay.world import World
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams.routing.policies.least_load import LeastLoad

__all__ = ["ADAPTERS", "ROUTERS", "AdapterRun", "OneWorkerPerAdapter", "adapter_trace", "run_adapters"]

ADAPTERS: Final = 20
_SYSTEM_BLOCKS: Final = 2
_WORKERS: Final = 4


class OneWorkerPerAdapter(Peer):
    """Dynamo issue 15018, protocol version 2: the worker with the highest random weight for the adapter, no other."""

    def pick(self, leg: Leg, now: float) -> int:
        """The adapter's worker, whatever its load."""
        adapter = leg.request.adapter
        return max(range(len(self.running)), key=lambda worker: xxhash.xxh3_64_intdigest(b"%d %d" % (adapter, worker)))


ROUTERS: Final[Mapping[str, Callable[[World], Router]]] = {
    "cache_aware": lambda world: Ours(world, CacheAware),
    "cache_aware, blind": lambda world: Ours(world, CacheAware, by_adapter=False),
    "least_load": lambda world: Ours(world, LeastLoad),
    "least_load, blind": lambda world: Ours(world, LeastLoad, by_adapter=False),
    "one worker per adapter": OneWorkerPerAdapter,
    "the proxy": lambda world: Replicas(world, 1, "nothing", adapters=ADAPTERS),
    "4 proxies": lambda world: Replicas(world, 4, "everything", adapters=ADAPTERS),
    "4 proxies, apart": lambda world: Replicas(world, 4, "nothing", adapters=ADAPTERS),
}


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """An `AdapterRun` is the result of one router."""

    router: str
    loads: int
    """The number of times an adapter was loaded, on all workers."""
    mean_s: float
    """Time to first token."""
    p99_s: float
    busiest: float
    """The share of all work that the busiest worker has done."""


def adapter_trace(number: int, *, shared_prompts: bool, seed: int = 1) -> list[Request]:
    """Returns requests for 20 adapters, the first asked for most, the n-th 1/n as often.

    `shared_prompts`: each adapter has a system prompt of its own; otherwise no two prompts have anything in common.
    """
    die = Random(seed)
    weights = [1 / (rank + 1) for rank in range(ADAPTERS)]
    at, used = 0.0, ADAPTERS * _SYSTEM_BLOCKS
    made: list[Request] = []
    for session in range(number):
        at += die.expovariate(4.0)
        rank = die.choices(range(ADAPTERS), weights)[0]
        system = list(range(rank * _SYSTEM_BLOCKS, (rank + 1) * _SYSTEM_BLOCKS)) if shared_prompts else []
        tokens = len(system) * BLOCK + die.randrange(100, 4000)
        own = -(-tokens // BLOCK) - len(system)
        blocks = [*system, *range(used, used + own)]
        used += own
        made.append(Request(at, tokens, die.randrange(20, 300), blocks, session, rank + 1))
    return made


def run_adapters(
    *,
    shared_prompts: bool,
    load: float,
    load_s: float,
    number: int = 4000,
    seed: int = 1,
    routers: Collection[str] = ROUTERS.keys(),
) -> list[AdapterRun]:
    """Runs one trace with these routers.

    Args:
        shared_prompts: see `adapter_trace`.
        load: how busy round robin keeps the workers, without what adapters add.
        load_s: what loading one takes.
        number: of requests.
        seed: of the trace.
        routers: names in `ROUTERS`.
    """
    trace = adapter_trace(number, shared_prompts=shared_prompts, seed=seed)
    world = World(2000, workers=_WORKERS, adapter_load_s=load_s)
    speed = speed_for([request._replace(adapter=0) for request in trace], world, load)
    return [_run(name, replay(trace, speed, world, ROUTERS[name](world))) for name in routers]


def _run(name: str, outcome: Outcome) -> AdapterRun:
    busiest = max(outcome.busy_s) / sum(outcome.busy_s)
    return AdapterRun(name, outcome.adapter_loads, outcome.mean_s, outcome.quantile_s(0.99), busiest)
