"""Caches the token ids of parts of texts, within a bound.

The least recently used parts are evicted first. A missing part costs its encoding, never a wrong id.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from sys import getsizeof
from typing import Final

__all__ = ["SegmentCache"]

_ENTRY_BYTES: Final = 300
"""Of an entry, beside its text and its ids: measured, rounded up."""


class SegmentCache:
    """The parts of one tokenizer, for several threads."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of texts and ids together. A part of more than an eighth of it is not kept."""
        self.max_bytes: Final = max_bytes
        self._entries: OrderedDict[str, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """The bytes held now."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def look_up(self, parts: Sequence[str]) -> "list[array[int] | None]":
        """Returns the ids of each part, None where they are not known."""
        entries = self._entries
        found: list[array[int] | None] = []
        with self._lock:
            for part in parts:
                ids = entries.get(part)
                if ids is not None:
                    entries.move_to_end(part)
                found.append(ids)
        return found

    def add(self, part: str, ids: "array[int]") -> None:
        """Adds parts and their ids. `ids` are never changed again."""
        size = _size(part, ids)
        if size > self.max_bytes // 8:
            return
        with self._lock:
            if part in self._entries:
                return
            self._entries[part] = ids
            self._bytes += size
            while self._bytes > self.max_bytes:
                self._bytes -= _size(*self._entries.popitem(last=False))


def _size(part: str, ids: "array[int]") -> int:
    return getsizeof(part) + ids.itemsize * len(ids) + _ENTRY_BYTES
