"""Tests the fleet's bookkeeping: load is given back, engines leave and return, and models are known."""

import asyncio

import pytest

from kvparams.instances import Instance, RequestFacts, Role, RoundRobin
from kvparams.routing.admission import RoleLimits
from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.event_loop.deadlines import Deadlines
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.health import HealthStatus, has_usable_pair
from kvparams_proxy.fleet.member import Member, MemberState
from tests.support.proxy.clock import Clock


def facts(model: str | None = "m", **more: object) -> RequestFacts:
    return RequestFacts("r", "t", model, 1, 1, None, None)._replace(**more)


def instance(id: str, role: Role = Role.DECODE) -> Instance:
    return Instance(id, "b", role, "http://h:1", "nixl")


def fleet(prefill: int = 2, decode: int = 3, clock: Clock | None = None, **changes: object) -> Fleet:
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.AGGREGATED: 0, Role.ENCODE: 0}
    clock = clock or Clock()
    return Fleet(
        [instance(f"{role}-{number}", role) for role in Role for number in range(counts[role])],
        {role: RoundRobin() for role in Role},
        clock.now,
        clock.call_later,
        **changes,  # pyright: ignore[reportArgumentType]
    )


class Nobody:
    """For legs that are never made to wait."""

    facts = facts()

    def granted(self, instance: Instance) -> None:
        raise AssertionError

    def refused(self, error: ProxyError) -> None:
        raise AssertionError


def take(one: Fleet, role: Role = Role.DECODE, request: RequestFacts = Nobody.facts, avoid: str = "") -> Instance:
    taken = one.acquire(role, request, {avoid} if avoid else (), Nobody())
    assert taken is not None
    return taken


class Witness:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Member]] = []

    def joined(self, member: Member) -> None:
        self.heard.append(("joined", member))

    def left(self, member: Member) -> None:
        self.heard.append(("left", member))


def test_everyone_has_a_turn_in_order() -> None:
    one = fleet()
    chosen = [take(one).id for _ in range(7)]
    assert chosen == [f"decode-{n % 3}" for n in range(7)]
    assert take(one, Role.PREFILL).id == "prefill-0"


def test_who_failed_this_request_is_chosen_last() -> None:
    one = fleet(decode=2)
    assert {take(one, avoid="decode-0").id for _ in range(5)} == {"decode-1"}
    one.drain("decode-1")
    assert take(one, avoid="decode-0").id == "decode-0"


def test_a_model_is_served_only_by_those_who_have_it() -> None:
    one = fleet(prefill=1, decode=2)
    prefill, first, second = one.members
    one.record_probe(prefill, True, frozenset("ab"))
    one.record_probe(first, True, frozenset("a"))
    one.record_probe(second, True, frozenset("b"))
    assert {take(one, request=facts("b")).id for _ in range(4)} == {"decode-1"}
    assert one.may_serve_model("a")
    assert not one.may_serve_model("c")
    assert one.models() == ["a", "b"]
    one.record_probe(second, False, frozenset("b"))
    with pytest.raises(ProxyError, match="serves this model"):
        take(one, request=facts("b"))


def test_invented_models_do_not_fill_the_memory() -> None:
    one = fleet()
    for number in range(5_000):
        request = facts(f"invented-{number}")
        one.release(take(one, request=request), request)
    remembered = one._roles[Role.DECODE]._candidates  # pyright: ignore[reportPrivateUsage]
    assert 0 < len(remembered) <= 1024


def test_what_is_given_back_twice_is_an_error() -> None:
    one = fleet()
    taken = take(one)
    one.release(taken, Nobody.facts)
    with pytest.raises(ValueError, match="more often"):
        one.release(taken, Nobody.facts)
    again = take(one)
    one.remove(again.id)
    one.release(again, Nobody.facts)
    with pytest.raises(ValueError, match="more often"):
        one.release(again, Nobody.facts)


def test_an_engine_that_comes_back_is_another_incarnation() -> None:
    one = fleet()
    before = take(one)
    member = one.member(before)
    one.record_probe(member, True, None)
    assert member.instance is before
    one.record_failure(before, connected=False)
    assert not member.ready
    one.record_probe(member, True, None)
    assert member.instance.id == before.id
    assert member.instance.incarnation != before.incarnation
    assert one.member(before) is member
    one.release(before, Nobody.facts)  # what ran on the earlier one is still given back
    assert member.in_flight == 0
    with pytest.raises(KeyError):
        one.member(before)


def test_each_incarnation_is_remembered_as_long_as_its_legs_run() -> None:
    one = fleet(decode=1)
    member = one.member(take(one))
    legs = [member.instance]
    for _ in range(3):
        one.record_probe(member, False, None)
        one.record_probe(member, True, None)
        legs += [take(one), take(one)]
    one.remove("decode-0")
    assert member.in_flight == len(legs)
    while legs:
        leg = legs.pop(len(legs) // 2)
        assert one.member(leg) is member
        one.release(leg, Nobody.facts)
        if leg not in legs:
            with pytest.raises(KeyError):
                one.member(leg)
    assert member.in_flight == 0


def test_what_happened_to_an_earlier_incarnation_is_not_held_against_the_new_one() -> None:
    one = fleet(decode=1, breaker=BreakerLimits(consecutive=1))
    before = take(one)
    member = one.member(before)
    one.record_probe(member, False, None)
    one.record_probe(member, True, None)
    one.record_failure(before, connected=True)
    one.record_failure(before, connected=False)
    assert member.state is MemberState.READY
    one.record_failure(member.instance, connected=True)  # the control
    assert member.state is MemberState.BROKEN


def test_two_instances_of_one_name_are_refused() -> None:
    clock = Clock()
    with pytest.raises(ValueError, match="called 'a'"):
        Fleet([instance("a"), instance("a")], {r: RoundRobin() for r in Role}, clock.now, clock.call_later)
    one = fleet()
    with pytest.raises(ValueError, match="called 'decode-0'"):
        one.add(instance("decode-0"))


def test_who_joins_is_chosen_once_it_is_known_to_be_ready() -> None:
    one = fleet(decode=0)
    witness = Witness()
    one.add_listener(witness)
    member = one.add(instance("new"))
    assert witness.heard == [("joined", member)]
    with pytest.raises(ProxyError, match="reachable") as caught:
        take(one)
    assert (caught.value.status, caught.value.code) == (503, "no_decode_instance")
    assert caught.value.retry_after_s is not None
    incarnation = member.instance.incarnation
    one.record_probe(member, True, None)
    assert take(one) is member.instance
    assert member.instance.incarnation == incarnation  # it has come, it did not come back


def test_who_is_removed_gets_no_new_legs_and_is_forgotten_after_its_last() -> None:
    one = fleet(decode=2)
    witness = Witness()
    one.add_listener(witness)
    idle, busy = (member for member in one.members if member.instance.role is Role.DECODE)
    legs = [take(one) for _ in range(4)]
    for leg in legs:
        if leg is idle.instance:
            one.release(leg, Nobody.facts)
    one.remove(idle.instance.id)
    assert witness.heard == [("left", idle)]
    one.remove(busy.instance.id)
    assert len(witness.heard) == 1
    with pytest.raises(ProxyError, match="no decode instance is configured"):
        take(one)
    first, last = (leg for leg in legs if leg is busy.instance)
    one.release(first, Nobody.facts)
    assert len(witness.heard) == 1
    one.release(last, Nobody.facts)
    assert witness.heard == [("left", idle), ("left", busy)]
    with pytest.raises(KeyError):
        one.remove("decode-0")


def test_that_it_has_left_is_said_once_even_when_its_last_leg_ends_meanwhile() -> None:
    """Who waits is refused because it leaves, and gives up its other leg there and then."""
    one = fleet(decode=1, limits={Role.DECODE: RoleLimits(1)})
    witness = Witness()
    one.add_listener(witness)
    member = one.member(take(one))

    class Both(Nobody):
        def refused(self, error: ProxyError) -> None:
            one.release(member.instance, self.facts)

    assert one.acquire(Role.DECODE, Nobody.facts, (), Both()) is None
    one.remove("decode-0")
    assert witness.heard == [("left", member)]


def test_what_was_replaced_goes_on_beside_the_new_one() -> None:
    one = fleet(decode=1)
    witness = Witness()
    one.add_listener(witness)
    before = take(one)
    old = one.member(before)
    new = one.replace(instance("decode-0"))
    assert witness.heard == [("joined", new)]
    assert (old.state, new.state) == (MemberState.LEFT, MemberState.NOT_READY)
    one.record_probe(old, True, frozenset("late"))  # a probe that was under way
    assert old.models is None
    one.record_probe(new, True, None)
    after = take(one)
    assert one.member(after) is new
    assert (old.in_flight, new.in_flight) == (1, 1)
    one.release(before, Nobody.facts)
    assert witness.heard[1:] == [("left", old)]
    one.release(after, Nobody.facts)
    assert new.in_flight == 0


def test_the_same_instance_may_be_removed_and_added_again_while_it_runs() -> None:
    one = fleet(decode=1)
    before = take(one)
    one.remove("decode-0")
    new = one.add(before)
    one.record_probe(new, True, None)
    take(one)
    one.release(before, Nobody.facts)
    assert new.in_flight == 1


def test_who_is_drained_gets_no_new_legs_until_that_is_over() -> None:
    one = fleet(decode=2)
    first = take(one)
    one.drain(first.id)
    assert {take(one).id for _ in range(3)} == {"decode-1"}
    one.drain("decode-1")
    with pytest.raises(ProxyError, match="drained"):
        take(one)
    assert one.health()[Role.DECODE].status is HealthStatus.UNAVAILABLE
    one.drain(first.id, False)
    assert take(one) is first  # the same incarnation
    one.release(first, Nobody.facts)
    assert one.health()[Role.DECODE].status is HealthStatus.OK


def test_health_says_for_each_role_how_many_there_are_of_what() -> None:
    one = fleet(prefill=1, decode=4, breaker=BreakerLimits(consecutive=1))
    drained, broken, gone, _ = (m for m in one.members if m.instance.role is Role.DECODE)
    one.drain(drained.instance.id)
    one.record_failure(broken.instance, connected=True)
    one.record_failure(gone.instance, connected=False)
    assert one.health()[Role.DECODE] == (4, 1, 1, 1, 0, 2)
    assert one.health()[Role.PREFILL] == (1, 1, 0, 0, 0, 1)


def test_without_limits_nothing_but_the_policy_is_asked() -> None:
    """What keeps a request cheap: no work for each candidate unless something is the matter."""
    clock = Clock()
    one = fleet(clock=clock, breaker=BreakerLimits(consecutive=1, open_s=1.0))
    decode = one._roles[Role.DECODE]  # pyright: ignore[reportPrivateUsage]
    assert not decode.needs_notice
    member = one.member(take(one))
    one.record_failure(member.instance, connected=True)
    assert decode.needs_notice
    clock.pass_time(1.0)
    one.record_success(member.instance)
    assert not decode.needs_notice
    one.record_probe(member, False, None)
    one.record_probe(member, True, None)
    assert decode.needs_notice  # it starts slowly
    clock.pass_time(10.0)
    assert not decode.needs_notice
    assert clock.pending == 0
    assert fleet(limits={Role.DECODE: RoleLimits(1)})._roles[Role.DECODE].needs_notice  # pyright: ignore[reportPrivateUsage]


class Clocked:
    """Something with a time-out."""

    def __init__(self) -> None:
        self.expired = asyncio.Event()

    def expire(self) -> None:
        self.expired.set()


async def test_the_watch_fires_for_what_ran_out_and_not_for_what_was_renewed_or_stopped() -> None:
    watch = Deadlines(asyncio.get_running_loop())
    due, renewed, stopped = Clocked(), Clocked(), Clocked()
    for what in (due, renewed, stopped):
        watch.start(what, 0.05)
    watch.start(renewed, 60)
    watch.stop(stopped)
    await asyncio.wait_for(due.expired.wait(), 5)
    assert not renewed.expired.is_set()
    assert not stopped.expired.is_set()
    again = Clocked()
    watch.start(again, 0.01)
    await asyncio.wait_for(again.expired.wait(), 5)


# groups, where engines are suspected


def grouped(*groups: str) -> Fleet:
    """A prefill and a decode instance of each group; breakers open at the first failure and stay open."""
    clock = Clock()
    return Fleet(
        [Instance(f"{role}-{g}", "b", role, "http://h:1", "nixl", group=g) for role in PAIRED for g in groups],
        {role: RoundRobin() for role in Role},
        clock.now,
        clock.call_later,
        breaker=BreakerLimits(consecutive=1, open_s=60.0, longest_s=60.0),
    )


PAIRED = (Role.PREFILL, Role.DECODE)


def suspect(one: Fleet, *ids: str) -> None:
    for member in one.members:
        if member.instance.id in ids:
            one.record_failure(member.instance, connected=True)


def beside(one: Fleet, role: Role, partner: Instance | Role) -> set[str]:
    """Who is chosen for this role."""
    taken = [one.acquire(role, facts(), (), Nobody(), partner) for _ in range(6)]
    return {instance.id for instance in taken if instance is not None}


def of(one: Fleet, id: str) -> Instance:
    return next(member.instance for member in one.members if member.instance.id == id)


def test_a_pair_that_is_well_comes_before_one_that_is_suspected() -> None:
    one = grouped("a", "b")
    suspect(one, "decode-a")
    assert beside(one, Role.PREFILL, Role.DECODE) == {"prefill-b"}
    with pytest.raises(ProxyError, match="may be paired"):  # the request leaves for the other pair
        beside(one, Role.DECODE, of(one, "prefill-a"))
    assert one.should_fail_over(of(one, "prefill-a"), facts(), ())


def test_where_no_pair_is_well_suspected_ones_are_used() -> None:
    one = grouped("a", "b")
    suspect(one, "decode-a", "prefill-b")
    assert beside(one, Role.PREFILL, Role.DECODE) == {"prefill-a", "prefill-b"}
    assert beside(one, Role.DECODE, of(one, "prefill-a")) == {"decode-a"}
    assert beside(one, Role.DECODE, of(one, "prefill-b")) == {"decode-b"}
    assert not one.should_fail_over(of(one, "prefill-a"), facts(), ())


def test_health_knows_whether_anybody_can_be_paired() -> None:
    one = grouped("a", "b")
    assert has_usable_pair(one.members)
    suspect(one, "decode-a", "decode-b")
    assert has_usable_pair(one.members)  # they are used
    one.drain("decode-a")
    one.drain("prefill-b")
    assert not has_usable_pair(one.members)
    assert all(health.usable for health in one.health().values())  # the control
