"""The interface that takes changes from the admin API of one worker to the other workers."""

from typing import NamedTuple, Protocol

__all__ = ["AdminWrite", "AdminWriteListener"]


class AdminWrite(NamedTuple):
    """A request to `/admin` that has changed something."""

    method: str
    path: str
    """Decoded, with its query."""
    body: bytes


class AdminWriteListener(Protocol):
    """Takes changes to the other workers."""

    async def written(self, write: AdminWrite) -> None:
        """Takes a change to the other workers. It is already made in this one, and its client waits for the answer.

        Raises:
            ProxyError: the client gets this error instead. The change in this worker stays.
        """
        ...
