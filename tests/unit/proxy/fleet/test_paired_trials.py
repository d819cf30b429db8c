"""Tests trials of instances that are paired with others: while one runs, no other leg leads there."""

import pytest

from kvparams.instances import Instance, RequestFacts, Role, RoundRobin
from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.fleet import Fleet
from tests.support.proxy.clock import Clock

FACTS = RequestFacts("r", "t", "m", 1, 1, None, None)
PAIRED = (Role.PREFILL, Role.DECODE)


class Nobody:
    """A leg that is never made to wait."""

    facts = FACTS

    def granted(self, instance: Instance) -> None:
        raise AssertionError

    def refused(self, error: ProxyError) -> None:
        raise AssertionError


def take(fleet: Fleet, role: Role, partner: Instance | Role, facts: RequestFacts = FACTS) -> Instance:
    taken = fleet.acquire(role, facts, (), Nobody(), partner)
    assert taken is not None
    return taken


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize(("first", "second"), [PAIRED, PAIRED[::-1]])
def test_nobody_is_sent_to_the_partner_of_an_instance_on_trial(first: Role, second: Role, answered: bool) -> None:
    """Its leg would be computed for nothing: the other one finds no instance, and the request leaves for another pair.

    The control is the time before the trial, and that after the trial has been answered.
    """
    clock = Clock()
    fleet = Fleet(
        [
            Instance(f"{role}-{group}", "b", role, "http://h:1", "nixl", group=group)
            for role in PAIRED
            for group in "ab"
        ],
        {role: RoundRobin() for role in Role},
        clock.now,
        clock.call_later,
        breaker=BreakerLimits(consecutive=1, open_s=1.0, longest_s=1.0),
        slow_start_s=0.0,
    )
    tried = next(member for member in fleet.members if member.instance.id == f"{second}-a")
    fleet.record_failure(tried.instance, connected=True)
    assert {take(fleet, first, second).group for _ in range(6)} == {"b"}
    clock.pass_time(2.0)
    assert {take(fleet, first, second).group for _ in range(6)} == {"a", "b"}
    trial = FACTS._replace(request_id="trial")
    partner = next(member.instance for member in fleet.members if member.instance.id == f"{first}-a")
    assert take(fleet, second, partner, trial) is tried.instance
    assert tried.trial is trial
    if answered:
        fleet.record_first_byte(tried.instance)
    assert {take(fleet, first, second).group for _ in range(6)} == ({"a", "b"} if answered else {"b"})
