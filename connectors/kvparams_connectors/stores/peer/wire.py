"""Defines what peers say to each other: frames of fixed size, tables of keys, and of what became of them. Pure.

All numbers are big-endian. A reader sends a request: its head, then the lengths of all keys, the room that there is for
each value, and the keys. The other side answers in the same order: a head, a table with a word for each key, then all
sizes, and for GET the values themselves, one after the other. Every number from the other side is checked against its
bound before anything is allocated, sent or read for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from struct import Struct, calcsize, pack, unpack_from
from struct import error as StructError
from typing import Final

from kvparams_connectors.store import Result, ResultCode, Results

__all__ = [
    "MOST_KEYS",
    "REPLY_HEAD",
    "REQUEST_HEAD",
    "PeerOperation",
    "PeerProtocolError",
    "PeerReply",
    "PeerRequest",
    "PeerStatus",
    "PlacedValue",
    "PlacementTable",
    "encode_found",
    "encode_keys",
    "encode_placement",
    "encode_sizes",
    "parse_found",
    "parse_keys",
    "parse_placement",
    "parse_reply",
    "parse_request",
]

MOST_KEYS: Final = 4096
"""In one request."""
_LONGEST_KEY: Final = 128
_MOST_RUNS: Final = 64
"""A value that lies in more pieces than this is read in another way."""
_LARGEST: Final = 1 << 48
"""No length or room is larger."""
_LONGEST_S: Final = 3600

REQUEST_HEAD: Final = Struct("!BxHII")
"""Operation, keys, bytes of the body, milliseconds until the reader gives up."""
REPLY_HEAD: Final = Struct("!BxHI")
"""Status, keys, bytes of the table."""
_KEY_BYTES: Final = 9
"""Its length and its room."""
_FOUND_BYTES: Final = 9
_PLACED: Final = Struct("!BQQB")
_RUN: Final = Struct("!QQ")
_MOST_BODY: Final = MOST_KEYS * (_KEY_BYTES + _LONGEST_KEY)
_MOST_TABLE: Final = 256 + MOST_KEYS * (_PLACED.size + _MOST_RUNS * _RUN.size)


class PeerProtocolError(ConnectionError):
    """The other side does not speak as it should."""


class PeerOperation(IntEnum):
    """Describes what a reader asks for."""

    GET = 1
    """The values."""
    SIZES = 2
    """How large they are."""
    HOLD = 3
    """Where they lie; they stay there until RETURN, or until the reader's time is over."""
    RETURN = 4
    """The reader has what it held. FINE: it was held until now."""


class PeerStatus(IntEnum):
    """Describes what becomes of a request as a whole."""

    FINE = 0
    UNABLE = 1
    """HOLD: values are not read from memory here; ask with GET."""
    OVER = 2
    """RETURN: the time was over before; what was read may have been overwritten."""


_WORDS: Final = {ResultCode.OK: 0, ResultCode.MISS: 1, ResultCode.TOO_LARGE: 2}
_CODES: Final = {word: code for code, word in _WORDS.items()}


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """The head of a request."""

    operation: PeerOperation
    count: int
    nbytes: int
    """Of the body."""
    give_up_s: float


@dataclass(frozen=True, slots=True)
class PeerReply:
    """The head of a reply."""

    status: PeerStatus
    count: int
    nbytes: int
    """Of the table."""


@dataclass(frozen=True, slots=True)
class PlacedValue:
    """Describes what became of a key, and where its value lies."""

    result: Result
    generation: int = 0
    """Of the value: another value under the same key, later, has another one."""
    runs: tuple[tuple[int, int], ...] = ()
    """Addresses and lengths. None although it is there: it lies in too many pieces."""


@dataclass(frozen=True, slots=True)
class PlacementTable:
    """A table of HOLD."""

    session: str
    """How the transfer engine calls the other side."""
    values: list[PlacedValue]


def encode_keys(keys: Sequence[str], rooms: Sequence[int]) -> bytes:
    """The body of a request."""
    count = len(keys)
    return pack(f"!{count}B{count}Q", *map(len, keys), *rooms) + "".join(keys).encode("ascii")


def parse_request(head: bytes | bytearray) -> PeerRequest:
    """Raises ProtocolError."""
    operation, count, nbytes, milliseconds = REQUEST_HEAD.unpack(head)
    if operation not in PeerOperation.__members__.values():
        raise PeerProtocolError(f"operation {operation} is not known")
    if count > MOST_KEYS or nbytes > _MOST_BODY:
        raise PeerProtocolError(f"a request for {count} keys in {nbytes} bytes")
    return PeerRequest(PeerOperation(operation), count, nbytes, min(_LONGEST_S, milliseconds / 1000))


def parse_keys(body: bytes | bytearray, count: int) -> tuple[list[str], Sequence[int]]:
    """The keys and rooms in the body of a request with so many keys; raises ProtocolError."""
    numbers = f"!{count}B{count}Q"
    try:
        lengths_and_rooms = unpack_from(numbers, body)
        text = body[calcsize(numbers) :].decode("ascii")
    except (StructError, UnicodeDecodeError) as error:
        raise PeerProtocolError(f"a request that ends early or has no keys: {error}") from error
    lengths, rooms = lengths_and_rooms[:count], lengths_and_rooms[count:]
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != len(text):
        raise PeerProtocolError("a request with more or less in it than keys")
    if count and (min(lengths) == 0 or max(lengths) > _LONGEST_KEY or max(rooms) > _LARGEST):
        raise PeerProtocolError("a key that cannot be one")
    return [text[start:end] for start, end in pairwise(ends)], rooms


def parse_reply(head: bytes | bytearray, count: int) -> PeerReply:
    """The head of the reply to a request with so many keys; raises ProtocolError."""
    status, answered, nbytes = REPLY_HEAD.unpack(head)
    if status not in PeerStatus.__members__.values():
        raise PeerProtocolError(f"status {status} is not known")
    if answered != (count if status == PeerStatus.FINE else 0) or nbytes > _MOST_TABLE:
        raise PeerProtocolError(f"{answered} answers in {nbytes} bytes to {count} keys")
    return PeerReply(PeerStatus(status), answered, nbytes)


def encode_found(results: Results) -> bytes:
    """Returns what became of each key."""
    count = len(results)
    return pack(f"!{count}B{count}Q", *[_WORDS[one.code] for one in results], *[one.nbytes for one in results])


def encode_sizes(sizes: Sequence[int | None]) -> bytes:
    """The same for SIZES: each value's size, or None where there is none."""
    count = len(sizes)
    return pack(f"!{count}B{count}Q", *[size is None for size in sizes], *[size or 0 for size in sizes])


def parse_found(table: bytes | bytearray, rooms: Sequence[int]) -> Results:
    """The table of GET or SIZES; raises ProtocolError.

    Args:
        table: as it came.
        rooms: what was asked with; for SIZES as much as can be.
    """
    count = len(rooms)
    if len(table) != count * _FOUND_BYTES:
        raise PeerProtocolError(f"a table of {len(table)} bytes for {count} keys")
    words = table[:count]
    known: dict[tuple[int, int, int], Result] = {}  # pages are of few sizes
    results: Results = []
    for said in zip(words, unpack_from(f"!{count}Q", table, count), rooms, strict=True):
        result = known.get(said)
        if result is None:
            result = known[said] = _result(*said)
        results.append(result)
    return results


def encode_placement(placement: PlacementTable) -> bytes:
    """The session, then for each key what became of it, and its runs."""
    session = placement.session.encode("ascii")
    parts = [bytes([len(session)]), session]
    for placed in placement.values:
        runs = placed.runs if len(placed.runs) <= _MOST_RUNS else ()
        word = _WORDS[placed.result.code]
        parts.append(_PLACED.pack(word, placed.result.nbytes, placed.generation, len(runs)))
        parts += [_RUN.pack(*run) for run in runs]
    return b"".join(parts)


def parse_placement(table: bytes | bytearray, rooms: Sequence[int]) -> PlacementTable:
    """The table of HOLD; raises ProtocolError."""
    values: list[PlacedValue] = []
    try:
        at = 1 + table[0]
        session = table[1:at].decode("ascii")
        for room in rooms:
            word, nbytes, generation, count = _PLACED.unpack_from(table, at)
            at += _PLACED.size
            if count > _MOST_RUNS:
                raise PeerProtocolError(f"a value in {count} pieces")
            runs: list[tuple[int, int]] = []
            for _ in range(count):
                address, length = _RUN.unpack_from(table, at)
                at += _RUN.size
                if length > _LARGEST:
                    raise PeerProtocolError("a piece without an end")
                runs.append((address, length))
            result = _result(word, nbytes, room)
            if runs and (result.code is not ResultCode.OK or sum(length for _, length in runs) != nbytes):
                raise PeerProtocolError("pieces that are not the value")
            values.append(PlacedValue(result, generation, tuple(runs)))
    except (IndexError, StructError, UnicodeDecodeError) as error:
        raise PeerProtocolError(f"a table that ends early: {error}") from error
    if at != len(table):
        raise PeerProtocolError("a table with more in it than was asked for")
    return PlacementTable(session, values)


def _result(word: int, nbytes: int, room: int) -> Result:
    code = _CODES.get(word)
    if code is None:
        raise PeerProtocolError(f"{word} is no answer")
    fits = (
        nbytes <= room
        if code is ResultCode.OK
        else room < nbytes <= _LARGEST
        if code is ResultCode.TOO_LARGE
        else not nbytes
    )
    if not fits:
        raise PeerProtocolError(f"{code.name} of {nbytes} bytes where there is room for {room}")
    return Result(code, nbytes)
