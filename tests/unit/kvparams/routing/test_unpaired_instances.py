"""Tests a plan that holds one engine and waits for the other when no possible partner is left."""

import pytest

from kvparams.dialects.store import STORE, STORE_MEET
from kvparams.instances import RequestFacts, Role
from kvparams.routing.managers.concurrent_legs import ConcurrentLegs
from kvparams.routing.managers.interface import DisaggregatedRequestManager
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import AcquireInstance, LegFailed
from tests.support.kvparams.planning import Table, fleet_of

FACTS = RequestFacts("r", "t", None, 1, 1, None, None)
MANAGERS = (
    pytest.param(PrefillThenDecode(decode_first=True), Role.DECODE, id="decode first"),
    pytest.param(ConcurrentLegs(), Role.PREFILL, id="at once"),
)


@pytest.mark.parametrize(("manager", "first"), MANAGERS)
def test_what_it_has_is_given_back_before_it_chooses_anew(manager: DisaggregatedRequestManager, first: Role) -> None:
    table = Table(STORE if first is Role.DECODE else STORE_MEET, fleet_of(2, 2), retries=1)
    plan = manager.legs(FACTS, table)
    chosen = next(one for one in table.fleet if one.role is first)
    step = next(plan)
    assert isinstance(step, AcquireInstance)
    assert step.role is first
    step = plan.send(chosen)
    assert isinstance(step, AcquireInstance)
    assert step.paired_with is chosen
    step = plan.throw(LegFailed("nobody is left", another=True, claimed=False))
    assert isinstance(step, AcquireInstance)
    assert step.role is first
    assert table.given_back == [chosen.id]


@pytest.mark.parametrize(("manager", "first"), MANAGERS)
def test_without_another_attempt_it_is_told(manager: DisaggregatedRequestManager, first: Role) -> None:
    table = Table(STORE if first is Role.DECODE else STORE_MEET, fleet_of(2, 2), retries=0)
    plan = manager.legs(FACTS, table)
    next(plan)
    plan.send(next(one for one in table.fleet if one.role is first))
    with pytest.raises(LegFailed, match="nobody is left"):
        plan.throw(LegFailed("nobody is left", another=True, claimed=False))
