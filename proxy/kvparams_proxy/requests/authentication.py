"""Authenticates clients by their keys, and isolates what tenants share in engines' caches.

What is kept of a key, and why a fast hash is right for it, stands in `api_keys_file.py`. A refusal reveals only that
the key is not valid here, neither in words nor by its timing.
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

from kvparams.signing.shared_files import FileState, file_state
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.api_keys_file import KEY_BYTES, APIKeyRecord, APIKeysError, hash_api_key, read_api_keys

__all__ = [
    "APIKeyAuthenticator",
    "AuthenticatedClient",
    "Unauthorized",
    "require_client",
    "session_from_header",
    "tenant_cache_salt",
]

_log: Final = logging.getLogger(__name__)
_ID: Final = slice(4, 16)
"""Where a key's id stands in it."""
_MOST_SESSION: Final = 256
_SALT: Final = b"kvparams cache salt 1"
_FOREVER: Final = float("inf")


class AuthenticatedClient(NamedTuple):
    """The client that sent a request, as far as the proxy knows it."""

    key_id: str
    """Which of the tenant's keys it was."""
    tenant: str
    priority: int
    """For `RequestFacts.priority`."""
    cache_salt: str
    """The cache salt of its requests that bring none of their own: see `tenant_cache_salt`."""


class Unauthorized(ProxyError):
    """An error 401: no key was sent, or none that is valid here."""

    def __init__(self, *, given: bool) -> None:
        """`given`: whether there was an Authorization header."""
        if given:
            said = "the API key is not valid"
        else:
            said = "an API key is needed: send the header `Authorization: Bearer kvp_...`"
        super().__init__(401, "invalid_request_error", said, code="invalid_api_key")
        self._given = given

    def headers(self) -> bytes:
        """See `ProxyError.headers`; RFC 6750 section 3 asks for this one."""
        challenge = b'Bearer realm="kvparams", error="invalid_token"' if self._given else b'Bearer realm="kvparams"'
        return b"%bwww-authenticate: %b\r\n" % (super().headers(), challenge)


class _ValidKey(NamedTuple):
    digest: bytes
    expires_s: float
    client: AuthenticatedClient


class APIKeyAuthenticator:
    """Authenticates clients by the keys that are valid now."""

    __slots__ = ("_entries", "_nobody", "_now", "_path", "_seen")

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """Reads the keys in `path`. `now` is in seconds since 1970.

        Raises:
            APIKeysError: the file cannot be used; see `read_api_keys`.
        """
        self._path = path
        self._now = now
        self._nobody = _ValidKey(token_bytes(32), _FOREVER, AuthenticatedClient("", "", 0, ""))
        """What an unknown id is compared with, so that it takes as long as a known one. Nothing hashes to it."""
        records, seen = read_api_keys(path)
        self._seen: FileState | None = seen
        self._entries = _entries(records)

    def __len__(self) -> int:
        return len(self._entries)

    def authenticate(self, authorization: bytes | None) -> AuthenticatedClient | None:
        """Returns the client that sent this Authorization header, or None without a valid key.

        Takes about 1 us; nothing is kept.
        """
        if authorization is None:
            return None
        scheme, _, key = authorization.partition(b" ")
        if len(key) != KEY_BYTES or scheme.lower() != b"bearer":
            return None
        entry = self._entries.get(key[_ID], self._nobody)
        if not compare_digest(hash_api_key(key), entry.digest) or self._now() >= entry.expires_s:
            return None
        return entry.client

    def reload(self) -> bool:
        """Reads the file again if it has changed since the last check.

        Returns whether the keys have changed. May be called in a thread of its own: the keys change all at once.

        Raises:
            APIKeysError: it cannot be used; the keys stay as they were. The same state of the file is not tried again.
        """
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        records, self._seen = read_api_keys(self._path)
        self._entries = _entries(records)
        return True

    async def watch_file(self, every_s: float) -> NoReturn:
        """Reloads the keys whenever the file changes, until cancelled. An error in it is logged once."""
        before = self._seen
        while True:
            await asyncio.sleep(every_s)
            seen = await asyncio.to_thread(self._look)
            if seen == before and seen != self._seen:  # at rest: an editor may have written only a part of it before
                try:
                    await asyncio.to_thread(self.reload)
                    _log.warning("client keys were read again: %d", len(self))
                except APIKeysError as error:
                    _log.error("%s; the old keys stay in use", error)
            before = seen

    def _look(self) -> FileState | None:
        """Returns the state of the file, or None where there is none."""
        try:
            return file_state(self._path.stat())
        except OSError:
            return None


def _entries(records: dict[str, APIKeyRecord]) -> dict[bytes, _ValidKey]:
    return {
        id.encode(): _ValidKey(
            record.digest,
            _FOREVER if record.expires is None else record.expires.timestamp(),
            AuthenticatedClient(id, record.tenant, record.priority, tenant_cache_salt(record.tenant, None)),
        )
        for id, record in records.items()
    }


def require_client(keys: APIKeyAuthenticator, authorization: bytes | None) -> AuthenticatedClient:
    """Returns the client that a key belongs to.

    Raises:
        Unauthorized: the key belongs to no client.
    """
    client = keys.authenticate(authorization)
    if client is None:
        raise Unauthorized(given=authorization is not None)
    return client


def session_from_header(value: bytes) -> str:
    """Returns the session that the header `x-session-id` names."""
    return value[:_MOST_SESSION].decode("latin-1")


def tenant_cache_salt(tenant: str, client_salt: str | None) -> str:
    """Returns the cache salt of a tenant's request: 43 letters, digits, - and _.

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
