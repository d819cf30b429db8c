"""Tracks the other proxies of a site: who lives, and whether their messages arrive complete and in order.

A sibling lives as long as it is heard from within its lease. All times are those of the receiver's own clock, so
clocks that differ change nothing here. The sender is a random number of one run of a proxy: one that restarts is
another sibling, and one that has ended is never believed again.
"""

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

__all__ = ["Arrival", "Sibling", "SiblingTable"]

_MOST_SIBLINGS: Final = 256
_MOST_GONE: Final = 4096
"""Senders that are remembered. Each is one that held the key of the site, so nobody else can fill this."""


class Arrival(Enum):
    """An `Arrival` says how a message of a sibling fits what was heard of it before."""

    IN_ORDER = "in order"
    AFTER_GAP = "after a gap"
    """Messages before it are missing."""
    REPEATED = "repeated"
    """It was heard before, or comes late: ignore it."""
    IGNORED = "ignored"
    """Its sender has ended, or there are too many: ignore it."""


class Sibling:
    """A sibling is one run of another proxy, and the facts it has told."""

    __slots__ = ("away_s", "heard_at", "id", "info", "loads", "next_sequence")

    def __init__(self, id: int, now: float, away_s: float) -> None:
        self.id: Final = id
        self.heard_at = now
        self.away_s: Final = away_s
        """For how long nothing had been heard of it when it was heard again; infinite if it never had been."""
        self.next_sequence: int | None = None
        """None before its first message."""
        self.loads: dict[int, tuple[int, int]] = {}
        """Legs and prompt tokens, by engine; no zeros."""
        self.info: Mapping[str, object] = MappingProxyType({})
        """What it says about itself."""


class _GoneSibling(NamedTuple):
    """A `_GoneSibling` is one that lived."""

    next_sequence: int | None
    """The sequence number that it may go on with."""
    heard_at: float
    has_ended: bool = False
    """Whether it is never believed again."""


_NEVER_HEARD: Final = _GoneSibling(None, float("-inf"))


class SiblingTable:
    """The siblings of one proxy."""

    def __init__(self, own_id: int, lease_s: float) -> None:
        """Creates an empty table.

        Args:
            own_id: this proxy's number, whose messages are ignored.
            lease_s: the seconds without a message after which a sibling has ended.
        """
        self._own_id = own_id
        self._lease_s = lease_s
        self._siblings: dict[int, Sibling] = {}
        self._gone: OrderedDict[int, _GoneSibling] = OrderedDict()
        """Those that lived."""
        self.refused = 0
        """Messages of senders that were too many."""

    def __len__(self) -> int:
        return len(self._siblings)

    @property
    def alive(self) -> Mapping[int, Sibling]:
        """The siblings that live, by number."""
        return MappingProxyType(self._siblings)

    def hear(self, sender: int, sequence: int, now: float) -> tuple[Arrival, Sibling | None]:
        """Records a message. A `sequence` of 0 stands outside the order.

        Returns:
            How it fits, and the sibling where it is to be used.
        """
        sibling = self._siblings.get(sender)
        if not sequence:  # only who lives by its other messages
            return (Arrival.IGNORED, None) if sibling is None else (Arrival.IN_ORDER, sibling)
        if sibling is None:
            gone = self._gone.get(sender, _NEVER_HEARD)
            if sender == self._own_id or gone.has_ended:
                return Arrival.IGNORED, None
            expected = gone.next_sequence
        else:
            expected = sibling.next_sequence
        if expected is not None and sequence < expected:
            return Arrival.REPEATED, None
        if sibling is None:
            if len(self._siblings) >= _MOST_SIBLINGS:
                self.refused += 1
                return Arrival.IGNORED, None
            gone = self._gone.pop(sender, _NEVER_HEARD)
            sibling = self._siblings[sender] = Sibling(sender, now, now - gone.heard_at)
        sibling.heard_at = now
        sibling.next_sequence = sequence + 1
        return (Arrival.IN_ORDER if expected in (None, sequence) else Arrival.AFTER_GAP), sibling

    def end(self, id: int) -> Sibling | None:
        """Ends a sibling. Returns it, or None if it did not live."""
        sibling = self._siblings.pop(id, None)
        if sibling is not None:
            self._remember(id, _GoneSibling(None, sibling.heard_at, has_ended=True))
        return sibling

    def expire(self, now: float) -> list[Sibling]:
        """Forgets the siblings whose lease has ended, and returns them.

        One that is heard from again is a new sibling, since it may only have been out of reach. What it sent before
        cannot be replayed.
        """
        late = [each for each in self._siblings.values() if now - each.heard_at > self._lease_s]
        for each in late:
            del self._siblings[each.id]
            self._remember(each.id, _GoneSibling(each.next_sequence, each.heard_at))
        return late

    def _remember(self, id: int, gone: _GoneSibling) -> None:
        self._gone[id] = gone
        if len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)
