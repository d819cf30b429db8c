"""Hands the listening sockets of a running proxy to its successor, so that no connection is refused in between.

Both name the same directory, which only their user can enter; the running proxy offers its sockets there, at a unix
socket. The successor connects and gets copies of the listening sockets. Both accept connections until the successor
serves and says so; then the predecessor accepts no more, lets its requests end and exits. A successor that fails to
start closes the connection, and its predecessor goes on.

The messages are single bytes, but for the sockets (unix(7), SCM_RIGHTS). Each side checks the user id of the other.
"""

import asyncio
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Final

from kvparams_proxy.listening.activation import ActivationError, adopt_socket

__all__ = ["Predecessor", "TakeoverError", "TakeoverOffer", "check_takeover_directory"]

_log: Final = logging.getLogger(__name__)
_NAME: Final = "takeover.sock"
_MOST: Final = 64
"""Listening sockets of one proxy: one for each worker."""
_SOCKETS: Final = b"S"
_SERVING: Final = b"R"
_ACCEPTED: Final = b"A"
_REFUSED: Final = b"N"
_AGAIN_S: Final = 1.0
_ANSWER_S: Final = 10.0
"""The longest time for one answer of the other side's event loop."""
_CREDENTIALS: Final = struct.Struct("iII")
"""`struct ucred`: process, user, group."""


class TakeoverError(OSError):
    """The sockets of the predecessor cannot be taken over."""


def check_takeover_directory(path: Path) -> Path:
    """Returns the directory, and makes it if it is missing.

    Raises:
        TakeoverError: it is no directory, or others than this user may enter it.
    """
    try:
        path.mkdir(0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise TakeoverError(f"{path} cannot be used: {error.strerror or error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise TakeoverError(f"{path} is no directory")
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise TakeoverError(f"{path} must belong to the user of the proxy, who alone may enter it (chmod 700)")
    return path


class Predecessor:
    """The connection of a successor to the proxy that it replaces."""

    def __init__(self, connection: socket.socket, sockets: list[socket.socket]) -> None:
        self._connection = connection
        self.sockets: Final = sockets
        """Copies of its listening sockets."""

    @classmethod
    def find(cls, directory: Path) -> "Predecessor | None":
        """Returns the proxy that offers its sockets in a directory, or None if there is none. Blocks.

        Raises:
            TakeoverError: there is one, and it does not hand them over.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_ANSWER_S)
            try:
                connection.connect(str(directory / _NAME))
            except (FileNotFoundError, ConnectionRefusedError):  # there is none, or it was killed
                connection.close()
                return None
            if not _is_same_user(connection):
                raise TakeoverError("a process of another user offers its sockets there")
            message, descriptors, _, _ = socket.recv_fds(connection, len(_SOCKETS), _MOST)
            if message != _SOCKETS or not descriptors:  # it is shutting down
                connection.close()
                return None
            return cls(connection, [adopt_socket(each, "the running proxy") for each in descriptors])
        except (TakeoverError, ActivationError):
            connection.close()
            raise
        except OSError as error:
            connection.close()
            raise TakeoverError(f"the running proxy does not hand over its sockets: {error}") from error

    async def tell_serving(self) -> bool:
        """Tells it that this process serves. Returns whether it makes way: False if it does so for another process."""
        loop = asyncio.get_running_loop()
        self._connection.setblocking(False)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await loop.sock_sendall(self._connection, _SERVING)
                return await loop.sock_recv(self._connection, 1) != _REFUSED
        except OSError as error:  # it has exited meanwhile; `TimeoutError` is one, too
            _log.warning("the proxy before this one does not say that it makes way: %s", error or "no answer")
            return True
        finally:
            self._connection.close()

    def close(self) -> None:
        """Closes the connection: the predecessor goes on, unless it was told that this process serves."""
        self._connection.close()


class TakeoverOffer:
    """Offers the listening sockets of this process to a successor."""

    def __init__(self, directory: Path, sockets: Sequence[socket.socket], on_taken: Callable[[], None]) -> None:
        """Creates an offer that is not open yet.

        Args:
            directory: see `check_takeover_directory`.
            sockets: the listening sockets.
            on_taken: called once, when a successor serves.
        """
        self._path = directory / _NAME
        self._sockets = [each for number, each in enumerate(sockets) if each not in sockets[:number]]
        self._on_taken = on_taken
        self._is_taken = False
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Offers the sockets, from now on in place of a predecessor. Needs the running event loop.

        Raises:
            OSError: the unix socket cannot be made.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            own = self._path.with_name(f"{token_hex(4)}.sock")
            listener.bind(str(own))
            listener.listen(1)
            listener.setblocking(False)
            own.replace(self._path)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._inode = self._path.lstat().st_ino
        self._spawn(listener)

    def close(self) -> None:
        """Withdraws the offer."""
        for task in self._tasks:
            task.cancel()
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        with suppress(OSError):
            if self._path.lstat().st_ino == self._inode:  # or it is the successor's by now
                self._path.unlink()

    def _spawn(self, listener: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._accept(listener))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_taken:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many open files, say
                _log.warning("a successor could not be heard: %s", error)
                await asyncio.sleep(_AGAIN_S)
                continue
            task = loop.create_task(self._hand_over(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _hand_over(self, connection: socket.socket) -> None:
        """Gives one successor the sockets, and waits until it serves or is gone."""
        loop = asyncio.get_running_loop()
        was_taken = True
        with connection:
            if not _is_same_user(connection):
                _log.warning("a process of another user has asked for the listening sockets and gets none")
                return
            try:
                socket.send_fds(connection, [_SOCKETS], [each.fileno() for each in self._sockets])
                _log.info("a successor starts and has got the listening sockets")
                if await loop.sock_recv(connection, 1) != _SERVING:
                    _log.warning("the successor has not started; this proxy goes on")
                    return
                was_taken, self._is_taken = self._is_taken, True
                await loop.sock_sendall(connection, _REFUSED if was_taken else _ACCEPTED)
            except OSError as error:
                if not was_taken:
                    self._is_taken = False  # another one may come
                _log.warning("the successor has not started; this proxy goes on: %s", error)
                return
        if not was_taken:
            _log.info("the successor serves; this proxy accepts no more connections and lets its requests end")
            self._on_taken()


def _is_same_user(connection: socket.socket) -> bool:
    """Returns whether the other side has the same user id. Only Linux tells; elsewhere the directory protects."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
    return user == os.geteuid()
