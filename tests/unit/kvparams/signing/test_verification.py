"""Tests which of several faults a verifier names, and how it compares values."""

from typing import Any

import pytest

from kvparams import parse
from kvparams.signing import verification
from kvparams.signing.canonical_json import canonical_document, canonical_json, sha256_digest
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.replay_window import ReplayWindow
from kvparams.signing.verification import UNTRUSTED_REASONS, UntrustedParams, UntrustedReason, verify_params

NOW = 1_767_225_600
KEY = SigningKey("k", bytes(32), NOW - 1_000_000)
NATIVE = {"remote_host": "10.0.0.7"}
TIMES: dict[UntrustedReason, tuple[int, int]] = {
    "lifetime": (NOW + 100, NOW - 100),  # early and expired as well
    "early": (NOW + 100, NOW + 200),
    "expired": (NOW - 200, NOW - 100),
}
"""`iat` and `exp`."""


def carrier(faults: frozenset[UntrustedReason]) -> dict[str, Any]:
    """Returns a `kv_transfer_params` for the engine `e` of the pool `pool` that has these faults."""
    iat, exp = next((times for reason, times in TIMES.items() if reason in faults), (NOW - 5, NOW + 300))
    signature: dict[str, Any] = {
        "alg": "none" if "algorithm" in faults else "hmac-sha256",
        "kid": "unknown" if "key" in faults else "k",
        "aud": "elsewhere" if "audience" in faults else "pool",
        "iat": iat,
        "exp": exp,
        "nonce": "used" if "replayed" in faults else "new",
        "native": sha256_digest(canonical_json({} if "native" in faults else NATIVE)),
        "value": "v",
    }
    document: dict[str, Any] = {
        "version": "1.0",
        "request_id": "r",
        "transfer": {"id": "t", "attempt": 1},
        "phase": "decode",
        "mode": "pull",
        "consumer": {"id": "other" if "instance" in faults else "e"},
        "signature": signature,
    }
    if "uncanonical" in faults:
        document["extensions"] = {"com.example": {"a": 1.5}}
    elif "forged" not in faults:
        signature["value"] = KEY.tag(canonical_document(document))
    if "unsigned" in faults:
        del document["signature"]
    return {**NATIVE, "kvparams": document}


def why_refused(faults: frozenset[UntrustedReason]) -> UntrustedReason | None:
    replay = ReplayWindow(NOW - 10_000)
    assert replay.try_use("k used ", NOW + 10_000, NOW)
    try:
        verify_params(carrier(faults), SigningKeyring([KEY]), "pool", NOW, replay, instance="e")
    except UntrustedParams as error:
        return error.reason
    return None


@pytest.mark.parametrize("number", range(len(UNTRUSTED_REASONS) + 1))
def test_of_several_faults_the_first_of_the_list_is_named(number: int) -> None:
    """Spec-mandated, 1.0#13.8: all faults from one on; the last time there is none."""
    expected = UNTRUSTED_REASONS[number] if number < len(UNTRUSTED_REASONS) else None
    assert why_refused(frozenset(UNTRUSTED_REASONS[number:])) == expected


@pytest.mark.parametrize("reason", UNTRUSTED_REASONS)
def test_each_fault_alone_is_named(reason: UntrustedReason) -> None:
    """Spec-mandated, 1.0#13.8."""
    assert why_refused(frozenset((reason,))) == reason


@pytest.mark.parametrize("differs", [True, False])
def test_values_are_compared_in_constant_time(differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec-mandated, 1.0#13.10: `hmac.compare_digest` decides, whatever it is told to say."""
    compared: list[str] = []

    def compare(one: str, other: str) -> bool:
        compared.extend((one, other))
        return not differs

    monkeypatch.setattr(verification, "compare_digest", compare)
    assert why_refused(frozenset(("forged",))) == ("forged" if differs else None)
    signature = parse(carrier(frozenset(("forged",)))["kvparams"]).signature
    assert signature is not None
    assert (signature.value in compared, signature.native in compared) == (True, not differs)
