"""Messages: the envelope of entries, authenticated with a key that the proxies of one site share.

    offset  bytes  field
    0       3      "kvx"
    3       1      format, 1
    4       1      kind, see `MessageKind`
    5       1      key number: the first byte of SHA-256 of the key
    6       8      sender: 64 random bits, drawn when a proxy starts
    14      8      receiver; 0 for all
    22      8      sequence number: one more than the sender's message before, of those for all; 0 in others
    30      8      time, in milliseconds since 1970, of the sender's clock
    38      ..     payload
    -16     16     HMAC-SHA256 over the site's name, a zero byte and everything before, its first 16 bytes

Numbers are little-endian. A message is believed only if its tag fits. A message is not older than `MAX_AGE_S`, by the
receiver's clock, so nobody can replay what he has recorded for long; clocks may differ by that much.
"""

import hmac
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from hashlib import sha256
from typing import Final, NamedTuple

__all__ = [
    "MAX_AGE_S",
    "MAX_MESSAGE_BYTES",
    "AuthenticationError",
    "Message",
    "MessageAuthenticator",
    "MessageError",
    "MessageKind",
    "sender_of",
]

MAX_MESSAGE_BYTES: Final = 128 << 10
MAX_AGE_S: Final = 60.0
_MAGIC: Final = b"kvx\x01"
_HEAD: Final = struct.Struct("<4sBBQQQQ")
_TAG_BYTES: Final = 16
_DOMAIN: Final = b"kvparams replication 1\n"


class MessageError(ValueError):
    """A message is damaged, too long, too old, or of another format."""


class AuthenticationError(MessageError):
    """A message was not made with a key of this site."""


class MessageKind(IntEnum):
    """The kinds of messages. A reader ignores kinds that it does not know."""

    ENTRIES = 1
    """Entries, in the order of the sequence numbers."""
    HEARTBEAT = 2
    """What the sender is (JSON), and its whole load."""
    SNAPSHOT_REQUEST = 3
    """Asks one proxy for all that it knows."""
    SNAPSHOT = 4
    """A piece of the answer: entries."""
    GOODBYE = 5
    """The sender ends: its load is to be forgotten at once."""
    MISSED_REQUEST = 6
    """Asks one proxy to tell all once more what it told in the last seconds; the payload says how many (float32)."""
    REPEATED = 7
    """The answer: everything has been told once more."""


class Message(NamedTuple):
    """A message that has been authenticated."""

    kind: int
    sender: int
    receiver: int
    sequence: int
    sent_s: float
    payload: memoryview


class _Key(NamedTuple):
    number: int
    secret: bytes


class MessageAuthenticator:
    """Seals and opens the messages of one site."""

    __slots__ = ("_keys", "_prefix")

    def __init__(self, site: str, secrets: Sequence[bytes]) -> None:
        """Creates an authenticator.

        Args:
            site: the name of the site. Messages of another one are not believed, whatever their key.
            secrets: the keys that are believed, at least one; the first one seals. Each should have 32 random bytes.

        Raises:
            ValueError: there is no key.
        """
        self._prefix = site.encode() + b"\0"
        self._keys = _derived(secrets)
        if not self._keys:
            raise ValueError("messages between proxies need at least one key")

    def use_secrets(self, secrets: Sequence[bytes]) -> None:
        """Replaces the keys, as in the constructor; no secrets change nothing."""
        self._keys = _derived(secrets) or self._keys

    def seal(self, kind: MessageKind, sender: int, receiver: int, sequence: int, now: float, payload: bytes) -> bytes:
        """Makes a message. `now` is in seconds since 1970.

        Raises:
            MessageError: it would be too long.
        """
        key = self._keys[0]
        body = _HEAD.pack(_MAGIC, kind, key.number, sender, receiver, sequence, int(now * 1000)) + payload
        if len(body) + _TAG_BYTES > MAX_MESSAGE_BYTES:
            raise MessageError(f"a message has at most {MAX_MESSAGE_BYTES} bytes")
        return body + self._tag(key, body)

    def open(self, data: bytes, now: float) -> Message:
        """Reads a message. `now` is in seconds since 1970.

        Raises:
            AuthenticationError: no key of this site made it.
            MessageError: it is no message, or too long or old.
        """
        if not _HEAD.size + _TAG_BYTES <= len(data) <= MAX_MESSAGE_BYTES:
            raise MessageError(f"{len(data)} bytes are no message")
        magic, kind, number, sender, receiver, sequence, sent_ms = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise MessageError("it has another format")
        body, tag = memoryview(data)[:-_TAG_BYTES], data[-_TAG_BYTES:]
        if not any(hmac.compare_digest(self._tag(key, body), tag) for key in self._keys if key.number == number):
            raise AuthenticationError("no key of this site made it")
        sent_s = sent_ms / 1000
        if abs(now - sent_s) > MAX_AGE_S:
            raise MessageError(f"it was sent {now - sent_s:.0f} s ago, by the sender's clock")
        return Message(kind, sender, receiver, sequence, sent_s, body[_HEAD.size :])

    def _tag(self, key: _Key, body: bytes | memoryview) -> bytes:
        return hmac.digest(key.secret, b"".join((self._prefix, body)), "sha256")[:_TAG_BYTES]


def sender_of(data: bytes) -> int | None:
    """Returns the sender that a message names, before it is authenticated; None if it is no message."""
    return None if len(data) < _HEAD.size else int.from_bytes(data[6:14], "little")


def _derived(secrets: Iterable[bytes]) -> tuple[_Key, ...]:
    keys = (hmac.digest(secret, _DOMAIN, "sha256") for secret in secrets)
    return tuple(_Key(sha256(key).digest()[0], key) for key in keys)
