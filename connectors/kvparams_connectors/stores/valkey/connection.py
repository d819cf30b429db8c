"""A connection to a server: a stream, and replies that are read from it in the order in which they were asked for.

A connection is reusable only while no reply is owed on it; one that has raised is closed.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvparams.native import NATIVE, NativeCode
from kvparams_connectors.stores.deadline_socket import DeadlineSocket
from kvparams_connectors.stores.valkey.resp import ErrorReply, OversizedValue, ReplyReader, RESPProtocolError

__all__ = ["NativeGet", "NativeOutcome", "NativePut", "ValkeyConnection", "Window"]

NativePut = tuple[list[bytes | memoryview], bytes | None]
"""What is sent to put a value, and the header of a page that lacks its checksums."""
NativeGet = tuple[bytes, memoryview]
"""What is sent to get a value, and the memory for it."""
Window = tuple[int, int]
"""How many bytes may be under way, of several values and of two."""
Answer = TypeVar("Answer")

_LATE: Final = 2
_CLOSED: Final = 3
_BROKEN: Final = 4
_FAILED: Final = 5
"""How an exchange in native code has ended; see `kvparams.native.interface`."""
_STEP: Final = 256 << 10
"""Over TCP, where what is not received at once waits in the kernel. A unix socket holds 208 KiB: whenever nobody
receives, however briefly, the server has to go back to its event loop."""


@dataclass(frozen=True, slots=True)
class NativeOutcome(Generic[Answer]):
    """A `NativeOutcome` is what native code has done of several requests."""

    answers: list[Answer]
    """To the first requests. The next reply that is owed is that to the request behind these."""
    sent: int
    """So many requests were sent."""
    error: OSError | None
    """Why the connection is over; None: it goes on."""


class ValkeyConnection(DeadlineSocket):
    """A connected socket, plain or TLS, used by one thread at a time. Every wait ends at the deadline in force."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes a connected socket, which `close` closes.

        Args:
            sock: the socket, plain or TLS; no other code may use it any more.
        """
        super().__init__(sock)
        self._owed = 0
        unix = sock.family == socket.AF_UNIX
        self._reader = ReplyReader(self.receive, step=None if unix else _STEP)

    def send(
        self, parts: Sequence[bytes | memoryview], replies: int, meanwhile: Callable[[], bool] | None = None
    ) -> None:
        """Send all of `parts`, in order; `replies` more replies are owed to us then. See `send_parts`."""
        self._owed += replies
        self.send_parts(parts, meanwhile)

    def reply(self) -> int | bytes | ErrorReply | None:
        """The next reply that is owed; see `ReplyReader.reply`. Raises TimeoutError as well."""
        reply = self._reader.reply()
        self._owed -= 1
        return reply

    def replies(self, count: int) -> list[int | bytes | ErrorReply | None]:
        """Receives that many replies; see `ReplyReader.replies`. Raises TimeoutError as well."""
        replies = self._reader.replies(count)
        self._owed -= count
        return replies

    def value(
        self, buffers: Sequence[memoryview], coming: Callable[[int], None] | None = None
    ) -> int | OversizedValue | ErrorReply | None:
        """The next reply that is owed, a value; see `ReplyReader.value`. Raises TimeoutError as well."""
        reply = self._reader.value(buffers, coming)
        self._owed -= 1
        return reply

    def put_values(self, values: list[NativePut], window: Window) -> NativeOutcome[bool]:
        """Puts values in native code, up to the first reply that is out of the ordinary; not over TLS.

        Args:
            values: see `NativeCode.put_values`.
            window: of this connection.

        Returns:
            Of each value whether it was stored, and did not exist.

        Raises:
            ValueError: a buffer was released; nothing was done.
        """
        native, fd = self._native()
        return self._outcome(*native.put_values(fd, self.deadline, values, *window))

    def get_values(
        self, values: list[NativeGet], window: Window, *, are_hashed: bool
    ) -> NativeOutcome[tuple[int, int]]:
        """Gets values in native code; see `put_values`.

        Args:
            values: see `NativeCode.get_values`.
            window: of this connection.
            are_hashed: whether checksums are wanted.

        Returns:
            Of each value its size, -1 if there is none, and XXH3-64 of what follows the header of a page.
        """
        native, fd = self._native()
        return self._outcome(*native.get_values(fd, self.deadline, values, are_hashed, *window))

    def _native(self) -> tuple[NativeCode, int]:
        fd = self.plain_fd
        if NATIVE is None or fd is None:
            raise RuntimeError("there is no native code for this connection")
        return NATIVE, fd

    def _outcome(self, status: int, error: int, answers: list[Answer], sent: int, rest: bytes) -> NativeOutcome[Answer]:
        self._owed += sent - len(answers)
        if rest:
            self._reader.feed(rest)
        return NativeOutcome(answers, sent, _failure(status, error))

    @property
    def is_idle(self) -> bool:
        """Returns whether no reply is owed or lies unread."""
        return not self._owed and self._reader.empty

    @property
    def is_reusable(self) -> bool:
        """Returns whether no reply is owed or lies unread, and the peer has neither spoken unasked nor gone away."""
        return self.is_idle and self.is_silent


def _failure(status: int, error: int) -> OSError | None:
    """Returns why a connection is over after an exchange in native code; None: it goes on."""
    if status == _LATE:
        return TimeoutError("the deadline has passed")
    if status == _CLOSED:
        return ConnectionError("the server closed the connection")
    if status == _BROKEN:
        return RESPProtocolError("a value does not end where it should")
    return OSError(error, os.strerror(error)) if status == _FAILED else None
