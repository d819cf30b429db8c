"""A stored page: a 256-byte header that says what the payload is, then the payload.

`seal` writes the header in front of a payload that already stands in the buffer; `verify` says whether a buffer holds
exactly the page that was asked for. With keys (`kvparams.page_auth`) it carries a tag that only their owners can make:
a checksum finds accidents, a tag attackers. A page must not reach a model before `verify` has returned None. The layout
of the header is in `kvparams.page_layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final, Literal

from xxhash import xxh3_64, xxh3_64_intdigest

from kvparams.keys import KVShard, Namespace, Page
from kvparams.page_auth import PAGE_AUTH_METHODS, TenantPageAuthKeys
from kvparams.page_layout import (
    CHECKED_BYTES,
    CHECKSUM,
    COVERED,
    FIELDS,
    HEADER_BYTES,
    MAGIC,
    PAYLOAD_CHECKSUM_AT,
    TAG_AT,
    UNUSED_AT,
    VERSION,
    WHOLE,
    HeaderTemplate,
)

__all__ = [
    "HEADER_BYTES",
    "PAGE_REFUSAL_REASONS",
    "REASONS_USABLE_BY_OTHERS",
    "HeaderClaim",
    "PageIdentity",
    "PageRefusal",
    "PageRefusalReason",
    "complete_header",
    "page_identity",
    "read_claim",
    "seal",
    "seal_detached",
    "unsealed_header",
    "verify",
    "verify_detached",
]

PageRefusalReason = Literal[
    "torn",  # fewer or more bytes than the page has
    "malformed",  # not a page at all
    "version",  # a page of another format version, or with flags that are not known here
    "flipped_header",  # the header's checksum does not fit
    "unsealed",  # a page without a tag, where only pages with one are used
    "locked",  # a page with a tag that cannot be checked here
    "namespace",  # a page of another model, dtype, geometry, LoRA or cache salt
    "prefix",  # a page of other tokens
    "length",  # a page of another number of tokens or bytes
    "rectangle",  # a page of other layers or heads
    "flipped_payload",  # the payload's checksum does not fit
    "forged",  # all of that fits, and the tag does not: no owner of the key has written it
]
PAGE_REFUSAL_REASONS: Final[tuple[PageRefusalReason, ...]] = (
    "torn",
    "malformed",
    "version",
    "flipped_header",
    "unsealed",
    "locked",
    "namespace",
    "prefix",
    "length",
    "rectangle",
    "flipped_payload",
    "forged",
)
"""Every reason for which a page is refused; spec/1.0/spec.md section 11 lists the checks in their order."""

REASONS_USABLE_BY_OTHERS: Final[frozenset[PageRefusalReason]] = frozenset({"version", "locked"})
"""Reasons that lie with the reader: with a newer build or another key the page may be good, so it is no reader's to
delete. All others say that it is good for nobody, or must not be trusted."""
_NO_KEY: Final = (bytes(8), bytes(32))
"""The id of the key and the random bytes of a page without a tag."""


@dataclass(frozen=True, slots=True)
class PageRefusal:
    """Why a buffer is not the page that was asked for."""

    reason: PageRefusalReason
    message: str


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """A `PageIdentity` holds the fields of the header without the payload's checksum."""

    namespace: bytes
    """The namespace's digest."""
    chain: bytes
    tokens: int
    shard: KVShard
    payload_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Header and payload together."""
        return HEADER_BYTES + self.payload_bytes


def page_identity(namespace: Namespace, page: Page, rectangle: KVShard) -> PageIdentity:
    """The identity of `page`'s part `rectangle`."""
    payload_bytes = namespace.payload_bytes(page.tokens, rectangle)
    return PageIdentity(namespace.digest, page.chain, page.tokens, rectangle, payload_bytes)


def seal(
    buffer: memoryview,
    identity: PageIdentity,
    keys: TenantPageAuthKeys | None = None,
    *,
    payload_checksum: int | None = None,
) -> None:
    """Write the header in front of the payload.

    Args:
        buffer: `identity.stored_bytes` writable bytes; the payload already stands behind the first `HEADER_BYTES`.
        identity: what the page is.
        keys: of the tenant, for a page with a tag.
        payload_checksum: XXH3-64 of the payload, where the caller has computed it when it wrote these bytes. None: it
            is computed here.

    Raises:
        ValueError: the buffer has another length.
    """
    if buffer.nbytes != identity.stored_bytes:
        raise ValueError(f"the buffer has {buffer.nbytes} bytes, the page {identity.stored_bytes}")
    seal_detached(buffer[:HEADER_BYTES], buffer[HEADER_BYTES:], identity, keys, payload_checksum=payload_checksum)


def seal_detached(
    header: memoryview,
    payload: memoryview | list[memoryview],
    identity: PageIdentity,
    keys: TenantPageAuthKeys | None = None,
    *,
    payload_checksum: int | None = None,
) -> None:
    """`seal` for a payload that does not stand behind its header; stored one after the other they are the page.

    Args:
        header: `HEADER_BYTES` writable bytes.
        payload: `identity.payload_bytes` bytes, in one piece or in several, in their order.
        identity: what the page is.
        keys: of the tenant, for a page with a tag.
        payload_checksum: as for `seal`.

    Raises:
        ValueError: a buffer has another length.
    """
    pieces = [payload] if isinstance(payload, memoryview) else payload
    payload_bytes = sum(piece.nbytes for piece in pieces)
    if (header.nbytes, payload_bytes) != (HEADER_BYTES, identity.payload_bytes):
        raise ValueError(
            f"{header.nbytes} and {payload_bytes} bytes; header and payload have {HEADER_BYTES} and "
            f"{identity.payload_bytes}"
        )
    checksum = _checksum(pieces) if payload_checksum is None else payload_checksum
    if keys is None:
        WHOLE.pack_into(header, 0, unsealed_header(identity))
        complete_header(header, checksum)
        return
    key_id, salt = keys.key_id, keys.new_salt()
    WHOLE.pack_into(header, 0, _header(identity, keys.flags, checksum, key_id, salt))
    covered = [*(header[part] for part in COVERED), *pieces]
    header[TAG_AT:UNUSED_AT] = keys.tag(keys.flags, key_id, salt, covered)
    CHECKSUM.pack_into(header, CHECKED_BYTES, xxh3_64_intdigest(header[:CHECKED_BYTES]))


def unsealed_header(identity: PageIdentity) -> bytes:
    """Returns the header of a page without a tag, with zeros in place of its two checksums.

    A store that computes the checksum of the payload on its way completes it, as `complete_header` does.
    """
    return _header(identity, 0, 0, *_NO_KEY)


def complete_header(header: memoryview | bytearray, payload_checksum: int) -> None:
    """Writes the two checksums into the header of a page without a tag.

    Args:
        header: `HEADER_BYTES` writable bytes, which begin as `unsealed_header`.
        payload_checksum: XXH3-64 of the payload.
    """
    CHECKSUM.pack_into(header, PAYLOAD_CHECKSUM_AT, payload_checksum)
    CHECKSUM.pack_into(header, CHECKED_BYTES, xxh3_64_intdigest(header[:CHECKED_BYTES]))


def _header(identity: PageIdentity, flags: int, payload_checksum: int, key_id: bytes, salt: bytes) -> bytes:
    """Returns a header without its tag and its own checksum."""
    part = identity.shard
    return FIELDS.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        flags,
        identity.tokens,
        part.layer_start,
        part.layer_end,
        part.head_start,
        part.head_end,
        identity.payload_bytes,
        payload_checksum,
        identity.namespace,
        identity.chain,
        key_id,
        salt,
        bytes(16),
    ).ljust(HEADER_BYTES, b"\0")


def _checksum(pieces: Sequence[memoryview]) -> int:
    """XXH3-64 of the pieces, one after the other."""
    if len(pieces) == 1:
        return xxh3_64_intdigest(pieces[0])
    state = xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def verify(
    buffer: memoryview,
    expected: PageIdentity,
    keys: TenantPageAuthKeys | None = None,
    *,
    payload_checksum: int | None = None,
) -> PageRefusal | None:
    """None if `buffer` holds exactly the page `expected`, whole and unchanged; otherwise the first reason it does not.

    Args:
        buffer: the bytes that a store gave back: header and payload, nothing else.
        expected: the page that was asked for.
        keys: of the tenant. With keys only pages with a good tag are used; without, only pages that have none.
        payload_checksum: XXH3-64 of what stands behind the header, where the caller has computed it from these bytes
            while they came. None: it is computed here.
    """
    if buffer.nbytes < HEADER_BYTES:
        return PageRefusal("torn", f"{buffer.nbytes} bytes are fewer than a header has")
    header, payload = buffer[:HEADER_BYTES], buffer[HEADER_BYTES:]
    return verify_detached(header, payload, expected, keys, payload_checksum=payload_checksum)


def verify_detached(
    header: memoryview,
    payload: memoryview,
    expected: PageIdentity,
    keys: TenantPageAuthKeys | None = None,
    *,
    payload_checksum: int | None = None,
) -> PageRefusal | None:
    """`verify` for a payload that does not stand behind its header.

    Args:
        header: the first `HEADER_BYTES` that a store gave back.
        payload: the rest, and nothing else.
        expected: the page that was asked for.
        keys: of the tenant, as for `verify`.
        payload_checksum: as for `verify`.
    """
    if keys is None and payload.nbytes == expected.payload_bytes:
        payload_checksum = _checksum((payload,)) if payload_checksum is None else payload_checksum
        if HeaderTemplate(unsealed_header(expected)).expected_checksum(header, expected.chain) == payload_checksum:
            return None
    return _refusal(header, payload, expected, keys, payload_checksum)


def _refusal(
    header: memoryview,
    payload: memoryview,
    expected: PageIdentity,
    keys: TenantPageAuthKeys | None,
    payload_checksum: int | None,
) -> PageRefusal | None:
    """Checks one thing after the other; see `verify_detached`."""
    (
        magic,
        version,
        header_bytes,
        flags,
        tokens,
        *part,
        payload_bytes,
        checksum,
        namespace,
        chain,
        key_id,
        salt,
        tag,
    ) = FIELDS.unpack_from(header, 0)
    refusal = _format_refusal(header, magic, version, header_bytes, flags) or _key_refusal(keys, flags, key_id)
    if refusal is not None:
        return refusal
    wanted = expected.shard
    if namespace != expected.namespace:
        return PageRefusal("namespace", f"a page of the namespace {namespace.hex()[:16]}")
    if chain != expected.chain:
        return PageRefusal("prefix", f"a page of the chain {chain.hex()[:16]}")
    if (tokens, payload_bytes) != (expected.tokens, expected.payload_bytes):
        return PageRefusal("length", f"a page of {tokens} tokens in {payload_bytes} bytes")
    if part != [wanted.layer_start, wanted.layer_end, wanted.head_start, wanted.head_end]:
        return PageRefusal("rectangle", f"a page of the layers and heads {part}")
    if payload.nbytes != expected.payload_bytes:
        return PageRefusal("torn", f"{HEADER_BYTES + payload.nbytes} of {expected.stored_bytes} bytes")
    if checksum != (_checksum((payload,)) if payload_checksum is None else payload_checksum):
        return PageRefusal("flipped_payload", "the payload's checksum does not fit")
    if keys is not None:
        good = keys.tag(flags, key_id, salt, [*(header[covered] for covered in COVERED), payload])
        if not compare_digest(tag, good):
            return PageRefusal("forged", "its tag does not fit: no owner of the key has written this")
    return None


def _format_refusal(
    header: memoryview, magic: bytes, version: int, header_bytes: int, flags: int
) -> PageRefusal | None:
    """Returns why a header is none of this format, or is damaged."""
    if magic != MAGIC:
        return PageRefusal("malformed", f"it starts with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        return PageRefusal("version", f"page format version {version}; this build reads {VERSION}")
    (header_checksum,) = CHECKSUM.unpack_from(header, CHECKED_BYTES)
    if header_checksum != xxh3_64_intdigest(header[:CHECKED_BYTES]):
        return PageRefusal("flipped_header", "the header's checksum does not fit")
    if header_bytes != HEADER_BYTES or flags not in (0, *PAGE_AUTH_METHODS.values()):
        return PageRefusal("version", f"header of {header_bytes} bytes with flags {flags:#x}: neither is known here")
    return None


def _key_refusal(keys: TenantPageAuthKeys | None, flags: int, key_id: bytes) -> PageRefusal | None:
    """Returns why a page cannot be used with these keys: it has a tag and there are none, or the other way round."""
    if keys is not None and not flags:
        return PageRefusal("unsealed", "it has no tag, and keys are configured here: only pages with a tag are used")
    if keys is None and flags:
        return PageRefusal("locked", "it has a tag, and no key is configured here; configure the keys of its writer")
    if keys is not None and (obstacle := keys.why_unverifiable(flags, key_id)) is not None:
        return PageRefusal("locked", obstacle)
    return None


@dataclass(frozen=True, slots=True)
class HeaderClaim:
    """A `HeaderClaim` holds the fields that a header claims; none of them has been checked."""

    identity: PageIdentity
    flags: int
    """How the tag is made, 0 without one; see `kvparams.page_auth.METHODS`."""
    key_id: bytes
    """Of the key of the tag; zero without one."""


def read_claim(buffer: memoryview) -> HeaderClaim:
    """For tools: the page that a buffer says it is. `verify` against its own claim checks everything but the identity.

    Raises:
        ValueError: it is no page of this format, or says something impossible.
    """
    if buffer.nbytes < HEADER_BYTES:
        raise ValueError(f"{buffer.nbytes} bytes are fewer than a header has")
    (magic, version, header_bytes, flags, tokens, *part, payload_bytes, _, namespace, chain, key_id, _, _) = (
        FIELDS.unpack_from(buffer, 0)
    )
    if (magic, version, header_bytes) != (MAGIC, VERSION, HEADER_BYTES):
        raise ValueError(f"it does not start as a page of format version {VERSION} does")
    return HeaderClaim(PageIdentity(namespace, chain, tokens, KVShard(*part), payload_bytes), flags, key_id)
