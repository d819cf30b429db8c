"""Indexes which workers hold how much of a prompt's prefix: a tree of blocks, in flat arrays.

Lookups use the hashes alone. A worker has a block if it was reported to have it, whatever was reported about the blocks
in front; its match is the number of blocks from the beginning without a gap. So events may be lost, doubled or out of
order, and the answer is still what was reported. Parents only decide what is evicted first.
"""

from collections.abc import Hashable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvparams.index.block_hashes import BlockHashes
from kvparams.index.block_tree import BlockTree
from kvparams.index.hash_table import NodeNumbers
from kvparams.index.holder_sets import LEVELS, HolderSets
from kvparams.index.prefix_match import PrefixMatch, match_runs

__all__ = ["PrefixIndex"]

_NONE: Final[BlockHashes] = np.empty(0, np.uint64)
_PURGED: Final = 64
"""Sets from which bits of workers that have gone are taken, with each change."""
_MANY_RUNS: Final = 16
"""Of nodes with the same holders; more are sorted by their holders first."""
_SWEPT: Final = 1024
"""Nodes looked at, with each change, for those that nobody holds any more."""


class PrefixIndex:
    """A `PrefixIndex` maps block hashes to the workers that hold them.

    Hashes are those of a `BlockHasher`, in the order of the prompt: any 64 bits but 0, none of them twice.

    Workers are any names; a worker is there from its first `stored` to its `cleared`. Levels are 0 (device), 1 (host),
    2 (disk) and 3 (remote); a store that several workers reach is a worker of its own.
    Times are seconds of the caller's clock, which does not go back.
    """

    __slots__ = ("_swept", "capacity", "holders", "tree")

    def __init__(self, capacity: int, ttl: float | None = None) -> None:
        """Creates an empty index.

        Args:
            capacity: blocks, about 40 bytes each; what is not used yet is not committed.
            ttl: seconds after which `expire` forgets what was not used.

        Raises:
            ValueError: there is no room for a block, or for more than 2^31 - 1.
        """
        if not 1 <= capacity < 2**31:
            raise ValueError("an index has room for 1 to 2^31 - 1 blocks")
        self.capacity = capacity
        self.holders = HolderSets()
        self.tree = BlockTree(capacity, ttl, self._let_go)
        self._swept = 1

    def __len__(self) -> int:
        """Blocks that somebody holds, and blocks in front of those."""
        return len(self.tree)

    @property
    def epoch(self) -> int:
        """Returns the epoch of blocks that are used now (`last_used`)."""
        return self.tree.epoch

    def match(self, hashes: BlockHashes) -> PrefixMatch:
        """Returns how many of these blocks each worker holds from the beginning, without changing the index."""
        return match_runs(self.holders, self.tree.leading_runs(hashes), len(hashes))

    def stored(
        self, worker: Hashable, hashes: BlockHashes, parent: int = 0, level: int = 0, now: float = 0.0
    ) -> BlockHashes:
        """A worker has these blocks, which follow one another. They are used by that, too.

        Args:
            worker: who.
            hashes: the blocks. Where there are more than the index has room for, the first ones are kept.
            parent: the hash of the block in front of them; 0 where there is none, or it is not known.
            level: where the worker has them.
            now: the time.

        Returns:
            What was forgotten to make room.

        Raises:
            ValueError: a hash stands there twice, or the level is none.
        """
        bit = self.holders.add_worker(worker, _checked(level))
        self._tend()
        chain = _usable(hashes)[: self.capacity]
        asked = np.concatenate((np.array([parent], np.uint64), chain)) if parent else chain
        ordered = np.sort(asked)
        if (ordered[1:] == ordered[:-1]).any():
            raise ValueError("a hash stands in a chain twice")
        if not len(chain):
            return _NONE
        tree = self.tree
        numbers = tree.find(asked)
        front, numbers = (numbers.item(0), numbers[1:]) if parent else (0, numbers)
        fresh = numbers == 0
        missing = int(np.count_nonzero(fresh))
        forgotten = _NONE
        if missing:
            room = self.capacity - len(tree)
            if missing > room:
                forgotten = tree.make_room(missing - room, front, numbers[~fresh])
                room = self.capacity - len(tree)
            if missing > room:
                cut = int(fresh.nonzero()[0][room])
                chain, numbers = chain[:cut], numbers[:cut]
            tree.add(chain, numbers, front)
        tree.use(numbers, now)
        self._change(numbers, 0, bit)
        return forgotten

    def stored_forest(
        self,
        worker: Hashable,
        hashes: BlockHashes,
        parents: BlockHashes,
        now: float = 0.0,
        level: int = 0,
        epochs: NodeNumbers | None = None,
    ) -> int:
        """A worker has these blocks of any prompts: thousands at once. Nothing makes room.

        Args:
            worker: who.
            hashes: the blocks, none of them twice or 0.
            parents: for each the hash of the block in front of it, or 0.
            now: the time.
            level: where the worker has them.
            epochs: for each when it was used last, above 0, if it is new; then the others are as old as before.

        Returns:
            For how many, from the first one on, there was room.

        Raises:
            ValueError: a hash stands there twice, or is 0.
        """
        ordered = np.sort(hashes)
        if len(ordered) and (not ordered[0] or (ordered[1:] == ordered[:-1]).any()):
            raise ValueError("a hash stands there twice, or is 0")
        bit = self.holders.add_worker(worker, _checked(level))
        self._tend()
        numbers = self.tree.add_forest(hashes, parents, epochs)
        if len(numbers):
            if epochs is None:
                self.tree.use(numbers, now)
            self._change(numbers, 0, bit)
        return len(numbers)

    def contents(self, worker: Hashable, level: int) -> Iterator[tuple[BlockHashes, BlockHashes]]:
        """Yields the blocks that a worker has in a level, and the blocks in front of them: see `BlockTree.contents`."""
        holders, offset = self.holders, _checked(level)

        def is_wanted() -> NDArray[np.bool_]:
            bits = holders.bits(worker)
            wanted = (bits & -bits) << offset
            return np.array([mask & wanted != 0 for mask in holders.masks], bool)

        if is_wanted().any():
            yield from self.tree.contents(is_wanted)

    def touch(self, hashes: BlockHashes, now: float = 0.0) -> None:
        """These blocks are used: whatever is known of them is forgotten later."""
        numbers = self.tree.find(hashes)
        self.tree.use(numbers[numbers != 0], now)

    def removed(self, worker: Hashable, hashes: BlockHashes, level: int | None = None) -> None:
        """A worker has these blocks no longer, at this level or, without one, at any; in any order.

        Raises:
            ValueError: the level is none.
        """
        self._tend()
        bits = self.holders.bits(worker)
        if level is not None:
            bits &= (bits & -bits) << _checked(level)
        if bits:
            numbers = np.sort(self.tree.find(hashes))
            numbers = numbers[np.append(numbers[:1] != 0, numbers[1:] != numbers[:-1])]
            self._change(numbers, bits, 0)
            self.tree.prune(numbers[self.tree.sets.take(numbers) == 0])

    def cleared(self, worker: Hashable) -> None:
        """Removes a worker at every level, until something is stored for it again.

        The cost does not depend on how much it had.
        """
        self.holders.remove_worker(worker)
        self._tend()

    def expire(self, now: float, most: int = 4096) -> BlockHashes:
        """Forget what was not used for the time to live, a sixteenth more or less, unless younger blocks stand behind.

        Returns:
            What was forgotten. Where these are as many as `most`, there may be more.
        """
        return self.forget(most, self.tree.outdated(now))

    def forget(self, most: int, epoch: int | None = None) -> BlockHashes:
        """Forget what was used longest ago, leaves first.

        Args:
            most: how many blocks; a few more where nobody holds what stands in front.
            epoch: nothing that was used later (`last_used`).
        """
        self._tend()
        return self.tree.evict(most, self.tree.epoch if epoch is None else epoch)

    def chain_to(self, hash: int, blocks: int) -> BlockHashes:
        """Returns the hashes of at most so many blocks that follow one another, the last of which is this one.

        There are fewer where blocks in front are not known.
        """
        return self.tree.chain_to(hash, blocks)

    def last_used(self, hashes: BlockHashes) -> NodeNumbers:
        """In which epoch each block was used last; later ones have higher numbers, 0 is never."""
        return self.tree.last_used(hashes)

    def _let_go(self, numbers: NodeNumbers) -> None:
        self._change(numbers, -1, 0)

    def _change(self, numbers: NodeNumbers, remove: int, add: int) -> None:
        """Other holders for nodes, each of which stands there once."""
        sets = self.tree.sets.take(numbers)
        edges = (sets[1:] != sets[:-1]).nonzero()[0]
        if len(edges) > _MANY_RUNS:
            order = sets.argsort(kind="stable")
            numbers, sets = numbers.take(order), sets.take(order)
            edges = (sets[1:] != sets[:-1]).nonzero()[0]
        first = 0
        for end in [*(edges + 1).tolist(), len(sets)]:
            if end:
                source = sets.item(first)
                target = self.holders.derive(source, remove, add)
                if target != source:
                    self.tree.sets[numbers[first:end]] = target
                    self.holders.move(end - first, source, target)
                first = end

    def _tend(self) -> None:
        """A little of what has to be done when workers have gone."""
        holders = self.holders
        holders.purge(_PURGED)
        if not holders.hollow:
            return
        first = self._swept if self._swept < self.tree.end else 1
        self._swept = first + _SWEPT
        hollow = np.zeros(len(holders.masks), bool)
        hollow[list(holders.hollow)] = True
        sets = self.tree.sets[first : min(self._swept, self.tree.end)]
        numbers = (hollow[sets].nonzero()[0] + first).astype(np.uint32)
        self._change(numbers, -1, 0)
        self.tree.prune(numbers)


def _checked(level: int) -> int:
    if not 0 <= level < LEVELS:
        raise ValueError(f"a level is 0 to {LEVELS - 1}")
    return level


def _usable(hashes: BlockHashes) -> BlockHashes:
    """Returns the hashes in front of the first 0, which is no hash."""
    if np.count_nonzero(hashes) == len(hashes):  # three times faster than `all`
        return hashes
    return hashes[: int((hashes == 0).argmax())]
