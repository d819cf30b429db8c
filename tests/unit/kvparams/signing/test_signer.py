"""Tests what a signer writes: its own time, an end, and nonces that nobody has used."""

import pytest

from kvparams import parse, read_request
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.signer import LIFETIME_S, MAX_LIFETIME_S, Signer

NOW = 1_767_225_600
RING = SigningKeyring([SigningKey("k", bytes(32), NOW - 10)])
PARAMS = parse(
    {
        "version": "1.0",
        "request_id": "r",
        "transfer": {"id": "t", "attempt": 1},
        "phase": "release",
        "mode": "store",
    }
)


@pytest.mark.parametrize("lifetime_s", [1, LIFETIME_S, MAX_LIFETIME_S])
def test_a_signature_begins_now_ends_within_an_hour_and_has_a_nonce_of_its_own(lifetime_s: int) -> None:
    """Spec-mandated, 1.0#13.6: also where several processes sign with one key, or one after a restart."""
    nonces: set[object] = set()
    now = float(NOW)
    signers = [Signer(RING, "pool", lambda: now, lifetime_s) for _ in range(3)]
    for _ in range(50):
        for signer in signers:
            params = read_request(signer.sign(PARAMS))
            assert params is not None
            signature = params.signature
            assert signature is not None
            assert (signature.iat, signature.exp) == (int(now), int(now) + lifetime_s)
            nonces.add(signature.nonce)
        now += 0.3
    assert len(nonces) == 150


@pytest.mark.parametrize("lifetime_s", [0, MAX_LIFETIME_S + 1])
def test_a_signature_cannot_be_made_for_no_time_or_for_longer(lifetime_s: int) -> None:
    """Spec-mandated, 1.0#13.6."""
    assert MAX_LIFETIME_S == 3600
    with pytest.raises(ValueError, match="1 to 3600 seconds"):
        Signer(RING, "pool", lambda: NOW, lifetime_s)
