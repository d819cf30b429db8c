"""Keys that documents are signed with: which there are, and when each may be used.

A key is 32 random bytes with a name and a time. The newest of those that are valid signs; each that was valid when a
document was signed verifies it. So a key is changed without losing a request: the new one is in everybody's file before
its time begins, and the old one stays there until nothing that it has signed is under way. No text, error or repr of
these objects holds a secret, but for `SigningKeyring.text`, which is the file's content.
"""

import hmac
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from secrets import token_bytes, token_hex
from typing import Final, cast

from kvparams.errors import JSONTextError, KVParamsError
from kvparams.jsontext.document import JSONLimits, load_object

__all__ = ["SECRET_BYTES", "SigningKey", "SigningKeyring", "SigningKeyringError"]

SECRET_BYTES: Final = 32
_DOMAIN: Final = b"kvparams signature 1\n"
"""Before everything that is signed, so that a signature is never another protocol's."""
_MAX_KEYS: Final = 16
_LIMITS: Final = JSONLimits(max_bytes=64 << 10, max_depth=4)
_KID: Final = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_SECRET: Final = re.compile(r"[0-9a-f]{64}")
_FORMAT: Final = 1
_NAMES: Final = frozenset(("format", "keys"))
_KEY_NAMES: Final = frozenset(("kid", "secret", "not_before", "not_after"))


class SigningKeyringError(KVParamsError, ValueError):
    """Keys cannot be used; the message never holds one."""


class SigningKey:
    """A `SigningKey` is a secret with a name and a validity period."""

    __slots__ = ("_keyed", "_secret", "kid", "not_after", "not_before")

    def __init__(self, kid: str, secret: bytes, not_before: int, not_after: int | None = None) -> None:
        """Validates and creates a key.

        Args:
            kid: its name, 1 to 128 letters, digits and `._~-`; no secret.
            secret: 32 random bytes.
            not_before: from when on it signs, in seconds since 1970.
            not_after: from when on it signs no more.

        Raises:
            SigningKeyringError: one of them is something else.
        """
        if _KID.fullmatch(kid) is None:
            raise SigningKeyringError("`kid` must be 1 to 128 letters, digits and ._~-")
        if len(secret) != SECRET_BYTES:
            raise SigningKeyringError(f"the secret of {kid} must have {SECRET_BYTES} bytes")
        if not_after is not None and not_after <= not_before:
            raise SigningKeyringError(f"the key {kid} ends before it begins")
        self.kid: Final = kid
        self.not_before: Final = not_before
        self.not_after: Final = not_after
        self._secret = secret
        self._keyed = hmac.new(secret, _DOMAIN, "sha256")

    @classmethod
    def new(cls, not_before: int, not_after: int | None = None) -> "SigningKey":
        """A key of 256 random bits."""
        return cls(token_hex(6), token_bytes(SECRET_BYTES), not_before, not_after)

    def tag(self, text: bytes) -> str:
        """HMAC-SHA256 over `text`, in hexadecimal. About 2 us a kilobyte."""
        keyed = self._keyed.copy()
        keyed.update(text)
        return keyed.hexdigest()

    def is_valid_at(self, at: float, skew_s: float = 0.0) -> bool:
        """Returns True if the key may sign at `at`, in seconds since 1970, for a clock that is wrong by `skew_s`."""
        return self.not_before - skew_s <= at and (self.not_after is None or at < self.not_after + skew_s)

    def with_end(self, not_after: int) -> "SigningKey":
        """The same key with another end."""
        return SigningKey(self.kid, self._secret, self.not_before, not_after)

    def derive(self, purpose: bytes) -> bytes:
        """Returns 32 bytes for another purpose than signing, which say nothing of the key."""
        return hmac.digest(self._secret, purpose, "sha256")

    def document(self) -> dict[str, object]:
        """As a file holds it, the secret included."""
        kept: dict[str, object] = {"kid": self.kid, "secret": self._secret.hex(), "not_before": _text(self.not_before)}
        return kept if self.not_after is None else {**kept, "not_after": _text(self.not_after)}

    def __repr__(self) -> str:
        return f"SigningKey({self.kid})"


class SigningKeyring:
    """The keys of a deployment. Never changed: another state of the file is another keyring."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[SigningKey]) -> None:
        """1 to 16 keys, each with a name of its own.

        Raises:
            SigningKeyringError: there are more, or none, or two of one name.
        """
        found = tuple(keys)
        if not 1 <= len(found) <= _MAX_KEYS:
            raise SigningKeyringError(f"{len(found)} keys; there must be 1 to {_MAX_KEYS}")
        self._keys = {key.kid: key for key in found}
        if len(self._keys) != len(found):
            raise SigningKeyringError("two keys have the same name")

    @classmethod
    def parse(cls, text: str | bytes) -> "SigningKeyring":
        """Read what `text` has written.

        Raises:
            SigningKeyringError: it is something else; the message names the place, never what stands there.
        """
        try:
            document, _ = load_object(text.encode() if isinstance(text, str) else text, _LIMITS)
        except (JSONTextError, UnicodeEncodeError):
            raise SigningKeyringError("it is not a JSON object") from None
        _only(document, _NAMES, "the file")
        if document.get("format") != _FORMAT:
            raise SigningKeyringError(f"`format` must be {_FORMAT}")
        keys = document.get("keys")
        if not isinstance(keys, list):
            raise SigningKeyringError("`keys` must be a list")
        return cls(_key(member, number) for number, member in enumerate(cast("list[object]", keys), 1))

    def text(self) -> str:
        """The keyring as text, secrets included: for its file, and nothing else."""
        return json.dumps({"format": _FORMAT, "keys": [key.document() for key in self]}, indent=2) + "\n"

    def signing_key_at(self, at: float) -> SigningKey | None:
        """The newest of those that may sign now; None where none may."""
        able = [key for key in self if key.is_valid_at(at)]
        return max(able, key=lambda key: (key.not_before, key.kid)) if able else None

    def find(self, kid: str) -> SigningKey | None:
        """The key of this name."""
        return self._keys.get(kid)

    def __iter__(self) -> Iterator[SigningKey]:
        return iter(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"SigningKeyring({', '.join(self._keys)})"


def _key(member: object, number: int) -> SigningKey:
    where = f"key {number}"
    if not isinstance(member, dict):
        raise SigningKeyringError(f"{where} must be an object")
    found = cast("dict[str, object]", member)
    _only(found, _KEY_NAMES, where)
    kid, secret = found.get("kid"), found.get("secret")
    if not isinstance(kid, str):
        raise SigningKeyringError(f"{where}: `kid` must be text")
    if not isinstance(secret, str) or _SECRET.fullmatch(secret) is None:
        raise SigningKeyringError(f"{where}: `secret` must be {2 * SECRET_BYTES} hexadecimal digits in lower case")
    not_after = None if found.get("not_after") is None else _moment(found, "not_after", where)
    try:
        return SigningKey(kid, bytes.fromhex(secret), _moment(found, "not_before", where), not_after)
    except SigningKeyringError as error:
        raise SigningKeyringError(f"{where}: {error}") from None


def _only(document: Mapping[str, object], names: frozenset[str], where: str) -> None:
    if strange := sorted(document.keys() - names):
        raise SigningKeyringError(
            f"{where}: `{strange[0][:64]}` is not a known member; known: {', '.join(sorted(names))}"
        )


def _moment(document: Mapping[str, object], name: str, where: str) -> int:
    value = document.get(name)
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else datetime.min
    except ValueError:
        moment = datetime.min
    if moment.tzinfo is None or not 2000 <= moment.year <= 9000:
        raise SigningKeyringError(f"{where}: `{name}` must be a time such as 2026-01-02T03:04:05Z")
    return int(moment.timestamp())


def _text(moment: int) -> str:
    return datetime.fromtimestamp(moment, UTC).replace(tzinfo=None).isoformat() + "Z"
