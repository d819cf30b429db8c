"""Blocks that a save has still to copy: the engine counts us among their users until every worker has copied them.

vLLM gives a block to another request as soon as it has no user: its request has ended or was preempted, and its prefix
was evicted. `BlockPool.touch` adds a user (vllm/v1/core/block_pool.py, 0.28 and 0.32), so the block is kept.

Invariant: the step that orders a save pins its blocks, before the engine can free them. They are unpinned once, when
the last worker has copied them. Without the pins vLLM stores wrong pages under right keys.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvparams_connectors.engines.vllm.interface import BlockPool

__all__ = ["BlockPins"]


@dataclass(slots=True)
class _BlockPin:
    block_ids: tuple[int, ...]
    workers: int
    """That have not copied yet."""


class BlockPins:
    """Describes what is held. Used by the scheduler's thread alone."""

    def __init__(self, pool: BlockPool, workers: int) -> None:
        """Begins without a pinned block.

        Args:
            pool: vLLM's pool of blocks.
            workers: the number of workers, each of which copies a part of each block.
        """
        self._pool, self._workers = pool, workers
        self._next = 1
        self._held: dict[int, _BlockPin] = {}

    def __len__(self) -> int:
        """Saves that are not copied yet."""
        return len(self._held)

    def pin(self, block_ids: Sequence[int]) -> int:
        """Keep these blocks as they are; the number by which workers say that they are copied."""
        number, self._next = self._next, self._next + 1
        self._pool.touch([self._pool.blocks[block] for block in block_ids])
        self._held[number] = _BlockPin(tuple(block_ids), self._workers)
        return number

    def record_copied(self, numbers: Iterable[int]) -> None:
        """Each of these has been copied by one more worker."""
        for number in numbers:
            hold = self._held.get(number)
            if hold is None:
                continue
            hold.workers -= 1
            if not hold.workers:
                del self._held[number]
                # Backwards, as vLLM does it, so that the start of a prefix is evicted last.
                self._pool.free_blocks([self._pool.blocks[block] for block in reversed(hold.block_ids)])

    @property
    def blocks_other_requests(self) -> bool:
        """Returns whether blocks will be free for others when what is held is copied."""
        blocks = self._pool.blocks
        return any(blocks[block].ref_cnt == 1 for hold in self._held.values() for block in hold.block_ids)
