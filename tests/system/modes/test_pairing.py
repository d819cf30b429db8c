"""Tests which engines are paired: replicas and pools in one fleet, compatibility keys, and the error without a pair."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvparams.instances import Instance, RequestFacts, Role, RoundRobin
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.pairing import may_pair
from kvparams.routing.policies.session_affinity import SessionAffinity
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.fleet import Fleet
from tests.support.proxy.clock import Clock

FACTS = RequestFacts("r", "t", None, 1, 1, None, None)


def instance(id: str, group: str | None = None, compatibility: str | None = None) -> Instance:
    role = Role.PREFILL if id.startswith("p") else Role.DECODE
    return Instance(id, "b", role, "http://h:1", "nixl", group=group, compatibility=compatibility)


MIXED = (
    *(instance(f"{letter}{number}", group) for letter in "pd" for number, group in enumerate(("left", "right", None))),
    *(instance(f"{letter}{number}") for letter in "pd" for number in (3, 4)),
    *(instance(f"{letter}{number}", None, key) for letter in "pd" for number, key in ((5, "v1"), (6, "v2"))),
    instance("p7", "left", "v2"),
    instance("d8", None, "v3"),
)


class Waits:
    """A waiter."""

    facts = FACTS

    def __init__(self) -> None:
        self.heard: list[Instance | ProxyError] = []

    def granted(self, instance: Instance) -> None:
        self.heard.append(instance)

    def refused(self, error: ProxyError) -> None:
        self.heard.append(error)


def fleet_of(instances: Sequence[Instance], clock: Clock | None = None, legs: int | None = None) -> Fleet:
    clock = clock or Clock()
    limits = {role: RoleLimits(legs) for role in Role}
    return Fleet(
        instances,
        {role: RoundRobin() for role in Role},
        clock.now,
        clock.call_later,
        limits=limits,
        queue=QueueLimits(8, None, 5.0),
        slow_start_s=0.0,
    )


def pair(fleet: Fleet, facts: RequestFacts = FACTS, *, decode_first: bool = False) -> tuple[Instance, Instance]:
    first, second = (Role.DECODE, Role.PREFILL) if decode_first else (Role.PREFILL, Role.DECODE)
    one = fleet.acquire(first, facts, (), Waits(), second)
    assert one is not None
    other = fleet.acquire(second, facts, (), Waits(), one)
    assert other is not None
    fleet.release(one, facts)
    fleet.release(other, facts)
    return (other, one) if decode_first else (one, other)


@pytest.mark.parametrize("decode_first", [False, True])
def test_only_those_are_paired_who_may_be_while_the_fleet_changes(decode_first: bool) -> None:
    drawn = random.Random(7)
    fleet = fleet_of(MIXED)
    seen: set[tuple[str, str]] = set()
    for _ in range(2000):
        for member in list(fleet.members):
            if drawn.random() < 0.05:
                fleet.drain(member.instance.id, not member.draining)
        try:
            prefill, decode = pair(fleet, decode_first=decode_first)
        except ProxyError:
            ready = [member.instance for member in fleet.members if member.available]
            assert not any(
                may_pair(one, other)
                for one in ready
                for other in ready
                if one.role is Role.PREFILL and other.role is Role.DECODE
            )
            continue
        assert may_pair(prefill, decode)
        seen.add((prefill.id, decode.id))
    roles = [[one for one in MIXED if one.role is role] for role in (Role.PREFILL, Role.DECODE)]
    could = {(p.id, d.id) for p in roles[0] for d in roles[1] if may_pair(p, d)}
    assert seen == could
    assert {first for first, _ in seen}.isdisjoint({"p7"})


def test_without_the_other_leg_everybody_may_be_taken() -> None:
    """The control: what is not split needs no partner, and so who has none is taken."""
    fleet = fleet_of(MIXED)
    taken = {fleet.acquire(Role.PREFILL, FACTS, (), Waits()) for _ in range(20)}
    assert "p7" in {one.id for one in taken if one is not None}


def test_who_has_no_partner_is_told_so() -> None:
    fleet = fleet_of([instance("p0", "left"), instance("d0", "right")])
    with pytest.raises(ProxyError, match="paired with any decode one: check `connector`, `group` and `compatibility`"):
        fleet.acquire(Role.PREFILL, FACTS, (), Waits(), Role.DECODE)
    with pytest.raises(ProxyError, match="the other leg's engine, of the group left"):
        fleet.acquire(Role.DECODE, FACTS, (), Waits(), instance("p0", "left"))


def test_engines_of_two_connectors_are_not_paired() -> None:
    """Neither could fetch the other's KV: decode would compute all of it again, and nobody would be told."""
    spoken = {"p0": "nixl", "d0": "mooncake", "p1": "mooncake", "d1": "content", "d2": "nixl"}
    instances = [replace(instance(id), dialect=dialect) for id, dialect in spoken.items()]
    fleet = fleet_of(instances)
    assert {(one.id, other.id) for one, other in (pair(fleet) for _ in range(20))} == {("p0", "d2"), ("p1", "d0")}
    fleet.remove("d2")
    with pytest.raises(ProxyError, match="the other leg's engine, of no group with the connector nixl: check"):
        fleet.acquire(Role.DECODE, FACTS, (), Waits(), instances[0])
    assert {pair(fleet)[0].id for _ in range(8)} == {"p1"}


def test_a_store_may_be_spoken_of_in_several_ways() -> None:
    """The engines are the same; what differs is when the proxy tells them, and what it has dropped."""
    ways = ("store", "store-drop", "store-meet")
    sides = [[replace(instance(f"{side}{way}"), dialect=way) for way in ways] for side in "pd"]
    assert all(may_pair(prefill, decode) for prefill in sides[0] for decode in sides[1])


def test_whoever_waits_for_a_partner_waits_for_its_own_and_hears_if_that_leaves() -> None:
    fleet = fleet_of([instance("p0", "left"), instance("d0", "left"), instance("p1"), instance("d1")], legs=1)
    left, free = instance("p0", "left"), instance("p1")
    assert fleet.acquire(Role.DECODE, FACTS, (), Waits(), left) is not None
    waiting = Waits()
    assert fleet.acquire(Role.DECODE, FACTS, (), waiting, left) is None
    other = fleet.acquire(Role.DECODE, FACTS, (), Waits(), free)  # those that wait for others are not in the way
    assert other is not None
    assert other.id == "d1"
    fleet.release(other, FACTS)
    assert waiting.heard == []  # d1 is free, and no partner
    fleet.remove("d0")
    (error,) = waiting.heard
    assert isinstance(error, ProxyError)
    assert "of the group left" in error.message


def test_a_group_comes_and_goes_as_one() -> None:
    fleet = fleet_of([instance("p0", "left"), instance("d0", "left")])
    right = [instance("p1", "right"), instance("d1", "right")]
    for one in right:
        fleet.record_probe(fleet.add(one), True, None)
    assert {pair(fleet)[1].id for _ in range(8)} == {"d0", "d1"}
    fleet.drain("d1")  # as soon as one half has gone, the other is not asked either
    assert {pair(fleet)[0].id for _ in range(8)} == {"p0"}
    fleet.drain("d1", False)
    assert {pair(fleet)[0].id for _ in range(8)} == {"p0", "p1"}
    fleet.remove("p1")
    assert {tuple(one.id for one in pair(fleet)) for _ in range(8)} == {("p0", "d0")}


def test_a_conversation_stays_with_its_pair() -> None:
    clock = Clock()
    policy = {role: SessionAffinity() for role in Role}
    fleet = Fleet(MIXED, policy, clock.now, clock.call_later, slow_start_s=0.0)
    pairs: dict[str, set[tuple[str, str]]] = {}
    for number in range(600):
        session = f"s{number % 60}"
        prefill, decode = pair(fleet, FACTS._replace(session=session))
        assert may_pair(prefill, decode)
        pairs.setdefault(session, set()).add((prefill.id, decode.id))
    assert all(len(found) == 1 for found in pairs.values())
    assert len({one for found in pairs.values() for one in found}) > 5
