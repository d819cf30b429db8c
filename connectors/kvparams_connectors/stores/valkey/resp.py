"""RESP (version 2), as far as values need it: replies from a stream of bytes, values straight into their buffers.

A declared length allocates nothing. A stream in an unknown state is never read again, so a caller that gets an
exception from here closes the connection.

The protocol: https://valkey.io/topics/protocol/ (as of Valkey 8.0). Replies here are simple strings, errors, integers
and bulk strings; nothing that a store asks is answered by an array.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvparams_connectors.stores.progress import progress_step_bytes

__all__ = [
    "ErrorReply",
    "OversizedValue",
    "RESPProtocolError",
    "ReceiveInto",
    "ReplyReader",
    "encode_command",
    "flatten_buffers",
]

_SCRATCH: Final = 64 << 10
_LINE: Final = 8 << 10
"""The longest line that is taken for a reply; errors of real servers are far shorter."""
_GLIMPSE: Final = 512
"""How much is received when a value's first line is wanted: the rest goes straight to its buffers."""
_BIG: Final = 16 << 10
"""From this size on a value's bytes are not worth a copy through the scratch memory."""
_DIGITS: Final = 19


class RESPProtocolError(ConnectionError):
    """The peer sent something that is no reply to what was asked."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error reply."""

    text: str

    @property
    def word(self) -> str:
        """Its first word, which says the kind: `OOM`, `NOAUTH`, `MOVED`."""
        return self.text.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class OversizedValue:
    """A value that did not fit into the buffers; nothing was written to them."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class _Bulk:
    """The first line of a bulk string."""

    nbytes: int


def encode_command(*words: bytes) -> bytes:
    """A command whose words are all short; a value's bytes are never copied into one."""
    return b"".join((b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)))


def flatten_buffers(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The same memory as bytes, without the empty pieces. Raises ValueError if a buffer was released."""
    return [buffer.cast("B") for buffer in buffers if buffer.nbytes]


ReceiveInto = Callable[[memoryview, bool, Callable[[], bool] | None], int]
_LOOK: Final = 64 << 10
"""So much is looked at before it is asked again whether more has come."""


class ReplyReader:
    """Replies from a stream of bytes that may be cut anywhere."""

    def __init__(self, receive: ReceiveInto, *, step: int | None) -> None:
        """Allocates the scratch memory; nothing is read yet.

        Args:
            receive: as `DeadlineSocket.receive`.
            step: the number of bytes to receive before `GetOp.on_progress` is called. None: it is called whenever the
                reader would have to wait for more bytes.
        """
        self._receive = receive
        self._about = step
        self._memory = bytearray(_SCRATCH)
        self._view = memoryview(self._memory)
        self._start = 0
        self._end: int = 0

    @property
    def empty(self) -> bool:
        """Returns whether everything that was received has been read."""
        return self._start == self._end

    def feed(self, received: bytes) -> None:
        """Takes bytes of the stream that another reader has received and not read, at most 64 KiB.

        Nothing that this reader has received may be left.
        """
        self._memory[: len(received)] = received
        self._start, self._end = 0, len(received)

    def reply(self) -> int | bytes | ErrorReply | None:
        """A reply of one line: an integer, a simple string, an error, or None for the null reply.

        Raises:
            RESPProtocolError: it is something else.
            ConnectionError: the stream ended.
        """
        line = self._line(_SCRATCH)
        if isinstance(line, _Bulk):
            raise RESPProtocolError("a value came where none was asked for")
        return line

    def replies(self, count: int) -> list[int | bytes | ErrorReply | None]:
        """Reads that many one-line replies together, which costs less; raises as `reply` does."""
        found: list[int | bytes | ErrorReply | None] = []
        while len(found) < count:
            at = self._memory.rfind(b"\r\n", self._start, self._end)
            if at < 0:
                found.append(self.reply())  # it waits, and knows how long a line may be
                continue
            lines = bytes(self._view[self._start : at]).split(b"\r\n")[: count - len(found)]
            for line in lines:
                meaning = _meaning(line)
                if isinstance(meaning, _Bulk):
                    raise RESPProtocolError("a value came where none was asked for")
                found.append(meaning)
            self._start += sum(map(len, lines)) + 2 * len(lines)
        return found

    def value(
        self, buffers: Sequence[memoryview], coming: Callable[[int], None] | None = None
    ) -> int | OversizedValue | ErrorReply | None:
        """A value, received into `buffers` one after the other.

        Args:
            buffers: flat bytes, writable; see `flatten_buffers`.
            coming: see `GetOp`.

        Returns:
            its size in bytes; None if there is none; `OversizedValue` if it is larger than the buffers together, after
            it was received and thrown away.

        Raises:
            RESPProtocolError: the reply is no value.
            ConnectionError: the stream ended.
        """
        room = sum(buffer.nbytes for buffer in buffers)
        line = self._line(_GLIMPSE if room >= _BIG else _SCRATCH)
        if line is None or isinstance(line, ErrorReply):
            return line
        if not isinstance(line, _Bulk):
            raise RESPProtocolError("a value was asked for and something else came")
        if line.nbytes > room:
            self._skip(line.nbytes)
            self._end_of_value()
            return OversizedValue(line.nbytes)
        left = line.nbytes
        step = left
        if coming is not None and self._about is None and left >= _BIG:
            self._looked_at(buffers, left, coming)
            self._end_of_value()
            return left
        if coming is not None:
            if self._about is not None:
                step = progress_step_bytes(
                    left, self._about
                )  # equal parts: a small last one would go through the scratch memory
            if step >= left:
                coming = None  # what comes in one part is looked at when it has arrived
            else:
                coming(0)
        for buffer in buffers:
            at = 0
            while left and at < buffer.nbytes:
                part = buffer[at : at + min(step, left)]
                self._exactly(part)
                at += part.nbytes
                left -= part.nbytes
                if coming is not None and left:  # the last part is looked at when it has arrived
                    coming(line.nbytes - left)
        self._end_of_value()
        return line.nbytes

    def _looked_at(self, buffers: Sequence[memoryview], nbytes: int, coming: Callable[[int], None]) -> None:
        """Receive a value, and say what has come of it while the rest is waited for."""
        came = told = 0

        def look() -> bool:
            nonlocal told
            if told == came:
                return False
            told = min(told + _LOOK, came)
            coming(told)
            return True

        coming(0)
        for buffer in buffers:
            target = buffer[: nbytes - came]
            held = min(self._end - self._start, target.nbytes)
            target[:held] = self._view[self._start : self._start + held]
            self._start += held
            came += held
            while held < target.nbytes:
                received = self._receive(target[held:], False, look)
                if not received:
                    raise ConnectionError("the server closed the connection within a value")
                held += received
                came += received

    def _line(self, most: int) -> int | bytes | ErrorReply | _Bulk | None:
        """The next line and what it says; receives at most `most` bytes at a time."""
        while (at := self._memory.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start > _LINE:
                raise RESPProtocolError("a line has no end")
            self._fill(most)
        if at - self._start > _LINE:
            raise RESPProtocolError("a line is too long")
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return _meaning(line)

    def _fill(self, most: int) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == _SCRATCH:
            held = self._end - self._start
            self._memory[:held] = self._memory[self._start : self._end]
            self._start, self._end = 0, held
        received = self._receive(self._view[self._end : self._end + most], False, None)
        if not received:
            raise ConnectionError("the server closed the connection")
        self._end += received

    def _exactly(self, target: memoryview) -> None:
        """Fill `target`: from what is here already, then directly."""
        held = min(self._end - self._start, target.nbytes)
        if held:
            target[:held] = self._view[self._start : self._start + held]
            self._start += held
        done, size = held, target.nbytes
        while done < size and size < _BIG:  # small values come many at a time
            self._fill(_SCRATCH)
            held = min(self._end, size - done)
            target[done : done + held] = self._view[:held]
            self._start = held
            done += held
        while done < size:  # all that was here has been used
            received = self._receive(target[done:], self._about is not None, None)
            if not received:
                raise ConnectionError("the server closed the connection within a value")
            done += received

    def _skip(self, nbytes: int) -> None:
        while nbytes:
            if self._start == self._end:
                self._fill(min(_SCRATCH, nbytes))
            held = min(self._end - self._start, nbytes)
            self._start += held
            nbytes -= held

    def _end_of_value(self) -> None:
        while self._end - self._start < 2:
            self._fill(_GLIMPSE)
        if not self._memory.startswith(b"\r\n", self._start, self._end):
            raise RESPProtocolError("a value does not end where it should")
        self._start += 2


def _meaning(line: bytes) -> int | bytes | ErrorReply | _Bulk | None:
    kind, rest = line[:1], line[1:]
    if kind == b":":
        return int(rest) if rest.isdigit() and len(rest) <= _DIGITS else _number(rest)
    if kind == b"$":
        if rest == b"-1":
            return None
        nbytes = _number(rest)
        if nbytes < 0:
            raise RESPProtocolError("a value of negative length")
        return _Bulk(nbytes)
    if kind == b"+":
        return rest
    if kind == b"-":
        return ErrorReply(rest.decode("utf-8", "backslashreplace"))
    raise RESPProtocolError(f"a reply of an unknown kind: {line[:32]!r}")


def _number(text: bytes) -> int:
    digits = text.removeprefix(b"-")
    if not (digits.isdigit() and len(digits) <= _DIGITS):
        raise RESPProtocolError(f"{text[:32]!r} is not a number")
    return int(text)
