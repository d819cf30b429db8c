"""Who asks: clients are known by their keys, and what they may share in engines' caches is bound to their tenant.

What is kept of a key, and why a fast hash is right for it, stands in `keys_file.py`. The one rule: a refusal tells
nothing but that the key is not valid here, neither in words nor in the time it takes.
"""

import asyncio
import logging
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from secrets import token_bytes
from typing import Final, NamedTuple, NoReturn

from kvparams.trust.files import State, state_of
from kvparams_proxy.clients.keys_file import KEY_BYTES, KeyRecord, KeysError, hash_key, read_keys
from kvparams_proxy.errors import ProxyError

__all__ = ["Client", "KeyRing", "Unauthorized", "bind_salt"]

_log: Final = logging.getLogger(__name__)
_ID: Final = slice(4, 16)
"""Where a key's id stands in it."""
_SALT: Final = b"kvparams cache salt 1"
_FOREVER: Final = float("inf")


class Client(NamedTuple):
    """Who asks, as far as the proxy knows."""

    key_id: str
    """Which of the tenant's keys it was."""
    tenant: str
    priority: int
    """For `RequestFacts.priority`."""
    salt: str
    """The cache salt of its requests that bring none of their own: see `bind_salt`."""


class Unauthorized(ProxyError):
    """401: no key was sent, or none that is valid here."""

    def __init__(self, *, given: bool) -> None:
        """`given`: whether there was an Authorization header."""
        if given:
            said = "the API key is not valid here"
        else:
            said = "an API key is needed: send the header `Authorization: Bearer kvp_...`"
        super().__init__(401, "invalid_request_error", said, code="invalid_api_key")
        self._given = given

    def headers(self) -> bytes:
        """See `ProxyError.headers`; RFC 6750 section 3 asks for this one."""
        challenge = b'Bearer realm="kvparams", error="invalid_token"' if self._given else b'Bearer realm="kvparams"'
        return b"%bwww-authenticate: %b\r\n" % (super().headers(), challenge)


class _Entry(NamedTuple):
    digest: bytes
    expires_s: float
    client: Client


class KeyRing:
    """The client keys that are valid now."""

    __slots__ = ("_entries", "_nobody", "_now", "_path", "_seen")

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """Read the keys in `path`. `now` is in seconds since 1970.

        Raises:
            KeysError: the file cannot be used; see `read_keys`.
        """
        self._path = path
        self._now = now
        self._nobody = _Entry(token_bytes(32), _FOREVER, Client("", "", 0, ""))
        """What an unknown id is compared with, so that it takes as long as a known one. Nothing hashes to it."""
        records, seen = read_keys(path)
        self._seen: State | None = seen
        self._entries = _entries(records)

    def __len__(self) -> int:
        return len(self._entries)

    def authenticate(self, authorization: bytes | None) -> Client | None:
        """Who sent this Authorization header; None if nobody with a valid key did. About 1 us; nothing is kept."""
        if authorization is None:
            return None
        scheme, _, key = authorization.partition(b" ")
        if len(key) != KEY_BYTES or scheme.lower() != b"bearer":
            return None
        entry = self._entries.get(key[_ID], self._nobody)
        if not compare_digest(hash_key(key), entry.digest) or self._now() >= entry.expires_s:
            return None
        return entry.client

    def reload(self) -> bool:
        """Read the file again if it has changed since it was last looked at; whether its keys are others now. May be
        called in a thread of its own: the keys change all at once.

        Raises:
            KeysError: it cannot be used; the keys stay as they were. The same state of the file is not tried again.
        """
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        records, self._seen = read_keys(self._path)
        self._entries = _entries(records)
        return True

    async def follow(self, every_s: float) -> NoReturn:
        """Keep the keys as the file has them, until cancelled. What is wrong with it is logged once."""
        before = self._seen
        while True:
            await asyncio.sleep(every_s)
            seen = await asyncio.to_thread(self._look)
            if seen == before and seen != self._seen:  # at rest: an editor may have written only a part of it before
                try:
                    await asyncio.to_thread(self.reload)
                    _log.warning("client keys were read again: %d", len(self))
                except KeysError as error:
                    _log.error("%s; the keys stay as they were", error)
            before = seen

    def _look(self) -> State | None:
        """The state of the file; None where there is none."""
        try:
            return state_of(self._path.stat())
        except OSError:
            return None


def _entries(records: dict[str, KeyRecord]) -> dict[bytes, _Entry]:
    return {
        id.encode(): _Entry(
            record.digest,
            _FOREVER if record.expires is None else record.expires.timestamp(),
            Client(id, record.tenant, record.priority, bind_salt(record.tenant, None)),
        )
        for id, record in records.items()
    }


def bind_salt(tenant: str, client_salt: str | None) -> str:
    """The cache salt of a tenant's request: 43 letters, digits, - and _.

    Distinct pairs of tenant and salt give distinct salts, whatever is in them, so no tenant can name another's cache;
    a client's own salt only divides what is its tenant's. Texts that look alike but are other code points are other
    texts. It is no secret: it keeps apart who comes through the proxy, not who reaches an engine past it.
    """
    owner = tenant.encode("utf-8", "surrogatepass")
    parts = [_SALT, len(owner).to_bytes(8, "big"), owner]
    if client_salt is not None:
        parts.append(b"\x01")
        parts.append(client_salt.encode("utf-8", "surrogatepass"))
    return urlsafe_b64encode(sha256(b"".join(parts)).digest())[:-1].decode()
