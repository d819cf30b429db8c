"""Provides a store in this process's memory whose values are put and got, as those of a store elsewhere."""

from collections.abc import Iterator

from kvparams_connectors.store import KVStore
from kvparams_connectors.stores.memory.store import MemoryStore

__all__ = ["CopyingStore", "in_place_and_copied"]


class CopyingStore(MemoryStore):
    """A `MemoryStore` without access in place."""

    @property
    def memory(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns nothing: every value is copied."""
        return None


def in_place_and_copied(kind: str, size_bytes: int) -> Iterator[KVStore]:
    """Yields a store for a fixture: of the kind `in place`, whose values are read and written in place, or `copied`."""
    store = (MemoryStore if kind == "in place" else CopyingStore)(size_bytes, unit_bytes=4096)
    yield store
    assert store.pinned_count == 0, "a value is still pinned"
    store.close()
