"""Sets of holders, interned: however many blocks have the same holders, there is one set.

A set is an integer with one bit for each holder. A holder is one level of a worker (device, host, disk, remote), so a
worker has four bits side by side. The bits of a worker that has gone are taken out of the sets little by little; until
that is done nobody else gets them, and `live` says which bits count.
"""

from collections.abc import Hashable
from typing import Final

import numpy as np

__all__ = ["LEVELS", "HolderSets"]

LEVELS: Final = 4
_EVERY_LEVEL: Final = (1 << LEVELS) - 1
_SPREAD: Final = 1024


class HolderSets:
    """Workers, their bits, and the sets in use, each with a number. Set 0 is empty and stays."""

    __slots__ = (
        *("_base", "_cursor", "_free", "_free_places", "_names", "_numbers", "_places", "_purging", "_retired"),
        *("_spread", "_uses"),
        *("further", "hollow", "live", "masks"),
    )

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        """The sets, by number; bits of workers that have gone may still be in them."""
        self.live = 0
        """The bits that count."""
        self.further = 0
        """The bits of all levels but the nearest, of every worker that there is or was."""
        self.hollow: set[int] = set()
        """Sets of which only workers that have gone were members, as far as they have been purged."""
        self._numbers: dict[int, int] = {0: 0}
        self._uses: list[int] = [0]
        self._free: list[int] = []
        self._names: list[Hashable] = []  # by place; a worker's bits begin at LEVELS times its place
        self._places: dict[Hashable, int] = {}
        self._spread: dict[int, list[Hashable]] = {}  # the workers of sets that were asked for lately
        self._free_places: list[int] = []
        self._base = 0  # the lowest bit of every place
        self._retired: list[int] = []  # places whose bits may still be in sets
        self._purging = 0  # how many of them the round that is under way takes out
        self._cursor = 0

    def __len__(self) -> int:
        """Sets in use."""
        return len(self.masks) - len(self._free)

    @property
    def nearest(self) -> int:
        """The bits of the nearest level of all workers."""
        return self.live & self._base

    def bits(self, worker: Hashable) -> int:
        """Returns all bits of a worker, the nearest level lowest; 0 if the worker is unknown."""
        place = self._places.get(worker)
        return 0 if place is None else _EVERY_LEVEL << LEVELS * place

    def add_worker(self, worker: Hashable, level: int) -> int:
        """The bit of a worker's level; the worker is there from now on."""
        place = self._places.get(worker)
        if place is None:
            place = self._take_place()
            self._names[place] = worker
            self._spread.clear()
            self._places[worker] = place
            self.live |= _EVERY_LEVEL << LEVELS * place
        return 1 << LEVELS * place + level

    def remove_worker(self, worker: Hashable) -> None:
        """No set has it any more. The cost does not depend on how many did."""
        place = self._places.pop(worker, None)
        if place is not None:
            self.live &= ~(_EVERY_LEVEL << LEVELS * place)
            self._retired.append(place)

    def derive(self, number: int, remove: int, add: int) -> int:
        """The number of the set `number` without the bits `remove` and with the bits `add`."""
        mask = (self.masks[number] & self.live & ~remove) | add
        found = self._numbers.get(mask)
        if found is None:
            if self._free:
                found = self._free.pop()
                self.masks[found] = mask
            else:
                found = len(self.masks)
                self.masks.append(mask)
                self._uses.append(0)
            self._numbers[mask] = found
        return found

    def move(self, blocks: int, source: int, target: int) -> None:
        """Moves the holder count of `blocks` blocks from the set `source` to the set `target`."""
        self._uses[target] += blocks
        self._uses[source] -= blocks
        if source and not self._uses[source]:
            self._forget(source)
            self.masks[source] = 0
            self.hollow.discard(source)
            self._free.append(source)

    def collect_depths(self, mask: int, blocks: int, into: dict[Hashable, int]) -> None:
        """Write for each worker whose lowest bit is in `mask` (`within`) how many blocks it has."""
        names = self._spread.get(mask)
        if names is None:
            raw = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
            places = (np.unpackbits(raw, bitorder="little").nonzero()[0] // LEVELS).tolist()
            names = [self._names[place] for place in places]
            if len(self._spread) >= _SPREAD:
                self._spread.clear()
            self._spread[mask] = names
        for name in names:
            into[name] = blocks

    def within(self, mask: int, level: int) -> int:
        """For each worker that has a bit of this level or a nearer one, its lowest bit."""
        found = mask
        for further in range(1, level + 1):
            found |= mask >> further
        return found & self._base

    def purge(self, steps: int) -> None:
        """Take the bits of workers that have gone out of so many sets."""
        if not self._purging:
            if not self._retired:
                return
            self._purging, self._cursor = len(self._retired), 1
        gone = sum(_EVERY_LEVEL << LEVELS * place for place in self._retired[: self._purging])
        end = min(self._cursor + steps, len(self.masks))
        for number in range(self._cursor, end):
            mask = self.masks[number]
            if mask & gone:
                self._forget(number)
                mask &= ~gone
                self.masks[number] = mask
                if mask:
                    self._numbers.setdefault(mask, number)
                else:
                    self.hollow.add(number)
        self._cursor = end
        if end == len(self.masks):
            self._free_places += self._retired[: self._purging]
            del self._retired[: self._purging]
            self._purging = 0

    def _take_place(self) -> int:
        if self._free_places:
            return self._free_places.pop()
        self._names.append(None)
        self._base |= 1 << LEVELS * (len(self._names) - 1)
        self.further |= (_EVERY_LEVEL - 1) << LEVELS * (len(self._names) - 1)
        return len(self._names) - 1

    def _forget(self, number: int) -> None:
        """The set is not found by its mask any more."""
        if self._numbers.get(self.masks[number]) == number:
            del self._numbers[self.masks[number]]
