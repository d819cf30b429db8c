"""A connection between two peers.

That of `DeadlineSocket`: every wait ends at the deadline in force, and a connection that has raised is closed.
"""

import select
import socket
from contextlib import suppress

from kvparams_connectors.stores.deadline_socket import DeadlineSocket

__all__ = ["PeerChannel"]


class PeerChannel(DeadlineSocket):
    """A stream, used by one thread at a time; another one may only `hang_up`."""

    def fill(self, target: memoryview) -> None:
        """Receive exactly as many bytes as `target` has.

        Raises:
            TimeoutError: the deadline passed.
            OSError: the connection is gone, or was closed before.
        """
        done = 0
        while done < target.nbytes:
            received = self.receive(target[done:], True)
            if not received:
                raise ConnectionError("the other side closed the connection")
            done += received

    def read(self, nbytes: int) -> bytearray:
        """The next bytes, a few; raises like `fill`."""
        memory = bytearray(nbytes)
        self.fill(memoryview(memory))
        return memory

    def wait_readable(self, wait_s: float) -> bool:
        """Returns whether the other side says something, or hangs up, within this time."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLRDHUP)
        return bool(poll.poll(max(0.0, wait_s) * 1000))

    def hang_up(self) -> None:
        """End the connection; whoever waits on it is told. It is still to be closed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
