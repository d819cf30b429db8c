"""Tests that an explanation names the instance that the next request gets, whatever the state of the fleet."""

from random import Random
from typing import Any

import pytest

from kvparams.instances import Instance, RequestFacts, Role, RoundRobin
from kvparams.routing.admission import RoleLimits
from kvparams.routing.breaker import BreakerLimits
from kvparams.routing.policies.least_load import LeastLoad
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.fleet import Fleet
from tests.support.proxy.clock import Clock


class Waiter:
    def __init__(self, facts: RequestFacts) -> None:
        self.facts = facts

    def granted(self, instance: Instance) -> None:
        """It waits for nothing: the test takes it out again."""

    def refused(self, error: ProxyError) -> None:
        """Likewise."""


def facts(tokens: int = 10) -> RequestFacts:
    return RequestFacts("r", "t", None, 1, tokens, None, None)


class Rig:
    def __init__(self, policy: Any = RoundRobin, *, requests: int | None = None) -> None:
        self.clock = Clock()
        self.fleet = Fleet(
            (),
            {role: policy() for role in Role},
            self.clock.now,
            self.clock.call_later,
            limits={role: RoleLimits(requests) for role in Role},
            breaker=BreakerLimits(consecutive=2, open_s=4.0),
        )
        for role, prefix in ((Role.PREFILL, "p"), (Role.DECODE, "d")):
            for number in range(3):
                self.join(f"{prefix}{number}", role)
        self.fleet.startup_complete()

    def join(self, id: str, role: Role) -> None:
        member = self.fleet.add(Instance(id, "b", role, "http://h:1", "nixl"))
        self.fleet.record_probe(member, True, None)

    def instance(self, id: str) -> Instance:
        return next(one.instance for one in self.fleet.members if one.instance.id == id)


@pytest.mark.parametrize("policy", [RoundRobin, LeastLoad])
@pytest.mark.parametrize("requests", [None, 2])
@pytest.mark.parametrize("seed", range(5))
def test_the_next_request_goes_where_the_explanation_says(policy: Any, requests: int | None, seed: int) -> None:
    random = Random(seed)
    rig = Rig(policy, requests=requests)
    running: list[tuple[Instance, RequestFacts]] = []
    waited = granted = 0
    for _ in range(300):
        act = random.randrange(6)
        prefill, decode = rig.instance(f"p{random.randrange(3)}"), rig.instance(f"d{random.randrange(3)}")
        if act == 0 and running:
            rig.fleet.release(*running.pop(random.randrange(len(running))))
        elif act == 1:
            rig.fleet.record_failure(decode, connected=True, why="x", beside=prefill)
        elif act == 2:
            rig.fleet.record_success(decode, prefill)
        elif act == 3:
            rig.clock.pass_time(random.random() * 3)
        elif act == 4:  # it comes back, slowly
            member = rig.fleet.member(decode)
            rig.fleet.record_probe(member, False, None)
            rig.fleet.record_probe(member, True, None)
        asked, role = facts(), random.choice((Role.PREFILL, Role.DECODE))
        beside = None if role is Role.PREFILL else prefill
        try:
            explained = rig.fleet.explain(role, asked, beside)
        except ProxyError:
            continue
        waiter = Waiter(asked)
        taken = rig.fleet.acquire(role, asked, (), waiter, beside)
        if taken is None:
            assert explained.waits
            rig.fleet.cancel_wait(waiter)
            waited += 1
        else:
            assert (explained.chosen.id, explained.waits) == (taken.id, False)
            assert taken.id not in explained.excluded
            running.append((taken, asked))
            granted += 1
    assert granted > 20
    assert waited > 5 or requests is None


def test_an_explanation_says_why_others_get_nothing_now() -> None:
    rig = Rig(requests=1)
    full = rig.fleet.acquire(Role.PREFILL, facts(), (), Waiter(facts()))
    assert full is not None
    explained = rig.fleet.explain(Role.PREFILL, facts())
    assert explained.excluded == {full.id: "no room"}
    assert not explained.waits
    for _ in range(2):
        rig.fleet.acquire(Role.PREFILL, facts(), (), Waiter(facts()))
    assert rig.fleet.explain(Role.PREFILL, facts()).waits


def test_a_pair_that_fails_is_not_chosen() -> None:
    rig = Rig(LeastLoad)
    prefill = rig.instance("p0")
    first = rig.fleet.explain(Role.DECODE, facts(), prefill).chosen
    for _ in range(3):
        rig.fleet.record_failure(first, connected=True, why="x", beside=prefill)
    explained = rig.fleet.explain(Role.DECODE, facts(), prefill)
    assert explained.excluded == {first.id: "its pairs fail"}
    assert explained.chosen is not first
    assert rig.fleet.explain(Role.DECODE, facts(), rig.instance("p1")).excluded == {}, "the control: another pair"


def test_an_instance_in_slow_start_gets_nothing_beyond_its_share() -> None:
    rig = Rig(LeastLoad)
    for _ in range(4):
        rig.fleet.acquire(Role.DECODE, facts(), (), Waiter(facts()))
    rig.join("d9", Role.DECODE)
    taken = rig.fleet.acquire(Role.DECODE, facts(), (), Waiter(facts()))
    assert taken is not None
    assert taken.id == "d9", "it may have one"
    explained = rig.fleet.explain(Role.DECODE, facts())
    assert explained.excluded == {"d9": "slow start"}
    rig.clock.pass_time(20.0)
    assert rig.fleet.explain(Role.DECODE, facts()).excluded == {}
