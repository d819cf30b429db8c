"""Documents that are signed: by a proxy that has the keys, for engines that have them too.

A signature covers the whole document and, by their digest, the native keys beside it: what the engine will really use.
The signed bytes are the sent bytes: the text that goes out is the canonical form itself, with the signature's value put
into it. Native keys with a fraction are the exception, because their canonical form is not JSON.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from secrets import token_hex
from typing import Final, cast

from pydantic_core import from_json, to_json

from kvparams.codec import DOCUMENT_KEY
from kvparams.errors import KVParamsError
from kvparams.params import KVTransferParams
from kvparams.signing.canonical_json import UNSIGNED_MEMBERS, canonical_json, canonical_members, native_members
from kvparams.signing.document_outline import encode_prefix_verbatim, join_members, merge_with_native
from kvparams.signing.keyring import SigningKeyring

__all__ = ["ALGORITHM", "LIFETIME_S", "MAX_LIFETIME_S", "EncodedNativeKeys", "NoSigningKey", "Signer"]

ALGORITHM: Final = "hmac-sha256"
LIFETIME_S: Final = 300
"""For how long a signed document may be used: an engine may let a request wait before it looks at it."""
MAX_LIFETIME_S: Final = 3600
"""Longer ones are refused everywhere: whoever remembers nonces must be able to forget them."""
_REMEMBERED: Final = 256
"""Native texts whose canonical form is kept: those that are the same for every request."""


class NoSigningKey(KVParamsError):
    """None of the keys may sign at this time."""

    def __str__(self) -> str:
        return (
            "no signing key is valid now: each begins later or has expired; add one with `kvparams signing-keys rotate`"
        )


@dataclass(slots=True)
class EncodedNativeKeys:
    """Native keys, ready to be sent."""

    text: bytes
    """Of a JSON object."""
    digest: bytes = b""
    """SHA-256 of its canonical form, in hexadecimal; empty where nobody signs."""


class Signer:
    """Signs for one audience. It keeps no time of its own, and hands out no nonce twice."""

    __slots__ = (
        "_audience",
        "_head",
        "_keyring",
        "_lifetime_s",
        "_natives",
        "_now",
        "_numbers",
        "_run",
        "_second",
        "_tag",
    )

    def __init__(
        self,
        keyring: SigningKeyring,
        audience: str,
        now: Callable[[], float],
        lifetime_s: int = LIFETIME_S,
    ) -> None:
        """Creates a signer for one audience.

        Args:
            keyring: its newest valid key signs.
            audience: the name of the pool of engines that the documents are for, 1 to 256 visible ASCII characters.
            now: the time, in seconds since 1970.
            lifetime_s: for how long a document may be used, at most an hour.

        Raises:
            ValueError: the audience or the lifetime is something else.
        """
        if not 0 < len(audience) <= 256 or not all("!" <= character <= "~" for character in audience):
            raise ValueError("an audience is 1 to 256 visible ASCII characters")
        if not 1 <= lifetime_s <= MAX_LIFETIME_S:
            raise ValueError(f"a signed document may be used for 1 to {MAX_LIFETIME_S} seconds")
        self._keyring = keyring
        self._audience = to_json(audience)
        self._now = now
        self._lifetime_s = lifetime_s
        self._run = token_hex(12).encode()
        self._numbers = count()
        self._natives: dict[bytes, EncodedNativeKeys] = {}
        self._second = -1
        self._head = b""
        self._tag: Callable[[bytes], str] = _no_key

    def use_keyring(self, keyring: SigningKeyring) -> None:
        """Sign with the keys of this one from now on; from another thread it may be one second later."""
        self._keyring = keyring
        self._second = -1  # so the next one asks for its key

    def encode_native(self, keys: bytes | Mapping[str, object]) -> EncodedNativeKeys:
        """Native keys, as `encode_carrier` takes them.

        Args:
            keys: the object, of which `kvparams.signing.canonical_json.UNSIGNED` is left out; or its text, which has
                none of these: what was asked before is found at once.

        Raises:
            NotCanonical: they cannot be signed; for example there is an integer of more than 64 bits among them.
            ValueError: they are no text of a JSON object.
        """
        if not isinstance(keys, bytes):
            return _native(keys if UNSIGNED_MEMBERS.isdisjoint(keys) else native_members(keys))
        known = self._natives.get(keys)
        if known is None:
            known = _native(from_json(keys))
            if len(self._natives) >= _REMEMBERED:
                self._natives.clear()
            self._natives[keys] = known
        return known

    def encode_carrier(
        self, native: EncodedNativeKeys, members: dict[str, bytes], prefix: bytes | None = None
    ) -> bytes:
        """The text of a whole `kv_transfer_params`: native keys, and a signed document.

        Args:
            native: from `encode_native`; without the members of `kvparams.signing.canonical_json.UNSIGNED`.
            members: all of the document, as `kvparams.signing.canonical_json.fragments` and
                `kvparams.signing.document_outline` make them; changed here.
            prefix: the member `prefix` as it shall be sent, where that is another form than the canonical one.

        Raises:
            NoSigningKey: there is no key for this time.
        """
        second = int(self._now())
        if second != self._second:
            self._begin(second)
        signature = b'%b%b","nonce":"%b-%x"' % (self._head, native.digest, self._run, next(self._numbers))
        members["signature"] = signature
        names = sorted(members)
        at = names.index("signature")
        before, after = join_members(members, names[:at]), join_members(members, names[at + 1 :])
        tag = self._tag(b"{%b,%b},%b}" % (before, signature, after))
        if prefix is not None:
            members["prefix"] = prefix
            before = join_members(members, names[:at])
        return merge_with_native(native.text, b'{%b,%b,"value":"%b"},%b}' % (before, signature, tag.encode(), after))

    def sign(self, params: KVTransferParams, native: Mapping[str, object] | None = None) -> dict[str, object]:
        """The value of `kv_transfer_params`: as `kvparams.write` makes it, with a signed document.

        A signature that `params` has is replaced.

        Args:
            params: any document.
            native: the engine's keys. `prompt_token_ids` among them is carried, and not signed.

        Raises:
            NoSigningKey: there is no key for this time.
            NotCanonical: there is a float in the document, or a number of more than 64 bits.
        """
        found = native or {}
        text = self.encode_carrier(
            self.encode_native(native_members(found)), canonical_members(params), encode_prefix_verbatim(params.prefix)
        )
        document = cast("dict[str, object]", from_json(text))[DOCUMENT_KEY]
        aside = {name: value for name, value in found.items() if name in UNSIGNED_MEMBERS and name != DOCUMENT_KEY}
        return {**native_members(found), **aside, DOCUMENT_KEY: document}

    def _begin(self, second: int) -> None:
        """Prepares the text and the key that all signatures of one second have in common.

        The text ends before the digest of native keys.
        """
        key = self._keyring.signing_key_at(second)
        if key is None:
            raise NoSigningKey
        self._head = b'"signature":{"alg":"%b","aud":%b,"exp":%d,"iat":%d,"kid":"%b","native":"sha256:' % (
            ALGORITHM.encode(),
            self._audience,
            second + self._lifetime_s,
            second,
            key.kid.encode(),
        )
        self._second, self._tag = second, key.tag


def _native(keys: Mapping[str, object]) -> EncodedNativeKeys:
    fractions: list[float] = []
    canonical = canonical_json(keys, fractions=fractions)
    return EncodedNativeKeys(to_json(keys) if fractions else canonical, sha256(canonical).hexdigest().encode())


def _no_key(text: bytes) -> str:
    raise NoSigningKey
