"""Tests the model of decode engines' caches, and that legs go to the engine with the cached prefix."""

from array import array
from itertools import count
from random import Random

import pytest

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.admission import RoleLimits
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel
from tests.support.proxy.clock import Clock
from tests.system.modes.test_pairing import Waits

ENGINES = [Instance(id, "1", Role.DECODE, f"http://{id}", "nixl") for id in ("d0", "d1")]
D0, D1 = ENGINES
_NUMBERS = count()


def facts(seed: int, tokens: int = 600) -> RequestFacts:
    name = f"r{next(_NUMBERS)}"
    return RequestFacts(
        name, name, "m", 1, 1, array("I", Random(seed).choices(range(1000), k=tokens)), None, prompt_tokens=tokens
    )


def some_time_passes(fleet: Fleet) -> None:
    """What is older is told from what is newer by how much was used between."""
    for seed in (100, 101):
        fleet.record_decode(D1, facts(seed, 100_000), None, None)


@pytest.fixture
def fleet() -> Fleet:
    clock = Clock()
    return Fleet(
        ENGINES,
        {role: CacheAware() for role in Role},
        clock.now,
        clock.call_later,
        slow_start_s=0.0,
        limits={Role.DECODE: RoleLimits(requests=1)},
        prefixes=PrefixCacheModel(clock.now, seed=1),
    )


def test_who_has_answered_has_the_prompt_and_nobody_else(fleet: Fleet) -> None:
    assert fleet.cached_tokens(Role.DECODE, facts(1)) == {}
    fleet.record_decode(D0, facts(1), None, None)
    assert fleet.cached_tokens(Role.DECODE, facts(1)) == {"d0": 576}  # the last token is always computed
    assert fleet.cached_tokens(Role.DECODE, facts(2)) == {}
    assert fleet.cached_tokens(Role.PREFILL, facts(1)) == {}


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ((600, 0), {}),
        ((600, None), {}),  # vLLM leaves out what is 0
        ((600, 576), {"d1": 576}),
        ((300, 288), {"d1": 576}),  # its ids are others than ours
        ((None, None), {"d1": 576}),  # a stream without usage
    ],
)
def test_what_it_had_not_says_that_what_is_older_has_gone(
    fleet: Fleet, said: tuple[int | None, int | None], left: dict[str, int]
) -> None:
    fleet.record_decode(D1, facts(3), 600, 64)  # it says such things
    fleet.record_decode(D1, facts(1), None, None)
    some_time_passes(fleet)
    fleet.record_decode(D1, facts(2), None, None)
    some_time_passes(fleet)
    fleet.record_decode(D1, facts(2), *said)
    assert fleet.cached_tokens(Role.DECODE, facts(1)) == left
    assert fleet.cached_tokens(Role.DECODE, facts(2)) == {"d1": 576}


def test_what_it_was_handed_is_not_held_against_it(fleet: Fleet) -> None:
    fleet.record_decode(D1, facts(3), 600, 64)
    fleet.record_decode(D1, facts(1), None, None)
    some_time_passes(fleet)
    fleet.record_decode(D1, facts(2), None, None)
    some_time_passes(fleet)
    fleet.record_decode(D1, facts(2), None, None)
    assert fleet.cached_tokens(Role.DECODE, facts(1)) == {"d1": 576}


def test_who_has_left_has_nothing_though_its_leg_ends_later(fleet: Fleet) -> None:
    fleet.record_decode(D0, facts(1), None, None)
    fleet.remove("d0")
    fleet.record_decode(D0, facts(1), None, None)
    assert fleet.cached_tokens(Role.DECODE, facts(1)) == {}
    fleet.add(D0)
    fleet.record_probe(next(each for each in fleet.members if each.instance.id == "d0"), True, None)
    assert fleet.cached_tokens(Role.DECODE, facts(1)) == {}


def test_who_is_near_is_taken_as_long_as_it_has_room(fleet: Fleet) -> None:
    one, third = facts(1), Waits()
    assert fleet.acquire(Role.DECODE, one, (), Waits(), near=["d1"]) is D1
    assert fleet.acquire(Role.DECODE, facts(1), (), Waits(), near=["d1"]) is D0
    assert fleet.acquire(Role.DECODE, third.facts, (), third, near=["d1"]) is None
    fleet.release(D1, one)
    assert third.heard == [D1]


def test_who_is_near_but_has_twice_as_much_to_do_is_not_taken() -> None:
    clock = Clock()
    fleet = Fleet(ENGINES, {role: CacheAware() for role in Role}, clock.now, clock.call_later, slow_start_s=0.0)
    taken = [fleet.acquire(Role.DECODE, facts(1), (), Waits(), near=["d1"]) for _ in range(6)]
    assert taken[:2] == [D1, D1]
    assert taken.count(D0) == 2
