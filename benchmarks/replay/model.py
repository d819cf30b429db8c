"""Prefill and decode workers, simulated event by event.

A prefill worker computes one prompt after the other in the order they were given to it. What its cache holds is seen
when it begins, and what it computes is held from then on (nobody else can begin there before). The first token is there
when prefill ends. A decode worker gives all its answers a token at a time, the slower the more they are.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Final, Protocol

from benchmarks.replay.cache import BlockCache
from benchmarks.replay.trace import BLOCK, Request
from benchmarks.replay.world import World

__all__ = ["Leg", "Outcome", "Router", "replay"]

_STEP_S: Final = (0.015, 0.0005)
"""One token of a decode worker, and for each answer that runs there."""


@dataclass(slots=True, eq=False)
class Leg:
    """The prefill of one request."""

    number: int
    request: Request
    arrived: float
    worker: int = -1
    stored: int = 0
    """Blocks from the beginning that the store has when it arrives."""
    fetch: bool = False
    """Whether to fetch what the store has beyond the worker's own cache."""
    ready: float = 0.0
    """When what is fetched is there."""
    fetched_to: int = 0
    """Blocks from the beginning that fetching brings, those that the worker had included."""
    held: int = 0
    """Blocks that were not computed: cached or fetched."""
    cached: int = 0
    """Blocks that the worker had itself: what it reports."""
    ended: float = 0.0


class Router(Protocol):
    """A `Router` chooses workers, and knows only the events that it is told."""

    def place(self, leg: Leg, now: float) -> int:
        """The prefill worker for a request; may set `leg.fetch`."""
        ...

    def done(self, leg: Leg, now: float) -> None:
        """A prefill has ended: `leg.cached` and `leg.held` are what its worker reports."""
        ...

    def event(self, worker: int, came: Sequence[int], went: Sequence[int]) -> None:
        """Records a worker's event about its cache."""
        ...

    def decode(self, leg: Leg, running: Sequence[int]) -> int:
        """The decode worker for an answer; `running` says how many each has."""
        ...


@dataclass(slots=True)
class Outcome:
    """An `Outcome` is the result of a request."""

    ttft_s: list[float] = field(default_factory=list[float])
    """In the order of arrival."""
    computed: int = 0
    """Tokens that were computed in prefill."""
    asked: int = 0
    """Tokens of all prompts."""
    fetched: int = 0
    """Tokens that came from the store."""
    busy_s: list[float] = field(default_factory=list[float])
    """Of each prefill worker."""
    legs: list[int] = field(default_factory=list[int])
    """Of each prefill worker."""
    adapter_loads: int = 0
    """LoRA adapters that prefill workers had to load before they could compute."""
    itl_s: float = 0.0
    """Mean seconds between two tokens of an answer."""

    @property
    def mean_s(self) -> float:
        """Mean time to first token."""
        return sum(self.ttft_s) / len(self.ttft_s)

    def quantile_s(self, share: float) -> float:
        """The time to first token that this share of requests do not exceed."""
        return sorted(self.ttft_s)[min(len(self.ttft_s) - 1, int(share * len(self.ttft_s)))]


class _Worker:
    __slots__ = ("adapters", "cache", "fetching_until", "queue", "running")

    def __init__(self, cache: BlockCache, adapter_slots: int) -> None:
        self.cache = cache
        self.adapters = BlockCache(adapter_slots)
        """The LoRA adapters that are loaded, kept as the blocks of a cache are."""
        self.queue = deque[Leg]()
        self.running: Leg | None = None
        self.fetching_until = 0.0


class _Decoder:
    """Answers that share a worker: all go on alike, so one clock in tokens and a heap of ends is all there is."""

    __slots__ = ("clock", "ends", "now")

    def __init__(self) -> None:
        self.clock = 0.0
        self.now = 0.0
        self.ends: list[tuple[float, int, float, int]] = []

    def advance(self, now: float) -> float:
        """Let time pass; the sum of seconds per token over the answers that ended."""
        told = 0.0
        while self.ends:
            step = _STEP_S[0] + _STEP_S[1] * len(self.ends)
            end = self.ends[0][0]
            at = self.now + (end - self.clock) * step
            if at > now:
                self.clock += (now - self.now) / step
                break
            _, _, began, tokens = heappop(self.ends)
            self.now, self.clock = at, end
            told += (at - began) / tokens
        self.now = now
        return told

    def join(self, number: int, tokens: int) -> None:
        """Adds an answer."""
        heappush(self.ends, (self.clock + tokens, number, self.now, tokens))


class _Replay:
    """A `_Replay` is the state of one run."""

    def __init__(self, trace: Sequence[Request], speed: float, world: World, router: Router) -> None:
        self._world = world
        self._router = router
        self._factors = world.factors(len(trace))
        slowness = world.slowness or (1.0,)
        self._slowness = [slowness[worker % len(slowness)] for worker in range(world.workers)]
        pool = BlockCache(world.blocks * world.workers) if world.pool else None
        self._workers = [_Worker(pool or BlockCache(world.blocks), world.adapter_slots) for _ in range(world.workers)]
        self._decoders = [_Decoder() for _ in range(world.workers)]
        self._store = BlockCache(world.store.blocks) if world.store else None
        self._store_until = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        die = Random(world.seed)
        self._lost = [die.random() < world.events_lost for _ in trace]
        self._trace = trace
        self._speed = speed
        self._latencies = 0.0
        self.outcome = Outcome([0.0] * len(trace), busy_s=[0.0] * world.workers, legs=[0] * world.workers)

    def run(self) -> Outcome:
        arrivals = iter(enumerate(self._trace))
        upcoming = next(arrivals, None)
        while upcoming is not None or self._events:
            if upcoming is not None and (not self._events or upcoming[1].at / self._speed < self._events[0][0]):
                number, request = upcoming
                self._arrive(Leg(number, request, request.at / self._speed))
                upcoming = next(arrivals, None)
                continue
            now, _, happen = heappop(self._events)
            happen(now)
        for decoder in self._decoders:
            self._latencies += decoder.advance(float("inf"))
        self.outcome.itl_s = self._latencies / max(1, len(self._trace))
        return self.outcome

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heappush(self._events, (when, next(self._order), happen))

    def _arrive(self, leg: Leg) -> None:
        now = leg.arrived
        leg.stored = self._store.match(leg.request.blocks) if self._store else 0
        leg.worker = self._router.place(leg, now)
        worker = self._workers[leg.worker]
        leg.ready = now
        if leg.fetch:
            here = worker.cache.match(leg.request.blocks)
            leg.fetched_to = leg.stored
            if leg.fetched_to > here:
                leg.ready = self._fetch(worker, (leg.fetched_to - here) * BLOCK, now)
                self._at(leg.ready, partial(self._begin, leg.worker))
        worker.queue.append(leg)
        self._begin(leg.worker, now)

    def _fetch(self, worker: _Worker, tokens: int, now: float) -> float:
        store = self._world.store
        assert store is not None
        worker.fetching_until = max(now, worker.fetching_until) + tokens / store.link_tokens_per_s
        self._store_until = max(now, self._store_until) + tokens / store.tokens_per_s
        return max(worker.fetching_until, self._store_until)

    def _written(self, blocks: Sequence[int]) -> None:
        assert self._store is not None
        self._store.use(blocks)

    def _begin(self, number: int, now: float) -> None:
        """The next prompt for which everything is there, if the worker is idle."""
        worker = self._workers[number]
        if worker.running is not None:
            return
        leg = next((leg for leg in worker.queue if leg.ready <= now), None)
        if leg is None:
            return
        worker.queue.remove(leg)
        worker.running = leg
        request = leg.request
        leg.cached = worker.cache.match(request.blocks)
        leg.held = max(leg.cached, leg.fetched_to)
        new = max(1, request.tokens - leg.held * BLOCK)
        seconds = self._world.cost.seconds(new, request.tokens) * self._factors[leg.number] * self._slowness[number]
        outcome = self.outcome
        if request.adapter and worker.adapters.use([request.adapter])[0]:
            seconds += self._world.adapter_load_s
            outcome.adapter_loads += 1
        outcome.asked += request.tokens
        outcome.computed += new
        outcome.fetched += (leg.held - leg.cached) * BLOCK
        outcome.busy_s[number] += seconds
        outcome.legs[number] += 1
        came, went = worker.cache.use(request.blocks)
        if not self._lost[leg.number]:
            self._at(now + seconds + self._world.event_delay_s, lambda _: self._router.event(number, came, went))
        self._at(now + seconds, partial(self._end, leg))

    def _end(self, leg: Leg, now: float) -> None:
        worker = self._workers[leg.worker]
        worker.running = None
        leg.ended = now
        self.outcome.ttft_s[leg.number] = now - leg.arrived
        if self._store is not None:
            assert self._world.store is not None
            computed = (len(leg.request.blocks) - leg.held) * BLOCK
            self._store_until = max(now, self._store_until) + computed / self._world.store.tokens_per_s
            blocks = leg.request.blocks
            self._at(self._store_until, lambda _: self._written(blocks))
        self._router.done(leg, now)
        for decoder in self._decoders:
            self._latencies += decoder.advance(now)
        chosen = self._router.decode(leg, [len(decoder.ends) for decoder in self._decoders])
        self._decoders[chosen].join(leg.number, max(1, leg.request.output))
        self._begin(leg.worker, now)


def replay(trace: Sequence[Request], speed: float, world: World, router: Router) -> Outcome:
    """A trace, its arrivals so many times as fast, through a fleet."""
    return _Replay(trace, speed, world, router).run()
