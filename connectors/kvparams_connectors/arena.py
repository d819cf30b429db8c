"""Page-sized buffers, allocated once, touched once, leased and given back.

Fresh memory is the dominant cost of moving pages, so the steady path allocates none. A slot is given back only when
nothing uses it any more: by `Job.add_settled_callback`, never at the end of a wait.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

__all__ = ["Arena", "Slot"]

_ALIGNMENT: Final = 4096


class Slot:
    """A `Slot` is a leased buffer."""

    def __init__(self, arena: "Arena", index: int, view: memoryview) -> None:
        self.arena: Final = arena
        self.index: Final = index
        self.view: Final = view
        """`slot_bytes` writable bytes, aligned to 64."""

    def release(self) -> None:
        """End the lease.

        Raises:
            RuntimeError: it has ended already: two owners would write over each other.
        """
        self.arena.release(self)


class Arena:
    """A fixed number of equal slots in one piece of memory."""

    def __init__(
        self, size_bytes: int, slot_bytes: int, *, allocate: Callable[[int], memoryview] | None = None
    ) -> None:
        """Allocates the memory and touches every page of it.

        Args:
            size_bytes: the size of all slots together, in bytes; at least one slot is allocated.
            slot_bytes: the usable size of one slot, in bytes; rounded up to a multiple of 64 in memory.
            allocate: returns so many writable bytes; None: ordinary memory. Transfers to a GPU need pinned memory.

        Raises:
            ValueError: a slot has no byte.
        """
        if slot_bytes < 1:
            raise ValueError(f"slot_bytes is {slot_bytes}; a slot has at least one byte")
        stride = -(-slot_bytes // 64) * 64
        self.slot_bytes: Final = slot_bytes
        self.slots: Final = max(1, size_bytes // stride)
        nbytes = self.slots * stride + _ALIGNMENT
        memory = np.empty(nbytes, np.uint8) if allocate is None else np.frombuffer(allocate(nbytes), np.uint8)
        memory.fill(0)  # touch every page now, not during a transfer
        offset = -memory.ctypes.data % _ALIGNMENT
        whole = memory.data[offset : offset + self.slots * stride]
        self.memory: Final = whole
        """All slots: what a store registers."""
        self._views = [whole[start : start + slot_bytes] for start in range(0, self.slots * stride, stride)]
        self._changed = threading.Condition(threading.Lock())
        self._free = list(range(self.slots))[::-1]
        self._leased: dict[int, Slot] = {}

    @property
    def free_slots(self) -> int:
        """Returns how many slots are not leased."""
        with self._changed:
            return len(self._free)

    def lease(self, timeout_s: float = 0.0) -> Slot | None:
        """A slot, or None if none comes free within `timeout_s`; its content is whatever was left there."""
        slots = self.lease_many(1, 1, timeout_s)
        return slots[0] if slots else None

    def lease_many(self, least: int, most: int, timeout_s: float = 0.0) -> list[Slot]:
        """As many slots as are free, at most `most`; none at all if fewer than `least` come free within `timeout_s`.

        Whoever needs several at once must not lease one after the other: two of them would wait for each other.
        """
        with self._changed:
            if len(self._free) < least and not self._changed.wait_for(lambda: len(self._free) >= least, timeout_s):
                return []
            slots: list[Slot] = []
            for _ in range(min(most, len(self._free))):
                index = self._free.pop()
                slot = self._leased[index] = Slot(self, index, self._views[index])
                slots.append(slot)
        return slots

    def release(self, slot: Slot) -> None:
        """End the lease of `slot`; see `Slot.release`."""
        self.release_many((slot,))

    def release_many(self, slots: Iterable[Slot]) -> None:
        """Ends the leases of several slots; see `Slot.release`."""
        with self._changed:
            try:
                for slot in slots:
                    if self._leased.get(slot.index) is not slot:
                        raise RuntimeError(f"slot {slot.index} was given back twice")
                    del self._leased[slot.index]
                    self._free.append(slot.index)
            finally:
                self._changed.notify_all()  # those who wait want different numbers
