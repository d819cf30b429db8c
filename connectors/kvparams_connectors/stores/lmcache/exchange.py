"""Requests to an `lm://` server, done in order over one connection, with as much under way as keeps both sides busy.

The one rule: the server works on a connection's requests one after the other, so an answer says that everything that
was sent before it on that connection has been done. That is how a put, which has no answer of its own, is confirmed.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvparams_connectors.store import Code, Result
from kvparams_connectors.stores.lmcache.connection import QUESTIONS, Connection, Server
from kvparams_connectors.stores.lmcache.wire import REQUEST_BYTES, Command, Entry, Kind, ProtocolError, Reply, request
from kvparams_connectors.stores.pooling import Pool

__all__ = [
    "PUT_WINDOW_BYTES",
    "WINDOW_BYTES",
    "Bury",
    "Connections",
    "Exchange",
    "Fetch",
    "Question",
    "Store",
    "ask_records",
    "code_of",
    "do",
    "flat",
    "nbytes_of",
]

_LOGGER: Final = logging.getLogger(__name__)

WINDOW_BYTES: Final = 2 << 20
"""So many bytes may be under way to us on a connection, or two values."""
PUT_WINDOW_BYTES: Final = 16 << 20
"""So many may be under way to the server, or two values: it need not wait for us to hear of what it has confirmed. Of
more we would not know, should the deadline pass in between."""
_TAG_BITS: Final = 62
_MISS: Final = Result(Code.MISS)
_CORRUPT: Final = Result(Code.CORRUPT)

Connections = Pool[Server, Connection]


class Question(Protocol):
    """A request with one answer."""

    weight: int
    """How much it counts against what may be under way, in bytes."""

    def parts(self) -> Sequence[bytes | memoryview]:
        """What is sent."""
        ...

    def read(self, connection: Connection) -> Result:
        """Receive the answer; raises as `Connection.reply` and `Connection.value` do."""
        ...


@dataclass(slots=True)
class Exchange:
    """What came of requests."""

    answers: list[Result] = field(default_factory=list[Result])
    """Of as many as were answered, from the first on."""
    error: OSError | None = None
    """Why the others were not."""
    connected: bool = False


def do(
    pool: Connections, server: Server, questions: Sequence[Question], deadline: float, *, window: int = WINDOW_BYTES
) -> Exchange:
    """Do requests in order.

    Args:
        deadline: on the clock of `time.monotonic`.
        window: what may be under way, in bytes; 0: one request at a time.
    """
    came = Exchange()
    answers = came.answers
    if not questions:
        return came
    try:
        connection = pool.take(server, deadline)
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
        pool.give_back(server, connection)
    return came


def _fits(weight: int, under_way: int, window: int) -> bool:
    """Whether one more may be under way: two always, so that the server need not wait for us between them."""
    return not under_way or (window > 0 and (under_way < 2 or (weight <= window and under_way < QUESTIONS)))


def code_of(error: OSError, server: Server) -> Result:
    """What an exchange that has ended means for the requests that were not answered."""
    if isinstance(error, TimeoutError):
        return Result(Code.TIMEOUT)
    if isinstance(error, ProtocolError):
        _LOGGER.error("lmcache: %s:%s does not speak as it should: %s", *server, error)
    return Result(Code.UNAVAILABLE)


def flat(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The same memory as bytes, without the empty pieces. Raises ValueError if a buffer was released."""
    return [buffer.cast("B") for buffer in buffers if buffer.nbytes]


def nbytes_of(parts: Sequence[memoryview]) -> int:
    """How many bytes they have together."""
    return sum(part.nbytes for part in parts)


def ask_records(pool: Connections, server: Server, names: Sequence[bytes], deadline: float) -> list[Result]:
    """Ask for records, of thousands in one round trip: OK with the value's size, MISS, CORRUPT if something else
    stands there, or why there is no answer."""
    results: list[Result] = []
    while len(results) < len(names):
        chunk = names[len(results) : len(results) + QUESTIONS]
        try:
            connection = pool.take(server, deadline)
        except OSError as error:
            return results + [code_of(error, server)] * (len(names) - len(results))
        try:
            connection.ask([b"".join([request(Command.GET, name) for name in chunk])], len(chunk))
            results += [_of_record(reply) for reply in connection.replies(len(chunk))]
        except OSError as error:
            connection.close()
            return results + [code_of(error, server)] * (len(names) - len(results))
        except BaseException:
            connection.close()
            raise
        pool.give_back(server, connection)
    return results


def _of_record(reply: Reply) -> Result:
    if not reply.found:
        return _MISS
    entry = reply.entry
    if entry is None or entry.kind is Kind.VALUE:
        return _CORRUPT
    return Result(Code.OK, entry.size) if entry.kind is Kind.RECORD else _MISS


class Store:
    """A value, then its record, then the question whether the record stands there: OK, or EXISTS if it is another's."""

    def __init__(self, value: bytes, record: bytes, buffers: Sequence[memoryview]) -> None:
        """Args:
        value, record: names.
        buffers: flat bytes.
        """
        self._value, self._record = value, record
        self._buffers = buffers
        self._nbytes = nbytes_of(buffers)
        self._tag = secrets.randbits(_TAG_BITS)
        self.weight = self._nbytes + 3 * REQUEST_BYTES

    def parts(self) -> Sequence[bytes | memoryview]:
        entry = Entry(Kind.VALUE, self._nbytes, self._tag)
        record = Entry(Kind.RECORD, self._nbytes, self._tag)
        return [
            request(Command.PUT, self._value, self._nbytes, entry),
            *self._buffers,
            request(Command.PUT, self._record, 0, record) + request(Command.GET, self._record),
        ]

    def read(self, connection: Connection) -> Result:
        (reply,) = connection.replies(1)
        entry = reply.entry
        if entry is None or entry.kind is not Kind.RECORD:  # not kept, or deleted at once
            return Result(Code.UNAVAILABLE)
        return Result(Code.OK, self._nbytes) if entry.tag == self._tag else Result(Code.EXISTS)


class Fetch:
    """A value, into the caller's buffers."""

    def __init__(
        self, value: bytes, buffers: Sequence[memoryview], arrived: Callable[[int], None] | None = None
    ) -> None:
        """Args:
        value: a name.
        buffers: flat bytes, writable.
        arrived: see `GetOp`.
        """
        self._value = value
        self._buffers = buffers
        self._arrived = arrived
        self._room = nbytes_of(buffers)
        self.weight = self._room + REQUEST_BYTES
        self.gone = False
        """Whether it was found buried when it was read last."""

    def parts(self) -> Sequence[bytes | memoryview]:
        return [request(Command.GET, self._value)]

    def read(self, connection: Connection) -> Result:
        reply = connection.reply()
        entry = reply.entry
        self.gone = entry is not None and entry.kind is Kind.GONE
        if entry is None or entry.kind is not Kind.VALUE:
            if reply.nbytes:
                connection.skip(reply.nbytes)
            return _MISS if self.gone or not reply.found else _CORRUPT
        if reply.nbytes > self._room:
            connection.skip(reply.nbytes)
            return Result(Code.TOO_LARGE, reply.nbytes)
        if reply.nbytes:
            connection.value(reply.nbytes, self._buffers)
        if self._arrived is not None:
            self._arrived(reply.nbytes)
        return Result(Code.OK, reply.nbytes)


class Bury:
    """There is no delete, so a value is overwritten by none, and its record says so: OK when that stands there."""

    weight = 3 * REQUEST_BYTES

    def __init__(self, value: bytes, record: bytes) -> None:
        """Args:
        value, record: names.
        """
        self._value, self._record = value, record

    def parts(self) -> Sequence[bytes | memoryview]:
        gone = Entry(Kind.GONE)
        puts = request(Command.PUT, self._record, 0, gone) + request(Command.PUT, self._value, 0, gone)
        return [puts + request(Command.GET, self._record)]

    def read(self, connection: Connection) -> Result:
        connection.replies(1)  # whatever it says: another may have put it again already
        return Result(Code.OK)
