"""The process's limit of open files, and what follows from it for the number of connections.

Of `files` that may be open, some are the proxy's own, some are for connections that are told that there are too many,
and the rest is shared by clients and engines. A flood may for a moment use the engines' share, never their share and
the clients' too: the backlog bounds how many connections one turn of the event loop accepts.
"""

import resource
import socket
from contextlib import suppress
from typing import Final

__all__ = [
    "backlog_for",
    "connections_for",
    "descriptor_limit",
    "descriptors_for",
    "raise_descriptor_limit",
    "refusals_for",
]

_OWN: Final = 32
"""Descriptors of what is no connection: the listener, logs, the event loop, sockets of KV events."""
_UNLIMITED: Final = 1 << 20
_MOST_REFUSALS: Final = 64
_REFUSALS_SHARE: Final = 12
"""One in so many descriptors is for a connection that is refused in words."""
_BACKLOG_SHARE: Final = 12
"""One in so many descriptors is for a connection that was accepted in this turn of the event loop. Two turns pass until
the connection that makes room for it is closed."""


def descriptor_limit() -> int:
    """Returns how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """Raises the limit as far as this process may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS reports a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def refusals_for(descriptors: int) -> int:
    """Returns how many connections over the limit may be open at a time to be told so."""
    return min(_MOST_REFUSALS, max(1, descriptors // _REFUSALS_SHARE))


def backlog_for(descriptors: int) -> int:
    """Returns how many connections may wait to be accepted.

    They may all be accepted in one turn of the event loop, before any is counted. The kernel lets further clients wait.
    """
    return min(socket.SOMAXCONN, max(1, descriptors // _BACKLOG_SHARE))


def connections_for(descriptors: int) -> int:
    """Returns how many connections clients may have where `descriptors` files may be open.

    A request that runs takes one for its client and one for its engine.
    """
    return max(1, (descriptors - _OWN - refusals_for(descriptors)) // 2)


def descriptors_for(connections: int) -> int:
    """Returns how many files must be allowed for so many connections of clients: the inverse of `connections_for`."""
    descriptors = 2 * connections + _OWN
    while descriptors - _OWN - refusals_for(descriptors) < 2 * connections:
        descriptors += 1
    return descriptors
