"""Lists the runs of the replay, by the five questions that they answer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.replay.beliefs import Belief, ByEvents, BySelf
from benchmarks.replay.generated import KINDS, generate
from benchmarks.replay.model import Router, replay
from benchmarks.replay.ours import Ours
from benchmarks.replay.peers import PEERS, Peer, RoundRobin
from benchmarks.replay.trace import Request
from benchmarks.replay.world import Cost, Store, World
from kvparams.instances import SchedulingPolicy
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams.routing.policies.least_load import LeastLoad
from kvparams.routing.policies.random_choice import RandomChoice
from kvparams.routing.policies.session_affinity import SessionAffinity
from kvparams.routing.policies.two_choices import TwoChoices

__all__ = ["OURS", "PARTS", "Point", "Row", "run_part", "speed_for"]

OURS: Final = "cache_aware"
_POLICIES: Final[dict[str, Callable[[], SchedulingPolicy]]] = {
    "random": RandomChoice,
    "least_load": LeastLoad,
    "two_choices": TwoChoices,
    "session_affinity": SessionAffinity,
    OURS: CacheAware,
}
_HARD: Final = ("least load", "SGLang", "llm-d", "Dynamo", "Mooncake ETTFT")
"""Peers that are looked at where one thing is made hard; round robin and those that pile up are far off everywhere."""
_TOKEN_BYTES: Final = 131_072
"""Of KV: 32 layers, 8 heads of 128, two of 2 bytes (Llama 3.1 8B)."""
_LINK_BYTES_S: Final = 2.67e9
"""What one client gets from one Valkey server with every page verified: `benchmarks/RESULTS.md`, TCP, 256 KiB."""


@dataclass(frozen=True, slots=True)
class Point:
    """A trace, the workers' caches in blocks, and how busy round robin is."""

    name: str
    blocks: int
    load: float


@dataclass(frozen=True, slots=True)
class Row:
    """A `Row` is the result of one run."""

    part: str
    point: str
    policy: str
    mean_s: float
    p99_s: float
    reused: float
    """The share of prompt tokens that prefill did not compute."""
    itl_ms: float
    predicted: float | None = None
    """Of the blocks believed to be cached where requests went, the share that was."""


Run = tuple[Point, str, Sequence[Request], World, Callable[[World], Router]]
POINTS: Final = tuple(Point("trace", blocks, load) for blocks in (1000, 4000, 16000) for load in (0.7, 0.95))


def speed_for(trace: Sequence[Request], world: World, load: float) -> float:
    """Returns the speed-up of the trace at which round robin keeps workers busy at this load."""
    busy_s = sum(replay(trace, 1.0, world, RoundRobin(world)).busy_s)
    return load * world.workers * trace[-1].at / busy_s


def ours(world: World, belief: Callable[[], Belief] = ByEvents) -> Ours:
    """`cache_aware`."""
    return Ours(world, CacheAware, belief)


def _peer(name: str) -> Callable[[World], Peer]:
    return PEERS[name]


def _policy(policy: Callable[[], SchedulingPolicy]) -> Callable[[World], Router]:
    return lambda world: Ours(world, policy)


def _believing(capacity: int) -> Callable[[World], Router]:
    return lambda world: ours(world, lambda: BySelf(capacity))


def _pooled(world: World) -> Router:
    belief = ByEvents()
    return ours(world, lambda: belief)


def policies(trace: Sequence[Request]) -> Iterator[Run]:
    """Every policy at every point."""
    for point in POINTS:
        world = World(point.blocks)
        for name in PEERS:
            yield point, name, trace, world, _peer(name)
        for name, policy in _POLICIES.items():
            yield point, name, trace, world, _policy(policy)


def beliefs(trace: Sequence[Request]) -> Iterator[Run]:
    """Exact events, and none: what was routed, corrected by what engines report, from a wrong idea of their size."""
    for point in POINTS:
        world = World(point.blocks)
        yield point, "exact events", trace, world, ours
        for name, factor in (("size right", 1.0), ("a quarter", 0.25), ("four times", 4.0)):
            yield point, name, trace, world, _believing(int(point.blocks * factor))


def store(trace: Sequence[Request]) -> Iterator[Run]:
    """A store as large as all caches together; beside it one cache for all, and one without end."""
    link = _LINK_BYTES_S / _TOKEN_BYTES
    for point in POINTS:
        world = World(point.blocks)
        yield point, "one pool", trace, replace(world, pool=True), _pooled
        yield point, "endless pool", trace, replace(world, pool=True, blocks=10**9), _pooled
        yield point, "no store", trace, world, ours
        for servers in (8, 4):
            size = point.blocks * world.workers
            yield point, f"{servers} servers", trace, replace(world, store=Store(size, link, servers * link)), ours


def hardship(trace: Sequence[Request]) -> Iterator[Run]:
    """Runs each policy under conditions that it is not told of, each at a speed found anew."""
    cost = Cost(pair_s=2e-9)
    for point in (POINTS[0], POINTS[3]):
        plain = World(point.blocks)
        for name, world in (
            ("quadratic attention", replace(plain, cost=cost)),
            ("noisy service", replace(plain, noise=0.5)),
            ("unequal workers", replace(plain, slowness=(0.7, 0.9, 1.0, 1.4))),
            ("events 2 s late, a fifth lost", replace(plain, event_delay_s=2.0, events_lost=0.2)),
        ):
            named = replace(point, name=name)
            for peer in _HARD:
                yield named, peer, trace, world, _peer(peer)
            yield named, OURS, trace, world, ours
            yield named, "no events", trace, world, _believing(point.blocks)


def generated(trace: Sequence[Request]) -> Iterator[Run]:
    """Traces made up. The trace given is not looked at."""
    for kind in KINDS:
        made = generate(kind, 4000)
        for load in (0.7, 0.95):
            point = Point(kind, 1000, load)
            for peer in _HARD:
                yield point, peer, made, World(1000), _peer(peer)
            yield point, OURS, made, World(1000), ours
            yield point, "no events", made, World(1000), _believing(1000)


PARTS: Final[dict[str, Callable[[Sequence[Request]], Iterator[Run]]]] = {
    "policies": policies,
    "beliefs": beliefs,
    "store": store,
    "hardship": hardship,
    "generated": generated,
}


def run_part(part: str, trace: Sequence[Request]) -> Iterator[Row]:
    """The runs of a part, one after the other."""
    speeds: dict[tuple[Point, int], float] = {}
    for point, name, requests, world, router in PARTS[part](trace):
        key = point, id(requests)
        if key not in speeds:
            speeds[key] = speed_for(requests, replace(world, pool=False, store=None, blocks=point.blocks), point.load)
        made = router(world)
        outcome = replay(requests, speeds[key], world, made)
        predicted = made.reported / made.predicted if isinstance(made, Ours) and made.predicted else None
        reused = 1.0 - outcome.computed / outcome.asked
        label = f"{point.name}, {point.blocks:,} blocks, {point.load:.0%}"
        yield Row(part, label, name, outcome.mean_s, outcome.quantile_s(0.99), reused, outcome.itl_s * 1000, predicted)
