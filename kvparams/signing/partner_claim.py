"""Signed claims about the prefill partner of a decode engine: an endpoint picker makes them, a sidecar verifies them.

A claim is one header value, `PAYLOAD.TAG`: base64url of canonical JSON, and an HMAC-SHA256 over it. It names one
request and one prefill engine, is of no use for another request, and each sidecar believes it once.
"""

import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Callable
from hashlib import sha256
from secrets import token_hex
from typing import Final, Literal, NamedTuple, cast

from kvparams.errors import KVParamsError
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.replay_window import ReplayWindow
from kvparams.signing.signer import NoSigningKey

__all__ = ["PARTNER_HEADER", "PartnerClaim", "PartnerClaimError", "PartnerSigner", "PartnerVerifier", "RefusedClaim"]

PARTNER_HEADER: Final = "x-kvparams-prefill-partner"
"""The header that carries a claim."""
_PURPOSE: Final = b"kvparams prefill partner 1"
_LIFETIME_S: Final = 60
"""The header travels with the request that it is for."""
_SKEW_S: Final = 30.0
_MAX_BYTES: Final = 2048
_FIELDS: Final = ("aud", "iat", "kid", "nonce", "prefill", "request")

RefusedClaim = Literal["format", "key", "signature", "audience", "expired", "request", "replay"]
"""Why a claim is not believed."""


class PartnerClaimError(KVParamsError):
    """A claim is not believed."""

    def __init__(self, reason: RefusedClaim) -> None:
        super().__init__(f"the claim about the prefill partner is not believed ({reason})")
        self.reason: Final[RefusedClaim] = reason


class PartnerClaim(NamedTuple):
    """The content of a claim."""

    request_id: str
    """The X-Request-Id of the request."""
    prefill: str
    """The engine that computes its prompt, `host:port`."""


class PartnerSigner:
    """Signs claims for one audience."""

    def __init__(self, keyring: Callable[[], SigningKeyring], audience: str, now: Callable[[], float]) -> None:
        """Creates a signer.

        Args:
            keyring: returns the keys of this moment.
            audience: the name of the pool of engines.
            now: the time, in seconds since 1970.
        """
        self._keyring = keyring
        self._audience = audience
        self._now = now

    def sign(self, claim: PartnerClaim) -> str:
        """Returns the header value of a claim.

        Raises:
            NoSigningKey: there is no key for this time.
        """
        now = self._now()
        key = self._keyring().signing_key_at(now)
        if key is None:
            raise NoSigningKey
        members = {
            "aud": self._audience,
            "iat": int(now),
            "kid": key.kid,
            "nonce": token_hex(12),
            "prefill": claim.prefill,
            "request": claim.request_id,
        }
        payload = urlsafe_b64encode(json.dumps(members, separators=(",", ":")).encode())
        return f"{payload.decode()}.{_tag(key, payload)}"


class PartnerVerifier:
    """Verifies claims. Each is believed once, and none that was signed before this verifier was made."""

    def __init__(self, keyring: Callable[[], SigningKeyring], audience: str, now: Callable[[], float]) -> None:
        """Creates a verifier; arguments are as for `PartnerSigner`."""
        self._keyring = keyring
        self._audience = audience
        self._now = now
        self._replay = ReplayWindow(now())

    def verify(self, value: str, request_id: str) -> PartnerClaim:
        """Returns the content of a header value.

        Args:
            value: the header's.
            request_id: the X-Request-Id of the request that carries it.

        Raises:
            PartnerClaimError: it is not believed.
        """
        payload, _, tag = value.partition(".")
        members = _parse(value, payload)
        key = self._keyring().find(str(members["kid"]))
        if key is None:
            raise PartnerClaimError("key")
        if not hmac.compare_digest(_tag(key, payload.encode()).encode(), tag.encode()):
            raise PartnerClaimError("signature")
        if members["aud"] != self._audience:
            raise PartnerClaimError("audience")
        now, issued = self._now(), cast("int", members["iat"])
        if not issued - _SKEW_S <= now < issued + _LIFETIME_S or not key.is_valid_at(issued):
            raise PartnerClaimError("expired")
        if members["request"] != request_id:
            raise PartnerClaimError("request")
        # An earlier process may have believed what was signed before this one began.
        is_new = issued >= int(self._replay.since)
        if not is_new or not self._replay.try_use(str(members["nonce"]), issued + _LIFETIME_S, now):
            raise PartnerClaimError("replay")
        return PartnerClaim(request_id, str(members["prefill"]))


def _parse(value: str, payload: str) -> dict[str, object]:
    """Returns the members of a payload.

    Raises:
        PartnerClaimError: it does not have exactly the members of a claim.
    """
    try:
        if len(value) > _MAX_BYTES or not value.isascii():
            raise PartnerClaimError("format")
        found: object = json.loads(urlsafe_b64decode(payload))
    except (Base64Error, ValueError, RecursionError):
        raise PartnerClaimError("format") from None
    if not isinstance(found, dict) or tuple(sorted(cast("dict[str, object]", found))) != _FIELDS:
        raise PartnerClaimError("format")
    members = cast("dict[str, object]", found)
    if type(members["iat"]) is not int or not all(type(members[name]) is str for name in _FIELDS if name != "iat"):
        raise PartnerClaimError("format")
    return members


def _tag(key: SigningKey, payload: bytes) -> str:
    return hmac.new(key.derive(_PURPOSE), payload, sha256).hexdigest()
