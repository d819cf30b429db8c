"""Tests which engine a failed decode leg is blamed on: prefill, decode, or only the pair."""

from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvparams.instances import Instance, Role
from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.fleet.pair_failures import PairFailures

LIMITS = BreakerLimits(consecutive=3, window=6, failures=6, open_s=1.0, longest_s=4.0)


def instance(id: str) -> Instance:
    return Instance(id, "b", Role.PREFILL if id[0] == "p" else Role.DECODE, "http://h:1", "nixl")


A, B, C = (instance(f"p{n}") for n in range(3))
D, E = instance("d0"), instance("d1")


def apart(prefill: Instance = A, decode: Instance = D, *, until: float = 0.0) -> PairFailures:
    """This pair has just been set apart."""
    pairs = PairFailures(LIMITS)
    for _ in range(LIMITS.consecutive):
        pairs.record_failure(prefill, decode, until)
    assert pairs.is_separated(prefill, decode, until)
    return pairs


def test_it_is_false_while_nothing_has_failed() -> None:
    pairs = PairFailures(LIMITS)
    assert not pairs
    assert not pairs.record_success(A, D)
    pairs.record_failure(A, D, 0.0)
    assert pairs
    assert not pairs.record_success(A, D)  # it was not set apart
    assert not pairs


def test_a_pair_that_fails_again_and_again_is_set_apart_and_nobody_else_is() -> None:
    pairs = PairFailures(LIMITS)
    assert [pairs.record_failure(A, D, 0.0) for _ in range(3)] == [False] * 3
    assert pairs.is_separated(A, D, 0.9)
    assert pairs.separated_from(D, 0.9) == ["p0"]
    assert pairs.separated_from(A, 0.9) == ["d0"]
    assert pairs.separated_from(B, 0.9) == pairs.separated_from(E, 0.9) == []
    assert pairs.separated_count == 1
    assert not pairs.is_separated(A, D, 1.0)


def test_a_success_between_failures_keeps_a_pair_together() -> None:
    pairs = PairFailures(LIMITS)
    for _ in range(10):
        pairs.record_failure(A, D, 0.0)
        pairs.record_failure(A, D, 0.0)
        assert not pairs.record_success(A, D)
    assert pairs.separated_count == 0


def test_a_decode_engine_that_fails_with_several_prefill_engines_is_to_blame() -> None:
    pairs = PairFailures(LIMITS)
    assert [pairs.record_failure(who, D, 0.0) for who in (A, B, A, B)] == [False, True, True, True]


def test_a_decode_engine_is_to_blame_where_the_kv_is_good_for_another_one() -> None:
    pairs = PairFailures(LIMITS)
    assert not pairs.record_failure(A, D, 0.0)
    pairs.record_success(A, E)
    assert pairs.record_failure(A, D, 0.0)


def test_a_decode_engine_that_fetches_other_kv_is_never_to_blame() -> None:
    pairs = PairFailures(LIMITS)
    pairs.record_failure(A, D, 0.0)
    pairs.record_success(B, D)
    pairs.record_success(A, E)
    pairs.record_failure(C, D, 0.0)
    assert [pairs.record_failure(A, D, now) for now in (0.0, 0.0, 0.0, 100.0)] == [False] * 4
    assert pairs.record_failure(C, D, 0.0)  # not with this: it fails with two


def test_a_decode_engine_is_to_blame_where_nothing_else_explains_it_for_some_time() -> None:
    """The only prefill engine there is: the pair is set apart, and used all the same, nobody else being there."""
    pairs = apart()
    assert not pairs.record_failure(A, D, 0.9)
    assert pairs.record_failure(A, D, 1.0)


def test_a_pair_that_was_set_apart_is_tried_by_one_leg_at_a_time_ever_more_seldom() -> None:
    pairs = apart()
    now = 0.0
    for wait in (1.0, 2.0, 4.0, 4.0, 4.0):
        assert pairs.is_separated(A, D, now + wait - 0.01)
        now += wait
        assert not pairs.is_separated(A, D, now)
        pairs.record_choice(A, D, now)
        assert pairs.is_separated(A, D, now)  # for all others
        now += 0.1
        pairs.record_failure(A, D, now)
    assert pairs.record_success(A, D)
    assert not pairs


def test_a_trial_that_tells_nothing_is_followed_by_another() -> None:
    pairs = apart()
    pairs.record_choice(A, D, 1.0)
    assert pairs.is_separated(A, D, 1.9)
    assert not pairs.is_separated(A, D, 2.0)


def test_what_had_begun_before_a_pair_was_set_apart_makes_nothing_worse() -> None:
    pairs = apart()
    for _ in range(10):
        pairs.record_failure(A, D, 0.5)
    assert pairs.separated_until(A, D) == 1.0


def test_an_incarnation_that_has_gone_is_forgotten() -> None:
    for gone in (A, D):
        pairs = apart()
        pairs.forget(gone)
        assert not pairs
        pairs = apart()
        pairs.record_failure(B, D, 0.0)
        pairs.record_failure(A, E, 0.0)
        pairs.forget(gone)
        assert pairs
        assert not pairs.is_separated(A, D, 0.0)


def test_who_has_no_partner_left_is_known() -> None:
    pairs = apart()
    assert pairs.without_partner(Role.PREFILL, [D], 0.0) == {"p0"}
    assert pairs.without_partner(Role.PREFILL, [D, E], 0.0) == set()
    assert pairs.without_partner(Role.PREFILL, [], 0.0) == set()
    assert pairs.without_partner(Role.DECODE, [A], 0.0) == {"d0"}
    assert pairs.without_partner(Role.DECODE, [A, B], 0.0) == set()
    assert pairs.without_partner(Role.PREFILL, [D], 1.0) == set()
    other = Instance("d2", "b", Role.DECODE, "http://h:1", "nixl", group="elsewhere")
    assert pairs.without_partner(Role.PREFILL, [D, other], 0.0) == {"p0"}


def test_however_many_fail_little_is_remembered() -> None:
    pairs = PairFailures(LIMITS)
    decode = [instance(f"d{n}") for n in range(300)]
    prefill = [instance(f"p{n}") for n in range(70)]
    for one in decode:
        for other in prefill:
            for _ in range(3):
                pairs.record_failure(other, one, 0.0)
    assert 0 < pairs.separated_count <= 256 * 64
    assert pairs.is_separated(prefill[-1], decode[-1], 0.0)


class Outcome(NamedTuple):
    prefill: Instance
    decode: Instance


PREFILL, DECODE = st.sampled_from([A, B, C]), st.sampled_from([D, E])


class PairMachine(RuleBasedStateMachine):
    """Against a model that remembers everything that was ever told."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = PairFailures(LIMITS)
        self.now = 0.0
        self.since: dict[Outcome, list[Outcome]] = {}
        """What has worked since a pair failed first, for those that have not worked since."""

    @rule(prefill=PREFILL, decode=DECODE)
    def fail(self, prefill: Instance, decode: Instance) -> None:
        worked = self.since.setdefault(Outcome(prefill, decode), [])
        blamed = self.pairs.record_failure(prefill, decode, self.now)
        if any(other.decode is decode for other in worked):
            assert not blamed
        elif sum(pair.decode is decode for pair in self.since) > 1 or worked_elsewhere(worked, prefill):
            assert blamed

    @rule(prefill=PREFILL, decode=DECODE)
    def work(self, prefill: Instance, decode: Instance) -> None:
        self.pairs.record_success(prefill, decode)
        self.since.pop(Outcome(prefill, decode), None)
        for worked in self.since.values():
            worked.append(Outcome(prefill, decode))
        assert not self.pairs.is_separated(prefill, decode, self.now)

    @rule(prefill=PREFILL, decode=DECODE)
    def choose(self, prefill: Instance, decode: Instance) -> None:
        was_apart = self.pairs.is_separated(prefill, decode, self.now)
        self.pairs.record_choice(prefill, decode, self.now)
        assert not was_apart or self.pairs.is_separated(prefill, decode, self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(gone=st.sampled_from([A, B, D]))
    def go(self, gone: Instance) -> None:
        self.pairs.forget(gone)
        self.since = {pair: worked for pair, worked in self.since.items() if gone not in pair}

    @invariant()
    def it_knows_of_those_that_fail_and_of_nobody_else(self) -> None:
        assert bool(self.pairs) is bool(self.since)
        for prefill in (A, B, C):
            for decode in (D, E):
                if Outcome(prefill, decode) not in self.since:
                    assert self.pairs.separated_until(prefill, decode) == 0

    @invariant()
    def nothing_is_set_apart_for_longer_than_the_limits_say(self) -> None:
        for prefill, decode in self.since:
            assert self.pairs.separated_until(prefill, decode) <= self.now + LIMITS.longest_s

    @invariant()
    def both_sides_say_the_same(self) -> None:
        for prefill in (A, B, C):
            for decode in (D, E):
                known = self.pairs.is_separated(prefill, decode, self.now)
                assert (prefill.id in self.pairs.separated_from(decode, self.now)) is known
                assert (decode.id in self.pairs.separated_from(prefill, self.now)) is known


def worked_elsewhere(worked: list[Outcome], prefill: Instance) -> bool:
    return any(other.prefill is prefill for other in worked)


@pytest.mark.hypothesis
def test_a_decode_engine_is_blamed_by_the_rules_whatever_happens() -> None:
    budget = settings(stateful_step_count=30)
    run_state_machine_as_test(PairMachine, settings=budget)  # pyright: ignore[reportUnknownMemberType]
