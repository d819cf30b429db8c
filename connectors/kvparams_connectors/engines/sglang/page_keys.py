"""Defines what a page of HiCache is as a page of ours: its key in the store, its identity, its size.

SGLang names a page by a SHA-256 chain over its tokens, the request's salt and adapter (`get_storage_hash_str`,
srt/mem_cache/utils.py of 0.5.23); nothing of the model is in it, and every backend adds what it thinks of. All that
changes the bytes is in the form here. Whatever changes the bytes of a page changes its key. This file uses none of
SGLang's classes.
"""

import hashlib
import struct
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Final, Literal

from kvparams.keys import KVShard
from kvparams.pages import PageIdentity

__all__ = ["AttentionKind", "HiCachePageLayout", "HiCacheStoredPage"]

_FORM_DOMAIN: Final = b"kvparams sglang form 1\n"
_PAGE_DOMAIN: Final = b"kvparams sglang page 1\n"

AttentionKind = Literal["mha", "mla"]


@dataclass(frozen=True)
class HiCachePageLayout:
    """Describes what all pages of one rank have in common."""

    model: str
    revision: str
    """What tells the weights from others of the same name."""
    tenant: str | None
    kind: AttentionKind
    """mha: K and V of this rank's heads. mla: one latent, the same on all ranks, which only one of them writes."""
    layout: str
    """SGLang's name of the order of the elements: `page_first`."""
    dtype: str
    """Of the elements; where SGLang keeps them as bytes, what they mean as well: `uint8 fp8_e4m3`."""
    page_tokens: int
    layer_start: int
    layers: int
    """Of this rank; those of a draft model among them."""
    draft_layers: int
    heads: int
    """Of this rank; 1 where there is one latent."""
    k_dim: int
    """Elements per token and head."""
    v_dim: int
    """The same of V; 0 where there is one latent."""
    tensor: tuple[int, int]
    """Rank and size of tensor parallelism; (0, 1) where all ranks have the same."""
    pipeline: tuple[int, int]
    context: tuple[int, int]
    payload_bytes: int
    """Of a page."""
    tag: str = ""
    """SGLang's name of the page's format where it has one of its own."""

    def __post_init__(self) -> None:
        if not self.model or not self.revision:
            raise ValueError("model and revision are not empty: pages of other weights would be taken for these")
        if min(self.page_tokens, self.layers, self.heads, self.k_dim, self.payload_bytes) < 1:
            raise ValueError("a page has at least one token of at least one byte")

    @cached_property
    def digest(self) -> bytes:
        """Returns a 32-byte digest of all fields.

        It is SHA-256 over a domain and, for each field in its order, its name and its value as UTF-8 text, each behind
        its length; None is no text at all.
        """
        encoded = bytearray(_FORM_DOMAIN)
        for field in fields(self):
            value = getattr(self, field.name)
            for text in (field.name, None if value is None else str(value)):
                raw = b"" if text is None else text.encode()
                encoded += struct.pack("<?I", text is not None, len(raw)) + raw
        return hashlib.sha256(encoded).digest()

    @cached_property
    def shard(self) -> KVShard:
        """The part of the model. Layers of a draft model count on behind those of the rank."""
        first = self.tensor[0] * self.heads
        return KVShard(self.layer_start, self.layer_start + self.layers, first, first + self.heads)

    @cached_property
    def _start(self) -> str:
        return f"sgl1.{self.digest.hex()[:16]}."

    def page(self, name: str) -> "HiCacheStoredPage":
        """The page that SGLang calls `name`."""
        chain = hashlib.sha256(_PAGE_DOMAIN + name.encode()).digest()
        identity = PageIdentity(self.digest, chain, self.page_tokens, self.shard, self.payload_bytes)
        return HiCacheStoredPage(self._start + chain.hex(), identity)


@dataclass(frozen=True, slots=True)
class HiCacheStoredPage:
    """A `HiCacheStoredPage` is a page with its keys in the store."""

    key: str
    """Its key in the store."""
    identity: PageIdentity
    """What its header says."""
