"""Determines whether calls into somebody else's library come back: a breaker for calls that block. Pure.

Calls are reported when they begin and end. One that has not come back although nobody waits for it any more is a stall,
and so is an answer that says that no call can succeed. From then on everything is refused until a probe has succeeded
and no call is overdue. Whoever is refused is refused at once; only a probe finds out whether it is over.
"""

import threading
from typing import Final

__all__ = ["StallBreaker"]


class StallBreaker:
    """The calls in flight, and whether more may begin. Times are in seconds on any one clock."""

    def __init__(self, patience_s: float) -> None:
        """Begins closed: calls may begin.

        Args:
            patience_s: a call that has taken fewer seconds is no stall, however short its deadline was.
        """
        self._patience_s: Final = patience_s
        self._changed: Final = threading.Condition(threading.Lock())
        self._next = 0
        self._running: dict[int, float] = {}
        """When each call is overdue."""
        self._tripped = False
        self._ended = False
        self._trips = 0

    @property
    def trip_count(self) -> int:
        """Returns how often everything began to be refused."""
        with self._changed:
            return self._trips

    @property
    def running(self) -> int:
        """Calls in flight."""
        with self._changed:
            return len(self._running)

    def begin(self, now: float, deadline: float) -> int | None:
        """A call is about to be made: a number for `end`, or None if there must be no more calls at all."""
        with self._changed:
            if self._ended:
                return None
            self._next += 1
            self._running[self._next] = max(deadline, now + self._patience_s)
            return self._next

    def end(self, call: int, *, lost: bool = False) -> None:
        """A call came back; `lost`: with the answer that no call can succeed."""
        with self._changed:
            del self._running[call]
            if lost:
                self._trip()
            self._changed.notify_all()

    def is_open(self, now: float) -> bool:
        """Returns whether calls are refused."""
        with self._changed:
            if any(overdue <= now for overdue in self._running.values()):
                self._trip()
            return self._tripped or self._ended

    def recover(self, now: float) -> bool:
        """A probe has succeeded; whether calls are let through again: not while one is overdue."""
        with self._changed:
            if not any(overdue <= now for overdue in self._running.values()):
                self._tripped = False
            return not self._tripped

    def finish(self, timeout_s: float) -> bool:
        """Let no call begin any more and wait for those in flight, at most `timeout_s`; whether all came back."""
        with self._changed:
            self._ended = True
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def _trip(self) -> None:
        """The lock is held."""
        if not self._tripped:
            self._tripped = True
            self._trips += 1
