"""Keys whose values were found damaged, for a while.

Bounded in number and in time; what falls out is merely asked for again.
"""

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["Quarantine"]


class Quarantine:
    """A set of keys that forgets. It does not lock; whoever owns it does."""

    def __init__(self, most: int, seconds: float) -> None:
        """Begins empty.

        Args:
            most: the largest number of keys; the oldest are dropped for new ones.
            seconds: how long each key stays.
        """
        self._most = most
        self._seconds = seconds
        self._until: OrderedDict[str, float] = OrderedDict()  # the earliest to be let go first

    def __len__(self) -> int:
        return len(self._until)

    def add(self, keys: Iterable[str], now: float) -> None:
        """These are damaged."""
        for key in keys:
            self._until.pop(key, None)
            self._until[key] = now + self._seconds
        while len(self._until) > self._most:
            self._until.popitem(last=False)

    def lift(self, key: str) -> None:
        """It was stored anew."""
        self._until.pop(key, None)

    def holds(self, key: str, now: float) -> bool:
        """Returns whether nobody should be given this value now."""
        until = self._until.get(key)
        if until is None:
            return False
        if now < until:
            return True
        del self._until[key]
        return False
