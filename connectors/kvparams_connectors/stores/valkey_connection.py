"""A connection to a server: a socket, and replies that are read from it in the order in which they were asked for.

The one rule: every wait ends at the deadline in force, and a connection that has raised is closed, never used again.
"""

import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Final

from kvparams_connectors.stores.resp import Oversized, ReplyReader, ServerError

__all__ = ["Connection"]

_GRAIN_S: Final = 0.02
"""The kernel's own time-out of one call; the deadline is looked at in between."""
_VECTORS: Final = 1024  # IOV_MAX of Linux
_AT_ONCE: Final = 4 << 20
"""Bytes handed to the kernel in one call, so that a peer that takes them one by one cannot hold it for long."""
_TIMEVAL: Final = struct.Struct("ll")


class Connection:
    """A connected socket, plain or TLS, used by one thread at a time. Every wait ends at the deadline in force."""

    def __init__(self, sock: socket.socket) -> None:
        """Args:
        sock: connected, and from now on ours to close.
        """
        self._socket = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._deadline = 0.0
        self._grain_s = 0.0
        self._owed = 0
        self._reader = ReplyReader(self._receive)
        if not self._tls:
            # The kernel's time-outs on a blocking socket spare a poll() and its way through Python before each call.
            sock.setblocking(True)
            self._set_grain(_GRAIN_S)

    def until(self, deadline: float) -> None:
        """From now on waits end at `deadline`, on the clock of `time.monotonic`."""
        self._deadline = deadline
        if not self._tls and self._grain_s != _GRAIN_S:
            self._set_grain(_GRAIN_S)

    def send(self, parts: Sequence[bytes | memoryview], replies: int) -> None:
        """Send all of `parts`, in order; `replies` more replies are owed to us then.

        Raises:
            TimeoutError: the deadline passed.
            OSError: the connection is gone.
        """
        self._owed += replies
        left = [memoryview(part) for part in parts if len(part)]
        if self._tls:
            for part in left:
                self._send_tls(part)
            return
        at = 0
        while at < len(left):
            end, nbytes = at, 0
            while end < len(left) and end - at < _VECTORS and nbytes < _AT_ONCE:
                nbytes += left[end].nbytes
                end += 1
            vectors = left[at:end]
            if nbytes > _AT_ONCE:
                vectors[-1] = vectors[-1][: vectors[-1].nbytes - (nbytes - _AT_ONCE)]
            self._look_at_the_clock()
            try:
                sent = self._socket.sendmsg(vectors)
            except BlockingIOError:
                continue
            while sent and sent >= left[at].nbytes:
                sent -= left[at].nbytes
                at += 1
            if sent:
                left[at] = left[at][sent:]

    def reply(self) -> int | bytes | ServerError | None:
        """The next reply that is owed; see `ReplyReader.reply`. Raises TimeoutError as well."""
        reply = self._reader.reply()
        self._owed -= 1
        return reply

    def replies(self, count: int) -> list[int | bytes | ServerError | None]:
        """So many of the replies that are owed; see `ReplyReader.replies`. Raises TimeoutError as well."""
        replies = self._reader.replies(count)
        self._owed -= count
        return replies

    def value(self, buffers: Sequence[memoryview]) -> int | Oversized | ServerError | None:
        """The next reply that is owed, a value; see `ReplyReader.value`. Raises TimeoutError as well."""
        reply = self._reader.value(buffers)
        self._owed -= 1
        return reply

    @property
    def reusable(self) -> bool:
        """Whether no reply is owed or lies unread, and the peer has neither spoken unasked nor gone away."""
        if self._owed or not self._reader.empty:
            return False
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()

    def _receive(self, target: memoryview, whole: bool) -> int:
        if self._tls:
            self._socket.settimeout(self._remaining())
            return self._socket.recv_into(target)
        flags = socket.MSG_WAITALL if whole else 0  # one call for a value; the kernel's time-out ends it in between
        while True:
            self._look_at_the_clock()
            try:
                return self._socket.recv_into(target, 0, flags)
            except BlockingIOError:
                continue

    def _send_tls(self, part: memoryview) -> None:
        done = 0
        while done < part.nbytes:
            self._socket.settimeout(self._remaining())
            done += self._socket.send(part[done:])

    def _remaining(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the deadline has passed")
        return remaining

    def _look_at_the_clock(self) -> None:
        if self._deadline - time.monotonic() < self._grain_s:
            self._set_grain(max(0.001, self._remaining()))

    def _set_grain(self, seconds: float) -> None:
        self._grain_s = seconds
        packed = _TIMEVAL.pack(0, int(seconds * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, packed)
