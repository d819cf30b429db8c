"""Gives new instances their share of the work gradually.

Meanwhile an instance has at most ramp * (mean of the others) + 1 legs; ramp goes from 0 to 1.
"""

from collections.abc import Callable
from typing import Final, Protocol

from kvparams_proxy.fleet.member import Member

__all__ = ["CallLater", "CancellableTimer", "SlowStart"]

_STEPS: Final = 20
"""How often while it lasts those who wait are looked at again: time alone makes room."""


class CancellableTimer(Protocol):
    """A timer, as `call_later` returns it."""

    def cancel(self) -> object:
        """Cancels the call."""
        ...


CallLater = Callable[[float, Callable[[], None]], CancellableTimer]
"""`asyncio`'s: call that in so many seconds."""


class SlowStart:
    """Limits the share of new instances of one role."""

    def __init__(
        self, over_s: float, now: Callable[[], float], call_later: CallLater, stepped: Callable[[], None]
    ) -> None:
        """`over_s` is how long it lasts, 0 not at all; `stepped` is called when there may be more room."""
        self._over_s = over_s
        self._now = now
        self._call_later = call_later
        self._stepped = stepped
        self._since: dict[Member, float] = {}
        self._timer: CancellableTimer | None = None

    @property
    def active(self) -> bool:
        """True while any instance is in slow start."""
        return bool(self._since)

    def begin(self, member: Member) -> None:
        """Begins the slow start of a member that has just become ready."""
        if self._over_s > 0:
            self._since[member] = self._now()
            if self._timer is None:
                self._timer = self._call_later(self._over_s / _STEPS, self._step)

    def startup_complete(self) -> None:
        """Ends the slow start of all present instances: at the start of the proxy none is newer than the others."""
        self._since.clear()

    def within_share(self, members: list[Member], candidates: list[Member]) -> list[Member]:
        """Returns those of `members` that one more leg keeps within their share. `candidates` are all that share."""
        others = [member.in_flight for member in candidates if member not in self._since]
        if not others:  # nobody to be slower than
            return members
        mean = sum(others) / len(others)
        now = self._now()
        return [m for m in members if m not in self._since or m.in_flight <= mean * self._ramp(m, now)]

    def close(self) -> None:
        """Cancels the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ramp(self, member: Member, now: float) -> float:
        return min(1.0, (now - self._since[member]) / self._over_s)

    def _step(self) -> None:
        now = self._now()
        for member in [member for member, since in self._since.items() if now - since >= self._over_s]:
            del self._since[member]
        self._timer = self._call_later(self._over_s / _STEPS, self._step) if self._since else None
        self._stepped()
