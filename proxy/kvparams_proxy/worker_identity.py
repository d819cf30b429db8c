"""The place of a worker process among those of one proxy, as the supervisor tells it (`kvparams proxy --workers`)."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["WorkerIdentity"]


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Names one worker process."""

    number: int
    """From 1 to `count`. A successor has the number of the worker that it replaces; during a reload both run."""
    count: int
    """How many workers the proxy has."""
    serial: int
    """A number that no other process of this proxy has or had; later processes have higher ones."""
    directory: Path
    """A directory that only this proxy's workers share, for sockets and locks. It is empty when the proxy starts, is
    removed when it ends, and only its owner may read it."""
