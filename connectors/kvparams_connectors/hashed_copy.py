"""Copies bytes in host memory and computes their checksums in the same pass.

Native code copies several values a call, without the interpreter lock and past the processor's caches; the Python code
does the same in blocks.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from kvparams.native import NATIVE

__all__ = ["CopyPairs", "copy_hashed"]

_BLOCK: Final = 256 << 10
"""So much is copied before it is hashed, while a core's own cache holds it."""
CopyPairs = list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]
"""Equally long pieces of memory that a value is copied to and from, in order."""


def copy_hashed(values: Sequence[CopyPairs], skip: int = 0) -> list[int]:
    """Copies each value from the second of each pair to the first.

    Args:
        values: what is copied.
        skip: how many bytes at the front of each value are not part of its checksum.

    Returns:
        XXH3-64 of the other bytes of each value, as they were written.
    """
    if NATIVE is not None:
        checksums = NATIVE.copy_values(list(values), skip)
        if checksums is not None:
            return checksums
    return [_copy_in_blocks(pairs, skip) for pairs in values]


def _copy_in_blocks(pairs: CopyPairs, skip: int) -> int:
    """Copies a value; returns its checksum."""
    state = xxh3_64()
    for target, source in pairs:
        for start in range(0, target.size, _BLOCK):
            block = target[start : start + _BLOCK]
            np.copyto(block, source[start : start + _BLOCK])
            if skip < block.size:
                state.update(block[skip:].data)
            skip -= min(skip, block.size)
    return state.intdigest()
