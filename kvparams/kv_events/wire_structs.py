"""Defines the events on the wire of vLLM and SGLang, with members in the order of the array form.

Sources: vLLM 0.32 `distributed/kv_events.py` (maps; 0.14 and 0.20 the same as arrays), SGLang 0.5.23
`disaggregation/kv_events.py`. This module defines only types; bounds and meaning are checked in `value_conversion.py`
and `msgpack_batches.py`.
"""

from typing import Annotated, Final

from msgspec import Meta, Raw, Struct

from kvparams.kv_events.model import MAX_EVENTS

__all__ = [
    "NIL",
    "ClearedArray",
    "ClearedMap",
    "RemovedArray",
    "RemovedMap",
    "StoredArray",
    "StoredMap",
    "WireArrayBatch",
    "WireBatch",
]

WireBlockHash = int | bytes
NIL: Final = Raw(b"\xc0")


class StoredMap(Struct, tag="BlockStored", gc=False):
    """A `StoredMap` is a map that announces stored blocks."""

    block_hashes: list[WireBlockHash]
    parent_block_hash: WireBlockHash | None
    token_ids: list[int | tuple[int, int]]
    """Pairs: SGLang with EAGLE, `mem_cache/events.py`."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw = NIL
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    """SGLang's, only ever in maps."""


class RemovedMap(Struct, tag="BlockRemoved", gc=False):
    """A `RemovedMap` is a map that announces removed blocks."""

    block_hashes: list[WireBlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class ClearedMap(Struct, tag="AllBlocksCleared", gc=False):
    """A `ClearedMap` is a map that announces that all blocks are cleared."""

    ownership: str | None = None


class StoredArray(StoredMap, tag="BlockStored", array_like=True, gc=False):
    """The same as an array."""


class RemovedArray(RemovedMap, tag="BlockRemoved", array_like=True, gc=False):
    """The same as an array."""


class ClearedArray(ClearedMap, tag="AllBlocksCleared", array_like=True, gc=False):
    """The same as an array."""


class WireBatch(Struct, array_like=True, gc=False):
    """A batch whose events are maps."""

    time: float
    events: Annotated[list[StoredMap | RemovedMap | ClearedMap], Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


class WireArrayBatch(Struct, array_like=True, gc=False):
    """A batch whose events are arrays."""

    time: float
    events: Annotated[list[StoredArray | RemovedArray | ClearedArray], Meta(max_length=MAX_EVENTS)]
    rank: int | None = None
