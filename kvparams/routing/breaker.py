"""Implements a circuit breaker, which withholds work from an instance that fails.

Closed, it lets everything through and counts; open, nothing, for a time that doubles with each failure after it; half
open, one trial at a time. A worker that fails gets requests ever less often, however idle it looks.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["Breaker", "BreakerLimits", "BreakerState"]


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """A `BreakerLimits` says when a breaker opens, and for how long."""

    consecutive: int = 5
    """Failures without a success between them."""
    window: int = 50
    """Outcomes that are remembered, the last ones."""
    failures: int = 25
    """Of these: half of what is done fails."""
    open_s: float = 1.0
    """At first."""
    longest_s: float = 15.0
    """However often it has failed. Where nobody else has the role, that is how long a repaired one is not noticed."""

    def __post_init__(self) -> None:
        if not 1 <= self.consecutive <= self.window or not 1 <= self.failures <= self.window:
            raise ValueError("consecutive and failures must be from 1 to window")
        if not 0 < self.open_s <= self.longest_s < float("inf"):
            raise ValueError("open_s must be more than 0 and at most longest_s")


class BreakerState(StrEnum):
    """See the module."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_CLOSED: Final = BreakerState.CLOSED
_OPEN: Final = BreakerState.OPEN
_HALF_OPEN: Final = BreakerState.HALF_OPEN
"""By names of their own: in CPython 3.11 an attribute of an enumeration takes as long as a call."""


class Breaker:
    """A `Breaker` tracks the outcomes of one instance. Time is passed in, in seconds."""

    __slots__ = ("_limits", "_outcomes", "_until", "opened", "state", "trial")

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._outcomes = 0
        """The last outcomes as bits, the newest lowest; 1 is a failure, and what was never seen a success."""
        self._until = 0.0
        self.state: BreakerState = _CLOSED
        self.opened: int = 0
        """How often since it last worked well for a whole window: what the back-off grows with."""
        self.trial = False
        """Whether the one leg of a half-open breaker is running."""

    @property
    def is_pristine(self) -> bool:
        """Returns True if a success would change nothing."""
        return not self._outcomes and self.state is _CLOSED

    @property
    def allows_requests(self) -> bool:
        """Returns True if the instance may be given a leg now."""
        return self.state is _CLOSED or (self.state is _HALF_OPEN and not self.trial)

    @property
    def half_open_at(self) -> float:
        """Returns the time at which an open breaker is half open, at the latest."""
        return self._until

    def record_success(self) -> bool:
        """A leg did what it should; whether that changes the state. While open, what had begun before tells nothing."""
        if self.state is _OPEN:
            return False
        if self.state is _HALF_OPEN:
            self.state = _CLOSED
            self.trial = False
            self._outcomes = 0b10  # it has failed before this: one whole window of successes makes it forgotten
            return True
        self._outcomes = (self._outcomes << 1) & ((1 << self._limits.window) - 1)
        if not self._outcomes:
            self.opened = 0
        return False

    def record_failure(self, now: float) -> bool:
        """A leg failed; whether that changes the state."""
        if self.state is _OPEN:
            return False
        limits = self._limits
        self._outcomes = (self._outcomes << 1 | 1) & ((1 << limits.window) - 1)
        streak = (1 << limits.consecutive) - 1
        bad = self._outcomes & streak == streak or self._outcomes.bit_count() >= limits.failures
        if self.state is _CLOSED and not bad:
            return False
        self.state = _OPEN
        self.trial = False
        self._until = now + min(limits.longest_s, limits.open_s * 2.0 ** min(self.opened, 62))
        self.opened += 1
        return True

    def record_probe_success(self, now: float) -> None:
        """A probe went well: half of what is left to wait is remitted. No-op unless open."""
        if self.state is _OPEN and self._until > now:
            self._until = now + (self._until - now) / 2

    def record_restart(self, now: float) -> None:
        """It is another process: what it did before tells little, and whether it works is tried at once."""
        if self.state is _OPEN:
            self._until = min(self._until, now)
        elif self.state is _CLOSED:
            self._outcomes = 0b10 if self.opened else 0

    def poll(self, now: float) -> bool:
        """Go half open, if it is time; whether that changed the state."""
        if self.state is not _OPEN or now < self._until:
            return False
        self.state = _HALF_OPEN
        return True

    def begin_trial(self) -> None:
        """A half-open one was given a leg."""
        self.trial = True

    def end_trial(self) -> None:
        """Ends the trial leg; if it had no outcome (its client left), another one may be tried."""
        self.trial = False
