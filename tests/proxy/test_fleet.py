"""The fleet's bookkeeping, round robin, and the watch over time-outs."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.scheduling import Instance, RequestFacts, Role, RoundRobin
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet import Fleet
from kvparams_proxy.watch import Watch


def facts(model: str | None = "m") -> RequestFacts:
    return RequestFacts("r", "t", model, 1, 1, None, None)


def fleet(prefill: int = 2, decode: int = 3) -> Fleet:
    counts = {Role.PREFILL: prefill, Role.DECODE: decode}
    instances = [Instance(f"{r}-{n}", "b", r, f"http://h:{n + 1}", "nixl") for r in Role for n in range(counts[r])]
    return Fleet(instances, {role: RoundRobin() for role in Role})


def test_everyone_has_a_turn_in_order() -> None:
    one = fleet()
    chosen = [one.choose(Role.DECODE, facts()).id for _ in range(7)]
    assert chosen == [f"decode-{n % 3}" for n in range(7)]
    assert one.choose(Role.PREFILL, facts()).id == "prefill-0"


@given(st.lists(st.sampled_from(["take", "give", "fail", "heal"]), max_size=60))
def test_load_is_what_was_taken_and_not_given_back(steps: list[str]) -> None:
    one = fleet(decode=3)
    members = {member.instance.id: member for member in one.members}
    held: list[Instance] = []
    for step in steps:
        if step == "take":
            if any(m.ready for m in members.values() if m.instance.role is Role.DECODE):
                held.append(one.choose(Role.DECODE, facts()))
                assert members[held[-1].id].ready
            else:
                with pytest.raises(ProxyError, match="reachable"):
                    one.choose(Role.DECODE, facts())
        elif step == "give" and held:
            one.release(held.pop(0))
        elif step == "fail":
            one.unreachable(next(m.instance for m in members.values() if m.instance.role is Role.DECODE))
        elif step == "heal":
            for member in members.values():
                one.learn(member, True, member.models)
        for name, member in members.items():
            assert member.in_flight == sum(instance.id == name for instance in held)


def test_a_model_is_served_only_by_those_who_have_it() -> None:
    one = fleet(prefill=1, decode=2)
    prefill, first, second = one.members
    one.learn(prefill, True, frozenset("ab"))
    one.learn(first, True, frozenset("a"))
    one.learn(second, True, frozenset("b"))
    assert {one.choose(Role.DECODE, facts("b")).id for _ in range(4)} == {"decode-1"}
    assert one.know_model("a")
    assert not one.know_model("c")
    assert one.models() == ["a", "b"]
    one.learn(second, False, frozenset("b"))
    with pytest.raises(ProxyError, match="serves this model"):
        one.choose(Role.DECODE, facts("b"))


def test_invented_models_do_not_fill_the_memory() -> None:
    one = fleet()
    for number in range(5_000):
        one.release(one.choose(Role.DECODE, facts(f"invented-{number}")))
    assert len(one._candidates) <= 1024  # pyright: ignore[reportPrivateUsage]


def test_an_engine_that_comes_back_is_another_incarnation() -> None:
    one = fleet()
    before = one.choose(Role.DECODE, facts())
    member = next(member for member in one.members if member.instance is before)
    one.learn(member, True, None)
    assert member.instance is before
    one.unreachable(before)
    one.learn(member, True, None)
    assert member.instance.id == before.id
    assert member.instance.incarnation != before.incarnation
    one.release(before)  # what ran on the earlier one is still given back
    assert member.in_flight == 0


def test_two_instances_of_one_name_are_refused() -> None:
    twice = [Instance("a", "b", Role.DECODE, "http://h:1", "nixl") for _ in range(2)]
    with pytest.raises(ValueError, match="called 'a'"):
        Fleet(twice, {role: RoundRobin() for role in Role})


class Clocked:
    """Something with a time-out."""

    def __init__(self) -> None:
        self.expired = asyncio.Event()

    def expire(self) -> None:
        self.expired.set()


async def test_the_watch_fires_for_what_ran_out_and_not_for_what_was_renewed_or_stopped() -> None:
    watch = Watch(asyncio.get_running_loop())
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
