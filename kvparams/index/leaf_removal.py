"""Removes leaves of the block tree, and the ancestors that become leaves by that."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvparams.index.hash_table import NodeNumbers
from kvparams.native import NATIVE

__all__ = ["EVERY", "FREED", "NodeLinks", "RemovedLeaves", "remove_leaves"]

FREED: Final = 0xFFFFFFFF
"""Stands for the number of children where there is no node."""
EVERY: Final = 1 << 31


class NodeLinks(NamedTuple):
    """The arrays of a block tree that say which nodes may go, by node number."""

    parents: memoryview
    children: memoryview
    """How many nodes stand behind this one."""
    sets: memoryview
    epochs: memoryview
    is_queued: memoryview
    """Whether the node is in an eviction bucket."""


class RemovedLeaves(NamedTuple):
    """The outcome of `remove_leaves`."""

    left: int
    """How many candidates, from the first one on, were not looked at."""
    removed: NodeNumbers
    queued: NodeNumbers
    """Nodes that belong into the eviction buckets from now on."""


def remove_leaves(links: NodeLinks, candidates: bytearray | NDArray[np.uint32], epoch: int, most: int) -> RemovedLeaves:
    """Removes those of these nodes that have no children, from the last one on, and their ancestors.

    An ancestor goes when it has no other children, if nobody holds it, or if it was last used by `epoch` and fewer than
    `most` are gone. No further candidate is looked at when so many are gone.

    Args:
        links: the tree.
        candidates: node numbers.
        epoch: of the eviction bucket that the candidates are taken out of; those that were used later are queued again.
            0: they come from no bucket, and all that are leaves go.
        most: nodes; an unheld ancestor goes even so.
    """
    if NATIVE is not None:
        left, removed, queued = NATIVE.remove_leaves(links, candidates, epoch, most)
        return RemovedLeaves(left, np.frombuffer(removed, np.uint32), np.frombuffer(queued, np.uint32))
    children, epochs, is_queued = links.children, links.epochs, links.is_queued
    removed_numbers: list[int] = []
    queued_numbers: list[int] = []
    numbers = np.frombuffer(candidates, np.uint32)
    left = len(numbers)
    while left and len(removed_numbers) < most:
        left -= 1
        number = numbers.item(left)
        if epoch:
            is_queued[number] = 0
        if not children[number]:
            if epoch and epochs[number] > epoch:
                top = number
            else:
                top = _climb(links, number, epoch, most, removed_numbers)
            if top and not is_queued[top]:
                is_queued[top] = 1
                queued_numbers.append(top)
    return RemovedLeaves(left, np.array(removed_numbers, np.uint32), np.array(queued_numbers, np.uint32))


def _climb(links: NodeLinks, number: int, epoch: int, most: int, removed: list[int]) -> int:
    """Removes a leaf and ancestors; returns the ancestor that has become a leaf and stays, or 0."""
    parents, children, sets, epochs = links.parents, links.children, links.sets, links.epochs
    while True:
        removed.append(number)
        children[number] = FREED
        number = parents[number]
        if not number:
            return 0
        left = children[number] - 1
        children[number] = left
        if left:
            return 0
        if sets[number] and (epochs[number] > epoch or len(removed) >= most):
            return number
