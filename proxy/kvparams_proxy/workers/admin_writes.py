"""The interface through which a change made at one worker's admin API reaches the other workers."""

from typing import NamedTuple, Protocol

__all__ = ["AdminWrite", "AdminWriteListener"]


class AdminWrite(NamedTuple):
    """A request that has changed something through `/admin`."""

    method: str
    path: str
    """Decoded, with its query."""
    body: bytes


class AdminWriteListener(Protocol):
    """Takes changes to the other workers."""

    async def written(self, write: AdminWrite) -> None:
        """Takes a change that has been made here to the other workers; the client gets its answer afterwards.

        Raises:
            ProxyError: the answer instead; the change stays made here.
        """
        ...
