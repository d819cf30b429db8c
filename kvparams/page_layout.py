"""The layout of the header of a page, for the modules that write and read it.

    offset  bytes  field (little-endian)
         0      4  magic "KVPG"
         4      2  version: 1
         6      2  header bytes: 256
         8      4  flags: 0, or how the tag is made: 0x100 HMAC-SHA256, 0x200 AES-256-GMAC; others are refused
        12      4  tokens in this page
        16     16  layers from, to, KV heads from, to (u32 each, ends excluded)
        32      8  payload bytes
        40      8  XXH3-64 of the payload
        48     32  digest of the namespace
        80     32  chain of the page
       112      8  with a tag: id of its key; else zero
       120     32  with a tag: random bytes; else zero
       152     16  with a tag: the tag; else zero
       168     80  zero
       248      8  XXH3-64 of bytes 0..247

The tag covers bytes 0..39, 48..151 and 168..247 of the header and then the payload: everything but itself and the two
checksums, which follow from the rest.
"""

import struct
from typing import Final

from xxhash import xxh3_64_intdigest

__all__ = [
    "CHAIN_AT",
    "CHECKED_BYTES",
    "CHECKSUM",
    "COVERED",
    "FIELDS",
    "HEADER_BYTES",
    "MAGIC",
    "PAYLOAD_CHECKSUM_AT",
    "TAG_AT",
    "UNUSED_AT",
    "VERSION",
    "WHOLE",
    "HeaderTemplate",
]

HEADER_BYTES: Final = 256
"""Bytes in front of the payload."""
MAGIC: Final = b"KVPG"
VERSION: Final = 1
FIELDS: Final = struct.Struct("<4sHHI5IQQ32s32s8s32s16s80x")
WHOLE: Final = struct.Struct(f"{HEADER_BYTES}s")
CHECKSUM: Final = struct.Struct("<Q")
CHECKED_BYTES: Final = HEADER_BYTES - CHECKSUM.size
PAYLOAD_CHECKSUM_AT: Final = 40
CHAIN_AT: Final = 80
TAG_AT: Final = 152
UNUSED_AT: Final = 168
COVERED: Final = (slice(0, 40), slice(48, TAG_AT), slice(UNUSED_AT, CHECKED_BYTES))
"""What the tag covers of the header; the payload comes after it."""


class HeaderTemplate:
    """A `HeaderTemplate` holds what the headers of alike pages have in common.

    These pages have no tag, and differ in their chain and their payload only.
    """

    def __init__(self, header: bytes) -> None:
        """Takes the unsealed header of any of these pages; its chain does not matter."""
        self._front: Final = header[:PAYLOAD_CHECKSUM_AT]
        self._namespace: Final = header[PAYLOAD_CHECKSUM_AT + 8 : CHAIN_AT]
        self._back: Final = header[CHAIN_AT + 32 : CHECKED_BYTES]

    def expected_checksum(self, header: memoryview, chain: bytes) -> int | None:
        """Returns the checksum that a payload must have for the page to be the one of this chain.

        None: the header is not that of this page; `verify_detached` says why. For callers that compute the checksum
        while they copy the payload.
        """
        raw = header.tobytes()
        if (
            raw[CHAIN_AT : CHAIN_AT + 32] != chain
            or not raw.startswith(self._front)
            or raw[PAYLOAD_CHECKSUM_AT + 8 : CHAIN_AT] != self._namespace
            or raw[CHAIN_AT + 32 : CHECKED_BYTES] != self._back
            or raw[CHECKED_BYTES:] != CHECKSUM.pack(xxh3_64_intdigest(raw[:CHECKED_BYTES]))
        ):
            return None
        (checksum,) = CHECKSUM.unpack_from(raw, PAYLOAD_CHECKSUM_AT)
        return checksum
