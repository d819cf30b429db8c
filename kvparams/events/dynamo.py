"""Dynamo's router events in JSON: `{"worker_id", "storage_tier", "event": {"event_id", "data", "dp_rank"}}`.

`data` is `{"stored": ...}`, `{"removed": ...}` or `"cleared"`. Members: `RouterEvent` and what is in it, Dynamo
`lib/kv-router/src/protocols.rs`. A worker counts its events by itself, all ranks and tiers together. Blocks come with a
hash of their tokens in place of the tokens, so that only an index that hashes as Dynamo does can use them.

The one rule: no tokens are made up; `Stored.tokens` is None, `Stored.contents` is what came in their place.
"""

from typing import Final

from msgspec import Raw, Struct
from msgspec.json import Decoder

from kvparams.events.inspection import BROKEN
from kvparams.events.jsonbatches import JsonEvents, rank_of
from kvparams.events.model import MAX_BYTES, Batch, Cleared, Event, Place, Removed, Source, Stored
from kvparams.events.values import Fault, bounded, pack_hash, pack_hashes, place, whole

__all__ = ["decode_dynamo"]


class _Object(Struct, gc=False):
    mm_hash: int
    offsets: list[tuple[int, int]] = []


class _Extra(Struct, gc=False):
    mm_objects: list[_Object]


class _Block(Struct, gc=False):
    block_hash: int
    tokens_hash: int
    mm_extra_info: _Extra | None = None


class _Stored(Struct, gc=False):
    blocks: list[_Block]
    parent_hash: int | None = None


class _Removed(Struct, gc=False):
    block_hashes: list[int]


class _Data(Struct, gc=False):
    stored: _Stored | None = None
    removed: _Removed | None = None


class _Inner(Struct, gc=False):
    event_id: int
    data: Raw
    dp_rank: int | None = None


class _Event(Struct, gc=False):
    worker_id: int
    event: _Inner
    storage_tier: str | None = None


_EVENT: Final = Decoder(_Event)
_CLEARED: Final = Decoder(str)
_NAMES: Final = Decoder(dict[str, Raw])
_DATA: Final = Decoder(_Data)
_NOBODY: Final = Source("")


def decode_dynamo(text: str | bytes, *, max_bytes: int = MAX_BYTES) -> tuple[Batch, ...]:
    """Read router events: a batch for each; the source is the worker's id in decimal and the rank.

    Args:
        text: a list of events, or one.
        max_bytes: longer text is refused unread.

    Raises:
        InvalidEvents: it is no list of events, or there are too many. Events that are unknown or malformed make batches
            without events that count them; where not even the worker can be told, of a source without a name.
    """
    read = JsonEvents(text, max_bytes)
    for index, raw in read:
        try:
            event = _EVENT.decode(raw)
        except BROKEN:
            read.lost(index, _NOBODY, Fault("", "type", "an event has a worker_id and an event with its event_id"))
            continue
        try:
            worker = bounded(event.worker_id, 2**64 - 1, "worker_id")
            number = bounded(event.event.event_id, 2**64 - 2, "event_id")
            source = Source(str(worker), rank_of(event.event.dp_rank, 0, "dp_rank"))
        except Fault as fault:
            read.lost(index, _NOBODY, fault)
            continue
        try:
            found = _canonical(event.event.data, place(event.storage_tier, None, None))
        except Fault as fault:
            found = fault
        read.add(index, source, number, found)
    return read.batches


def _canonical(raw: Raw, where: Place) -> tuple[Event, ...] | None:
    """The event; None: of a kind that is not known here."""
    try:
        return (Cleared(),) if _CLEARED.decode(raw) == "cleared" else None
    except BROKEN:
        pass
    try:
        if not {"stored", "removed"} & set(_NAMES.decode(raw)):
            return None
        data = _DATA.decode(raw)
    except BROKEN:
        raise Fault("data", "type", "not what stored or removed have") from None
    found: list[Event] = []
    if data.stored is not None and data.stored.blocks:
        found.append(_stored(data.stored, where))
    if data.removed is not None and data.removed.block_hashes:
        found.append(Removed(where, *pack_hashes(data.removed.block_hashes)))
    return tuple(found)


def _stored(data: _Stored, where: Place) -> Stored:
    hashes, width = pack_hashes([block.block_hash for block in data.blocks], "blocks")
    contents, _ = pack_hashes([block.tokens_hash for block in data.blocks], "tokens_hash")
    extras = tuple(_extras(block) for block in data.blocks)
    return Stored(
        where,
        hashes,
        width,
        pack_hash(data.parent_hash, width, "parent_hash"),
        extras=extras if any(extras) else None,
        contents=contents,
    )


def _extras(block: _Block) -> tuple[object, ...] | None:
    if block.mm_extra_info is None:
        return None
    return (
        tuple(
            (whole(one.mm_hash, "mm_hash"), tuple(_offsets(offsets) for offsets in one.offsets))
            for one in block.mm_extra_info.mm_objects
        )
        or None
    )


def _offsets(offsets: tuple[int, int]) -> tuple[int, int]:
    return whole(offsets[0], "offsets"), whole(offsets[1], "offsets")
