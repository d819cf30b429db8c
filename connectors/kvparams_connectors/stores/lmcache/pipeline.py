"""Requests to an `lm://` server, done in order over one connection, with as much under way as keeps both sides busy.

The server works on a connection's requests one after the other. So an answer confirms every request that was sent
before it on that connection, and thereby a put, which has no answer of its own.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvparams_connectors.store import Result, ResultCode
from kvparams_connectors.stores.connection_pool import ServerConnectionPool
from kvparams_connectors.stores.lmcache.connection import MAX_REPLIES_AT_ONCE, LMCacheAddress, LMCacheConnection
from kvparams_connectors.stores.lmcache.wire import (
    REQUEST_BYTES,
    LMCacheCommand,
    LMCacheEntry,
    LMCacheEntryKind,
    LMCacheProtocolError,
    LMCacheReply,
    encode_request,
)

__all__ = [
    "PUT_WINDOW_BYTES",
    "WINDOW_BYTES",
    "FetchValueRequest",
    "LMCacheConnectionPool",
    "LMCacheRequest",
    "PipelineResult",
    "StoreValueRequest",
    "TombstoneRequest",
    "flatten_buffers",
    "read_records",
    "result_of_error",
    "run_requests",
    "total_bytes",
]

_LOGGER: Final = logging.getLogger(__name__)

WINDOW_BYTES: Final = 2 << 20
"""So many bytes may be under way to us on a connection, or two values."""
PUT_WINDOW_BYTES: Final = 16 << 20
"""So many may be under way to the server, or two values: it need not wait for us to hear of what it has confirmed. Of
more we would not know, should the deadline pass in between."""
_TAG_BITS: Final = 62
_MISS: Final = Result(ResultCode.MISS)
_CORRUPT: Final = Result(ResultCode.CORRUPT)

LMCacheConnectionPool = ServerConnectionPool[LMCacheAddress, LMCacheConnection]


class LMCacheRequest(Protocol):
    """A request with one answer."""

    weight: int
    """How much it counts against what may be under way, in bytes."""

    def parts(self) -> Sequence[bytes | memoryview]:
        """Returns what is sent."""
        ...

    def read(self, connection: LMCacheConnection) -> Result:
        """Receive the answer; raises as `LMCacheConnection.reply` and `LMCacheConnection.value` do."""
        ...


@dataclass(slots=True)
class PipelineResult:
    """Describes what came of requests."""

    results: list[Result] = field(default_factory=list[Result])
    """Of as many as were answered, from the first on."""
    error: OSError | None = None
    """Why the others were not."""
    connected: bool = False


def run_requests(
    pool: LMCacheConnectionPool,
    server: LMCacheAddress,
    questions: Sequence[LMCacheRequest],
    deadline: float,
    *,
    window: int = WINDOW_BYTES,
) -> PipelineResult:
    """Do requests in order.

    Args:
        deadline: on the clock of `time.monotonic`.
        window: what may be under way, in bytes; 0: one request at a time.
    """
    came = PipelineResult()
    answers = came.results
    if not questions:
        return came
    try:
        connection = pool.acquire(server, deadline)
    except OSError as error:
        came.error = error
        return came
    came.connected = True
    sent = weight = 0
    try:
        while len(answers) < len(questions):
            parts: list[bytes | memoryview] = []
            first = sent
            while sent < len(questions) and _fits(weight + questions[sent].weight, sent - len(answers), window):
                weight += questions[sent].weight
                parts += questions[sent].parts()
                sent += 1
            if parts:
                connection.ask(parts, sent - first)
            answered = questions[len(answers)]
            answers.append(answered.read(connection))
            weight -= answered.weight
    except OSError as error:
        connection.close()
        came.error = error
    except BaseException:
        connection.close()
        raise
    else:
        pool.release(server, connection)
    return came


def _fits(weight: int, under_way: int, window: int) -> bool:
    """Returns whether one more may be under way: two always, so that the server need not wait for us between them."""
    return not under_way or (window > 0 and (under_way < 2 or (weight <= window and under_way < MAX_REPLIES_AT_ONCE)))


def result_of_error(error: OSError, server: LMCacheAddress) -> Result:
    """Returns what an exchange that has ended means for the requests that were not answered."""
    if isinstance(error, TimeoutError):
        return Result(ResultCode.TIMEOUT)
    if isinstance(error, LMCacheProtocolError):
        _LOGGER.error("lmcache: %s:%s does not speak as it should: %s", *server, error)
    return Result(ResultCode.UNAVAILABLE)


def flatten_buffers(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The same memory as bytes, without the empty pieces. Raises ValueError if a buffer was released."""
    return [buffer.cast("B") for buffer in buffers if buffer.nbytes]


def total_bytes(parts: Sequence[memoryview]) -> int:
    """Returns how many bytes they have together."""
    return sum(part.nbytes for part in parts)


def read_records(
    pool: LMCacheConnectionPool, server: LMCacheAddress, names: Sequence[bytes], deadline: float
) -> list[Result]:
    """Reads records, thousands of them in one round trip.

    Each result is OK with the value's size, MISS, CORRUPT if the bytes are no record, or the reason for no answer.
    """
    results: list[Result] = []
    while len(results) < len(names):
        chunk = names[len(results) : len(results) + MAX_REPLIES_AT_ONCE]
        try:
            connection = pool.acquire(server, deadline)
        except OSError as error:
            return results + [result_of_error(error, server)] * (len(names) - len(results))
        try:
            connection.ask([b"".join([encode_request(LMCacheCommand.GET, name) for name in chunk])], len(chunk))
            results += [_of_record(reply) for reply in connection.replies(len(chunk))]
        except OSError as error:
            connection.close()
            return results + [result_of_error(error, server)] * (len(names) - len(results))
        except BaseException:
            connection.close()
            raise
        pool.release(server, connection)
    return results


def _of_record(reply: LMCacheReply) -> Result:
    if not reply.found:
        return _MISS
    entry = reply.entry
    if entry is None or entry.kind is LMCacheEntryKind.VALUE:
        return _CORRUPT
    return Result(ResultCode.OK, entry.size) if entry.kind is LMCacheEntryKind.RECORD else _MISS


class StoreValueRequest:
    """A value, then its record, then the question whether the record stands there: OK, or EXISTS if it is another's."""

    def __init__(self, value: bytes, record: bytes, buffers: Sequence[memoryview]) -> None:
        """Draws the random tag that tells this put from another one.

        Args:
            value: the server's name of the value.
            record: the server's name of the record of its size.
            buffers: the value, as flat bytes.
        """
        self._value, self._record = value, record
        self._buffers = buffers
        self._nbytes = total_bytes(buffers)
        self._tag = secrets.randbits(_TAG_BITS)
        self.weight = self._nbytes + 3 * REQUEST_BYTES

    def parts(self) -> Sequence[bytes | memoryview]:
        """Returns the bytes that ask the server for it."""
        entry = LMCacheEntry(LMCacheEntryKind.VALUE, self._nbytes, self._tag)
        record = LMCacheEntry(LMCacheEntryKind.RECORD, self._nbytes, self._tag)
        return [
            encode_request(LMCacheCommand.PUT, self._value, self._nbytes, entry),
            *self._buffers,
            encode_request(LMCacheCommand.PUT, self._record, 0, record)
            + encode_request(LMCacheCommand.GET, self._record),
        ]

    def read(self, connection: LMCacheConnection) -> Result:
        """Reads the answer from the connection."""
        (reply,) = connection.replies(1)
        entry = reply.entry
        if entry is None or entry.kind is not LMCacheEntryKind.RECORD:  # not kept, or deleted at once
            return Result(ResultCode.UNAVAILABLE)
        return Result(ResultCode.OK, self._nbytes) if entry.tag == self._tag else Result(ResultCode.EXISTS)


class FetchValueRequest:
    """A value, into the caller's buffers."""

    def __init__(
        self, value: bytes, buffers: Sequence[memoryview], arrived: Callable[[int], None] | None = None
    ) -> None:
        """Takes the buffers to fill.

        Args:
            value: the server's name of the value.
            buffers: flat, writable bytes for the value.
            arrived: called with the size of the value when it is complete; see `GetOp.on_complete`.
        """
        self._value = value
        self._buffers = buffers
        self._arrived = arrived
        self._room = total_bytes(buffers)
        self.weight = self._room + REQUEST_BYTES
        self.gone = False
        """Whether it was found buried when it was read last."""

    def parts(self) -> Sequence[bytes | memoryview]:
        """Returns the bytes that ask the server for it."""
        return [encode_request(LMCacheCommand.GET, self._value)]

    def read(self, connection: LMCacheConnection) -> Result:
        """Reads the answer from the connection."""
        reply = connection.reply()
        entry = reply.entry
        self.gone = entry is not None and entry.kind is LMCacheEntryKind.GONE
        if entry is None or entry.kind is not LMCacheEntryKind.VALUE:
            if reply.nbytes:
                connection.skip(reply.nbytes)
            return _MISS if self.gone or not reply.found else _CORRUPT
        if reply.nbytes > self._room:
            connection.skip(reply.nbytes)
            return Result(ResultCode.TOO_LARGE, reply.nbytes)
        if reply.nbytes:
            connection.value(reply.nbytes, self._buffers)
        if self._arrived is not None:
            self._arrived(reply.nbytes)
        return Result(ResultCode.OK, reply.nbytes)


class TombstoneRequest:
    """There is no delete, so a value is overwritten by none, and its record says so: OK when that stands there."""

    weight = 3 * REQUEST_BYTES

    def __init__(self, value: bytes, record: bytes) -> None:
        """Takes the names to overwrite.

        Args:
            value: the server's name of the value.
            record: the server's name of the record of its size.
        """
        self._value, self._record = value, record

    def parts(self) -> Sequence[bytes | memoryview]:
        """Returns the bytes that ask the server for it."""
        gone = LMCacheEntry(LMCacheEntryKind.GONE)
        puts = encode_request(LMCacheCommand.PUT, self._record, 0, gone) + encode_request(
            LMCacheCommand.PUT, self._value, 0, gone
        )
        return [puts + encode_request(LMCacheCommand.GET, self._record)]

    def read(self, connection: LMCacheConnection) -> Result:
        """Reads the answer from the connection."""
        connection.replies(1)  # whatever it says: another may have put it again already
        return Result(ResultCode.OK)
