"""TensorRT-LLM's events in JSON, as `/kv_cache_events` answers them: a list of `{"event_id", "data", "window_size"}`.

`data.type` is `created` (the cache is new, so it is empty), `stored`, `removed` or `updated` (blocks that moved to
another level of the cache). Every rank counts its events by itself. Members: `KVCacheEventSerializer` in
`tensorrt_llm/_utils.py`; hashes are unsigned integers, or since the second cache manager SHA-256 in hexadecimal
(`runtime/kv_cache_manager_v2/_event_manager.py`). Its publisher over ZMQ imitates vLLM instead (`msgpack_batches.py`);
the reports to its own router are pickled, and are not read here.

Blocks that differ in a fact that a canonical event states once become several events.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Final

from msgspec import Meta, Raw, Struct
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
    Medium,
)
from kvparams.kv_events.value_conversion import (
    EventFault,
    check_bounds,
    check_int64,
    check_label,
    pack_hash,
    pack_hashes,
    pack_tokens,
)

__all__ = ["decode_trtllm"]

_LEVELS: Final[tuple[Medium, ...]] = ("device", "host", "disk")
"""Levels of the cache, where all three are configured."""
_TrtllmHash = int | str


class _TrtllmToken(Struct, gc=False):
    token_id: int | str
    """Text: the digest of what stands in for the token, such as an image."""
    token_extra_id: int = 0


class _TrtllmImage(Struct, gc=False):
    hash: str
    start_offset: int = 0


class _TrtllmBlock(Struct, gc=False):
    block_hash: _TrtllmHash
    tokens: list[_TrtllmToken] = []
    cache_level: int = 0
    mm_keys: Annotated[list[_TrtllmImage], Meta(max_length=65_536)] | None = None
    cache_salt: str | None = None
    lora_id: int | None = None


class _TrtllmStored(Struct, tag="stored", gc=False):
    blocks: list[_TrtllmBlock]
    parent_hash: _TrtllmHash | None = None


class _TrtllmRemoved(Struct, tag="removed", gc=False):
    block_hashes: list[_TrtllmHash]


class _TrtllmCreated(Struct, tag="created", gc=False):
    pass


class _TrtllmChange(Struct, gc=False):
    new_value: int
    old_value: int


class _TrtllmUpdated(Struct, tag="updated", gc=False):
    block_hash: _TrtllmHash
    cache_level: _TrtllmChange | None = None


class _TrtllmEvent(Struct, gc=False):
    data: _TrtllmStored | _TrtllmRemoved | _TrtllmCreated | _TrtllmUpdated
    window_size: int | None = None
    layer_group_id: int | None = None


class _TrtllmHead(Struct, gc=False):
    """A `_TrtllmHead` holds the members of every event."""

    event_id: int
    attention_dp_rank: int | None = None


class _TrtllmType(Struct, gc=False):
    type: str


class _TrtllmData(Struct, gc=False):
    data: _TrtllmType


_KNOWN: Final = ("created", "stored", "removed", "updated")
_EVENT: Final = Decoder(_TrtllmEvent)
_HEAD: Final = Decoder(_TrtllmHead)
_DATA: Final = Decoder(_TrtllmData)


def decode_trtllm(text: str | bytes, source: EventSource, *, max_bytes: int = MAX_BYTES) -> tuple[EventBatch, ...]:
    """Read an answer: a batch for each event, numbered by its `event_id` in the stream of its rank.

    Args:
        text: a list of events, or one.
        source: who answered. An event's own rank, where it has one, replaces that of `source`.
        max_bytes: longer text is refused unread.

    Raises:
        InvalidEvents: it is no list of events, or there are too many. Events that are unknown or malformed make batches
            without events that count them.
    """
    read = JSONEventReader(text, max_bytes)
    for index, raw in read:
        try:
            head = _HEAD.decode(raw)
            number = check_bounds(head.event_id, 2**64 - 2, "event_id")
            own = EventSource(source.instance, event_rank(head.attention_dp_rank, source.rank, "attention_dp_rank"))
        except BROKEN:
            read.lost(index, source, EventFault("", "type", "an event has an event_id, an integer"))
            continue
        except EventFault as fault:
            read.lost(index, source, fault)
            continue
        try:
            event = _EVENT.decode(raw)
        except BROKEN:
            read.add(index, own, number, _fault(raw))
            continue
        try:
            read.add(index, own, number, tuple(_events(event)))
        except EventFault as fault:
            read.add(index, own, number, fault)
    return read.batches


def _fault(raw: Raw) -> EventFault | None:
    """Why it does not decode; None: it is of a type that is not known here."""
    try:
        name = _DATA.decode(raw).data.type
    except BROKEN:
        return EventFault("data", "type", "an event has data that name their type")
    return EventFault("data", "type", f"not what {name} has") if name in _KNOWN else None


def _events(event: _TrtllmEvent) -> Iterator[KVCacheEvent]:
    data = event.data
    group = event.window_size if event.layer_group_id is None else event.layer_group_id
    if group is not None:
        check_bounds(group, 2**31 - 1, "window_size" if event.layer_group_id is None else "layer_group_id")
    if isinstance(data, _TrtllmCreated):
        yield AllBlocksCleared()
    elif isinstance(data, _TrtllmRemoved):
        # A block is removed from wherever it is: whoever keeps several levels apart looks into each.
        if data.block_hashes:
            hashes, width = pack_hashes(data.block_hashes)
            yield from (BlockRemoved(_place(level, group), hashes, width) for level in range(len(_LEVELS)))
    elif isinstance(data, _TrtllmUpdated):
        if (level := data.cache_level) is not None:
            hashes, width = pack_hashes([data.block_hash], "block_hash")
            yield BlockRemoved(_place(level.old_value, group), hashes, width)
            yield BlockStored(_place(level.new_value, group), hashes, width, window=_window(event))
    else:
        yield from _stored(data, group, _window(event))


def _stored(data: _TrtllmStored, group: int | None, window: int | None) -> Iterator[BlockStored]:
    parent = data.parent_hash
    for (size, level, salt, lora), run in groupby(
        data.blocks, key=lambda block: (len(block.tokens), block.cache_level, block.cache_salt, block.lora_id)
    ):
        blocks = list(run)
        hashes, width = pack_hashes([block.block_hash for block in blocks], "blocks")
        extras = tuple(_extras(block) for block in blocks)
        yield BlockStored(
            _place(level, group),
            hashes,
            width,
            pack_hash(parent, width, "parent_hash"),
            _tokens(blocks) if size else None,
            size or None,
            extras=extras if any(extras) else None,
            lora_id=None if lora is None else check_int64(lora, "lora_id"),
            salt=check_label(salt, "cache_salt"),
            window=window,
        )
        parent = blocks[-1].block_hash


def _tokens(blocks: list[_TrtllmBlock]) -> bytes | None:
    ids = [token.token_id for block in blocks for token in block.tokens]
    known = [one for one in ids if isinstance(one, int)]
    return pack_tokens(known, "tokens") if len(known) == len(ids) else None


def _extras(block: _TrtllmBlock) -> tuple[object, ...] | None:
    found: list[object] = [(image.hash, check_int64(image.start_offset, "mm_keys")) for image in block.mm_keys or ()]
    if any(token.token_extra_id for token in block.tokens):
        found.append(tuple(check_int64(token.token_extra_id, "tokens") for token in block.tokens))
    return tuple(found) or None


def _window(event: _TrtllmEvent) -> int | None:
    return None if event.window_size is None else check_bounds(event.window_size, 2**31 - 1, "window_size") or None


def _place(level: int, group: int | None) -> BlockLocation:
    level = check_bounds(level, 255, "cache_level")
    return BlockLocation(_LEVELS[min(level, len(_LEVELS) - 1)], f"level {level}", group)
