"""Describes where a page lies in memory: some stretches of bytes, in their order.

The order of the stretches is the order of the bytes in the store.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvparams_connectors.hashed_copy import CopyPairs, copy_hashed

__all__ = ["PageBuffers", "flat_bytes", "gather_page", "scatter_page"]

PageBuffers = Sequence[NDArray[np.uint8]]
"""Stretches of memory, contiguous and writable."""


def flat_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor of this machine's memory, as they lie there; it is kept alive."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def gather_page(place: PageBuffers, target: memoryview) -> int:
    """Copies a page out, its stretches one after the other; returns XXH3-64 of it. Other threads run meanwhile."""
    into = np.frombuffer(target, np.uint8)
    pairs: CopyPairs = []
    at = 0
    for stretch in place:
        pairs.append((into[at : at + stretch.nbytes], stretch))
        at += stretch.nbytes
    return copy_hashed([pairs])[0]


def scatter_page(source: memoryview, place: PageBuffers) -> None:
    """Copy a page in."""
    taken = np.frombuffer(source, np.uint8)
    at = 0
    for stretch in place:
        np.copyto(stretch, taken[at : at + stretch.nbytes])
        at += stretch.nbytes
