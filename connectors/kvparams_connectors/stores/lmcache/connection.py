"""A connection to an `lm://` server: requests sent, and replies read in the order in which they were asked for.

Invariant: a put that was begun ends whole, or in a reset. If the connection is *closed* in the middle of a value, the
server keeps an entry without bytes that is found and cannot be read (`handle_client` of `lmcache/v1/server/__main__.py`
in LMCache 0.5.6 stores what `receive_all` returns, None included). A reset makes it raise before it stores anything. So
closing resets, as the kernel does if the process is killed, unless no reply is owed.
"""

import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

from kvparams_connectors.stores.deadline_socket import DeadlineSocket, tcp_socket
from kvparams_connectors.stores.lmcache.wire import (
    REPLY_BYTES,
    LMCacheProtocolError,
    LMCacheReply,
    decode_replies,
    decode_reply,
)

__all__ = ["MAX_REPLIES_AT_ONCE", "LMCacheAddress", "LMCacheConnection", "TruncatedReply", "connect"]

MAX_REPLIES_AT_ONCE: Final = 1024
"""Replies without a value that may be owed at a time: they fit into the sockets' memory, so neither side blocks."""
_SKIPPED: Final = 64 << 10
_RESET: Final = struct.pack("ii", 1, 0)
_CLOSE: Final = struct.pack("ii", 0, 0)

LMCacheAddress = tuple[str, int]
"""Host and port."""


class TruncatedReply(ConnectionError):
    """The connection ended where a value should have begun."""


class LMCacheConnection(DeadlineSocket):
    """A connected socket and the replies that are owed on it."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes a connected socket, which `close` closes, with a reset if a reply is owed.

        Args:
            sock: the socket; no other code may use it any more.
        """
        super().__init__(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._owed = 0
        self._replies = memoryview(bytearray(MAX_REPLIES_AT_ONCE * REPLY_BYTES))

    def ask(self, parts: Sequence[bytes | memoryview], replies: int) -> None:
        """Send requests; so many more replies are owed to us then. Raises as `DeadlineSocket.send_parts` does."""
        self._owed += replies
        self.send_parts(parts)

    def reply(self) -> LMCacheReply:
        """The next reply that is owed. What it announces must be received next: see `value` and `skip`.

        Raises:
            LMCacheProtocolError: it is none.
            TimeoutError: the deadline passed.
            OSError: the connection is gone.
        """
        head = self._replies[:REPLY_BYTES]
        self._exactly(head)
        reply = decode_reply(head)
        if not reply.nbytes:
            self._owed -= 1
        if self._owed:
            self._acknowledge()
        return reply

    def replies(self, count: int) -> list[LMCacheReply]:
        """Receives that many replies, at most `MAX_REPLIES_AT_ONCE`, none of which has a value; raises as `reply`."""
        data = self._replies[: count * REPLY_BYTES]
        self._exactly(data, whole=count == 1)
        replies = list(decode_replies(data))
        if any(reply.nbytes for reply in replies):
            raise LMCacheProtocolError("a value came where none was asked for")
        self._owed -= count
        if self._owed:
            self._acknowledge()
        return replies

    def value(self, nbytes: int, targets: Sequence[memoryview]) -> None:
        """Receive the value that a reply has announced.

        Args:
            nbytes: as announced, at least 1.
            targets: flat bytes, writable, `nbytes` at least.

        Raises:
            TruncatedReply: the connection ended before it began.
            TimeoutError: the deadline passed.
            OSError: the connection is gone.
        """
        left = nbytes
        for target in targets:
            if left:
                part = target[:left]
                self._exactly(part, first=left == nbytes)
                left -= part.nbytes
        self._owed -= 1

    def skip(self, nbytes: int) -> None:
        """Receive a value that was announced and throw it away; raises as `value` does."""
        scratch = memoryview(bytearray(min(nbytes, _SKIPPED)))
        left = nbytes
        while left:
            part = scratch[:left]
            self._exactly(part, first=left == nbytes)
            left -= part.nbytes
        self._owed -= 1

    @property
    def is_reusable(self) -> bool:
        """Returns whether no reply is owed, and the peer has neither spoken unasked nor gone away."""
        return not self._owed and self.is_silent

    def close(self) -> None:
        """Closes the socket and resets a connection with owed replies, or one that the server has closed.

        The server listens without SO_REUSEADDR, and could not come back on its port for a minute otherwise.
        """
        if self.is_reusable:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE)
        super().close()

    def _acknowledge(self) -> None:
        """Acknowledges received bytes to the server's kernel at once.

        The server leaves Nagle's algorithm on, so the bytes that it sends behind a reply (its value, or the next one)
        wait there for the acknowledgment, which this kernel may hold back for 40 ms.
        """
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _exactly(self, target: memoryview, *, first: bool = False, whole: bool = True) -> None:
        done, size = 0, target.nbytes
        while done < size:
            if done:
                self._acknowledge()
            try:
                received = self.receive(target[done:], whole)
            except ConnectionError as error:
                if first and not done:
                    raise TruncatedReply("the server broke off before a value") from error
                raise
            if not received:
                if first and not done:
                    raise TruncatedReply("the server closed the connection before a value")
                raise ConnectionError("the server closed the connection")
            done += received


def connect(server: LMCacheAddress, deadline: float, connect_s: float) -> LMCacheConnection:
    """A new connection.

    Args:
        deadline: on the clock of `time.monotonic`.
        connect_s: the longest that it may take.

    Raises:
        TimeoutError: the deadline, or the time for connecting, has passed.
        OSError: it cannot be reached.
    """
    now = time.monotonic()
    until = min(deadline, now + connect_s)
    if until <= now:
        raise TimeoutError("the deadline has passed")
    return LMCacheConnection(tcp_socket(*server, until))
