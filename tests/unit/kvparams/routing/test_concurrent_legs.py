"""Tests plans of two legs at once, without any I/O."""

import json
from typing import Any

import pytest

from kvparams import parse
from kvparams.dialects.interface import Dialect
from kvparams.dialects.nixl import NIXL
from kvparams.dialects.store import STORE, STORE_MEET, StoreDialect
from kvparams.instances import Instance, RequestFacts
from kvparams.params import KVTransferParams
from kvparams.routing.managers.concurrent_legs import ConcurrentLegs
from kvparams.routing.managers.interface import DisaggregatedRequestManager
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import Leg, LegFailed, LegResult, StreamProgress
from tests.support.kvparams.planning import Table, fleet_of

RESULT: dict[str, object] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill_result",
    "mode": "store",
}
SENT = StreamProgress([1, 2], [3])


class Together(StoreDialect):
    """A connector whose engines always get both legs at once, whatever the manager."""

    sends_legs_together = True


TOGETHER = Together(drop=False, meet=True)


class Mixed(Table):
    """Engines of the first prefill's connector meet; those of the other one's do not."""

    def __init__(self, other: Dialect) -> None:
        super().__init__(STORE_MEET, fleet_of(2, 2), retries=2)
        self._other = other

    def dialect(self, instance: Instance) -> Dialect:
        return self._other if instance.id == "prefill-1" else self.speech


def told(leg: Leg) -> KVTransferParams:
    said: Any = leg.changes["kv_transfer_params"]
    return parse(json.loads(said)["kvparams"])


def broken_off(other: Dialect, choices: int = 1) -> list[Leg]:
    """A stream breaks off; as it goes on, the prefill fails that meets: the legs, with the next one's."""
    table = Mixed(other)
    ends: list[LegFailed | None] = [
        None,
        LegFailed("broken", another=True, begun=True, sent=SENT),
        LegFailed("broken", another=True),
    ]

    def answer(leg: Leg) -> LegResult | LegFailed:
        ended = ends.pop(0) if ends else None
        return ended or LegResult({} if leg.answers_client else {"kvparams": RESULT})

    return table.run(ConcurrentLegs().legs(RequestFacts("req", "tra", "m", 1, choices, None, None), table), answer)


def test_legs_one_after_the_other_go_on_from_where_both_at_once_have_come() -> None:
    legs = broken_off(STORE)
    assert [leg.instance.id for leg in legs] == ["prefill-0", "decode-0", "prefill-0", "prefill-1", "decode-1"]
    assert [leg.resume_from for leg in legs] == [None, None, SENT, SENT, SENT]  # else the client is answered twice
    transfers = [told(leg).transfer for leg in legs]
    assert [transfer.attempt for transfer in transfers] == [1, 1, 2, 3, 3]
    assert [transfer.id for transfer in transfers] == ["tra", "tra", "transfer-1", "transfer-2", "transfer-2"]


@pytest.mark.parametrize(
    ("manager", "speech"),
    [
        (ConcurrentLegs(), STORE_MEET),
        (PrefillThenDecode(), TOGETHER),
        (PrefillThenDecode(decode_first=True), TOGETHER),
    ],
    ids=["concurrent_legs", "prefill_then_decode", "decode_first"],
)
@pytest.mark.parametrize(("before", "route"), [([None], "p0 d0 p1 d1"), ([], "p0 p1 d0")])
def test_where_decode_fails_its_prefill_is_avoided_too(
    before: list[LegFailed | None], route: str, manager: DisaggregatedRequestManager, speech: Dialect
) -> None:
    """It cannot fetch what prefill does not give. A prefill that has failed says nothing of decode. Each attempt takes
    its own instances, whoever has chosen those of the first."""
    table = Table(speech, fleet_of(2, 2), retries=2)
    ends = [*before, LegFailed("broken", another=True)]

    def answer(leg: Leg) -> LegResult | LegFailed:
        ended = ends.pop(0) if ends else None
        return ended or LegResult({} if leg.answers_client else {"kvparams": RESULT})

    legs = table.run(manager.legs(RequestFacts("req", "tra", "m", 1, 1, None, None), table), answer)
    assert [f"{leg.instance.id[0]}{leg.instance.id[-1]}" for leg in legs] == route.split()


def test_one_engine_alone_goes_on_from_there_too() -> None:
    *_, last = broken_off(NIXL, choices=2)  # which NIXL cannot carry
    assert (last.instance.role, last.changes, last.resume_from) == ("decode", {}, SENT)
