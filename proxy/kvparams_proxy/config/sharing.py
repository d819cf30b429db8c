"""Defines how a proxy shares its fleet with others: where they meet, and the keys that they have in common."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes
from typing import Final, NamedTuple

from kvparams.signing.keyring import SigningKeyring, SigningKeyringError
from kvparams.signing.keyring_file import WatchedKeyring
from kvparams_proxy.config.share_url import ShareURL

__all__ = ["EXCHANGE_KEY_FILE", "SharingSettings", "share_directory", "share_server", "write_exchange_key"]

EXCHANGE_KEY_FILE: Final = "exchange.key"
"""In the directory of a supervisor: 32 random bytes."""
_PURPOSE: Final = b"kvparams replication\n"
_log: Final = logging.getLogger(__name__)


class SharingSettings(NamedTuple):
    """The proxies of one site."""

    place: ShareURL | Path
    """A server, or the private directory of the workers of one supervisor."""
    secrets: Callable[[], Sequence[bytes]]
    """Returns the keys that are believed now; the first one seals. Called again and again."""
    seed: int
    """64 bits for block hashes, which the proxies of the site share and clients do not know.

    They come from the oldest key, so a key that is added changes nothing."""
    response_secret: bytes
    """32 bytes for the ids of stored responses, from the same key."""

    @property
    def site(self) -> str:
        """The name of the site, which is the same for all of its proxies."""
        return self.place.prefix if isinstance(self.place, ShareURL) else "workers"


def share_server(url: ShareURL, keys_file: Path) -> SharingSettings:
    """Returns the settings of proxies that meet on a server. The file of signing keys may change at any time.

    Raises:
        SigningKeyringError: it cannot be used.
    """
    watched = WatchedKeyring(keys_file)

    def secrets() -> Sequence[bytes]:
        try:
            watched.reload_if_changed()
        except SigningKeyringError as error:
            _log.error("%s; the keys between proxies stay as they were", error)
        return _secrets(watched.keyring)

    oldest = min(watched.keyring, key=lambda key: (key.not_before, key.kid))
    secret = oldest.derive(_PURPOSE)
    return SharingSettings(url, secrets, _seed(secret), _response_secret(secret))


def share_directory(directory: Path) -> SharingSettings:
    """Returns the settings of the workers of one supervisor, which has written their key.

    Raises:
        OSError: there is none.
    """
    secret = (directory / EXCHANGE_KEY_FILE).read_bytes()
    return SharingSettings(directory, lambda: (secret,), _seed(secret), _response_secret(secret))


def write_exchange_key(directory: Path) -> None:
    """Writes a new key for the workers of one supervisor, which nobody else can read.

    Raises:
        OSError: it cannot be written.
    """
    file = os.open(directory / EXCHANGE_KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as opened:
        opened.write(token_bytes(32))


def _secrets(keyring: SigningKeyring) -> Sequence[bytes]:
    """Returns the key that signs now first: one whose time has not come may not be in everybody's file yet."""
    signing = keyring.signing_key_at(time.time())
    keys = sorted(keyring, key=lambda key: (key is not signing, -key.not_before, key.kid))
    return [key.derive(_PURPOSE) for key in keys]


def _response_secret(secret: bytes) -> bytes:
    return sha256(b"kvparams response ids\n" + secret).digest()


def _seed(secret: bytes) -> int:
    return int.from_bytes(sha256(b"kvparams block hashes\n" + secret).digest()[:8], "little")
