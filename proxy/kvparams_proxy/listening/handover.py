"""The listening sockets of one proxy process, and their way to its successor."""

import logging
import os
import socket
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Final, Self

from kvparams_proxy.listening.activation import take_activated_sockets
from kvparams_proxy.listening.takeover import Predecessor, TakeoverOffer, check_takeover_directory

__all__ = ["SocketHandover"]

_log: Final = logging.getLogger(__name__)


class SocketHandover:
    """Gets listening sockets from systemd or a predecessor, and offers them to a successor. Use it in a `with` block.

    Without a directory and without systemd there is nothing to get and nothing to offer.
    """

    def __init__(
        self,
        inherited: Sequence[socket.socket] = (),
        directory: Path | None = None,
        predecessor: Predecessor | None = None,
    ) -> None:
        self.inherited: Final = tuple(inherited)
        """The listening sockets that this process has got. Whoever serves them closes them."""
        self.has_predecessor: Final = predecessor is not None
        self._directory = directory
        self._predecessor = predecessor
        self._offer: TakeoverOffer | None = None

    @classmethod
    def prepare(cls, directory: Path | None, environment: MutableMapping[str, str] = os.environ) -> Self:
        """Gets the sockets: those of systemd, otherwise those of the proxy that runs. Blocks.

        Args:
            directory: where proxies hand over their sockets; None: they do not.
            environment: the variables of systemd are removed from it.

        Raises:
            OSError: the sockets or the directory cannot be used.
        """
        activated = take_activated_sockets(environment)
        if directory is not None:
            check_takeover_directory(directory)
        predecessor = None if directory is None else Predecessor.find(directory)
        if predecessor is None:
            return cls(activated, directory)
        for each in activated:  # they are those of the predecessor, or clients would not come from there
            each.close()
        return cls(predecessor.sockets, directory, predecessor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def complete(self, sockets: Sequence[socket.socket], on_taken: Callable[[], None]) -> bool:
        """Tells the predecessor that this process serves, and offers the sockets to a successor from now on.

        Args:
            sockets: the listening sockets of this process.
            on_taken: called once, when a successor serves: this process should accept no more connections.

        Returns:
            False if the predecessor makes way for another process: this one must end.
        """
        if self._predecessor is not None and not await self._predecessor.tell_serving():
            _log.error("the proxy before this one makes way for another process; this one ends")
            return False
        if self._directory is not None:
            self._offer = TakeoverOffer(self._directory, sockets, on_taken)
            try:
                self._offer.open()
            except OSError as error:
                _log.error("a successor of this proxy cannot take over its sockets: %s", error)
        return True

    def close(self) -> None:
        """Withdraws the offer. A predecessor that was not told that this process serves goes on."""
        if self._offer is not None:
            self._offer.close()
        if self._predecessor is not None:
            self._predecessor.close()

    def note_address(self, host: str, port: int) -> None:
        """Logs where the process listens, if its sockets are others than its settings ask for."""
        if not self.inherited:
            return
        bound = self.inherited[0].getsockname()
        if port not in (0, bound[1]):
            _log.warning("this proxy listens on %s:%d, which it was given; %s:%d has no effect", *bound[:2], host, port)
