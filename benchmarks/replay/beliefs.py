"""Models a router's beliefs about the workers' caches.

The index of the proxy (`kvparams.index`) is held to do the same on real token ids; here a dictionary of blocks does.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from benchmarks.replay.cache import BlockCache, matched
from benchmarks.replay.model import Leg

__all__ = ["Belief", "ByEvents", "BySelf", "Routed"]


class Belief(Protocol):
    """A `Belief` is the set of blocks that one worker is believed to hold."""

    def match(self, blocks: Sequence[int]) -> int:
        """Returns the number of blocks held from the beginning."""
        ...

    def routed(self, leg: Leg) -> None:
        """A leg has been given to it."""
        ...

    def done(self, leg: Leg) -> None:
        """Records the end of a leg; `leg.cached` is the number of blocks that it found in its cache."""
        ...

    def event(self, came: Sequence[int], went: Sequence[int]) -> None:
        """Records an event of the worker."""
        ...


class ByEvents:
    """A `ByEvents` believes the worker's events, and predicts the blocks of the prompts that it was given."""

    def __init__(self) -> None:
        self._said = set[int]()
        self._coming: dict[int, int] = {}
        """For how many legs that are on their way."""
        self._held = set[int]()
        """Both."""

    def match(self, blocks: Sequence[int]) -> int:
        """Returns the number of blocks held from the beginning."""
        return matched(blocks, self._held)

    def routed(self, leg: Leg) -> None:
        """Its blocks will come."""
        coming = self._coming
        for block in leg.request.blocks:
            coming[block] = coming.get(block, 0) + 1
        self._held.update(leg.request.blocks)

    def done(self, leg: Leg) -> None:
        """Its blocks are there, should the event be late or lost."""
        coming = self._coming
        for block in leg.request.blocks:
            coming[block] -= 1
            if not coming[block]:
                del coming[block]
        self._said.update(leg.request.blocks)

    def event(self, came: Sequence[int], went: Sequence[int]) -> None:
        """Blocks came and went."""
        self._said.update(came)
        self._held.update(came)
        self._said.difference_update(went)
        self._held.difference_update([block for block in went if block not in self._coming])


class Routed:
    """A `Routed` believes in the routed blocks, as many as the cache is said to hold, without correction."""

    def __init__(self, capacity: int) -> None:
        """`capacity` in blocks."""
        self._cache = BlockCache(capacity)

    def match(self, blocks: Sequence[int]) -> int:
        """Returns the number of blocks held from the beginning."""
        return self._cache.match(blocks)

    def routed(self, leg: Leg) -> None:
        """Taken to be there."""
        self._cache.use(leg.request.blocks)

    def done(self, leg: Leg) -> None:
        """Ignores the engine's report."""

    def event(self, came: Sequence[int], went: Sequence[int]) -> None:
        """Nor what it says."""


class BySelf:
    """A `BySelf` believes in the routed blocks, corrected by the engine's reports of cached blocks.

    Everything is kept in the order of last use, in more than the believed size. A block that was believed to be there
    and was not says more than itself: everything used longer ago has gone too, and that is how large the cache is. One
    that was there against belief says that it is larger, but only by chance is it asked for. So belief begins with four
    times what it is told.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` is what the worker's cache is said to hold, in blocks."""
        self.capacity = 4.0 * capacity
        self._used = OrderedDict[int, int]()
        """Blocks and when they were used last, oldest first."""
        self._gone = OrderedDict[int, None]()
        """Blocks used longer ago than what fits: should one of them be there all the same, more fits."""
        self._clock = 0
        self._routed: dict[int, tuple[list[int], int]] = {}

    def match(self, blocks: Sequence[int]) -> int:
        """Returns the number of blocks held from the beginning."""
        return matched(blocks, self._used)

    def routed(self, leg: Leg) -> None:
        """Records that the worker holds the leg's blocks from now on: what is asked next runs after it."""
        blocks = leg.request.blocks
        used = self._used
        held = matched(blocks, used)
        ghosts = held
        while ghosts < len(blocks) and blocks[ghosts] in self._gone:
            ghosts += 1
        self._routed[leg.number] = [used[block] for block in blocks[:held]], ghosts
        for block in reversed(blocks):
            self._clock += 1
            used[block] = self._clock
            used.move_to_end(block)
            self._gone.pop(block, None)
        self._shrink(-1)

    def done(self, leg: Leg) -> None:
        """Compares the engine's report with the belief, and corrects the believed size."""
        since, ghosts = self._routed.pop(leg.number)
        if leg.cached < len(since):
            before = len(self._used)
            self._shrink(since[leg.cached])
            if len(self._used) < before:
                self.capacity = len(self._used)
        elif len(since) < leg.cached <= ghosts:
            self.capacity += leg.cached - len(since) + self.capacity / 16

    def event(self, came: Sequence[int], went: Sequence[int]) -> None:
        """It is told nothing."""

    def _shrink(self, until: int) -> None:
        """Forget what was used at `until` or before, and what does not fit."""
        used, gone = self._used, self._gone
        while used and (len(used) > self.capacity or next(iter(used.values())) <= until):
            block, _ = used.popitem(last=False)
            gone[block] = None
        while len(gone) > 3 * self.capacity + 64:
            gone.popitem(last=False)
