"""Limits how many batches transfer values at a time, whatever the number of threads that work on batches."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

__all__ = ["TransferTurns"]


class TransferTurns:
    """Turns on the way to a server.

    There is a thread more than there are turns: while the server works on one batch, the next one is made ready and the
    last one looked at.
    """

    def __init__(self, count: int) -> None:
        """Begins with all turns free.

        Args:
            count: the number of batches that transfer values at a time.
        """
        self._free: Final = threading.Semaphore(count)

    @contextmanager
    def held(self, deadline: float) -> Generator[None]:
        """Holds a turn.

        Args:
            deadline: on the clock of `time.monotonic`.

        Raises:
            TimeoutError: none came free until the deadline.
        """
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError("other transfers took all of the time")
        try:
            yield
        finally:
            self._free.release()
