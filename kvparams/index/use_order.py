"""Sorts nodes by when they were used last, in steps of bounded time."""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvparams.index.hash_table import NodeNumbers

__all__ = ["used_last_first"]

_AGES: Final = 1 << 16
"""Epochs that are told apart; whatever is older counts as equally old."""


def used_last_first(
    nodes: Iterable[tuple[NodeNumbers, NDArray[np.uint32]]], epoch: int, piece: int
) -> Iterator[NodeNumbers]:
    """Yields nodes that were used last first, in the order given where the epoch is the same.

    Args:
        nodes: some nodes at a time, and the epochs in which they were used last.
        epoch: the last one when this began.
        piece: nodes to yield at a time. An empty piece comes after each step in which nothing can be yielded yet.
    """
    parts: list[tuple[NodeNumbers, NDArray[np.uint16]]] = []
    counts = np.zeros(_AGES, np.int64)
    for numbers, epochs in nodes:
        ages = np.clip(epoch - epochs.astype(np.int64), 0, _AGES - 1).astype(np.uint16)
        order = ages.argsort(kind="stable")
        parts.append((numbers.take(order), ages.take(order)))
        counts += np.bincount(ages, minlength=_AGES)
        yield numbers[:0]
    until = counts.cumsum()
    begins, begin = [0] * len(parts), 0
    while begin < until[-1]:
        age = int(until.searchsorted(begin + piece))
        ends = [int(ages.searchsorted(age, "right")) for _, ages in parts]
        found = [part[first:end] for (part, _), first, end in zip(parts, begins, ends, strict=True)]
        ages = [part[first:end] for (_, part), first, end in zip(parts, begins, ends, strict=True)]
        ordered = np.concatenate(found).take(np.concatenate(ages).argsort(kind="stable"))
        for first in range(0, len(ordered), piece):
            yield ordered[first : first + piece]
        begins, begin = ends, begin + len(ordered)
