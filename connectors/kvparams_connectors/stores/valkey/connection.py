"""A connection to a server: a stream, and replies that are read from it in the order in which they were asked for.

A connection is reusable only while no reply is owed on it; one that has raised is closed.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Final

from kvparams_connectors.stores.deadline_socket import DeadlineSocket
from kvparams_connectors.stores.valkey.resp import ErrorReply, OversizedValue, ReplyReader

__all__ = ["ValkeyConnection"]

_STEP: Final = 256 << 10
"""Over TCP, where what is not received at once waits in the kernel. A unix socket holds 208 KiB: whenever nobody
receives, however briefly, the server has to go back to its event loop."""


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

    @property
    def is_reusable(self) -> bool:
        """Returns whether no reply is owed or lies unread, and the peer has neither spoken unasked nor gone away."""
        return not self._owed and self._reader.empty and self.is_silent
