"""Bounds further attempts, so that a failing fleet does not get ever more requests.

Attempts beyond the first are a fraction of the requests; a small reserve allows single retries when there is little
traffic.
"""

__all__ = ["RetryBudget"]


class RetryBudget:
    """Shared by all requests. Every request pays in a fraction, every further attempt takes one."""

    __slots__ = ("_level", "most", "ratio")

    def __init__(self, ratio: float = 0.2, most: float = 200.0) -> None:
        """At first it is full: `most` attempts, about what is in flight when an engine dies."""
        if not 0 <= ratio <= 1 or most < 0:
            raise ValueError("ratio must be from 0 to 1, most at least 0")
        self.ratio = ratio
        self.most = most
        self._level = most

    def record_request(self) -> None:
        """A request has come."""
        level = self._level + self.ratio
        self._level = level if level < self.most else self.most

    def try_acquire(self) -> bool:
        """Takes one more attempt from the budget; returns False if there is none."""
        if self._level < 1:
            return False
        self._level -= 1
        return True
