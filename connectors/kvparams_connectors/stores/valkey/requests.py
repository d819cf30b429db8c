"""Defines what is asked of a server for one key, and what its answers mean.

Every answer ends in a `Result`, or in a `ErrorReply` that may be a redirect; nothing here waits or chooses a server.

Commands and error words: https://valkey.io/commands/ and `server.c` of Valkey 8.0.1.
"""

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from kvparams_connectors.store import GetOp, PutOp, Result, ResultCode
from kvparams_connectors.stores.valkey.connection import NativeGet, NativePut, ValkeyConnection
from kvparams_connectors.stores.valkey.resp import ErrorReply, OversizedValue, encode_command, flatten_buffers

__all__ = [
    "BulkSizeRequest",
    "DeleteRequest",
    "GetRequest",
    "PutRequest",
    "SizeRequest",
    "ValkeyRequest",
    "result_of_error",
]

_LOGGER: Final = logging.getLogger(__name__)

_ASKING: Final = encode_command(b"ASKING")
_SMALL: Final = 256
"""About what a command or a reply without a value takes."""

_CODES: Final = {
    "OOM": ResultCode.FULL,
    "NOAUTH": ResultCode.DENIED,
    "WRONGPASS": ResultCode.DENIED,
    "NOPERM": ResultCode.DENIED,
    "DENIED": ResultCode.DENIED,  # protected mode
    "READONLY": ResultCode.UNAVAILABLE,
    "LOADING": ResultCode.UNAVAILABLE,
    "CLUSTERDOWN": ResultCode.UNAVAILABLE,
    "MASTERDOWN": ResultCode.UNAVAILABLE,
    "NOREPLICAS": ResultCode.UNAVAILABLE,
    "MISCONF": ResultCode.UNAVAILABLE,
    "TRYAGAIN": ResultCode.UNAVAILABLE,
    "BUSY": ResultCode.UNAVAILABLE,
    "MOVED": ResultCode.UNAVAILABLE,  # one that was not followed any further
    "ASK": ResultCode.UNAVAILABLE,
    "WRONGTYPE": ResultCode.CORRUPT,  # something else than a value stands under our key
}
_MISS: Final = Result(ResultCode.MISS)
_CLIENTS: Final = "ERR max number of clients"
_TOO_LONG: Final = ("ERR string exceeds maximum allowed size", "ERR Protocol error: invalid bulk length")


def result_of_error(error: ErrorReply) -> Result:
    """Returns what an error reply means for the key that it answers."""
    code = _CODES.get(error.word)
    if code is None and error.text.startswith(_CLIENTS):
        code = ResultCode.UNAVAILABLE
    if code is None and error.text.startswith(_TOO_LONG):
        code = ResultCode.TOO_LARGE
    if code is None:
        _LOGGER.error("valkey: an error that is not known: %.200r", error.text)
        code = ResultCode.INTERNAL
    return Result(code)


class ValkeyRequest(Protocol):
    """A `ValkeyRequest` is a key of a batch."""

    key: bytes
    weight: int
    """How much it counts against what may be under way on a connection, in bytes."""
    replies: int
    """Answers it gets, besides those to ASKING."""

    def parts(self, *, asking: bool) -> list[bytes | memoryview]:
        """Returns what is sent; `asking` follows a redirect of kind ASK. Raises ValueError if a buffer was released."""
        ...

    def read(self, connection: ValkeyConnection, *, asking: bool) -> Result | ErrorReply:
        """Receive the answers; raises as `ValkeyConnection.reply` does."""
        ...

    def on_idle(self) -> bool:
        """Do a little of what `parts` will do, where it would only be waited; whether there is more."""
        ...

    def on_result(self, result: Result) -> None:
        """It came to this, and the next requests have been sent since, so that the server has something to do."""
        ...


class _NoPreparation:
    """A request that needs no work before it is sent."""

    def on_idle(self) -> bool:
        """Does nothing."""
        return False


class _NoCompletion:
    """A request whose end nobody wants to hear of."""

    def on_result(self, result: Result) -> None:
        """Does nothing."""


def _nbytes(buffers: Sequence[memoryview]) -> int:
    """Together; 0 if one was released, which `ValkeyRequest.parts` will say."""
    try:
        return sum(buffer.nbytes for buffer in buffers)
    except ValueError:
        return 0


def _reply(connection: ValkeyConnection, *, asking: bool) -> int | bytes | ErrorReply | None:
    if asking:  # its own answer says nothing: if it was refused, so is what follows
        connection.reply()
    return connection.reply()


class PutRequest(_NoCompletion):
    """SET key value NX: stored if nothing is there. A value is visible when it is whole."""

    replies = 1

    def __init__(self, key: bytes, op: PutOp, ttl_ms: int) -> None:
        """Takes the value's buffers from `op`.

        Args:
            key: the key at the server, with the prefix.
            op: the caller's operation.
            ttl_ms: the server deletes the value after so many milliseconds; 0: never.
        """
        self.key = key
        self.nbytes: Final = _nbytes(op.buffers)
        self.weight = _SMALL + self.nbytes
        self._op = op
        self._ttl_ms = ttl_ms

    def parts(self, *, asking: bool) -> list[bytes | memoryview]:
        """Returns the bytes that ask the server for it."""
        self._op = self._op.resolve_before_read()  # once, also where another server is asked afterwards
        head, tail = self._command()
        return [_ASKING + head if asking else head, *flatten_buffers(self._op.buffers), tail]

    def native_parts(self) -> NativePut:
        """Returns what native code sends, after it has sealed a page that is not sealed.

        Raises ValueError if a buffer was released.
        """
        header = self._op.page_header
        if header is None:
            self._op = self._op.resolve_before_read()
        head, tail = self._command()
        return [head, *flatten_buffers(self._op.buffers), tail], header

    def _command(self) -> tuple[bytes, bytes]:
        """Returns what stands in front of the value and behind it."""
        words = 6 if self._ttl_ms else 4
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(self.key), self.key, self.nbytes)
        if not self._ttl_ms:
            return head, b"\r\n$2\r\nNX\r\n"
        ttl = b"%d" % self._ttl_ms
        return head, b"\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)

    def on_idle(self) -> bool:
        """Does a little of what sealing the value takes; see `PutOp.on_idle`."""
        if self._op.on_idle is None:
            return False
        try:
            return self._op.on_idle()
        except ValueError:  # a buffer was released, which `parts` will say
            return False

    def read(self, connection: ValkeyConnection, *, asking: bool) -> Result | ErrorReply:
        """Reads the answer from the connection."""
        reply = _reply(connection, asking=asking)
        if reply is None:
            return Result(ResultCode.EXISTS)
        if isinstance(reply, ErrorReply):
            return reply
        return Result(ResultCode.OK, self.nbytes) if reply == b"OK" else Result(ResultCode.INTERNAL)


class GetRequest(_NoPreparation):
    """GET key, into the caller's buffers."""

    replies = 1

    def __init__(self, key: bytes, op: GetOp) -> None:
        """Takes the buffers to fill from `op`.

        Args:
            key: the key at the server, with the prefix.
            op: the caller's operation.
        """
        self.key = key
        self.weight = _SMALL + _nbytes(op.buffers)
        self._op = op
        self._targets: list[memoryview] = []

    def parts(self, *, asking: bool) -> list[bytes | memoryview]:
        """Returns the bytes that ask the server for it."""
        self._targets = flatten_buffers(self._op.buffers)
        return [_ASKING + self._command() if asking else self._command()]

    def native_parts(self) -> NativeGet | None:
        """Returns what native code sends, and the memory for the answer.

        None if there are several pieces of memory. Raises ValueError if a buffer was released.
        """
        self._targets = flatten_buffers(self._op.buffers)
        return (self._command(), self._targets[0]) if len(self._targets) == 1 else None

    def _command(self) -> bytes:
        return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(self.key), self.key)

    @property
    def wants_checksum(self) -> bool:
        """Returns whether the caller wants to be told the checksum of what has come."""
        return self._op.on_checksum is not None

    def on_answer(self, nbytes: int, checksum: int) -> Result:
        """Takes what native code has received, and returns what came of it."""
        if nbytes < 0:
            return _MISS
        if self._op.on_checksum is not None:
            self._op.on_checksum(nbytes, checksum)
        elif self._op.on_complete is not None:
            self._op.on_complete(nbytes)
        return Result(ResultCode.OK, nbytes)

    def read(self, connection: ValkeyConnection, *, asking: bool) -> Result | ErrorReply:
        """Reads the answer from the connection."""
        if asking:
            connection.reply()
        reply = connection.value(self._targets, self._op.on_progress)
        if reply is None:
            return Result(ResultCode.MISS)
        if isinstance(reply, OversizedValue):
            return Result(ResultCode.TOO_LARGE, reply.nbytes)
        if isinstance(reply, ErrorReply):
            return reply
        return Result(ResultCode.OK, reply)

    def on_result(self, result: Result) -> None:
        """Takes the result that another request has had."""
        if self._op.on_complete is not None and result.code is ResultCode.OK:
            self._op.on_complete(result.nbytes)


class SizeRequest(_NoPreparation, _NoCompletion):
    """STRLEN key, which counts as a use; EXISTS key tells an empty value from none, in the same round trip."""

    replies = 2
    weight = _SMALL

    def __init__(self, key: bytes) -> None:
        self.key = key

    def parts(self, *, asking: bool) -> list[bytes | memoryview]:
        """Returns the bytes that ask the server for it."""
        size = b"*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%b\r\n" % (len(self.key), self.key)
        there = b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(self.key), self.key)
        return [_ASKING + size + _ASKING + there if asking else size + there]

    def read(self, connection: ValkeyConnection, *, asking: bool) -> Result | ErrorReply:
        """Reads the answer from the connection."""
        size = _reply(connection, asking=asking)
        there = _reply(connection, asking=asking)
        for reply in (size, there):
            if isinstance(reply, ErrorReply):
                return reply
        if not isinstance(size, int) or not isinstance(there, int):
            return Result(ResultCode.INTERNAL)
        return Result(ResultCode.OK, size) if size or there else Result(ResultCode.MISS)


class BulkSizeRequest:
    """A `BulkSizeRequest` is a `SizeRequest` for many keys of one server.

    If they may stand in one command, a single EXISTS counts them all: if as many have a size, the others are missing.
    """

    def __init__(self, keys: Sequence[bytes], *, one_slot: bool) -> None:
        """Encodes the request.

        Args:
            keys: the keys at the server, with the prefix.
            one_slot: whether the server takes all keys in one command; a server of a cluster does not.
        """
        words = [b"$%d\r\n%b\r\n" % (len(key), key) for key in keys]
        size, there = b"*2\r\n$6\r\nSTRLEN\r\n", b"*2\r\n$6\r\nEXISTS\r\n"
        self._count = len(keys)
        self._one_slot = one_slot
        self.text: Final = (
            b"".join((size, size.join(words), b"*%d\r\n$6\r\nEXISTS\r\n" % (1 + len(words)), *words))
            if one_slot
            else b"".join([size + word + there + word for word in words])
        )
        self.replies: Final = len(keys) + 1 if one_slot else 2 * len(keys)

    def read(self, connection: ValkeyConnection) -> list[Result | None]:
        """Returns a result for each key, None where it has to be asked on its own.

        It raises as `ValkeyConnection.reply`.
        """
        replies = connection.replies(self.replies)
        sizes = replies[:-1] if self._one_slot else replies[::2]
        if self._one_slot:
            sure = replies[-1] == sum(1 for size in sizes if size)
            there: Sequence[object] = [0 if sure else None] * self._count
        else:
            there = replies[1::2]
        return [
            Result(ResultCode.OK, size)
            if isinstance(size, int) and (size or found == 1)
            else _MISS
            if size == 0 and found == 0
            else None
            for size, found in zip(sizes, there, strict=True)
        ]


class DeleteRequest(_NoPreparation, _NoCompletion):
    """UNLINK key: gone at once, its memory is freed in the server's own time."""

    replies = 1
    weight = _SMALL

    def __init__(self, key: bytes) -> None:
        self.key = key

    def parts(self, *, asking: bool) -> list[bytes | memoryview]:
        """Returns the bytes that ask the server for it."""
        unlink = encode_command(b"UNLINK", self.key)
        return [_ASKING + unlink if asking else unlink]

    def read(self, connection: ValkeyConnection, *, asking: bool) -> Result | ErrorReply:
        """Reads the answer from the connection."""
        reply = _reply(connection, asking=asking)
        if isinstance(reply, ErrorReply):
            return reply
        return Result(ResultCode.OK if reply else ResultCode.MISS)
