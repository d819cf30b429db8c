"""Memory that Mooncake may read and write: what was registered with it, and how a value lies in it.

The client library reads and writes only registered memory, and checks nothing: a wrong address ends the process. So an
address is handed out only together with the object that keeps its memory alive.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvparams_connectors.arena import Arena

__all__ = ["MemoryRegion", "RegisteredMemory", "RegisteredRegions", "leading_ranges", "memory_regions"]


class MemoryRegion:
    """A stretch of memory, which lives as long as this does."""

    __slots__ = ("_memory", "_owner", "address", "nbytes")

    def __init__(self, memory: memoryview) -> None:
        """Keeps the memory alive as long as the region lives.

        Args:
            memory: contiguous bytes, at least one.

        Raises:
            ValueError: the memory was released.
        """
        self._memory = memory
        self.nbytes = memory.nbytes
        if memory.readonly:
            self._owner = np.frombuffer(memory, dtype=np.uint8)
            self.address = int(self._owner.ctypes.data)
        else:  # five times as fast, and it is done for every page
            self._owner = ctypes.c_char.from_buffer(memory)
            self.address = ctypes.addressof(self._owner)

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes."""
        return np.frombuffer(self._memory, dtype=np.uint8)


def memory_regions(buffers: Sequence[memoryview]) -> list[MemoryRegion]:
    """The stretches of memory of these buffers, empty ones left out.

    Raises:
        ValueError: the caller has released one of them.
    """
    return [MemoryRegion(buffer) for buffer in buffers if buffer.nbytes]


def leading_ranges(pieces: Sequence[MemoryRegion], nbytes: int) -> tuple[list[int], list[int]]:
    """Addresses and lengths of the first `nbytes` bytes of these pieces."""
    if len(pieces) == 1 and nbytes and nbytes <= pieces[0].nbytes:
        return [pieces[0].address], [nbytes]
    addresses: list[int] = []
    lengths: list[int] = []
    for piece in pieces:
        if nbytes == 0:
            break
        length = min(piece.nbytes, nbytes)
        addresses.append(piece.address)
        lengths.append(length)
        nbytes -= length
    return addresses, lengths


class RegisteredRegions:
    """The registered stretches, in the order of their addresses. Replaced as a whole, so it is read without a lock."""

    def __init__(self, stretches: Sequence[MemoryRegion] = ()) -> None:
        self._stretches: Final = sorted(stretches, key=lambda piece: piece.address)
        for low, high in pairwise(self._stretches):
            if low.address + low.nbytes > high.address:
                raise ValueError("two registered stretches overlap")

    @property
    def addresses(self) -> list[int]:
        """Returns where each begins."""
        return [stretch.address for stretch in self._stretches]

    def with_one_more(self, piece: MemoryRegion) -> "RegisteredRegions":
        """These and `piece`. Raises ValueError if it overlaps with one of them."""
        return RegisteredRegions([*self._stretches, piece])

    def covers(self, pieces: Sequence[MemoryRegion]) -> bool:
        """Returns whether each of these lies within one registered stretch."""
        for piece in pieces:
            start, end = piece.address, piece.address + piece.nbytes
            for stretch in self._stretches:
                if stretch.address <= start and end <= stretch.address + stretch.nbytes:
                    break
            else:
                return False
        return True


class RegisteredMemory:
    """A `RegisteredMemory` holds all registered memory: connectors' arenas, and a staging area for other values."""

    def __init__(
        self,
        register: Callable[[int, int], int],
        unregister: Callable[[int], int],
        staging_bytes: int,
        threads: int,
    ) -> None:
        """Allocates the staging area and registers it with the library.

        Args:
            register: `Client.register`.
            unregister: `Client.unregister`.
            staging_bytes: the size of the staging area for all threads together, in bytes.
            threads: the number of threads that may use the staging area at a time.

        Raises:
            MemoryError: the library does not accept the staging area.
        """
        self._register: Final = register
        self._unregister: Final = unregister
        self._changing: Final = threading.Lock()
        self.regions = RegisteredRegions()
        slot_bytes = staging_bytes // threads // 64 * 64
        self.staging: Final = Arena(slot_bytes * threads, slot_bytes)
        if not self.add(self.staging):
            raise MemoryError(f"{staging_bytes} bytes of staging memory were not taken")

    def add(self, arena: Arena) -> bool:
        """Register an arena's memory, which is kept from now on; whether the library takes it."""
        [piece] = memory_regions([arena.memory])
        with self._changing:
            if self.regions.covers([piece]):
                return True
            try:
                regions = self.regions.with_one_more(piece)
            except ValueError:
                return False
            if self._register(piece.address, piece.nbytes) != 0:
                return False
            self.regions = regions
            return True

    def release(self) -> None:
        """The library forgets all of it; nothing reads or writes any more."""
        with self._changing:
            for address in self.regions.addresses:
                self._unregister(address)
            self.regions = RegisteredRegions()
