"""Defines what an offloaded chunk of vLLM is as a page of ours: its key in the store, its identity.

vLLM names a chunk by the hash of its tokens and all before them (LoRA name, images, cache salt and prompt embeddings
included) and its group of layers (`OffloadKey`, vllm/v1/kv_offload/base.py of 0.32). Not in there: the model, its
weights, how the bytes lie. All of them are in the digest of the form here. Whatever changes the bytes of a chunk, and
is known here, changes its key. This file uses none of vLLM's classes.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from kvparams.keys import KVShard
from kvparams.pages import HEADER_BYTES, PageIdentity

__all__ = ["KEY_BYTES", "OffloadChunkLayout", "OffloadLayerGroup"]

KEY_BYTES: Final = 36
"""Of a key of vLLM: SHA-256, and the group. Shorter ones are of a hash that can be forged, so that a chunk of other
tokens would be taken for one's own: they are left alone."""

_FORM_DOMAIN: Final = b"kvparams vllm chunk form 1\n"
_CHUNK_DOMAIN: Final = b"kvparams vllm chunk 1\n"


@dataclass(frozen=True, slots=True)
class OffloadLayerGroup:
    """Layers of one kind."""

    number: int
    """vLLM's."""
    block_tokens: int
    """Of one block, over all ranks."""
    layers: tuple[str, ...]
    """Their names."""


@dataclass(frozen=True)
class OffloadChunkLayout:
    """Describes how the chunks of one engine lie in memory, and of which model they are."""

    vllm: str
    """Its version: how a chunk lies in memory has no other name, and no version promises it to the next."""
    platform: str
    model: str
    revision: str
    dtype: str
    """Of the KV."""
    layout: str
    """vLLM's name of it (`KVCacheLayout`)."""
    groups: tuple[OffloadLayerGroup, ...]
    hash_tokens: int
    """Of one block hash."""
    chunk_blocks: int
    """Blocks in a chunk."""
    block_bytes: int
    """Of one block on one worker."""
    ranks: tuple[int, ...]
    """Tensor, pipeline, prefill context and decode context parallel sizes, and workers altogether."""
    copies: int
    """Parts of a chunk, one behind the other: the workers, or 1 where all of them hold the same."""
    canonical: bool
    """Whether vLLM has put the workers' parts together."""
    epoch: str = ""
    """Not empty: after a reset, since which nothing is shared."""
    _groups: dict[int, OffloadLayerGroup] = field(
        init=False, repr=False, compare=False, default_factory=dict[int, OffloadLayerGroup]
    )

    def __post_init__(self) -> None:
        if not self.groups or min(self.chunk_blocks, self.block_bytes, self.copies, *self.ranks) < 1:
            raise ValueError("a chunk has at least one block of at least one byte of at least one group")
        self._groups.update({group.number: group for group in self.groups})
        if len(self._groups) != len(self.groups):
            raise ValueError("two groups of layers have one number")
        KVShard(0, self.layers, 0, self.ranks[-1])  # within bounds

    @property
    def layers(self) -> int:
        """Returns the number of layers of all groups together."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def payload_bytes(self) -> int:
        """Returns the size of a chunk of all workers together, without its header."""
        return self.block_bytes * self.chunk_blocks * self.copies

    @property
    def stored_bytes(self) -> int:
        """Returns the size of a chunk in the store."""
        return HEADER_BYTES + self.payload_bytes

    def _texts(self) -> Iterator[str]:
        yield from (self.vllm, self.platform, self.model, self.revision, self.dtype, self.layout, self.epoch)
        yield from (str(self.hash_tokens), str(self.chunk_blocks), str(self.block_bytes), str(self.copies))
        yield from (str(int(self.canonical)), str(len(self.ranks)), *(str(rank) for rank in self.ranks))
        for group in self.groups:
            yield from (str(group.number), str(group.block_tokens), str(len(group.layers)), *group.layers)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it: SHA-256 over a domain and every field as UTF-8 text behind its length."""
        encoded = (text.encode() for text in self._texts())
        return hashlib.sha256(_FORM_DOMAIN + b"".join(struct.pack("<I", len(text)) + text for text in encoded)).digest()

    def is_known_key(self, key: bytes) -> bool:
        """Returns whether a key of vLLM's can be one of these chunks."""
        return len(key) == KEY_BYTES and int.from_bytes(key[-4:], "big") in self._groups

    @cached_property
    def _start(self) -> str:
        return f"vlt1.{self.digest.hex()[:16]}."

    def name(self, key: bytes) -> str:
        """Its key in the store."""
        return self._start + key.hex()

    def names(self, keys: Iterable[bytes]) -> list[str]:
        """Their keys in the store. vLLM's scheduler waits for this."""
        start = self._start
        return [start + key.hex() for key in keys]

    def identity(self, key: bytes) -> PageIdentity:
        """Returns what its header says. Workers stand for heads: vLLM cuts by rank."""
        group = self._groups[int.from_bytes(key[-4:], "big")]
        return PageIdentity(
            self.digest,
            hashlib.sha256(_CHUNK_DOMAIN + key).digest(),
            group.block_tokens * self.chunk_blocks,
            KVShard(0, self.layers, 0, self.ranks[-1]),
            self.payload_bytes,
        )
