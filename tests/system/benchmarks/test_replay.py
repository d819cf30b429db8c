"""Tests the fleet model where it can be computed by hand, and that the policies keep their order on the sample."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replay.__main__ import SAMPLE, main
from benchmarks.replay.beliefs import Belief, ByEvents, BySelf, Routed
from benchmarks.replay.cache import BlockCache
from benchmarks.replay.generated import KINDS, generate
from benchmarks.replay.model import Leg, replay
from benchmarks.replay.ours import Ours
from benchmarks.replay.parts import ours, speed_for
from benchmarks.replay.peers import PEERS, FewestRequests, RoundRobin, SGLang, VllmKvAware
from benchmarks.replay.trace import BLOCK, Request, load, requests
from benchmarks.replay.world import Cost, Store, World
from kvparams.routing.policies.cache_aware import CacheAware

BEST = "Mooncake ETTFT"
TROUBLES: list[dict[str, Any]] = [{}, {"cost": Cost(pair_s=2e-9)}]


def distinct(arrivals: list[float], tokens: list[int]) -> list[Request]:
    """Requests that have nothing in common."""
    made: list[tuple[float, int, int, list[int]]] = []
    used = 0
    for at, length in zip(arrivals, tokens, strict=True):
        count = -(-length // BLOCK)
        made.append((at, length, 10, list(range(used, used + count))))
        used += count
    return requests(made)


def test_one_worker_is_a_queue_with_poisson_arrivals_and_equal_service() -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) services."""
    die = Random(3)
    at = 0.0
    arrivals: list[float] = []
    for _ in range(10_000):
        at += die.expovariate(0.7)
        arrivals.append(at)
    world = World(1, workers=1, cost=Cost(fixed_s=0.0, tokens_per_s=100.0))
    outcome = replay(distinct(arrivals, [100] * len(arrivals)), 1.0, world, RoundRobin(world))
    assert outcome.mean_s - 1.0 == pytest.approx(0.7 / (2 * 0.3), rel=0.08)


def test_a_prompt_that_comes_again_costs_its_fixed_part_and_one_token() -> None:
    world = World(100, workers=1)
    again = Request(100.0, 1024, 1, [1, 2], 0)
    outcome = replay([again._replace(at=0.0), again], 1.0, world, RoundRobin(world))
    assert outcome.ttft_s == pytest.approx([0.02 + 1024 / 8000, 0.02 + 1 / 8000])


def test_a_cache_forgets_what_was_used_longest_ago_and_ends_of_prefixes_first() -> None:
    cache = BlockCache(3)
    cache.use([1, 2])
    came, went = cache.use([1, 3, 4])
    assert (sorted(came), went) == ([3, 4], [2])
    assert cache.match([1, 3, 4]) == 3
    assert cache.use([5])[1] == [4]


prompts = st.lists(
    st.tuples(st.floats(0, 50), st.integers(1, 6 * BLOCK), st.integers(0, 3), st.integers(0, 5)),
    min_size=1,
    max_size=40,
)


@given(prompts, st.sampled_from([*PEERS, "cache_aware"]), st.integers(1, 12), st.booleans())
def test_nothing_is_lost_whatever_the_policy(
    rows: list[tuple[float, int, int, int]], name: str, blocks: int, stored: bool
) -> None:
    """Every request has its first token, not before it can; work and tokens add up; books are empty at the end."""
    made: list[tuple[float, int, int, list[int]]] = []
    for number, (at, tokens, family, shared) in enumerate(rows):
        count = -(-tokens // BLOCK)
        made.append((at, tokens, 5, [family * 100 + i if i < shared else 1000 + number * 10 + i for i in range(count)]))
    trace = requests(made)
    world = World(blocks, workers=3, store=Store(20, 10_000.0, 30_000.0) if stored else None)
    router = Ours(world, CacheAware) if name == "cache_aware" else PEERS[name](world)
    outcome = replay(trace, 1.0, world, router)
    assert sum(outcome.legs) == len(trace)
    assert min(outcome.ttft_s) >= 0.02
    assert outcome.asked == sum(request.tokens for request in trace)
    assert outcome.computed >= len(trace)
    assert outcome.computed + outcome.fetched <= outcome.asked + len(trace) * BLOCK
    assert sum(outcome.busy_s) == pytest.approx(0.02 * len(trace) + outcome.computed / 8000)
    if isinstance(router, Ours):
        assert [(seat.in_flight, seat.tokens, seat.backlog.wait_s) for seat in router.seats] == [(0, 0, 0.0)] * 3
    else:
        assert router.running == [0] * 3


@pytest.mark.slow
def test_what_was_routed_and_reported_is_as_good_as_events_from_whatever_size_it_begins() -> None:
    trace = load(SAMPLE)
    world = World(100)
    speed = speed_for(trace, world, 0.7)
    exact = replay(trace, speed, world, ours(world)).mean_s

    def told(belief: Callable[[], Belief]) -> tuple[float, float]:
        """How much later the first token comes than with events, and how much of what was predicted was there."""
        router = ours(world, belief)
        outcome = replay(trace, speed, world, router)
        return outcome.mean_s / exact, router.reported / router.predicted

    uncorrected = told(partial(Routed, 4_000))[1]
    for capacity in (25, 100, 400):
        later, came_true = told(partial(BySelf, capacity))
        assert later < 1.05
        assert came_true > uncorrected + 0.05


def test_belief_learns_how_large_a_cache_is() -> None:
    """It is told a fourth or four times; what the worker reports corrects it."""
    for told in (25, 400):
        belief, cache = BySelf(told), BlockCache(100)
        die = Random(5)
        for number in range(3000):
            family = min(int(die.paretovariate(0.5)), 60)
            leg = Leg(number, Request(0.0, 4 * BLOCK, 1, [family * 4 + i for i in range(4)], 0), 0.0)
            leg.cached = cache.match(leg.request.blocks)
            belief.routed(leg)
            cache.use(leg.request.blocks)
            belief.done(leg)
        assert 90 <= belief.capacity <= 125


def test_events_that_come_late_take_nothing_away_that_is_on_its_way() -> None:
    belief = ByEvents()
    leg = Leg(0, Request(0.0, 2 * BLOCK, 1, [1, 2], 0), 0.0)
    belief.routed(leg)
    belief.event([], [1, 2])
    assert belief.match([1, 2]) == 2
    belief.done(leg)
    belief.event([], [2])
    assert belief.match([1, 2]) == 1


def test_a_store_makes_a_prompt_cheap_for_whoever_has_not_computed_it() -> None:
    store = Store(1000, 1_000_000.0, 8_000_000.0)
    world = World(1000, workers=2, store=store)

    long = Request(0.0, 20 * BLOCK, 1, list(range(20)), 0)
    outcome = replay([long, long._replace(at=60.0)], 1.0, world, RoundRobin(world))
    assert outcome.fetched == 0
    assert outcome.ttft_s[1] == pytest.approx(outcome.ttft_s[0])
    with_store = replay([long, long._replace(at=60.0)], 1.0, world, _Fetching(world))
    assert with_store.fetched == 20 * BLOCK
    assert with_store.ttft_s[1] < 0.1 * with_store.ttft_s[0]


class _Fetching(RoundRobin):
    def place(self, leg: Leg, now: float) -> int:
        leg.fetch = True
        return super().place(leg, now)


def test_peers_fail_as_their_users_say() -> None:
    """The controls: with one prefix for all, who looks only at caches piles up, and who looks at loads does not."""
    trace = [Request(i * 0.05, 4 * BLOCK, 1, [0, 10 * i + 1, 10 * i + 2, 10 * i + 3], i) for i in range(400)]
    world = World(1000)
    piled = replay(trace, 1.0, world, VllmKvAware(world))
    even = replay(trace, 1.0, world, FewestRequests(world))
    mine = replay(trace, 1.0, world, ours(world))
    assert max(piled.legs) == 400
    assert max(mine.legs) < 100
    assert max(even.legs) < 100
    assert mine.mean_s < 1.05 * even.mean_s < piled.mean_s
    stuck = [Request(i * 0.05, 4 * BLOCK, 1, [0, 1, 2, 10 * i + 3], i) for i in range(400)]
    kept = replay(stuck, 1.0, world, SGLang(world))
    assert kept.legs.count(0) == 5  # one worker after the other is filled until 64 more wait there than elsewhere
    assert replay(stuck, 1.0, world, ours(world)).mean_s < 0.2 * kept.mean_s


def test_conversations_are_found_in_a_trace() -> None:
    rows = [(0.0, 700, 1, [1, 2]), (1.0, 1500, 1, [1, 3, 4]), (2.0, 2000, 1, [1, 3, 5, 6]), (3.0, 600, 1, [8, 9])]
    assert [request.session for request in requests(rows)] == [0, 0, 0, 3]
    assert len({request.session for request in load(SAMPLE)}) < 500


@pytest.mark.parametrize(
    "line", ["{", '{"timestamp": 0}', '{"timestamp":0,"input_length":9,"output_length":1,"hash_ids":[]}']
)
def test_what_is_no_trace_is_refused_by_line(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(SAMPLE.read_text().splitlines()[0] + "\n" + line + "\n")
    assert main([str(path)]) == 2
    assert f"{path}:2" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_generated_traces_are_the_same_every_time(kind: str) -> None:
    made = generate(kind, 300)
    assert made == generate(kind, 300) != generate(kind, 300, seed=2)
    assert len(made) == 300
    assert all(-(-request.tokens // BLOCK) == len(request.blocks) for request in made)
    assert [request.at for request in made] == sorted(request.at for request in made)


def averaged(trace: list[Request], load: float, router: str) -> float:
    """Mean time to first token over fleets of several sizes and troubles, each at round robin's speed there."""
    worlds = [World(blocks, **more) for blocks in (250, 500, 1000) for more in TROUBLES]
    total = 0.0
    for world in worlds:
        made = ours(world) if router == "cache_aware" else PEERS[router](world)
        total += replay(trace, speed_for(trace, world, load), world, made).mean_s
    return total / len(worlds)


@pytest.mark.slow
@pytest.mark.parametrize("load_share", [0.7, 0.95])
def test_cache_aware_answers_sooner_than_every_peer(load_share: float) -> None:
    """The bars on the whole trace stand in benchmarks/RESULTS.md; this is what a sample of a twentieth can tell."""
    trace = load(SAMPLE)
    peers = {name: averaged(trace, load_share, name) for name in ("least load", "SGLang", "llm-d", "Dynamo", BEST)}
    assert averaged(trace, load_share, "cache_aware") <= min(peers.values()), peers


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_and_on_traces_that_nobody_has_tuned_on(kind: str) -> None:
    trace = generate(kind, 1500)
    world = World(1000)
    speed = speed_for(trace, world, 0.95)
    mine = replay(trace, speed, world, ours(world)).mean_s
    names = ("least load", "SGLang", "llm-d", "Dynamo", BEST)
    peers = {name: replay(trace, speed, world, PEERS[name](world)).mean_s for name in names}
    assert mine <= 1.01 * min(peers.values()), peers


@pytest.mark.slow
def test_a_store_comes_near_to_one_pool_for_all() -> None:
    """In the mean over some speeds: at a single one of them one choice changes all that follow, by some percent."""
    trace = load(SAMPLE)
    speed = speed_for(trace, World(250), 0.95)

    def mean(world: World, pool: bool = False) -> float:
        total = 0.0
        for factor in (0.98, 0.99, 1.0, 1.01, 1.02):
            belief = ByEvents()
            router = ours(world, (lambda one=belief: one) if pool else ByEvents)
            total += replay(trace, factor * speed, world, router).mean_s
        return total / 5

    alone = mean(World(250))
    pool = mean(World(250, pool=True), pool=True)
    store = mean(World(250, store=Store(2000, 20_000.0, 160_000.0)))
    assert pool < store < alone
    assert store <= 1.15 * pool
