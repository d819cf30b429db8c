"""Defines the operator's limits: legs per instance, requests in the queue, and the `Retry-After` estimate.

Every bound is checked when it is set, so that users of these objects can rely on it.
"""

from dataclasses import dataclass
from math import ceil, exp

__all__ = ["DrainRate", "QueueLimits", "RoleLimits", "retry_after_s"]


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """A `RoleLimits` bounds the legs that an instance of a role may run at a time; None means no limit."""

    requests: int | None = None
    """Legs."""
    tokens: int | None = None
    """Prompt tokens over all its legs. A leg that alone has more runs when nothing else does."""

    def __post_init__(self) -> None:
        for name in ("requests", "tokens"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"the limit in {name} must be at least 1")


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """A `QueueLimits` bounds how many requests may wait for room, and for how long."""

    waiting: int = 1024
    """For one role; 0 refuses whatever finds no room."""
    per_tenant: int | None = None
    """Of these for one tenant; None: as many as the others leave free."""
    wait_s: float = 60.0
    """For one leg."""

    def __post_init__(self) -> None:
        if self.waiting < 0:
            raise ValueError("waiting must not be negative")
        if self.per_tenant is not None and self.per_tenant < 1:
            raise ValueError("per_tenant must be at least 1")
        if not 0 < self.wait_s < float("inf"):
            raise ValueError("wait_s must be more than 0 seconds")


class DrainRate:
    """A `DrainRate` estimates how many requests leave in a second; recent seconds weigh most."""

    __slots__ = ("_at", "_per_s", "_tau_s")

    def __init__(self, tau_s: float = 10.0) -> None:
        """`tau_s`: what happened that long ago counts e times less."""
        self._tau_s = tau_s
        self._per_s = 0.0
        self._at = 0.0

    def record_departure(self, now: float) -> None:
        """Records the departure of one request."""
        if now - self._at > self._tau_s / 200:  # what is younger than that has lost nothing that counts
            self._per_s = self.per_s(now)
            self._at = now
        self._per_s += 1 / self._tau_s

    def per_s(self, now: float) -> float:
        """As of now."""
        return self._per_s * exp(min(0.0, self._at - now) / self._tau_s)


def retry_after_s(ahead: float, per_s: float) -> int:
    """Returns the seconds until a retry is sensible, 1 to 60, if `ahead` others leave before, `per_s` in a second."""
    if ahead >= 60 * per_s:
        return 60
    return max(1, ceil(ahead / per_s))
