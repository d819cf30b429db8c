"""Tests that a lease is handed on as spec/draft/vectors/leases.json says."""

import json
from typing import Any, cast

import pytest

from kvparams.instances import Instance, Role
from kvparams.params import KVTransferParams
from kvparams.routing.managers.prefill_handoff import PrefillHandoff
from kvparams.signing.signer import EncodedNativeKeys
from tests.support.kvparams.spec_folder import ROOT

CASES: list[dict[str, Any]] = json.loads((ROOT / "spec" / "draft" / "vectors" / "leases.json").read_text())["cases"]
ANSWERED_S = 1000.0


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_rest_of_a_lease_is_rounded_down_and_at_least_1(case: dict[str, Any]) -> None:
    ttl_ms: int = case["ttl_ms"]
    result = KVTransferParams.model_validate(
        {
            "version": "1.0",
            "request_id": "r",
            "transfer": {"id": "t", "attempt": 1},
            "phase": "prefill_result",
            "mode": "store",
            "lease": {"ttl_ms": ttl_ms},
        }
    )
    kv = PrefillHandoff(EncodedNativeKeys(b"{}"), ANSWERED_S + ttl_ms / 1000, result, ANSWERED_S)
    now_s = ANSWERED_S + case["passed_ms"] / 1000
    if case["handed_on"] is None:
        assert now_s >= kv.until_s
        return
    assert now_s < kv.until_s
    lease = cast("bytes", kv.decode_members(Instance("d", "1", Role.DECODE, "http://d", "store"), {}, now_s)["lease"])
    assert lease == b'"lease":{"ttl_ms":%d}' % case["handed_on"]
