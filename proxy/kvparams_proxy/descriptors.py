"""The process's limit of open files, and what follows from it for the number of connections."""

import resource
from contextlib import suppress
from typing import Final

__all__ = ["connections_for", "descriptor_limit", "descriptors_for", "raise_descriptor_limit"]

_OWN: Final = 32
"""Descriptors of what is no connection: the listener, logs, the event loop, sockets of KV events."""
_UNLIMITED: Final = 1 << 20


def descriptor_limit() -> int:
    """Returns how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """Raises the limit as far as this process may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS reports a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_for(descriptors: int) -> int:
    """Returns how many connections clients may have where `descriptors` files may be open: a request that runs takes
    one for its client and one for its engine."""
    return max(1, (descriptors - _OWN) // 2)


def descriptors_for(connections: int) -> int:
    """Returns how many files must be allowed for so many connections of clients: the inverse of `connections_for`."""
    return 2 * connections + _OWN
