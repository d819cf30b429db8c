"""Tracks which tiers have the bytes that were returned last for a key, to delete damaged ones there.

Bounded, and only ever about the last get of a key; of a key that is not known any more every tier is suspected.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

__all__ = ["ValueOrigins"]

_MOST: Final = 16_384
"""Keys that are remembered: what is loaded is verified soon after, so more would be of no use."""


class ValueOrigins:
    """It locks for itself: tiers answer in threads of their own."""

    def __init__(self, tiers: int, most: int = _MOST) -> None:
        """Begins empty: a value may be in any tier.

        Args:
            tiers: the number of tiers.
            most: the largest number of keys; the oldest are dropped for new ones.
        """
        self._every = tuple(range(tiers))
        self._alone = [(number,) for number in self._every]
        self._most = most
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        """By key: the tier that gave the bytes, then those that took a copy of them. The oldest get first."""

    def record_source(self, number: int, keys: Iterable[str]) -> None:
        """A tier has filled the caller's buffers, or has a value too large for them."""
        source, known = self._alone[number], self._known
        with self._lock:
            for key in keys:
                known[key] = source
                known.move_to_end(key)
            while len(known) > self._most:
                known.popitem(last=False)

    def record_copy(self, number: int, source: int, keys: Iterable[str]) -> None:
        """A tier has stored a copy of what `source` gave."""
        with self._lock:
            for key in keys:
                found = self._known.get(key)
                if found is not None and found[0] == source and number not in found:
                    self._known[key] = (*found, number)

    def tiers_of(self, key: str) -> tuple[int, ...]:
        """The tiers in which the value is that was given last; all of them if nobody knows."""
        with self._lock:
            return self._known.get(key, self._every)
