"""Defines what a chunk of LMCache is as a page of ours: its key in the store, its identity, the sizes that it may have.

LMCache names a chunk by model, world size, rank, a 64-bit hash of its tokens and the dtype (`CacheEngineKey`,
lmcache/utils.py of 0.5.6). Not in there: the revision of the weights, tokens in a chunk, shape and order of the
elements. All of them are in the namespace here. Whatever changes the bytes of a chunk, and is known here, changes its
key. This file uses none of LMCache's classes.
"""

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvparams.keys import KVShard
from kvparams.pages import HEADER_BYTES, PageIdentity

__all__ = ["LMCacheChunk", "LMCacheChunkLayout"]

_FORM_DOMAIN: Final = b"kvparams lmcache form 1\n"
_CHUNK_DOMAIN: Final = b"kvparams lmcache chunk 1\n"


@dataclass(frozen=True)
class LMCacheChunkLayout:
    """Describes how the chunks of one engine lie in memory."""

    order: str
    """LMCache's name of it (`MemoryFormat`): `KV_2LTD`, `KV_MLA_FMT`."""
    groups: tuple[tuple[str, int, int, int], ...]
    """For each group of layers of one kind: dtype, K and V (2) or one of both (1), layers, elements per token."""
    token_bytes: int
    """Of all groups together."""
    chunk_tokens: int
    """Tokens of a full chunk."""
    revision: str = ""
    """Of the weights, as the operator calls it."""

    def __post_init__(self) -> None:
        if not self.groups or self.token_bytes < 1 or self.chunk_tokens < 1:
            raise ValueError("a chunk has at least one token of at least one byte")

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it: SHA-256 over a domain and every field as UTF-8 text behind its length."""
        texts = [self.order, str(self.token_bytes), str(self.chunk_tokens), self.revision]
        texts += [str(value) for group in self.groups for value in group]
        encoded = [text.encode() for text in texts]
        return hashlib.sha256(_FORM_DOMAIN + b"".join(struct.pack("<I", len(text)) + text for text in encoded)).digest()

    @property
    def layers(self) -> int:
        """Returns the number of layers of all groups together."""
        return sum(layers for _, _, layers, _ in self.groups)

    @property
    def full_bytes(self) -> int:
        """Returns the size of a full chunk, without its header."""
        return self.chunk_tokens * self.token_bytes

    def tokens(self, payload_bytes: int) -> int | None:
        """Returns the tokens of a chunk of `payload_bytes`; None if no chunk has that size."""
        tokens, rest = divmod(payload_bytes, self.token_bytes)
        return tokens if not rest and 1 <= tokens <= self.chunk_tokens else None


@dataclass(frozen=True)
class LMCacheChunk:
    """An `LMCacheChunk` is a chunk of LMCache."""

    layout: LMCacheChunkLayout
    name: str
    """LMCache's key as text, tags and all (`CacheEngineKey.to_string`)."""
    rank: int
    """The worker whose part it is."""

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for the name."""
        return hashlib.sha256(_CHUNK_DOMAIN + self.name.encode()).digest()

    @cached_property
    def key(self) -> str:
        """Its key in the store."""
        return f"lmc1.{self.layout.digest.hex()[:16]}.{self.digest.hex()}"

    def identity(self, tokens: int) -> PageIdentity:
        """Returns the fields of the header of a chunk with this number of tokens.

        LMCache cuts heads by rank, so the ranks stand for them.
        """
        return PageIdentity(
            self.layout.digest,
            self.digest,
            tokens,
            KVShard(0, self.layout.layers, self.rank, self.rank + 1),
            tokens * self.layout.token_bytes,
        )

    def fits_size(self, stored_bytes: int) -> bool:
        """Returns whether a stored value of this size can be it."""
        return self.layout.tokens(stored_bytes - HEADER_BYTES) is not None
