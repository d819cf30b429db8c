"""A worker thread for work that would block the event loop.

Callers never wait. A job that does not fit into the bounded queue is not taken.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

__all__ = ["TokenizerWorker"]

T = TypeVar("T")


class TokenizerWorker(Generic[T]):
    """Runs jobs in a thread, as long as the event loop runs. Jobs run in the order in which they came."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, room: int) -> None:
        """`room`: how much may wait at a time, in the unit in which jobs are weighed."""
        self._loop = loop
        self._room: Final = room
        self._taken = 0
        self._jobs: SimpleQueue[tuple[Callable[[], T], Callable[[T], None], int] | None] = SimpleQueue()
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def pending_weight(self) -> int:
        """The weight of the jobs whose outcome has not been told yet."""
        return self._taken

    def submit(self, job: Callable[[], T], done: Callable[[T], None], weight: int) -> bool:
        """Runs the job in the thread and calls `done` with its outcome in the event loop. `job` never raises.

        Returns:
            False where there is no room: nothing is done then. Something is always taken by a lane that is empty.
        """
        if self._closed or (self._taken and self._taken + weight > self._room):
            return False
        self._taken += weight
        self._jobs.put((job, done, weight))
        return True

    def close(self) -> None:
        """Stops the thread: no more jobs begin, and no more callbacks are called."""
        self._closed = True
        self._jobs.put(None)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None and not self._closed:
            job, done, weight = entry
            outcome = job()
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._tell, done, outcome, weight)

    def _tell(self, done: Callable[[T], None], outcome: T, weight: int) -> None:
        self._taken -= weight
        if not self._closed:
            done(outcome)
