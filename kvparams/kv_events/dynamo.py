"""Dynamo's router events in JSON: `{"worker_id", "storage_tier", "event": {"event_id", "data", "dp_rank"}}`.

`data` is `{"stored": ...}`, `{"removed": ...}` or `"cleared"`. Members: `RouterEvent` and what is in it, Dynamo
`lib/kv-router/src/protocols.rs`. A worker counts its events by itself, all ranks and tiers together. Blocks come with a
hash of their tokens in place of the tokens, so that only an index that hashes as Dynamo does can use them.

The decoder makes no tokens up: `BlockStored.tokens` is None, and `BlockStored.contents` holds the hashes that came in
their place.
"""

from typing import Final

from msgspec import Raw, Struct
from msgspec.json import Decoder

from kvparams.kv_events.batch_inspection import BROKEN
from kvparams.kv_events.json_batches import JSONEventReader, event_rank
from kvparams.kv_events.model import (
    MAX_BYTES,
    AllBlocksCleared,
    BlockLocation,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventSource,
    KVCacheEvent,
)
from kvparams.kv_events.value_conversion import (
    EventFault,
    block_location,
    check_bounds,
    check_int64,
    pack_hash,
    pack_hashes,
)

__all__ = ["decode_dynamo"]


class _DynamoMedia(Struct, gc=False):
    mm_hash: int
    offsets: list[tuple[int, int]] = []


class _DynamoExtra(Struct, gc=False):
    mm_objects: list[_DynamoMedia]


class _DynamoBlock(Struct, gc=False):
    block_hash: int
    tokens_hash: int
    mm_extra_info: _DynamoExtra | None = None


class _DynamoStored(Struct, gc=False):
    blocks: list[_DynamoBlock]
    parent_hash: int | None = None


class _DynamoRemoved(Struct, gc=False):
    block_hashes: list[int]


class _DynamoData(Struct, gc=False):
    stored: _DynamoStored | None = None
    removed: _DynamoRemoved | None = None


class _DynamoInner(Struct, gc=False):
    event_id: int
    data: Raw
    dp_rank: int | None = None


class _DynamoEvent(Struct, gc=False):
    worker_id: int
    event: _DynamoInner
    storage_tier: str | None = None


_EVENT: Final = Decoder(_DynamoEvent)
_CLEARED: Final = Decoder(str)
_NAMES: Final = Decoder(dict[str, Raw])
_DATA: Final = Decoder(_DynamoData)
_NOBODY: Final = EventSource("")


def decode_dynamo(text: str | bytes, *, max_bytes: int = MAX_BYTES) -> tuple[EventBatch, ...]:
    """Read router events: a batch for each; the source is the worker's id in decimal and the rank.

    Args:
        text: a list of events, or one.
        max_bytes: longer text is refused unread.

    Raises:
        InvalidEvents: it is no list of events, or there are too many. Events that are unknown or malformed make batches
            without events that count them; where not even the worker can be told, of a source without a name.
    """
    read = JSONEventReader(text, max_bytes)
    for index, raw in read:
        try:
            event = _EVENT.decode(raw)
        except BROKEN:
            read.lost(index, _NOBODY, EventFault("", "type", "an event has a worker_id and an event with its event_id"))
            continue
        try:
            worker = check_bounds(event.worker_id, 2**64 - 1, "worker_id")
            number = check_bounds(event.event.event_id, 2**64 - 2, "event_id")
            source = EventSource(str(worker), event_rank(event.event.dp_rank, 0, "dp_rank"))
        except EventFault as fault:
            read.lost(index, _NOBODY, fault)
            continue
        try:
            found = _canonical(event.event.data, block_location(event.storage_tier, None, None))
        except EventFault as fault:
            found = fault
        read.add(index, source, number, found)
    return read.batches


def _canonical(raw: Raw, where: BlockLocation) -> tuple[KVCacheEvent, ...] | None:
    """The event; None: of a kind that is not known here."""
    try:
        return (AllBlocksCleared(),) if _CLEARED.decode(raw) == "cleared" else None
    except BROKEN:
        pass
    try:
        if not {"stored", "removed"} & set(_NAMES.decode(raw)):
            return None
        data = _DATA.decode(raw)
    except BROKEN:
        raise EventFault("data", "type", "not what stored or removed have") from None
    found: list[KVCacheEvent] = []
    if data.stored is not None and data.stored.blocks:
        found.append(_stored(data.stored, where))
    if data.removed is not None and data.removed.block_hashes:
        found.append(BlockRemoved(where, *pack_hashes(data.removed.block_hashes)))
    return tuple(found)


def _stored(data: _DynamoStored, where: BlockLocation) -> BlockStored:
    hashes, width = pack_hashes([block.block_hash for block in data.blocks], "blocks")
    contents, _ = pack_hashes([block.tokens_hash for block in data.blocks], "tokens_hash")
    extras = tuple(_extras(block) for block in data.blocks)
    return BlockStored(
        where,
        hashes,
        width,
        pack_hash(data.parent_hash, width, "parent_hash"),
        extras=extras if any(extras) else None,
        contents=contents,
    )


def _extras(block: _DynamoBlock) -> tuple[object, ...] | None:
    if block.mm_extra_info is None:
        return None
    return (
        tuple(
            (check_int64(one.mm_hash, "mm_hash"), tuple(_offsets(offsets) for offsets in one.offsets))
            for one in block.mm_extra_info.mm_objects
        )
        or None
    )


def _offsets(offsets: tuple[int, int]) -> tuple[int, int]:
    return check_int64(offsets[0], "offsets"), check_int64(offsets[1], "offsets")
