"""Defines what goes over the wire to LMCache's `lm://` server: requests, replies, and the names that values get. Pure.

A reply counts only for what it states in full. Bytes that are no reply raise `LMCacheProtocolError`.

Source: LMCache 0.5.6. The structs and numbers are those of `ClientMetaMessage` and `ServerMetaMessage` in
`lmcache/v1/protocol.py` (both in the machine's own byte order), formats those of `MemoryFormat` in
`lmcache/v1/memory_management.py`, names those of `parse_cache_key` in `lmcache/utils.py`. The server
(`lmcache/v1/server/__main__.py`) keeps the four numbers of a tensor's shape with a value and gives them back as they
are, if the format is BINARY: there we say what an entry is.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Final

__all__ = [
    "MAX_VALUE_BYTES",
    "REPLY_BYTES",
    "REQUEST_BYTES",
    "LMCacheCommand",
    "LMCacheEntry",
    "LMCacheEntryKind",
    "LMCacheNames",
    "LMCacheProtocolError",
    "LMCacheReply",
    "decode_replies",
    "decode_reply",
    "encode_request",
]

_REQUEST: Final = struct.Struct("=9i150s")
"""command, length, format, dtype, location, four numbers of a shape, name padded with spaces."""
_REPLY: Final = struct.Struct("=9i")
"""code, length, format, dtype, four numbers of a shape, location."""
REQUEST_BYTES: Final = _REQUEST.size
REPLY_BYTES: Final = _REPLY.size
MAX_VALUE_BYTES: Final = 2**31 - 1
"""What its length field can say."""

_SUCCESS: Final = 200
_FAIL: Final = 400
_BINARY: Final = 4
_UINT8: Final = 6
_NAME: Final = 150
_HALF: Final = 31
"""Bits of a tag in one number: all of them are positive."""


class LMCacheProtocolError(ConnectionError):
    """The peer sent something that is no reply to what was asked."""


class LMCacheCommand(IntEnum):
    """Describes what may be asked; LIST (4) is declared there and never answered."""

    PUT = 1
    GET = 2
    EXIST = 3
    HEALTH = 5


class LMCacheEntryKind(IntEnum):
    """Describes what an entry of ours is; the first number of its shape."""

    VALUE = 0x4B56_5001
    """The bytes of a value."""
    RECORD = 0x4B56_5002
    """Says, without any bytes, that the value is there and how large it is."""
    GONE = 0x4B56_5003
    """It was deleted; no bytes."""


@dataclass(frozen=True, slots=True)
class LMCacheEntry:
    """Describes what stands under a name of ours."""

    kind: LMCacheEntryKind
    size: int = 0
    """Bytes of the value."""
    tag: int = 0
    """Whose put this is: 62 bits drawn by it."""

    def shape(self) -> tuple[int, int, int, int]:
        """The numbers that say so."""
        return self.kind, self.size, self.tag >> _HALF, self.tag & (1 << _HALF) - 1


@dataclass(frozen=True, slots=True)
class LMCacheReply:
    """A reply of the server."""

    found: bool
    nbytes: int
    """Bytes that follow."""
    entry: LMCacheEntry | None
    """None: nothing was found, or what stands there is not ours."""


def encode_request(command: LMCacheCommand, name: bytes, nbytes: int = 0, entry: LMCacheEntry | None = None) -> bytes:
    """A request.

    Args:
        name: see `LMCacheNames`.
        nbytes: PUT: bytes that follow.
        entry: PUT: what they are.
    """
    shape = (0, 0, 0, 0) if entry is None else entry.shape()
    return _REQUEST.pack(command, nbytes, _BINARY, _UINT8, 0, *shape, name)


def decode_reply(data: bytes | bytearray | memoryview) -> LMCacheReply:
    """Decodes a reply of `REPLY_BYTES`, or raises ProtocolError."""
    return next(decode_replies(data))


def decode_replies(data: bytes | bytearray | memoryview) -> Iterator[LMCacheReply]:
    """Replies, one after the other. Raises ProtocolError where one is none."""
    for code, nbytes, form, _, kind, size, high, low, _ in _REPLY.iter_unpack(data):
        if code == _FAIL and nbytes == 0:
            yield _MISSING
        elif code == _SUCCESS and nbytes >= 0:
            yield LMCacheReply(True, nbytes, _entry(form, nbytes, kind, size, high, low))
        else:
            raise LMCacheProtocolError(f"no reply of an lm:// server: code {code}, length {nbytes}")


_MISSING: Final = LMCacheReply(False, 0, None)
_KINDS: Final = {int(kind): kind for kind in LMCacheEntryKind}


def _entry(form: int, nbytes: int, kind: int, size: int, high: int, low: int) -> LMCacheEntry | None:
    known = _KINDS.get(kind)
    if form != _BINARY or known is None or min(size, high, low) < 0:
        return None
    if nbytes != (size if known is LMCacheEntryKind.VALUE else 0):
        return None
    return LMCacheEntry(known, size, high << _HALF | low)


class LMCacheNames:
    """The names of values at the server: `model@world_size@worker_id@hash@dtype`, at most 150 characters.

    The model is `kvparams`, or `kvparams:` and a prefix; the hash is of our key, because both together may be too long.
    Worker 0 has the values, worker 1 the records.
    """

    LONGEST_PREFIX: Final = 64

    def __init__(self, prefix: str = "") -> None:
        """Takes the prefix of one deployment.

        Args:
            prefix: separates deployments that share a server; at most `LONGEST_PREFIX` characters, without `@` and
                spaces.
        """
        model = f"kvparams:{prefix}" if prefix else "kvparams"
        self._value = f"{model}@1@0@"
        self._record = f"{model}@1@1@"

    def value(self, key: str) -> bytes:
        """Returns where the bytes of a key's value stand."""
        return _name(self._value, key)

    def record(self, key: str) -> bytes:
        """Returns where it says how large they are."""
        return _name(self._record, key)


def _name(head: str, key: str) -> bytes:
    digest = blake2b(key.encode(), digest_size=32).hexdigest().lstrip("0")  # the server reads a number
    return f"{head}{digest}@uint8".encode().ljust(_NAME)
