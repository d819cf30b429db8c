"""From an engine's values to the canonical ones: hashes, token ids, media, names.

Values that the type checks of the wire form let through are still bounded here. A fault is an `EventFault` with its
member. No message repeats a value.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, cast

from kvparams.errors import ProblemKind
from kvparams.kv_events.model import MEDIA, BlockLocation
from kvparams.tokens import MAX_TOKENS, pack

__all__ = [
    "EventFault",
    "block_location",
    "check_bounds",
    "check_int64",
    "check_label",
    "pack_hash",
    "pack_hashes",
    "pack_pairs",
    "pack_tokens",
]

_MASK: Final = 2**64 - 1
_LOWEST: Final = -(2**63)
_MAX_WIDTH: Final = 64
_MAX_LABEL: Final = 1024
_SWAP: Final = sys.byteorder == "little"
EngineBlockHash = int | bytes | str


class EventFault(Exception):
    """An `EventFault` names the faulty member of one event, and its fault."""

    def __init__(self, member: str, kind: ProblemKind, message: str) -> None:
        super().__init__(member, kind, message)
        self.member = member
        self.kind: ProblemKind = kind
        self.message = message


def pack_hashes(hashes: Sequence[EngineBlockHash], member: str = "block_hashes") -> tuple[bytes, int]:
    """Packs hashes one after another, and returns them with the width of each in bytes.

    They are integers of both signs, or digests as bytes or in hexadecimal, of one width. `hashes` holds one or more.

    Raises:
        EventFault: one is out of range, they have several widths, or there are too many.
    """
    if len(hashes) > MAX_TOKENS:
        raise EventFault(member, "length", f"more than {MAX_TOKENS} blocks")
    first = hashes[0]
    if len(hashes) == 1:
        packed = _hash_bytes(first, member)
        return packed, len(packed)
    if type(first) is int:
        try:
            numbers = array("q" if first < 0 else "Q", cast("Sequence[int]", hashes))
        except (OverflowError, TypeError):  # both signs, or integers and digests
            pass
        else:
            if _SWAP:
                numbers.byteswap()
            return numbers.tobytes(), 8
    each = [_hash_bytes(one, member) for one in hashes]
    width = len(each[0])
    if any(len(one) != width for one in each):
        raise EventFault(member, "conflict", "hashes of several widths")
    return b"".join(each), width


def pack_hash(value: EngineBlockHash | None, width: int, member: str) -> bytes | None:
    """Packs a hash of `width` bytes, or returns None for None.

    Raises:
        EventFault: it has another width, or is out of range.
    """
    if value is None:
        return None
    packed = _hash_bytes(value, member)
    if len(packed) != width:
        raise EventFault(member, "conflict", "not of the width that the blocks' hashes have")
    return packed


def _hash_bytes(value: EngineBlockHash, member: str) -> bytes:
    if isinstance(value, int):
        if not _LOWEST <= value <= _MASK:
            raise EventFault(member, "range", "a hash has 64 bits, or is bytes")
        return (value & _MASK).to_bytes(8, "big")
    if isinstance(value, str):
        if len(value) > 2 * _MAX_WIDTH:
            raise EventFault(member, "length", f"a hash has 1 to {_MAX_WIDTH} bytes")
        try:
            value = bytes.fromhex(value) if value.isalnum() else b""  # `fromhex` also takes white space
        except ValueError:
            value = b""
        if not value:
            raise EventFault(member, "value", "not a hash in hexadecimal")
    if not 0 < len(value) <= _MAX_WIDTH:
        raise EventFault(member, "length", f"a hash has 1 to {_MAX_WIDTH} bytes")
    return value


def pack_tokens(ids: Sequence[int], member: str = "token_ids") -> bytes:
    """The ids as little-endian u32.

    Raises:
        EventFault: an id has more than 32 bits or a sign, or there are too many.
    """
    if len(ids) > MAX_TOKENS:
        raise EventFault(member, "length", f"more than {MAX_TOKENS} token ids")
    try:
        return pack(ids)
    except OverflowError:
        raise EventFault(member, "range", "a token id has 32 bits and no sign") from None


def pack_pairs(pairs: Sequence[object], member: str = "token_ids") -> tuple[bytes, int]:
    """Packs the tokens of SGLang's pairs, each a token and the next one; returns them and the last next token.

    Raises:
        EventFault: they are not such pairs, in one chain.
    """
    if len(pairs) > MAX_TOKENS:
        raise EventFault(member, "length", f"more than {MAX_TOKENS} token ids")
    if {*map(type, pairs)} != {tuple}:
        raise EventFault(member, "type", "token ids and pairs of them, mixed")
    chain = cast("Sequence[tuple[int, int]]", pairs)
    if any(here[1] != behind[0] for here, behind in pairwise(chain)):
        raise EventFault(member, "conflict", "a pair does not begin with the token that the one before it ends with")
    ids = pack_tokens([pair[0] for pair in chain], member)
    return ids, check_bounds(chain[-1][1], 2**32 - 1, member)


def check_bounds(value: int, high: int, member: str) -> int:
    """`value`, which lies between 0 and `high`.

    Raises:
        EventFault: it does not.
    """
    if not 0 <= value <= high:
        raise EventFault(member, "range", f"not between 0 and {high}")
    return value


def check_int64(value: int, member: str) -> int:
    """`value`, which has 64 bits, with a sign or without: JSON has longer ones.

    Raises:
        EventFault: it has more.
    """
    if not _LOWEST <= value <= _MASK:
        raise EventFault(member, "range", "an integer has 64 bits")
    return value


def check_label(value: str | None, member: str) -> str | None:
    """A name of reasonable length; an empty one is none.

    Raises:
        EventFault: it is longer.
    """
    if value is not None and len(value) > _MAX_LABEL:
        raise EventFault(member, "length", f"longer than {_MAX_LABEL} characters")
    return value or None


def block_location(
    medium: str | None, group: int | None, owner: str | None, *, locality: str | None = None
) -> BlockLocation:
    """The place that an engine names.

    Engines that name none have blocks in one place only, the device. What is `REMOTE` to whoever publishes it is remote
    whatever it is stored on.

    Raises:
        EventFault: a name is too long, or the group out of range.
    """
    native = check_label(medium, "medium")
    found = "device" if native is None else MEDIA.get(native.lower(), "other")
    if locality is not None and locality.upper() == "REMOTE":
        found = "remote"
    return BlockLocation(
        found,
        native,
        None if group is None else check_bounds(group, 2**31 - 1, "group_idx"),
        check_label(owner, "ownership"),
    )
