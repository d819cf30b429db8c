"""Tests the rules of every policy, and the purpose of each."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from random import Random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams import plugins
from kvparams.cost_model import FleetCostPrior
from kvparams.engine_backlog import EngineBacklog
from kvparams.instances import Instance, RequestFacts, Role, RoundRobin, SchedulingPolicy
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams.routing.policies.least_load import LeastLoad
from kvparams.routing.policies.random_choice import RandomChoice
from kvparams.routing.policies.session_affinity import SessionAffinity
from kvparams.routing.policies.two_choices import TwoChoices
from kvparams.routing.ttft_estimate import estimate_ttft

EXAMPLES = (Path(__file__).parents[4] / "docs" / "extending.md").read_text()
POLICIES: dict[str, type[SchedulingPolicy]] = {
    "cache_aware": CacheAware,
    "least_load": LeastLoad,
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "session_affinity": SessionAffinity,
    "two_choices": TwoChoices,
}


@dataclass(eq=False)
class Seat:
    """One instance, with books that a test keeps."""

    instance: Instance
    backlog: EngineBacklog
    in_flight: int = 0
    tokens: int = 0


@dataclass
class Fleet:
    """Instances of one role and their clock."""

    count: int
    role: Role = Role.PREFILL
    now: float = 0.0
    seats: list[Seat] = field(default_factory=list[Seat])

    def __post_init__(self) -> None:
        usual = FleetCostPrior()
        for index in range(self.count):
            instance = Instance(f"engine-{index}", "1", self.role, f"http://engine-{index}", "content")
            self.seats.append(Seat(instance, EngineBacklog(lambda: self.now, usual)))

    def run(self, seat: Seat, request: RequestFacts) -> None:
        """It is given this request."""
        seat.in_flight += 1
        seat.tokens += request.prompt_tokens
        expected = estimate_ttft(seat, request)
        seat.backlog.begin(request.request_id, expected.compute_s, expected.fetch_s, expected.load_s)

    def end(self, seat: Seat, request: RequestFacts) -> None:
        """It has done it, as was expected."""
        seat.in_flight -= 1
        seat.tokens -= request.prompt_tokens
        seat.backlog.end(request.request_id)

    def teach(self, tokens_per_s: float, seats: Sequence[Seat] | None = None) -> None:
        """All are as fast, or only these have told."""
        for seat in self.seats if seats is None else seats:
            for tokens in (1000, 2000, 8000, 500, 4000, 16000) * 4:
                seat.backlog.begin("lesson", 1.0)
                self.now += tokens / tokens_per_s
                seat.backlog.end("lesson", tokens, tokens)


def asked(name: str = "r", tokens: int = 1000, **more: object) -> RequestFacts:
    """A request."""
    facts = RequestFacts(name, name, None, 1, 1, None, None, prompt_tokens=tokens)
    return facts._replace(**more)


loads = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50_000), st.integers(0, 8_000)), min_size=1, max_size=12)


@pytest.mark.parametrize("name", POLICIES)
def test_each_is_registered_by_its_name(name: str) -> None:
    assert plugins.load_plugin("policies", name) is POLICIES[name]
    assert set(POLICIES) <= set(plugins.plugin_names("policies"))


@pytest.mark.parametrize("policy", POLICIES.values())
@given(loads, st.integers(0, 2**40), st.text(max_size=5), st.sampled_from(Role))
def test_a_choice_is_a_candidate_and_the_same_every_time(
    policy: Callable[[], SchedulingPolicy],
    loads: list[tuple[int, int, int]],
    turn: int,
    session: str,
    role: Role,
) -> None:
    fleet = Fleet(len(loads), role)
    cached = dict[Instance, int]()
    for seat, (in_flight, tokens, held) in zip(fleet.seats, loads, strict=True):
        seat.in_flight, seat.tokens = in_flight, tokens
        for leg in range(in_flight):
            seat.backlog.begin(leg, tokens / 10_000)
        cached[seat.instance] = held
    request = asked(tokens=8_000, session=session, cached_tokens=cached, stored_tokens=4_000)
    chosen = policy().choose(fleet.seats, request, turn)
    assert chosen in fleet.seats
    assert policy().choose(fleet.seats, request, turn) is chosen
    assert policy().choose(tuple(fleet.seats), request, turn) is chosen


@pytest.mark.parametrize("policy", [CacheAware, LeastLoad, RoundRobin])
@given(st.integers(1, 12), st.integers(0, 1000))
def test_with_little_to_do_everyone_gets_a_request_before_anyone_gets_two(
    policy: Callable[[], SchedulingPolicy], count: int, turn: int
) -> None:
    fleet, one = Fleet(count), policy()
    for number in range(count):
        request = asked(str(number))
        fleet.run(one.choose(fleet.seats, request, turn + number), request)
    assert [seat.in_flight for seat in fleet.seats] == [1] * count


@given(st.integers(2, 8))
def test_and_also_where_one_request_has_ended_before_the_next_comes(count: int) -> None:
    """What nobody holds goes round: to whoever has been idle longest."""
    fleet, policy, chosen = Fleet(count), CacheAware(), set[str]()
    for number in range(count):
        fleet.now += 100.0
        request = asked(str(number))
        seat = policy.choose(fleet.seats, request, 0)
        chosen.add(seat.instance.id)
        fleet.run(seat, request)
        fleet.now += 1.0
        fleet.end(seat, request)
    assert len(chosen) == count


def test_a_cached_prefix_is_gone_back_to() -> None:
    fleet = Fleet(4)
    holder = fleet.seats[2]
    request = asked(tokens=8_000, cached_tokens={holder.instance: 7_000})
    assert {CacheAware().choose(fleet.seats, request, turn).instance.id for turn in range(8)} == {holder.instance.id}


def test_unless_it_is_sooner_computed_elsewhere() -> None:
    """The same request, with work before it at the holder: the switch is this request's own, by seconds."""
    fleet = Fleet(4)
    fleet.teach(10_000.0)
    holder = fleet.seats[2]
    request = asked(tokens=8_000, cached_tokens={holder.instance: 7_000})
    small = asked("small", tokens=100, cached_tokens={holder.instance: 90})
    holder.in_flight = 1
    holder.backlog.begin("before", 0.5)
    assert CacheAware().choose(fleet.seats, request, 0) is holder
    assert CacheAware().choose(fleet.seats, small, 0) is not holder
    holder.backlog.begin("more", 0.5)
    assert CacheAware().choose(fleet.seats, request, 0) is not holder


@given(st.integers(2, 6), st.integers(500, 4_000))
def test_a_hot_prefix_spreads(count: int, tokens: int) -> None:
    """Many ask for one prompt at once: nobody waits more than twice as long as elsewhere, in the end all hold it."""
    fleet, policy = Fleet(count), CacheAware()
    held: dict[Instance, int] = {}
    for number in range(2_000):
        request = asked(str(number), tokens, cached_tokens=dict(held))
        least = min(estimate_ttft(seat, request).ttft_s for seat in fleet.seats)
        seat = policy.choose(fleet.seats, request, number)
        assert estimate_ttft(seat, request).ttft_s <= 2.0 * least
        fleet.run(seat, request)
        held[seat.instance] = tokens
        if len(held) == count:
            return
    raise AssertionError(f"only {len(held)} of {count} ever hold it")


@pytest.mark.parametrize(("cold_s", "warm_s"), [(0.8, 0.02), (1.0, 0.005)])
def test_with_everyone_on_one_prefix_nobody_stands_idle_for_good(cold_s: float, warm_s: float) -> None:
    """64 at a time ask for what one holds: to compute it takes 40 times as long, or 200, but only once for each."""
    fleet, policy = Fleet(4), CacheAware()
    held: dict[Instance, int] = {}
    ends: list[tuple[float, int, Seat, int]] = []
    free = dict.fromkeys((seat.instance for seat in fleet.seats), 0.0)
    got = dict.fromkeys((seat.instance for seat in fleet.seats), 0)

    def ask(number: int) -> None:
        request = asked(str(number), 8_000, cached_tokens=dict(held))
        seat = policy.choose(fleet.seats, request, number)
        one = seat.instance
        fleet.run(seat, request)
        got[one] += 1
        free[one] = max(free[one], fleet.now) + (warm_s if one in held else cold_s)
        heappush(ends, (free[one], number, seat, 64 if one in held else 8_000))
        held[one] = 7_936

    numbers = iter(range(3_000))
    ask(next(numbers))
    while ends:
        fleet.now, number, seat, computed = heappop(ends)
        seat.in_flight -= 1
        seat.tokens -= 8_000
        seat.backlog.end(str(number), computed, 8_000)
        for further in islice(numbers, 1 if number else 64):
            ask(further)
    assert min(got.values()) >= 300


def test_whoever_was_idle_only_for_a_moment_is_not_given_what_another_has_cached() -> None:
    """While most have work, which is when a second of computing makes others wait; the control is one idle for long."""
    fleet, policy = Fleet(4), CacheAware()
    fleet.teach(10_000.0)
    holder, idle, *busy = fleet.seats
    request = asked(tokens=8_000, cached_tokens={holder.instance: 4_000})
    for seat in (holder, *busy):
        for number in range(3):
            seat.in_flight += 1
            seat.backlog.begin(number, 0.25)
    idle.backlog.begin("last", 1.0)
    idle.backlog.end("last", 10_000, 10_000)
    fleet.now += 0.05
    assert policy.choose(fleet.seats, request, 0) is holder
    fleet.now += 50.0  # and the others have not got on
    assert idle.backlog.idle_s > 50.0
    assert holder.backlog.idle_s == 0.0
    assert policy.choose(fleet.seats, request, 0) is idle


def test_whoever_is_slow_gets_less() -> None:
    fleet = Fleet(2)
    for seat, rate in zip(fleet.seats, (2_000.0, 8_000.0), strict=True):
        for tokens in (1000, 4000, 2000, 8000) * 5:
            seat.backlog.begin("lesson", 1.0)
            fleet.now += tokens / rate
            seat.backlog.end("lesson", tokens, tokens)
    policy = CacheAware()
    for number in range(100):
        request = asked(str(number), 2_000)
        fleet.run(policy.choose(fleet.seats, request, number), request)
    slow, fast = (seat.in_flight for seat in fleet.seats)
    assert 10 <= slow <= 25
    assert fast == 100 - slow


@pytest.mark.parametrize("tokens_per_s", [100.0, 10_000.0, 1_000_000.0])
def test_whoever_is_new_is_tried_at_once_and_is_not_heaped_upon(tokens_per_s: float) -> None:
    """However fast engines are: what was guessed of the new one before anybody told is not believed of it alone."""
    fleet, policy = Fleet(4), CacheAware()
    *old, new = fleet.seats
    fleet.teach(tokens_per_s, old)
    assert policy.choose(fleet.seats, asked(), 0) is new
    for number in range(40):
        request = asked(str(number))
        fleet.run(policy.choose(fleet.seats, request, number), request)
    assert all(8 <= seat.in_flight <= 12 for seat in fleet.seats)


def test_what_a_store_has_is_fetched_where_that_is_sooner() -> None:
    fleet = Fleet(1)
    seat = fleet.seats[0]
    near = estimate_ttft(seat, asked(tokens=8_000, stored_tokens=7_000))
    assert (near.cached_tokens, near.fetched_tokens, near.computed_tokens) == (0, 7_000, 1_000)
    assert near.ttft_s < estimate_ttft(seat, asked(tokens=8_000)).ttft_s
    seat.backlog.begin("others fetch", 0.0, fetch_s=60.0)
    assert estimate_ttft(seat, asked(tokens=8_000, stored_tokens=7_000)).fetched_tokens == 0
    own = estimate_ttft(seat, asked(tokens=8_000, stored_tokens=7_000, cached_tokens={seat.instance: 7_500}))
    assert (own.cached_tokens, own.fetched_tokens, own.computed_tokens) == (7_500, 0, 500)


def test_decode_goes_where_least_runs_whatever_is_cached() -> None:
    fleet = Fleet(3, Role.DECODE)
    for seat, in_flight in zip(fleet.seats, (2, 1, 2), strict=True):
        seat.in_flight = in_flight
    request = asked(tokens=8_000, cached_tokens={fleet.seats[0].instance: 8_000})
    assert CacheAware().choose(fleet.seats, request, 0) is fleet.seats[1]


@given(st.integers(1, 12), st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=60))
def test_affinity_is_bounded(count: int, sessions: list[str]) -> None:
    """Nobody runs more than 5/4 of the mean, rounded up, however popular a conversation."""
    fleet, policy = Fleet(count), SessionAffinity()
    for number, session in enumerate(sessions):
        policy.choose(fleet.seats, asked(session=session), number).in_flight += 1
        assert max(seat.in_flight for seat in fleet.seats) <= -(-5 * (number + 1) // (4 * count))


def test_a_conversation_returns_and_others_stay_when_someone_leaves() -> None:
    fleet, policy = Fleet(8), SessionAffinity()
    sessions = [asked(session=f"conversation {number}") for number in range(400)]
    before = [policy.choose(fleet.seats, request, turn) for turn, request in enumerate(sessions)]
    assert before == [policy.choose(fleet.seats, request, 0) for request in sessions]
    gone = fleet.seats.pop(3)
    for request, seat in zip(sessions, before, strict=True):
        assert (policy.choose(fleet.seats, request, 0) is seat) == (seat is not gone)
    assert 20 < before.count(gone) < 90
    tenants = {policy.choose(fleet.seats, asked(session="1", tenant=tenant), 0).instance.id for tenant in "abcdefgh"}
    assert len(tenants) > 1


def test_random_is_even_and_two_choices_are_more_even() -> None:
    fleets = {policy: Fleet(8) for policy in (RandomChoice, TwoChoices)}
    for policy, fleet in fleets.items():
        for number in range(800):
            policy().choose(fleet.seats, asked(str(number)), number).in_flight += 1
    spread = {policy: max(seat.in_flight for seat in fleet.seats) - 100 for policy, fleet in fleets.items()}
    assert 2 < spread[RandomChoice] < 45
    assert spread[TwoChoices] <= 3


def test_a_third_party_registers_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/extending.md, installed as a distribution of somebody else."""
    example = re.search(r"```python\n(from collections.*?class MostCached.*?)```", EXAMPLES, re.DOTALL)
    assert example is not None
    (tmp_path / "their_policies.py").write_text(example.group(1))
    info = tmp_path / "their_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvparams.policies]\nmost_cached = their_policies:MostCached\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    policy = cast("type[SchedulingPolicy]", plugins.load_plugin("policies", "most_cached"))()
    fleet = Fleet(3)
    request = asked(cached_tokens={fleet.seats[1].instance: 5, fleet.seats[2].instance: 9})
    chosen: list[str] = []
    for turn in range(5):
        seat = policy.choose(fleet.seats, request, turn)
        seat.in_flight += 1
        chosen.append(seat.instance.id)
    assert chosen == ["engine-2", "engine-2", "engine-1", "engine-1", "engine-0"]


def test_a_shuffled_life_leaves_the_books_empty() -> None:
    die = Random(1)
    fleet, policy = Fleet(5), CacheAware()
    running: list[tuple[Seat, RequestFacts]] = []
    for number in range(2000):
        fleet.now += die.expovariate(5.0)
        if running and die.random() < 0.5:
            fleet.end(*running.pop(die.randrange(len(running))))
        request = asked(str(number), die.randrange(1, 9000))
        seat = policy.choose(fleet.seats, request, number)
        fleet.run(seat, request)
        running.append((seat, request))
    for each in running:
        fleet.end(*each)
    assert [(seat.in_flight, seat.tokens, seat.backlog.wait_s) for seat in fleet.seats] == [(0, 0, 0.0)] * 5
