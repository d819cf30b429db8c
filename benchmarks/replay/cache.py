"""A finite prefix cache of blocks, least recently used first out, the end of a prefix before its beginning."""

from collections import OrderedDict
from collections.abc import Container, Sequence
from itertools import takewhile

__all__ = ["BlockCache", "matched"]


def matched(blocks: Sequence[int], held: Container[int]) -> int:
    """Returns the number of blocks held from the beginning."""
    return sum(1 for _ in takewhile(held.__contains__, blocks))


class BlockCache:
    """A `BlockCache` is the cache of one worker, or a store."""

    def __init__(self, capacity: int) -> None:
        """Holds so many blocks at most."""
        self.capacity = capacity
        self.held = OrderedDict[int, None]()
        """The blocks, what goes first at the front."""

    def match(self, blocks: Sequence[int]) -> int:
        """Returns the number of blocks that it holds from the beginning."""
        return matched(blocks, self.held)

    def use(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """It holds them now, as many from the beginning as fit; what came and what went."""
        held = self.held
        came: list[int] = []
        for block in reversed(blocks[: self.capacity]):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                came.append(block)
        went: list[int] = []
        while len(held) > self.capacity:
            went.append(held.popitem(last=False)[0])
        return came, went
