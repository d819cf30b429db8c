"""A stored page: a 256-byte header that says what the payload is, then the payload.

`seal` writes the header in front of a payload that already stands in the buffer; `verify` says whether a buffer holds
exactly the page that was asked for. The one rule: nothing reaches a model before `verify` has returned None.

    offset  bytes  field (little-endian)
         0      4  magic "KVPG"
         4      2  version: 1
         6      2  header bytes: 256
         8      4  flags: 0; a flag that is not known is refused
        12      4  tokens in this page
        16     16  layers from, to, KV heads from, to (u32 each, ends excluded)
        32      8  payload bytes
        40      8  XXH3-64 of the payload
        48     32  digest of the namespace
        80     32  chain of the page
       112    136  zero
       248      8  XXH3-64 of bytes 0..247
"""

import struct
from dataclasses import dataclass
from typing import Final, Literal

from xxhash import xxh3_64_intdigest

from kvparams.keys import Namespace, Page, Rectangle

__all__ = ["HEADER_BYTES", "REASONS", "PageIdentity", "Reason", "Refusal", "identify", "seal", "verify"]

HEADER_BYTES: Final = 256
"""Bytes in front of the payload."""

Reason = Literal[
    "torn",  # fewer or more bytes than the page has
    "malformed",  # not a page at all
    "version",  # a page of another format version, or with flags that are not known here
    "flipped_header",  # the header's checksum does not fit
    "namespace",  # a page of another model, dtype, geometry, LoRA or cache salt
    "prefix",  # a page of other tokens
    "length",  # a page of another number of tokens or bytes
    "rectangle",  # a page of other layers or heads
    "flipped_payload",  # the payload's checksum does not fit
]
REASONS: Final[tuple[Reason, ...]] = (
    "torn",
    "malformed",
    "version",
    "flipped_header",
    "namespace",
    "prefix",
    "length",
    "rectangle",
    "flipped_payload",
)
"""Every reason for which a page is refused; spec/draft/spec.md section 11 lists the checks in their order."""

_MAGIC: Final = b"KVPG"
_VERSION: Final = 1
_FIELDS: Final = struct.Struct("<4sHHI5IQQ32s32s136x")
_CHECKSUM: Final = struct.Struct("<Q")
_CHECKED_BYTES: Final = HEADER_BYTES - _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a buffer is not the page that was asked for."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """What the header says besides the payload's checksum."""

    namespace: bytes
    """The namespace's digest."""
    chain: bytes
    tokens: int
    rectangle: Rectangle
    payload_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Header and payload together."""
        return HEADER_BYTES + self.payload_bytes


def identify(namespace: Namespace, page: Page, rectangle: Rectangle) -> PageIdentity:
    """The identity of `page`'s part `rectangle`."""
    payload_bytes = namespace.payload_bytes(page.tokens, rectangle)
    return PageIdentity(namespace.digest, page.chain, page.tokens, rectangle, payload_bytes)


def seal(buffer: memoryview, identity: PageIdentity) -> None:
    """Write the header in front of the payload.

    Args:
        buffer: `identity.stored_bytes` writable bytes; the payload already stands behind the first `HEADER_BYTES`.
        identity: what the page is.

    Raises:
        ValueError: the buffer has another length.
    """
    if buffer.nbytes != identity.stored_bytes:
        raise ValueError(f"the buffer has {buffer.nbytes} bytes, the page {identity.stored_bytes}")
    part = identity.rectangle
    _FIELDS.pack_into(
        buffer,
        0,
        _MAGIC,
        _VERSION,
        HEADER_BYTES,
        0,
        identity.tokens,
        part.layer_start,
        part.layer_end,
        part.head_start,
        part.head_end,
        identity.payload_bytes,
        xxh3_64_intdigest(buffer[HEADER_BYTES:]),
        identity.namespace,
        identity.chain,
    )
    _CHECKSUM.pack_into(buffer, _CHECKED_BYTES, xxh3_64_intdigest(buffer[:_CHECKED_BYTES]))


def verify(buffer: memoryview, expected: PageIdentity) -> Refusal | None:
    """None if `buffer` holds exactly the page `expected`, whole and unchanged; otherwise the first reason it does not.

    Args:
        buffer: the bytes that a store gave back: header and payload, nothing else.
        expected: the page that was asked for.
    """
    if buffer.nbytes < HEADER_BYTES:
        return Refusal("torn", f"{buffer.nbytes} bytes are fewer than a header has")
    (magic, version, header_bytes, flags, tokens, *part, payload_bytes, checksum, namespace, chain) = (
        _FIELDS.unpack_from(buffer, 0)
    )
    wanted = expected.rectangle
    if magic != _MAGIC:
        return Refusal("malformed", f"it starts with {magic!r}, not with {_MAGIC!r}")
    if version != _VERSION:
        return Refusal("version", f"page format version {version}; this build reads {_VERSION}")
    (header_checksum,) = _CHECKSUM.unpack_from(buffer, _CHECKED_BYTES)
    if header_checksum != xxh3_64_intdigest(buffer[:_CHECKED_BYTES]):
        return Refusal("flipped_header", "the header's checksum does not fit")
    if header_bytes != HEADER_BYTES or flags:
        return Refusal("version", f"header of {header_bytes} bytes with flags {flags:#x}: neither is known here")
    if namespace != expected.namespace:
        return Refusal("namespace", f"a page of the namespace {namespace.hex()[:16]}")
    if chain != expected.chain:
        return Refusal("prefix", f"a page of the chain {chain.hex()[:16]}")
    if (tokens, payload_bytes) != (expected.tokens, expected.payload_bytes):
        return Refusal("length", f"a page of {tokens} tokens in {payload_bytes} bytes")
    if part != [wanted.layer_start, wanted.layer_end, wanted.head_start, wanted.head_end]:
        return Refusal("rectangle", f"a page of the layers and heads {part}")
    if buffer.nbytes != expected.stored_bytes:
        return Refusal("torn", f"{buffer.nbytes} of {expected.stored_bytes} bytes")
    if checksum != xxh3_64_intdigest(buffer[HEADER_BYTES:]):
        return Refusal("flipped_payload", "the payload's checksum does not fit")
    return None
