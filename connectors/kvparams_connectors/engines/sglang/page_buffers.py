"""Describes where a page lies in memory: some stretches of bytes, in their order.

The order of the stretches is the order of the bytes in the store.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["PageBuffers", "flat_bytes", "gather_page", "scatter_page"]

PageBuffers = Sequence[NDArray[np.uint8]]
"""Stretches of memory, contiguous and writable."""


def flat_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor of this machine's memory, as they lie there; it is kept alive."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def gather_page(place: PageBuffers, target: memoryview) -> None:
    """Copy a page out, its stretches one after the other."""
    into = np.frombuffer(target, np.uint8)
    at = 0
    for stretch in place:
        np.copyto(into[at : at + stretch.nbytes], stretch)  # other threads run meanwhile
        at += stretch.nbytes


def scatter_page(source: memoryview, place: PageBuffers) -> None:
    """Copy a page in."""
    taken = np.frombuffer(source, np.uint8)
    at = 0
    for stretch in place:
        np.copyto(stretch, taken[at : at + stretch.nbytes])
        at += stretch.nbytes
