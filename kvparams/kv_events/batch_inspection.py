"""Finds the faults of a message that could not be decoded at once, to save its valid events.

A fault is located by the part that does not decode, never by the decoder's message.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from msgspec import UNSET, DecodeError, Raw, Struct, UnsetType
from msgspec.msgpack import Decoder
from msgspec.structs import fields

from kvparams.errors import Problem
from kvparams.kv_events.model import InvalidEvents
from kvparams.kv_events.value_conversion import EventFault
from kvparams.kv_events.wire_structs import NIL, ClearedMap, RemovedMap, StoredMap

__all__ = [
    "BROKEN",
    "ContainerHead",
    "RawBatch",
    "check_members",
    "decode_part",
    "event_type",
    "read_head",
    "read_raw_batch",
]

BROKEN: Final = (DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises: also where it does not say so, for text that is not UTF-8 and what is nested too deep."""
_MAX_MEMBERS: Final = 256
_Value = TypeVar("_Value")
ContainerHead = tuple[bool, int]
"""Whether an array begins here, and how many entries it says it has; or a map, and how many members."""


class RawBatch(Struct, array_like=True, gc=False):
    """A batch whose parts are looked at one by one."""

    time: Raw
    events: Raw
    rank: Raw = NIL


class _MapType(Struct, gc=False):
    type: str | UnsetType = UNSET


class _ArrayType(Struct, array_like=True, gc=False):
    type: str | UnsetType = UNSET


_OUTLINE: Final = Decoder(RawBatch)
_ONE_VALUE: Final = Decoder(Raw)
_ENTRIES: Final = Decoder(list[Raw])
_MAP_TYPE: Final = Decoder(_MapType)
_ARRAY_TYPE: Final = Decoder(_ArrayType)
_MEMBERS: Final = Decoder(dict[str, Raw])
_TYPES: Final[dict[str, tuple[tuple[str, bool, Decoder[Any]], ...]]] = {
    name: tuple((one.name, one.required, Decoder(one.type)) for one in fields(kind))
    for name, kind in (("BlockStored", StoredMap), ("BlockRemoved", RemovedMap), ("AllBlocksCleared", ClearedMap))
}
"""For each type of event its members in the order of arrays: name, whether it must be there, what it decodes as."""
_LONG: Final = {0xDC: (True, 3), 0xDD: (True, 5), 0xDE: (False, 3), 0xDF: (False, 5)}


def read_raw_batch(payload: bytes | bytearray | memoryview) -> RawBatch:
    """The parts of a batch.

    Raises:
        InvalidEvents: it has no such parts.
    """
    try:
        return _OUTLINE.decode(payload)
    except DecodeError:
        if not _is_one_value(payload):
            problem = Problem((), "value", "not one value in MessagePack")
        elif (found := read_head(payload)) is None or not found[0]:
            problem = Problem((), "type", "a batch is an array")
        else:
            problem = Problem((), "missing", "a batch has a time and events")
    except RecursionError:
        problem = Problem((), "length", "nested too deep")
    raise InvalidEvents((problem,)) from None


def decode_part(index: int, raw: Raw, read: Callable[[Raw], _Value]) -> _Value:
    """Decodes a numeric part of a batch.

    Raises:
        InvalidEvents: it is none.
    """
    try:
        return read(raw)
    except BROKEN:
        raise InvalidEvents((Problem((index,), "type", "not a number"),)) from None


def _is_one_value(payload: bytes | bytearray | memoryview) -> bool:
    """Returns whether nothing stands behind the first value, and nothing of it is missing."""
    try:
        _ONE_VALUE.decode(payload)
    except BROKEN:
        return False
    return True


def read_head(raw: Raw | bytes | bytearray | memoryview) -> ContainerHead | None:
    """Returns the kind and length of the container that begins here; None if it is neither array nor map."""
    first = bytes(memoryview(raw)[:5])
    if not first:
        return None
    if first[0] & 0xE0 == 0x80:
        return first[0] & 0x10 != 0, first[0] & 0x0F
    if first[0] not in _LONG:
        return None
    is_array, end = _LONG[first[0]]
    return is_array, int.from_bytes(first[1:end], "big")


def event_type(raw: Raw, found: ContainerHead) -> str:
    """The type that an event names.

    Raises:
        EventFault: it names none, or has more members than are looked at.
    """
    is_array, count = found
    if count > _MAX_MEMBERS:
        raise EventFault("", "length", f"more than {_MAX_MEMBERS} members")
    try:
        name: str | UnsetType | None = (_ARRAY_TYPE if is_array else _MAP_TYPE).decode(raw).type
    except BROKEN:
        name = None
    if isinstance(name, str):
        return name
    if name is UNSET:
        raise EventFault("type", "missing", "an event names its type")
    if not is_array:
        _names(raw)
    raise EventFault("type", "type", "an event names its type, in text")


def _names(raw: Raw) -> dict[str, Raw]:
    try:
        return _MEMBERS.decode(raw)
    except BROKEN:
        raise EventFault("", "type", "a name in an event is text") from None


def check_members(raw: Raw, name: str, found: ContainerHead) -> None:
    """The first member that is missing or wrong in an event of a known type.

    Raises:
        EventFault: with that member; without one where no member can be blamed.
    """
    is_array, _ = found
    types = _TYPES[name]
    if is_array:
        named = dict(zip((member for member, _, _ in types), _ENTRIES.decode(raw)[1:], strict=False))
    else:
        named = _names(raw)
    for member, required, decoder in types:
        if member not in named:
            if required:
                raise EventFault(member, "missing", "Field required")
            continue
        try:
            decoder.decode(named[member])
        except UnicodeDecodeError:
            raise EventFault(member, "value", "not text in UTF-8") from None
        except BROKEN:
            raise EventFault(member, "type", "not of the type that this member has") from None
    raise EventFault("", "type", f"not what a {name} is")
