"""Describes where keys can be read, as others have said. Pure.

A hint is only a hint: the newest one of a key counts, for a while, and there is room for so many.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from kvparams_connectors.stores.peer.addresses import PeerAddress

__all__ = ["KeyLocations"]


class KeyLocations:
    """Keys and places. Any thread may use it; times are in seconds on any one clock."""

    def __init__(self, most: int, lifetime_s: float) -> None:
        """Begins empty.

        Args:
            most: the largest number of keys; the oldest hints are dropped for new ones.
            lifetime_s: how long a hint is used, in seconds.
        """
        self._most: Final = most
        self._lifetime_s: Final = lifetime_s
        self._lock: Final = threading.Lock()
        self._places: Final[OrderedDict[str, tuple[PeerAddress, float]]] = OrderedDict()

    def add(self, keys: Iterable[str], place: PeerAddress, now: float) -> None:
        """These keys can be read there."""
        until = now + self._lifetime_s
        with self._lock:
            for key in keys:
                self._places[key] = (place, until)
                self._places.move_to_end(key)
            while len(self._places) > self._most:
                self._places.popitem(last=False)

    def find(self, keys: Sequence[str], now: float) -> list[PeerAddress | None]:
        """For each key the place, if one is known."""
        if not self._places:
            return [None] * len(keys)
        found: list[PeerAddress | None] = []
        with self._lock:
            for key in keys:
                place, until = self._places.get(key, (None, 0.0))
                if place is not None and until <= now:
                    del self._places[key]
                    place = None
                found.append(place)
        return found

    def forget(self, keys: Iterable[str], place: PeerAddress | None = None) -> None:
        """These are not to be read there, or not anywhere."""
        with self._lock:
            for key in keys:
                if place is None or self._places.get(key, (None, 0.0))[0] == place:
                    self._places.pop(key, None)
