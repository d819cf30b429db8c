"""Encodes and decodes entries.

An entry is a type (one byte), a length (two bytes) and a body. A reader skips entries of a type that it does not know,
and ignores bytes behind the fields that it knows, so two versions of the proxy understand each other. Numbers are
little-endian.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Final, cast

from kvparams.replication.entries import (
    AdapterUsed,
    BlocksChanged,
    BlocksHeld,
    BlocksRouted,
    EngineFailed,
    EngineLoad,
    EngineRestarted,
    Entry,
    LegDequeued,
    LegQueued,
    PrefillBegan,
    PrefillEnded,
    PrefillLoadsAdapter,
    PromptComputed,
    RoomOffered,
    SettingChanged,
)

__all__ = ["MAX_ENTRY_BYTES", "decode_entries", "decode_heartbeat", "encode_entry", "encode_heartbeat"]

MAX_ENTRY_BYTES: Final = (1 << 16) - 1
_HEAD: Final = struct.Struct("<BH")
_LENGTH: Final = struct.Struct("<I")
_LOAD: Final = struct.Struct("<QIQ")
_BEGAN: Final = struct.Struct("<QQIffIIIQ")
_LOADS_ADAPTER: Final = struct.Struct("<Qf")
_ADAPTER_USED: Final = struct.Struct("<Q")
_COMPUTED: Final = struct.Struct("<QII")
_ENDED: Final = struct.Struct("<QBII")
_ROUTED: Final = struct.Struct("<QIQ")
_HELD: Final = struct.Struct("<QIB")
_BLOCKS_CHANGED: Final = struct.Struct("<QBBQBH")
_KINDS: Final = ("stored", "removed", "cleared")
_FAILED: Final = struct.Struct("<QB")
_RESTARTED: Final = struct.Struct("<Q")
_QUEUED: Final = struct.Struct("<QqIHHH")
_OFFERED: Final = struct.Struct("<QQQ")
_DEQUEUED: Final = struct.Struct("<QB")
_MAX_NAME: Final = 4096
_CHANGED: Final = struct.Struct("<QQH")
_UNKNOWN: Final = 0xFFFF_FFFF
"""Stands for a number that an engine did not report."""


def encode_entry(entry: Entry) -> bytes:
    """Encodes one entry.

    Raises:
        ValueError: it is longer than an entry may be.
    """
    number, body = _BODIES[type(entry)](entry)
    if len(body) > MAX_ENTRY_BYTES:
        raise ValueError(f"an entry has at most {MAX_ENTRY_BYTES} bytes, not {len(body)}")
    return _HEAD.pack(number, len(body)) + body


def decode_entries(data: bytes | memoryview) -> Iterable[Entry]:
    """Decodes entries that follow one another, in one pass. Those of an unknown type are left out.

    Raises:
        ValueError: they are cut off or damaged.
    """
    view = memoryview(data)
    at, end = 0, len(view)
    found: list[Entry] = []
    while at < end:
        if end - at < _HEAD.size:
            raise ValueError("an entry is cut off")
        number, length = _HEAD.unpack_from(view, at)
        at += _HEAD.size
        if end - at < length:
            raise ValueError("an entry is cut off")
        decode = _DECODERS.get(number)
        if decode is not None:
            try:
                found.append(decode(view[at : at + length]))
            except (struct.error, UnicodeDecodeError) as error:
                raise ValueError(f"an entry is damaged: {error}") from error
        at += length
    return found


def encode_heartbeat(info: Mapping[str, object], entries: Iterable[Entry]) -> bytes:
    """Encodes what a proxy says about itself (JSON), and its whole load."""
    text = json.dumps(info).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *map(encode_entry, entries)))


def decode_heartbeat(payload: memoryview) -> tuple[dict[str, object], Iterable[Entry]]:
    """Decodes what `encode_heartbeat` has encoded.

    Raises:
        ValueError: it is cut off or damaged.
    """
    if len(payload) < _LENGTH.size:
        raise ValueError("a heartbeat is cut off")
    end = _LENGTH.size + _LENGTH.unpack_from(payload)[0]
    try:
        info: object = json.loads(bytes(payload[_LENGTH.size : end]))
    except RecursionError:
        raise ValueError("a heartbeat is nested too deeply") from None
    if not isinstance(info, dict):
        raise ValueError("a heartbeat says nothing about its sender")
    return cast("dict[str, object]", info), decode_entries(payload[end:])


def _number(value: int | None) -> int:
    return _UNKNOWN if value is None else min(value, _UNKNOWN - 1)


def _known(value: int) -> int | None:
    return None if value == _UNKNOWN else value


def _load_body(it: EngineLoad) -> tuple[int, bytes]:
    return 1, _LOAD.pack(*it)


def _load(body: memoryview) -> EngineLoad:
    return EngineLoad._make(_LOAD.unpack_from(body))


def _began_body(it: PrefillBegan) -> tuple[int, bytes]:
    return 2, _BEGAN.pack(*it[:9]) + it.hashes


def _began(body: memoryview) -> PrefillBegan:
    return PrefillBegan._make((*_BEGAN.unpack_from(body), _hashes(body[_BEGAN.size :])))


def _computed_body(it: PromptComputed) -> tuple[int, bytes]:
    return 3, _COMPUTED.pack(*it)


def _computed(body: memoryview) -> PromptComputed:
    return PromptComputed._make(_COMPUTED.unpack_from(body))


def _ended_body(it: PrefillEnded) -> tuple[int, bytes]:
    return 4, _ENDED.pack(it.leg, it.answered, _number(it.prompt_tokens), _number(it.cached_tokens))


def _ended(body: memoryview) -> PrefillEnded:
    leg, answered, prompt_tokens, cached_tokens = _ENDED.unpack_from(body)
    return PrefillEnded(leg, bool(answered), _known(prompt_tokens), _known(cached_tokens))


def _routed_body(it: BlocksRouted) -> tuple[int, bytes]:
    return 5, _ROUTED.pack(*it[:3]) + it.hashes


def _routed(body: memoryview) -> BlocksRouted:
    return BlocksRouted._make((*_ROUTED.unpack_from(body), _hashes(body[_ROUTED.size :])))


def _held_body(it: BlocksHeld) -> tuple[int, bytes]:
    return 9, _HELD.pack(*it[:3]) + it.hashes + it.parents


def _held(body: memoryview) -> BlocksHeld:
    both = _hashes(body[_HELD.size :])
    if len(both) % 16:
        raise struct.error("as many blocks as parents must be named")
    half = len(both) // 2
    return BlocksHeld._make((*_HELD.unpack_from(body), both[:half], both[half:]))


def _blocks_changed_body(it: BlocksChanged) -> tuple[int, bytes]:
    owner = (it.owner or "").encode(errors="replace")[:_MAX_NAME]
    kind = _KINDS.index(it.kind)
    head = _BLOCKS_CHANGED.pack(it.engine, kind, it.level, it.parent, it.owner is not None, len(owner))
    return 13, head + owner + it.hashes


def _blocks_changed(body: memoryview) -> BlocksChanged:
    engine, kind, level, parent, has_owner, length = _BLOCKS_CHANGED.unpack_from(body)
    start = _BLOCKS_CHANGED.size + length
    if start > len(body) or kind >= len(_KINDS):
        raise struct.error("the owner is cut off, or there is no such kind")
    owner = bytes(body[_BLOCKS_CHANGED.size : start]).decode(errors="replace") if has_owner else None
    return BlocksChanged(engine, _KINDS[kind], level, parent, owner, _hashes(body[start:]))


def _failed_body(it: EngineFailed) -> tuple[int, bytes]:
    return 6, _FAILED.pack(it.engine, it.connected) + it.why[:200].encode(errors="replace")


def _failed(body: memoryview) -> EngineFailed:
    engine, connected = _FAILED.unpack_from(body)
    return EngineFailed(engine, bool(connected), bytes(body[_FAILED.size :]).decode()[:200])


def _restarted_body(it: EngineRestarted) -> tuple[int, bytes]:
    return 7, _RESTARTED.pack(*it)


def _restarted(body: memoryview) -> EngineRestarted:
    return EngineRestarted._make(_RESTARTED.unpack_from(body))


def _changed_body(it: SettingChanged) -> tuple[int, bytes]:
    name = it.name.encode()
    return 8, _CHANGED.pack(it.revision, it.writer, len(name)) + name + it.value


def _changed(body: memoryview) -> SettingChanged:
    revision, writer, length = _CHANGED.unpack_from(body)
    start = _CHANGED.size + length
    if start > len(body):
        raise struct.error("the name is cut off")
    return SettingChanged(revision, writer, bytes(body[_CHANGED.size : start]).decode(), bytes(body[start:]))


def _queued_body(it: LegQueued) -> tuple[int, bytes]:
    parts = [text.encode(errors="replace")[:_MAX_NAME] for text in (it.role, it.tenant, it.model)]
    lengths = [len(part) for part in parts]
    return 10, _QUEUED.pack(it.leg, it.priority, it.tokens, *lengths) + b"".join(parts)


def _queued(body: memoryview) -> LegQueued:
    leg, priority, tokens, *lengths = _QUEUED.unpack_from(body)
    if _QUEUED.size + sum(lengths) > len(body):
        raise struct.error("a name is cut off")
    texts: list[str] = []
    start = _QUEUED.size
    for length in lengths:
        texts.append(bytes(body[start : start + length]).decode(errors="replace"))
        start += length
    role, tenant, model = texts
    return LegQueued(leg, role, priority, tokens, tenant, model)


def _dequeued_body(it: LegDequeued) -> tuple[int, bytes]:
    return 11, _DEQUEUED.pack(*it)


def _dequeued(body: memoryview) -> LegDequeued:
    leg, granted = _DEQUEUED.unpack_from(body)
    return LegDequeued(leg, bool(granted))


def _offered_body(it: RoomOffered) -> tuple[int, bytes]:
    return 12, _OFFERED.pack(*it)


def _offered(body: memoryview) -> RoomOffered:
    return RoomOffered._make(_OFFERED.unpack_from(body))


def _loads_adapter_body(it: PrefillLoadsAdapter) -> tuple[int, bytes]:
    return 14, _LOADS_ADAPTER.pack(*it)


def _loads_adapter(body: memoryview) -> PrefillLoadsAdapter:
    return PrefillLoadsAdapter._make(_LOADS_ADAPTER.unpack_from(body))


def _adapter_used_body(it: AdapterUsed) -> tuple[int, bytes]:
    return 15, _ADAPTER_USED.pack(it.engine) + it.adapter.encode(errors="replace")[:_MAX_NAME]


def _adapter_used(body: memoryview) -> AdapterUsed:
    (engine,) = _ADAPTER_USED.unpack_from(body)
    return AdapterUsed(engine, bytes(body[_ADAPTER_USED.size :]).decode(errors="replace"))


def _hashes(rest: memoryview) -> bytes:
    if len(rest) % 8:
        raise struct.error("block hashes have 8 bytes each")
    return bytes(rest)


_BODIES: Final[Mapping[type, Callable[..., tuple[int, bytes]]]] = {
    EngineLoad: _load_body,
    PrefillBegan: _began_body,
    PromptComputed: _computed_body,
    PrefillEnded: _ended_body,
    BlocksRouted: _routed_body,
    BlocksHeld: _held_body,
    BlocksChanged: _blocks_changed_body,
    EngineFailed: _failed_body,
    EngineRestarted: _restarted_body,
    SettingChanged: _changed_body,
    LegQueued: _queued_body,
    LegDequeued: _dequeued_body,
    RoomOffered: _offered_body,
    PrefillLoadsAdapter: _loads_adapter_body,
    AdapterUsed: _adapter_used_body,
}
_DECODERS: Final[Mapping[int, Callable[[memoryview], Entry]]] = {
    1: _load,
    2: _began,
    3: _computed,
    4: _ended,
    5: _routed,
    6: _failed,
    7: _restarted,
    8: _changed,
    9: _held,
    10: _queued,
    11: _dequeued,
    12: _offered,
    13: _blocks_changed,
    14: _loads_adapter,
    15: _adapter_used,
}
