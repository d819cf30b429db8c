"""Takes the listening sockets that systemd passes to a service (socket activation).

Source: sd_listen_fds(3) of systemd 252.
"""

import os
import re
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

__all__ = ["ActivationError", "adopt_socket", "take_activated_sockets"]

_FIRST: Final = 3
"""SD_LISTEN_FDS_START."""
_MOST: Final = 256
_NUMBER: Final = re.compile(r"[0-9]{1,10}")
_NAMES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_HTTP: Final = "http"
"""The name that tells the proxy's socket from others of the same service."""


class ActivationError(OSError):
    """The sockets that were passed cannot be used."""


def take_activated_sockets(environment: MutableMapping[str, str] = os.environ) -> list[socket.socket]:
    """Returns the listening sockets that are meant for this process, and removes the variables that name them.

    Of several, those called `http` (`FileDescriptorName=`) are taken if there are any; the others are closed.

    Raises:
        ActivationError: one is no listening TCP socket.
    """
    given = [environment.pop(name, "") for name in _NAMES]
    pid, count, names = given
    if pid != str(os.getpid()) or not _NUMBER.fullmatch(count) or not 0 < int(count) <= _MOST:
        return []
    descriptors = range(_FIRST, _FIRST + int(count))
    named = dict(zip(descriptors, names.split(":"), strict=False))
    chosen = [each for each in descriptors if named.get(each) == _HTTP] or list(descriptors)
    for descriptor in descriptors:
        if descriptor not in chosen:
            with suppress(OSError):
                os.close(descriptor)
    return [adopt_socket(descriptor, "systemd") for descriptor in chosen]


def adopt_socket(descriptor: int, source: str) -> socket.socket:
    """Returns the socket of a descriptor, which programs that this process starts do not inherit.

    Raises:
        ActivationError: it is no listening TCP socket.
    """
    try:
        found = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ActivationError(f"descriptor {descriptor} of {source} is no socket: {error}") from error
    found.set_inheritable(False)
    is_listening = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    if not is_listening or not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        found.close()
        raise ActivationError(f"descriptor {descriptor} of {source} is no listening TCP socket")
    return found
