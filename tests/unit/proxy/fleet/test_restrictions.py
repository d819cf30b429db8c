"""Tests which instances run the legs of a request that is restricted to some of them."""

import pytest

from kvparams.instances import Instance, InstanceRestriction, RequestFacts, Role, RoundRobin
from kvparams.routing.admission import RoleLimits
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.fleet import Fleet
from tests.support.proxy.clock import Clock
from tests.support.proxy.shared_site import Waiter, facts


def fleet(limits: RoleLimits | None = None) -> Fleet:
    clock = Clock()
    instances = [Instance(f"d{number}", "1", Role.DECODE, f"http://h:{number + 1}", "nixl") for number in range(3)]
    one = Fleet(
        instances,
        {role: RoundRobin() for role in Role},
        clock.now,
        clock.call_later,
        limits=None if limits is None else dict.fromkeys(Role, limits),
        slow_start_s=0.0,
    )
    one.startup_complete()
    return one


def restricted(name: str, *ids: str, required: bool = True, role: Role = Role.DECODE) -> RequestFacts:
    return facts(name, tokens=1)._replace(restrictions={role: InstanceRestriction(frozenset(ids), required)})


def chosen(one: Fleet, request: RequestFacts, avoid: tuple[str, ...] = ()) -> str | None:
    found = one.acquire(Role.DECODE, request, avoid, Waiter(request))
    return None if found is None else found.id


def test_only_named_instances_run_a_restricted_leg() -> None:
    one = fleet()
    assert {chosen(one, restricted(str(number), "d1", "d2")) for number in range(6)} == {"d1", "d2"}
    assert {chosen(one, facts(str(number), tokens=1)) for number in range(6)} == {"d0", "d1", "d2"}  # control
    other_role = {chosen(one, restricted(str(number), "p0", role=Role.PREFILL)) for number in range(6)}
    assert other_role == {"d0", "d1", "d2"}


def test_a_required_restriction_without_instances_is_a_503() -> None:
    for ids in ((), ("nobody",)):
        with pytest.raises(ProxyError) as caught:
            chosen(fleet(), restricted("r", *ids))
        assert (caught.value.status, caught.value.code) == (503, "no_decode_instance")


def test_a_restriction_that_is_not_required_gives_way() -> None:
    one = fleet()
    assert chosen(one, restricted("a", "d2", required=False)) == "d2"
    assert chosen(one, restricted("b", "d2", required=False), avoid=("d2",)) in ("d0", "d1")
    assert chosen(one, restricted("c", "nobody", required=False)) is not None
    # Control: one that is required does not, and a failed instance is taken again where there is nobody else.
    assert chosen(one, restricted("d", "d2"), avoid=("d2",)) == "d2"


def test_a_restricted_leg_waits_for_its_instances_and_others_pass_it() -> None:
    one = fleet(RoleLimits(requests=1))
    first = restricted("a", "d1")
    instance = one.acquire(Role.DECODE, first, (), Waiter(first))
    assert instance is not None
    waiting = Waiter(restricted("b", "d1"))
    assert one.acquire(Role.DECODE, waiting.facts, (), waiting) is None
    assert chosen(one, facts("c", tokens=1)) in ("d0", "d2")  # the others have room
    assert waiting.instance is None
    one.release(instance, first)
    assert waiting.instance is instance


def test_a_waiting_leg_is_refused_when_its_instances_leave() -> None:
    one = fleet(RoleLimits(requests=1))
    first = restricted("a", "d1")
    assert one.acquire(Role.DECODE, first, (), Waiter(first)) is not None
    waiting = Waiter(restricted("b", "d1"))
    assert one.acquire(Role.DECODE, waiting.facts, (), waiting) is None
    one.remove("d1")
    assert waiting.error is not None
    assert waiting.error.status == 503


def test_alternatives_are_the_others_that_may_run_the_leg_least_loaded_first() -> None:
    one = fleet()
    request = facts("a", tokens=1)
    taken = [one.acquire(Role.DECODE, request, (), Waiter(request)) for _ in range(2)]
    assert taken[0] is not None
    assert [each.id for each in one.alternatives(taken[0], request)] == ["d2", "d1"]
    assert [each.id for each in one.alternatives(taken[0], restricted("b", "d0", "d1"))] == ["d1"]
    assert one.alternatives(taken[0], restricted("b", "nobody")) == []
