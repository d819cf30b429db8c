"""Batches in MessagePack, as vLLM, SGLang and those who imitate them publish them: `[time, events, rank]`.

An event is a map with its class in `type` (vLLM from 0.24, SGLang today, TensorRT-LLM's publisher) or an array that
begins with it (vLLM up to 0.23, LMCache); hashes are integers of either sign, or bytes. Members and their order: vLLM
0.32 and SGLang 0.5.23, `kv_events.py` of both; arrays: vLLM 0.14 and 0.20.

Decoded with msgspec, the library that both engines encode with: it knows the types beforehand, so that nothing is built
that no event has, checks every length against the bytes that are there before it allocates, and is as fast as the
msgpack package, which has to build everything. It comes with the extra `events`.

A bad event costs itself, not its batch. A batch is first decoded at once; only if that fails, each event is decoded
alone.
"""

from collections.abc import Sequence
from contextlib import suppress
from math import isfinite
from typing import Final, cast

from msgspec import Raw
from msgspec.msgpack import Decoder
from xxhash import xxh3_64_intdigest

from kvparams.errors import Problem
from kvparams.kv_events import batch_inspection
from kvparams.kv_events.batch_inspection import BROKEN
from kvparams.kv_events.model import (
    MAX_BYTES,
    MAX_EVENTS,
    MAX_PROBLEMS,
    AllBlocksCleared,
    BlockLocation,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventSource,
    InvalidEvents,
    KVCacheEvent,
)
from kvparams.kv_events.value_conversion import (
    EventFault,
    block_location,
    check_bounds,
    check_label,
    pack_hash,
    pack_hashes,
    pack_pairs,
    pack_tokens,
)
from kvparams.kv_events.wire_structs import (
    NIL,
    ClearedArray,
    ClearedMap,
    RemovedArray,
    RemovedMap,
    StoredArray,
    StoredMap,
    WireArrayBatch,
    WireBatch,
)

__all__ = ["MAX_RANK", "decode_msgpack"]

MAX_RANK: Final = 65_535
"""The highest data parallel rank."""
_MAX_BLOCK: Final = 2**24
_MAX_WINDOW: Final = 2**31 - 1
_MAX_EXTRAS_BYTES: Final = 256 << 10
"""Of one event: they are the only member that is decoded without knowing what is in it."""
_KNOWN: Final = ("BlockStored", "BlockRemoved", "AllBlocksCleared")

_MAPS: Final = Decoder(WireBatch)
_ARRAYS: Final = Decoder(WireArrayBatch)
_EVENTS: Final = Decoder(list[Raw])
_TIME: Final = Decoder(float)
_RANK: Final = Decoder(int | None)
_MAP: Final = Decoder(StoredMap | RemovedMap | ClearedMap)
_ARRAY: Final = Decoder(StoredArray | RemovedArray | ClearedArray)
_ANYTHING: Final = Decoder()
_PLAIN: Final = frozenset[type]({str, int, bytes, float, bool, type(None)})


def decode_msgpack(
    payload: bytes | bytearray | memoryview,
    source: EventSource,
    sequence: int | None = None,
    *,
    max_bytes: int = MAX_BYTES,
) -> EventBatch:
    """Read one batch.

    Args:
        payload: the message without its topic and number.
        source: who sent it. The batch's own rank, where it has one, replaces that of `source`.
        sequence: its number, which travels beside it (`kvparams.kv_events.zmq_frames`).
        max_bytes: a longer one is refused unread.

    Raises:
        InvalidEvents: it is no batch. Events that are unknown or malformed are left out and counted instead.
    """
    if (size := len(payload)) > max_bytes:
        raise InvalidEvents((Problem((), "length", f"{size} bytes, and at most {max_bytes} are read"),))
    mark = xxh3_64_intdigest(payload)
    reader = _BatchReader()
    batch = _in_one_go(payload)
    if batch is None:
        time, events, rank = reader.one_by_one(payload)
    else:
        time, rank = batch.time, batch.rank
        events = reader.in_one_go(batch.events)
    if not isfinite(time):
        raise InvalidEvents((Problem((0,), "value", "a time is a finite number of seconds"),))
    if rank is not None:
        if not 0 <= rank <= MAX_RANK:
            raise InvalidEvents((Problem((2,), "range", f"not between 0 and {MAX_RANK}"),))
        source = EventSource(source.instance, rank)
    return EventBatch(
        source, tuple(events), sequence, time, mark, reader.unknown, reader.malformed, tuple(reader.problems)
    )


def _in_one_go(payload: bytes | bytearray | memoryview) -> WireBatch | WireArrayBatch | None:
    """The batch, if nothing is wrong with it; events of the other form are seen at the first one."""
    with suppress(*BROKEN):
        return _MAPS.decode(payload)
    with suppress(*BROKEN):
        return _ARRAYS.decode(payload)
    return None


class _BatchReader:
    """The events of one batch, and what is wrong with them."""

    __slots__ = ("_named", "_place", "malformed", "problems", "unknown")

    def __init__(self) -> None:
        self.unknown = 0
        self.malformed = 0
        self.problems: list[Problem] = []
        self._named: tuple[object, ...] = (None, None, None, None)
        self._place = block_location(None, None, None)

    def in_one_go(self, events: Sequence[StoredMap | RemovedMap | ClearedMap]) -> list[KVCacheEvent]:
        """Converts events that were decoded at once."""
        found: list[KVCacheEvent] = []
        for index, event in enumerate(events):
            try:
                made = self._event(event)
            except EventFault as fault:
                self._leave_out(index, fault)
            else:
                if made is not None:
                    found.append(made)
        return found

    def one_by_one(self, payload: bytes | bytearray | memoryview) -> tuple[float, list[KVCacheEvent], int | None]:
        """Decodes a batch part by part after it failed at once, and returns its time, events and rank.

        Raises:
            InvalidEvents: the batch itself is at fault.
        """
        outline = batch_inspection.read_raw_batch(payload)
        time = batch_inspection.decode_part(0, outline.time, _TIME.decode)
        rank = batch_inspection.decode_part(2, outline.rank, _RANK.decode)
        is_array, count = batch_inspection.read_head(outline.events) or (False, 0)
        if not is_array:
            raise InvalidEvents((Problem((1,), "type", "events are an array"),))
        if count > MAX_EVENTS:
            raise InvalidEvents((Problem((1,), "length", f"more than {MAX_EVENTS} events"),))
        found: list[KVCacheEvent] = []
        for index, raw in enumerate(_EVENTS.decode(outline.events)):
            try:
                made = self._alone(raw)
            except EventFault as fault:
                self._leave_out(index, fault)
            else:
                if made is not None:
                    found.append(made)
        return time, found, rank

    def _alone(self, raw: Raw) -> KVCacheEvent | None:
        head = batch_inspection.read_head(raw)
        if head is None:
            raise EventFault("", "type", "an event is a map or an array")
        is_array, _ = head
        try:
            event = (_ARRAY if is_array else _MAP).decode(raw)
        except BROKEN:
            pass
        else:
            return self._event(event)
        name = batch_inspection.event_type(raw, head)
        if name not in _KNOWN:
            self.unknown += 1
            return None
        if len(self.problems) < MAX_PROBLEMS:  # what is not described is not looked at: that takes time
            batch_inspection.check_members(raw, name, head)
        raise EventFault("", "type", "")

    def _event(self, event: StoredMap | RemovedMap | ClearedMap) -> KVCacheEvent | None:
        """The canonical event, or None for one of no blocks: vLLM announces some, where every block was masked."""
        if isinstance(event, ClearedMap):
            return AllBlocksCleared(check_label(event.ownership, "ownership"))
        named = (event.medium, event.group_idx, event.ownership, event.locality)
        if named != self._named:  # mostly all events of a batch are of one place
            self._place = block_location(*named[:3], locality=event.locality)
            self._named = named
        if not event.block_hashes:
            return None
        if isinstance(event, StoredMap):
            return _stored(event, self._place)
        return BlockRemoved(self._place, *pack_hashes(event.block_hashes))

    def _leave_out(self, index: int, fault: EventFault) -> None:
        self.malformed += 1
        if len(self.problems) < MAX_PROBLEMS:
            path = (1, index, fault.member) if fault.member else (1, index)
            self.problems.append(Problem(path, fault.kind, fault.message))


def _stored(event: StoredMap, where: BlockLocation) -> BlockStored:
    hashes, width = pack_hashes(event.block_hashes)
    blocks = len(hashes) // width
    parent = event.parent_block_hash
    if parent is not None:
        parent = pack_hash(parent, width, "parent_block_hash")
    ids, block_size = event.token_ids, event.block_size
    if not 0 <= block_size <= _MAX_BLOCK:
        raise EventFault("block_size", "range", f"not between 0 and {_MAX_BLOCK}")
    tokens = following = None
    if not ids:
        pass  # vLLM's offloading says that a block is stored, and not which
    elif type(ids[0]) is int:
        tokens = _tokens(cast("list[int]", ids))
    else:
        tokens, following = pack_pairs(ids)
    if tokens is not None and len(ids) != blocks * block_size:
        tokens = following = parent = None  # vLLM left blocks out, of a sliding window: nobody says which
    name, salt, kind, session = event.lora_name, event.cache_salt, event.kv_cache_spec_kind, event.session_id
    window = event.kv_cache_spec_sliding_window
    return BlockStored(
        where,
        hashes,
        width,
        parent,
        tokens,
        block_size or None,
        following,
        None if event.extra_keys is NIL else _extras(event.extra_keys, blocks),
        None if name is None else check_label(name, "lora_name"),
        event.lora_id,
        None if salt is None else check_label(salt, "cache_salt"),
        None if kind is None else check_label(kind, "kv_cache_spec_kind"),
        None if window is None else check_bounds(window, _MAX_WINDOW, "kv_cache_spec_sliding_window"),
        None if session is None else check_label(session, "session_id"),
    )


def _tokens(ids: list[int]) -> bytes:
    try:
        return pack_tokens(ids)
    except TypeError:
        raise EventFault("token_ids", "type", "token ids and pairs of them, mixed") from None


def _extras(raw: Raw, blocks: int) -> tuple[tuple[object, ...] | None, ...] | None:
    if len(memoryview(raw)) > _MAX_EXTRAS_BYTES:
        raise EventFault("extra_keys", "length", f"more than {_MAX_EXTRAS_BYTES} bytes")
    try:
        found = cast("object", _ANYTHING.decode(raw))
    except BROKEN:
        raise EventFault("extra_keys", "value", "nested too deep, or with text that is not UTF-8") from None
    if found is None:
        return None
    if not isinstance(found, list):
        raise EventFault("extra_keys", "type", "a list or nil")
    entries = tuple(_keys(entry) for entry in cast("list[object]", found))
    if not any(entries):
        return None
    if len(entries) != blocks:
        raise EventFault("extra_keys", "conflict", "not one entry for each block")
    return entries


def _keys(entry: object) -> tuple[object, ...] | None:
    """Returns the names and numbers that one block depends on, and lists of these (an image and where it begins)."""
    if entry is None:
        return None
    if not isinstance(entry, list):
        raise EventFault("extra_keys", "type", "for each block a list or nil")
    keys = cast("list[object]", entry)
    if not {*map(type, keys)} <= _PLAIN:
        keys = [_list(cast("list[object]", key)) if isinstance(key, list) else key for key in keys]
        if not {*map(type, keys)} <= {*_PLAIN, tuple}:
            raise EventFault("extra_keys", "type", "names, numbers, and lists of these")
    return tuple(keys) or None


def _list(key: list[object]) -> tuple[object, ...]:
    if not {*map(type, key)} <= _PLAIN:
        raise EventFault("extra_keys", "type", "names and numbers in a list")
    return tuple(key)
