"""The identity of a worker process of `kvparams proxy --workers`, as assigned by the supervisor."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["WorkerIdentity"]


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identifies one worker process of a proxy."""

    number: int
    """From 1 to `count`. A successor gets the number of the worker that it replaces. During a reload both run."""
    count: int
    """The number of workers of the proxy."""
    serial: int
    """Unique among all worker processes that the proxy has started. A later process has a higher one."""
    directory: Path
    """A private directory of this proxy's workers, for sockets and locks. The supervisor creates it with mode 0700 and
    removes it when the proxy exits."""
