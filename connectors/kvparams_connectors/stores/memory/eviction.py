"""Determines which value goes next: a table in two parts, new and hot, each least recently used first.

A new value has to be used again, some time later, to become hot; what is read once after it was written, as every page
on its way from prefill to decode is, stays new. So a scan of values that nobody wants twice passes through the new part
and leaves the hot one alone. Of the keys that are used together the last is evicted first, so that a sequence of pages
never loses its head before its tail.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar

__all__ = ["EvictionEntry", "ScanResistantTable"]

E = TypeVar("E", bound="EvictionEntry")

_HOT_SHARE: Final = 1 / 4
"""Of the room, at most, for what is hot. The rest is for what is new: a whole generation of pages must stay until it
has been read, however hot the one before it was."""
_LATER_SHARE: Final = 1 / 16
"""After so much of the room was written anew, a further use says that the value is wanted again. Before, it may be the
same request: a lookup and a load."""


class EvictionEntry:
    """A value in the table; whoever owns the table adds to it what the value is."""

    __slots__ = ("born", "hot", "units")

    def __init__(self, units: int) -> None:
        """Begins as an entry of the new part of the table.

        Args:
            units: the room that the value takes, in the table's units.
        """
        self.units = units
        self.born: int | None = None
        """The table's clock at the end of the batch that put it."""
        self.hot = False


class ScanResistantTable(Generic[E]):
    """Values under keys, in the order in which they should go. It does not lock; whoever owns it does.

    The order is one list with a border in it: new values come in at the border, used hot ones at the end, and when
    there is too much that is hot the border moves. A move of the border changes nobody's place.
    """

    def __init__(self, units: int, *, hot_share: float = _HOT_SHARE) -> None:
        """Begins empty.

        Args:
            units: the room for all entries, in their units.
            hot_share: the largest share of the room for hot entries; 0 is plain least-recently-used.
        """
        self._hot_limit = int(units * hot_share)
        self._later = max(1, int(units * _LATER_SHARE))
        self._entries: dict[str, E] = {}
        self._new: OrderedDict[str, E] = OrderedDict()
        self._hot: OrderedDict[str, E] = OrderedDict()
        self._hot_units = 0
        self._clock = 0
        """Units that were ever added."""
        self.get: Final = self._entries.get
        """The value of a key, or None; this is no use."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: str, value: E) -> None:
        """A new key."""
        self._entries[key] = self._new[key] = value
        self._clock += value.units

    def remove(self, key: str) -> None:
        """Forget `key`, which is there."""
        value = self._entries.pop(key)
        if value.hot:
            del self._hot[key]
            self._hot_units -= value.units
        else:
            del self._new[key]

    def touch(self, keys: Sequence[str]) -> None:
        """These were put, read or asked for together; unknown ones do not matter.

        A key becomes hot with any key behind it in `keys`: who wants a page wants all those before it.
        """
        find, new, hot_part = self._entries.get, self._new, self._hot
        before = self._clock - self._later if self._hot_limit else -1
        hot = False
        for key in reversed(keys):
            value = find(key)
            if value is None:
                continue
            if value.hot:
                hot_part.move_to_end(key)
                hot = True
            elif hot or (value.born is not None and value.born <= before):
                del new[key]
                hot_part[key] = value
                self._hot_units += value.units
                value.hot = hot = True
            else:
                new.move_to_end(key)
            if value.born is None:
                value.born = self._clock
        while self._hot_units > self._hot_limit:
            key, value = hot_part.popitem(last=False)
            self._hot_units -= value.units
            value.hot = False
            new[key] = value

    def eviction_order(self) -> Iterator[tuple[str, E]]:
        """Keys and values, the next to go first; nothing may change while one reads."""
        yield from self._new.items()
        yield from self._hot.items()

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._new.clear()
        self._hot.clear()
        self._hot_units = 0
