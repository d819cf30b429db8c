"""Estimates the load on an engine that comes from clients unknown to this proxy, such as proxies that share nothing.

The engine's queue depth counts all requests. Those that this proxy knows, its own and those that other proxies have
told it of, are subtracted; the rest is foreign load. Its size in tokens and seconds is unknown, so each foreign leg
counts as much as the mean leg of this proxy.
"""

from typing import Final

__all__ = ["ForeignLoad", "MeanLeg"]

_FRESH_S: Final = 2.0
"""A reading counts in full for so long. After it, it halves in each further time of this length."""
_STUCK_S: Final = 60.0
"""An engine whose figure has not changed for so long is taken to report no more: vLLM updates its gauges in scheduler
steps, so the last figure stays when an engine's last request is aborted."""
_KEPT: Final = 0.98
"""The weight of earlier legs beside the next reading's: the last 50 readings count."""


class ForeignLoad:
    """The foreign load on one engine, from readings of its queue depth."""

    __slots__ = ("_at", "_depth", "_known", "_legs", "_since")

    def __init__(self) -> None:
        self._legs = 0
        self._depth = 0
        self._known = 0
        self._at = 0.0
        """When the last reading came."""
        self._since = 0.0
        """Since when readings have been equal."""

    def record(self, depth: int, known_at_request: int, known_at_response: int, now: float) -> None:
        """Records a reading.

        Args:
            depth: the requests that the engine runs or queues.
            known_at_request: the known legs on the engine when its metrics were requested.
            known_at_response: the same when they arrived. The engine may have counted either, and a leg that is known
                must not be taken for a foreign one, so the higher number is subtracted.
            now: the time, in seconds.
        """
        known = max(known_at_request, known_at_response)
        if (depth, known) != (self._depth, self._known):
            self._depth, self._known, self._since = depth, known, now
        self._legs, self._at = max(0, depth - known), now

    def legs(self, now: float) -> int:
        """Returns the foreign legs now. A reading counts less and less when no newer one comes."""
        if not self._legs:
            return 0
        stale_s = max(now - self._at - _FRESH_S, now - self._since - _STUCK_S)
        if stale_s <= 0.0:
            return self._legs
        return int(self._legs * 0.5 ** (stale_s / _FRESH_S))


class MeanLeg:
    """The mean prompt tokens and pending seconds of this proxy's running legs: the best guess for foreign ones."""

    __slots__ = ("_legs", "_seconds", "_timed", "_tokens")

    def __init__(self) -> None:
        self._legs = 0.0
        self._tokens = 0.0
        self._timed = 0.0
        self._seconds = 0.0

    def record(self, legs: int, tokens: int, timed: int, seconds: float) -> None:
        """Records the legs that run on one engine now.

        Args:
            legs: how many run.
            tokens: their prompt tokens.
            timed: how many of them have prompts still to be computed, where policies look at that.
            seconds: the predicted seconds of these.
        """
        if legs:
            self._legs = _KEPT * self._legs + legs
            self._tokens = _KEPT * self._tokens + tokens
        if timed:
            self._timed = _KEPT * self._timed + timed
            self._seconds = _KEPT * self._seconds + seconds

    @property
    def tokens(self) -> float:
        """The mean prompt tokens of a leg; 0 before the first leg."""
        return self._tokens / self._legs if self._legs else 0.0

    @property
    def seconds(self) -> float:
        """The mean seconds of computing a leg; 0 before the first leg."""
        return self._seconds / self._timed if self._timed else 0.0
