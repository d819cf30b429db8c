"""Tests what foreign load does to a fleet: policies and limits see it, and it never shuts this proxy out."""

import pytest

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.admission import RoleLimits
from kvparams.routing.policies.least_load import LeastLoad
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from tests.support.proxy.clock import Clock
from tests.support.proxy.shared_site import Waiter, facts


def fleet(limits: RoleLimits | None = None) -> tuple[Fleet, list[Member]]:
    clock = Clock()
    instances = [Instance(f"d{number}", "1", Role.DECODE, "http://h:1", "nixl") for number in range(2)]
    one = Fleet(
        instances,
        {role: LeastLoad() for role in Role},
        clock.now,
        clock.call_later,
        limits=None if limits is None else dict.fromkeys(Role, limits),
        slow_start_s=0.0,
    )
    one.startup_complete()
    return one, list(one.members)


def take(one: Fleet, request: RequestFacts) -> tuple[Instance | None, Waiter]:
    waiter = Waiter(request)
    return one.acquire(Role.DECODE, request, (), waiter), waiter


def test_least_load_sees_it() -> None:
    one, (first, second) = fleet()
    one.set_foreign(first, 3, 300, 0.0)
    for number in range(3):
        chosen, _ = take(one, facts(str(number), tokens=10))
        assert chosen is second.instance
    assert (first.in_flight, first.tokens, first.own_in_flight, first.own_tokens) == (3, 300, 0, 0)
    assert (second.in_flight, second.own_in_flight) == (3, 3)
    one.set_foreign(first, 0, 0, 0.0)
    assert take(one, facts("4", tokens=10))[0] is first.instance


def test_it_stays_what_it_is_while_known_legs_come_and_go() -> None:
    one, (first, _) = fleet()
    one.set_foreign(first, 2, 20, 0.0)
    one.set_elsewhere(first, 5, 50)
    one.set_foreign(first, 1, 10, 0.0)
    one.set_elsewhere(first, 0, 0)
    assert (first.in_flight, first.tokens, first.own_in_flight, first.known_in_flight) == (1, 10, 0, 0)


@pytest.mark.parametrize("limits", [RoleLimits(requests=2), RoleLimits(tokens=100)])
def test_limits_count_it_and_a_leg_that_waits_goes_on_when_it_shrinks(limits: RoleLimits) -> None:
    one, members = fleet(limits)
    for member in members:
        one.set_foreign(member, 1, 60, 0.0)
    for number in range(2):  # one each
        assert take(one, facts(str(number), tokens=60))[0] is not None
    chosen, waiter = take(one, facts("next", tokens=30))
    assert chosen is None
    assert waiter.instance is None
    one.set_foreign(members[1], 0, 0, 0.0)
    assert waiter.instance is members[1].instance


@pytest.mark.parametrize("limits", [RoleLimits(requests=2), RoleLimits(tokens=100)])
def test_it_alone_never_shuts_this_proxy_out(limits: RoleLimits) -> None:
    one, members = fleet(limits)
    for member in members:
        one.set_foreign(member, 50, 5000, 0.0)
    request = facts("one", tokens=60)
    chosen, _ = take(one, request)
    assert chosen is not None
    assert take(one, facts("two", tokens=60))[0] is not None
    refused, waiter = take(one, facts("three", tokens=60))
    assert refused is None  # the control: one leg each, no more
    one.release(chosen, request)
    assert waiter.instance is chosen
