"""Computes from the holders of a prompt's blocks how much of the prompt each worker has from the beginning."""

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

from kvparams.index.holder_sets import LEVELS, HolderSets

__all__ = ["PrefixMatch", "match_runs"]

_NOBODY: Final[dict[Hashable, int]] = {}


class PrefixMatch(NamedTuple):
    """A `PrefixMatch` holds the known holders of one prompt's prefix."""

    blocks: int
    """That were asked for."""
    held: tuple[dict[Hashable, int], ...]
    """By level: for each worker how many blocks it has from the beginning in this level or a nearer one. Workers with
    none are absent. Where only the nearest level is used, this is one dict several times."""


def match_runs(holders: HolderSets, runs: Sequence[tuple[int, int]], blocks: int) -> PrefixMatch:
    """Returns how many blocks each worker holds from the beginning.

    Args:
        holders: the sets of holders.
        runs: for each run of blocks with the same holders, the position behind the last one, and their set. The blocks
            behind these runs are not known.
        blocks: that were asked for.
    """
    masks, further, alive = holders.masks, holders.further, holders.nearest
    found: dict[Hashable, int] = {}
    reached = 0
    for end, number in runs:
        mask = masks[number]
        if mask & further:
            return _match_levels(holders, runs, blocks)
        still = alive & mask
        if still != alive:
            if reached:
                holders.collect_depths(alive ^ still, reached, found)
            alive = still
            if not alive:
                return PrefixMatch(blocks, (found,) * LEVELS)
        reached = end
    if reached:
        holders.collect_depths(alive, reached, found)
    return PrefixMatch(blocks, (found,) * LEVELS)


def _match_levels(holders: HolderSets, runs: Sequence[tuple[int, int]], blocks: int) -> PrefixMatch:
    """The same where not everything is held in the nearest level."""
    live = [(end, holders.masks[number] & holders.live) for end, number in runs]
    seen = 0
    for _, mask in live:
        seen |= mask
    if not seen:
        return PrefixMatch(blocks, (_NOBODY,) * LEVELS)
    nearest = _depths(holders, live, 0)
    if seen == holders.within(seen, 0):
        return PrefixMatch(blocks, (nearest,) * LEVELS)
    return PrefixMatch(blocks, (nearest, *(_depths(holders, live, level) for level in range(1, LEVELS))))


def _depths(holders: HolderSets, runs: Sequence[tuple[int, int]], level: int) -> dict[Hashable, int]:
    """Returns how many blocks each worker has in this level or a nearer one; `runs` has their masks."""
    found: dict[Hashable, int] = {}
    alive, reached = holders.within(runs[0][1], level), 0
    for end, mask in runs:
        still = alive & holders.within(mask, level)
        if still != alive:
            holders.collect_depths(alive & ~still, reached, found)
            alive = still
            if not alive:
                return found
        reached = end
    if alive:
        holders.collect_depths(alive, reached, found)
    return found
