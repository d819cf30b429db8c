"""A connected socket whose every wait ends at a deadline: what stores that speak a server's protocol themselves share.

One thread at a time uses a socket. A socket that has raised is closed and never used again.
"""

import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

__all__ = ["DeadlineSocket", "tcp_socket"]

_GRAIN_S: Final = 0.02
"""The kernel's own time-out of one call; the deadline is looked at in between."""
_VECTORS: Final = 1024  # IOV_MAX of Linux
_AT_ONCE: Final = 4 << 20
"""Bytes handed to the kernel in one call, so that a peer that takes them one by one cannot hold it for long."""
_TIMEVAL: Final = struct.Struct("ll")

_ResolvedAddress = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]
"""As `socket.getaddrinfo` gives them."""


def tcp_socket(host: str, port: int, until: float) -> socket.socket:
    """Connect to a server. A name is looked up, and each of its addresses has a share of the time that is left.

    Args:
        until: when to give up, on the clock of `time.monotonic`.

    Raises:
        TimeoutError: it took too long.
        OSError: it cannot be reached.
    """
    sock = _connected(_addresses(host, port, until), until)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _addresses(host: str, port: int, until: float) -> Sequence[_ResolvedAddress]:
    """Returns where a host can be reached. Nothing bounds a look-up but a thread that is left to it."""
    with suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    found: list[Sequence[_ResolvedAddress]] = []
    failures: list[Exception] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=look_up, name="kvparams-look-up", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(f"no thread to look up {host}: {error}") from error
    thread.join(max(0.001, until - time.monotonic()))
    if found and found[0]:
        return found[0]
    if failures:
        raise failures[0] if isinstance(failures[0], OSError) else OSError(f"{host} cannot be looked up: {failures[0]}")
    raise TimeoutError(f"{host} was not found in time")


def _connected(addresses: Sequence[_ResolvedAddress], until: float) -> socket.socket:
    failure: OSError = TimeoutError("the deadline has passed")
    for number, (family, kind, protocol, _, address) in enumerate(addresses):
        remaining = until - time.monotonic()
        if remaining <= 0 and number:
            break
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # this machine has no such addresses
            failure = error
            continue
        try:
            sock.settimeout(max(0.001, remaining / (len(addresses) - number)))
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


class DeadlineSocket:
    """A connected socket, plain or TLS. Every wait ends at the deadline in force."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes a connected socket, which `close` closes.

        Args:
            sock: the socket; no other code may use it any more.
        """
        self._socket = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._deadline = 0.0
        self._grain_s = 0.0
        self._poll: select.poll | None = None
        if not self._tls:
            # The kernel's time-outs on a blocking socket spare a poll() and its way through Python before each call.
            sock.setblocking(True)
            self._set_grain(_GRAIN_S)

    def set_deadline(self, deadline: float) -> None:
        """From now on waits end at `deadline`, on the clock of `time.monotonic`."""
        self._deadline = deadline
        if not self._tls and self._grain_s != _GRAIN_S:
            self._set_grain(_GRAIN_S)

    def send_parts(self, parts: Sequence[bytes | memoryview], meanwhile: Callable[[], bool] | None = None) -> None:
        """Send all of `parts`, in order.

        Args:
            meanwhile: something else to do, for tens of microseconds, called where it would only be waited, until it
                says that there is no more of it.

        Raises:
            TimeoutError: the deadline passed.
            OSError: the connection is gone.
        """
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
                sent = self._socket.sendmsg(vectors, (), 0 if meanwhile is None else socket.MSG_DONTWAIT)
            except BlockingIOError:
                if meanwhile is not None and not meanwhile():
                    meanwhile = None
                continue
            while sent and sent >= left[at].nbytes:
                sent -= left[at].nbytes
                at += 1
            if sent:
                left[at] = left[at][sent:]

    def receive(self, target: memoryview, whole: bool, meanwhile: Callable[[], bool] | None = None) -> int:
        """Fill some of `target` and say how much; 0 when the stream has ended.

        Args:
            whole: all of it is wanted, and may be waited for; it may be less nevertheless.
            meanwhile: as for `send_parts`.

        Raises:
            TimeoutError: the deadline passed.
            OSError: the connection is gone.
        """
        if self._tls:
            self._socket.settimeout(self._remaining())
            return self._socket.recv_into(target)
        flags = socket.MSG_WAITALL if whole else 0  # one call for a value; the kernel's time-out ends it in between
        while True:
            self._look_at_the_clock()
            try:
                return self._socket.recv_into(target, 0, flags if meanwhile is None else socket.MSG_DONTWAIT)
            except BlockingIOError:
                if meanwhile is not None and not meanwhile():
                    meanwhile = None

    @property
    def plain_fd(self) -> int | None:
        """Returns the file descriptor, for native code that ends its waits at `deadline`; None for TLS."""
        return None if self._tls else self._socket.fileno()

    @property
    def deadline(self) -> float:
        """Returns when waits end, on the clock of `time.monotonic`."""
        return self._deadline

    @property
    def is_silent(self) -> bool:
        """Returns whether the peer has neither said anything that was not received nor gone away."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return False
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN | select.POLLRDHUP)
        return not self._poll.poll(0)

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()

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
