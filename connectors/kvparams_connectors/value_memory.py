"""Defines access in place to values that lie in this process's memory.

It spares the copy between a caller's buffer and a store. As in Apache Arrow's Plasma store, a value is created, written
and published, or pinned, read and unpinned.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvparams_connectors.store_operations import ResultCode

__all__ = ["CreatedValue", "PinnedValue", "ValueMemory"]


class CreatedValue(NamedTuple):
    """A new value that nobody else can see."""

    key: str
    view: memoryview
    """Its bytes, to be written."""
    value: object
    """What the store knows of it."""


class PinnedValue(NamedTuple):
    """A value that stays where it is, whatever is put or deleted, until it is unpinned."""

    nbytes: int
    views: tuple[memoryview, ...]
    """Its bytes, in order. Not to be written."""
    addresses: tuple[tuple[int, int], ...]
    """Where they are: addresses and lengths."""
    generation: int
    """Another value that was put later, under the same key or not, has another one."""
    value: object
    """What the store knows of it."""


class ValueMemory(Protocol):
    """The values of a store in this process's memory. Every method returns at once; any thread may call it."""

    def create_values(self, wanted: Sequence[tuple[str, int]]) -> list[CreatedValue | ResultCode]:
        """Makes room for values of so many bytes, each in one piece; each is to be published or abandoned.

        Returns:
            EXISTS for a value that is there. Another code says why there is no room now, and `KVStore.put` may still
            find some: it waits for whoever writes the same value, and puts a value in pieces.
        """
        ...

    def publish_values(self, values: Sequence[CreatedValue]) -> None:
        """Makes values visible that are written; nothing writes them any more."""
        ...

    def abandon_values(self, values: Sequence[CreatedValue]) -> None:
        """Gives the room back of values that are not published."""
        ...

    def use_values(self, keys: Sequence[str]) -> None:
        """Says that these were used together, the first one last; see `KVStore`."""
        ...

    def pin_values(self, keys: Sequence[str]) -> list[PinnedValue | None]:
        """Pins the values that are there, which counts as a use; each is to be unpinned once."""
        ...

    def unpin_values(self, held: Iterable[PinnedValue]) -> None:
        """Says that these are not read any more."""
        ...
