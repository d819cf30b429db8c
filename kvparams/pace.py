"""How much an instance still has to do, in seconds: what was given to it, by the speed that was learnt of it.

The one rule: a leg counts from the moment it is given until it is taken back, by its own key, so nothing can be
counted twice or leak. An engine is taken to prefill one leg after the other in the order they came; where it batches,
the sum is the same.
"""

from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

from kvparams.speed import SpeedCurve, features

__all__ = ["Pace"]

_TOGETHER: Final = 0.25
"""A leg that ends in less than this share of what it should take has been computed together with others: what they took
is told by all of them."""


class _Given(NamedTuple):
    seconds: float
    since: float


class Pace:
    """One instance's backlog and speed. Not bound to what it runs: any hashable key stands for a leg."""

    __slots__ = ("_features", "_given", "_head_since", "_now", "_pending", "_seconds", "speed")

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is the clock, in seconds."""
        self.speed: Final = SpeedCurve()
        self._now = now
        self._given: dict[Hashable, _Given] = {}
        self._pending = 0.0
        """The sum of what is given."""
        self._head_since = 0.0
        """When the oldest of them began."""
        self._features = (0.0, 0.0, 0.0, 0.0)
        """Of legs that have ended and whose time is told by the next one."""
        self._seconds = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until what was given to it should be done. A leg that overruns counts as about to end."""
        if not self._given:
            return 0.0
        head = next(iter(self._given.values())).seconds
        return max(0.0, self._pending - min(head, self._now() - self._head_since))

    def begin(self, leg: Hashable, seconds: float) -> None:
        """A leg that should take so long is given to it.

        Raises:
            ValueError: it was given already.
        """
        if leg in self._given:
            raise ValueError("this leg was given already")
        now = self._now()
        if not self._given:
            self._head_since = now
            self._pending = 0.0  # what rounding left
        self._given[leg] = _Given(seconds, now)
        self._pending += seconds

    def end(self, leg: Hashable, new: int | None = None, context: int = 0, fetched: int = 0) -> None:
        """A leg has ended. No-op if it was not given, or has ended already.

        Args:
            leg: which.
            new: tokens that it computed, as the engine tells; None where nothing is to be learnt, it failed.
            context: tokens of the whole prompt.
            fetched: tokens whose KV came from elsewhere.
        """
        given = self._given.get(leg)
        if given is None:
            return
        was_head = next(iter(self._given)) == leg
        del self._given[leg]
        self._pending -= given.seconds
        if new is None and not was_head:
            return
        now = self._now()
        began = max(self._head_since, given.since)
        self._head_since = now
        if new is None:
            return
        self._seconds += now - began
        summed = tuple(map(sum, zip(self._features, features(new, context, fetched), strict=True)))
        self._features = (summed[0], summed[1], summed[2], summed[3])
        if self._given and self._seconds < _TOGETHER * self.speed.seconds(new, context, fetched):
            return
        self.speed.learn(self._features, self._seconds)
        self._features = (0.0, 0.0, 0.0, 0.0)
        self._seconds = 0.0
