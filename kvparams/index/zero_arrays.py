"""Arrays of zeros that the system commits a small page at a time.

Where numpy asks for huge pages, as it does on Linux, the first touch of each has the kernel find and clear two
megabytes: some milliseconds, and several arrays reach their next one in the same step. Ordinary pages cost that step
nothing that can be seen, and a question a microsecond.
"""

import mmap
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["lazy_zeros"]

_LARGE: Final = 1 << 20
"""Bytes; numpy asks for huge pages for four times as many or more."""


def lazy_zeros(length: int, dtype: DTypeLike) -> NDArray[Any]:
    """As `numpy.zeros`, for one dimension."""
    size = length * np.dtype(dtype).itemsize
    if size < _LARGE or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(length, dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype)
