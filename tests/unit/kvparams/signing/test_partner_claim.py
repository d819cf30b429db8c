"""Tests claims about prefill partners: what is believed, and why everything else is not."""

import json
from base64 import urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.partner_claim import PartnerClaim, PartnerClaimError, PartnerSigner, PartnerVerifier
from kvparams.signing.signer import NoSigningKey

KEY = SigningKey("k1", bytes(range(32)), 1000)
KEYRING = SigningKeyring([KEY])
CLAIM = PartnerClaim("r1", "10.0.0.1:8000")


class Site:
    """A signer and a verifier that share a clock."""

    def __init__(self, audience: str = "pool", keyring: SigningKeyring = KEYRING) -> None:
        self.now = 1940.0
        self.signer = PartnerSigner(lambda: keyring, audience, lambda: self.now)
        self.verifier = PartnerVerifier(lambda: KEYRING, "pool", lambda: self.now)
        self.now = 2000.0

    def refusal(self, value: str, request_id: str = "r1") -> str:
        """Returns why a value is not believed."""
        with pytest.raises(PartnerClaimError) as caught:
            self.verifier.verify(value, request_id)
        return caught.value.reason


def test_what_is_signed_is_believed_once() -> None:
    site = Site()
    value = site.signer.sign(CLAIM)
    assert site.verifier.verify(value, "r1") == CLAIM
    assert site.refusal(value) == "replay"
    assert site.verifier.verify(site.signer.sign(CLAIM), "r1") == CLAIM  # another nonce


def test_a_claim_is_for_one_request_and_one_pool() -> None:
    site = Site()
    assert site.refusal(site.signer.sign(CLAIM), "r2") == "request"
    assert site.refusal(Site("other").signer.sign(CLAIM)) == "audience"


@pytest.mark.parametrize(("later_s", "reason"), [(-31, "expired"), (60, "expired"), (-29, None), (59, None)])
def test_a_claim_is_believed_for_a_minute(later_s: float, reason: str | None) -> None:
    site = Site()
    value = site.signer.sign(CLAIM)
    site.now += later_s
    if reason is None:
        assert site.verifier.verify(value, "r1") == CLAIM
    else:
        assert site.refusal(value) == reason


def test_a_verifier_that_was_started_again_believes_nothing_older() -> None:
    site = Site()
    value = site.signer.sign(CLAIM)
    site.now += 1.5
    again = PartnerVerifier(lambda: KEYRING, "pool", lambda: site.now)
    with pytest.raises(PartnerClaimError) as caught:
        again.verify(value, "r1")
    assert caught.value.reason == "replay"
    assert again.verify(site.signer.sign(CLAIM), "r1") == CLAIM


def test_keys() -> None:
    other = SigningKeyring([SigningKey("k2", bytes(32), 1000)])
    assert Site().refusal(Site(keyring=other).signer.sign(CLAIM)) == "key"
    same_name = SigningKeyring([SigningKey("k1", bytes(32), 1000)])
    assert Site().refusal(Site(keyring=same_name).signer.sign(CLAIM)) == "signature"
    late = Site(keyring=SigningKeyring([SigningKey("k1", bytes(32), 3000)]))
    with pytest.raises(NoSigningKey):
        late.signer.sign(CLAIM)


def test_a_signature_of_a_document_is_not_one_of_a_claim() -> None:
    site = Site()
    payload = site.signer.sign(CLAIM).split(".")[0]
    assert site.refusal(f"{payload}.{KEY.tag(payload.encode())}") == "signature"


@given(st.integers(0, 400), st.sampled_from("0123456789abcdefABC.=-_ \xff"))
def test_no_changed_character_is_believed(place: int, character: str) -> None:
    site = Site()
    value = site.signer.sign(CLAIM)
    changed = value[: place % len(value)] + character + value[place % len(value) + 1 :]
    if changed != value:
        assert site.refusal(changed) in ("format", "key", "signature")


@pytest.mark.parametrize(
    "members",
    [
        [],
        {},
        {"aud": "pool", "iat": "2000", "kid": "k1", "nonce": "n", "prefill": "p", "request": "r1"},
        {"aud": "pool", "iat": True, "kid": "k1", "nonce": "n", "prefill": "p", "request": "r1"},
        {"aud": "pool", "iat": 2000, "kid": "k1", "nonce": "n", "prefill": "p", "request": "r1", "more": "x"},
        {"aud": "pool", "iat": 2000, "kid": 1, "nonce": "n", "prefill": "p", "request": "r1"},
    ],
)
def test_other_members_are_no_claim(members: object) -> None:
    payload = urlsafe_b64encode(json.dumps(members).encode()).decode()
    assert Site().refusal(f"{payload}.00") == "format"
    assert Site().refusal("a" * 3000) == "format"
    assert Site().refusal("") == "format"
