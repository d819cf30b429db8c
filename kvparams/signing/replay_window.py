"""Remembers which signed documents were used, so that each is used once.

A nonce is remembered until its document has expired anyway. Memory is bounded: where more are alive than there is room
for, those that would expire first are forgotten, and with them everything that expires as early is refused.

Invariant: a nonce is accepted only if it is known to be new. So no document is accepted twice, after nonces were
forgotten or after a restart of the process.
"""

from heapq import heappop, heappush
from typing import Final

__all__ = ["ReplayWindow"]

_CAPACITY: Final = 1 << 16


class ReplayWindow:
    """Times are whatever the caller's clock says, in seconds; there is no clock in here."""

    __slots__ = ("_capacity", "_horizon", "_seen", "_until", "since")

    def __init__(self, since: float, capacity: int = _CAPACITY) -> None:
        """Creates an empty window.

        Args:
            since: when this process began. Documents signed before, by a clock that may be wrong, are refused, because
                an earlier process may have accepted them.
            capacity: how many nonces are remembered; about 200 bytes each.
        """
        if capacity < 1:
            raise ValueError("a replay window remembers at least one nonce")
        self.since: Final = since
        self._capacity = capacity
        self._seen: set[str] = set()
        self._until: list[tuple[float, str]] = []
        self._horizon = -1.0
        """What expires no later than this was forgotten."""

    def try_use(self, nonce: str, until: float, now: float) -> bool:
        """Uses up `nonce` and returns True if this was its first use.

        Args:
            nonce: of at most some hundred characters.
            until: from when on nobody would accept it in any case.
            now: what is over by now is forgotten.
        """
        while self._until and self._until[0][0] <= now:
            self._forget()
        if until <= self._horizon or until <= now or nonce in self._seen:
            return False
        while len(self._seen) >= self._capacity:
            self._forget()
        if until <= self._horizon:
            return False
        self._seen.add(nonce)
        heappush(self._until, (until, nonce))
        return True

    def _forget(self) -> None:
        until, nonce = heappop(self._until)
        self._seen.discard(nonce)
        self._horizon = max(self._horizon, until)

    def __len__(self) -> int:
        return len(self._seen)
