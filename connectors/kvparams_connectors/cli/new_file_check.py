"""Finds the files that opening a store would create, before the tools open it.

A command that only looks leaves nothing behind. A `file` store that is opened without `size` and does not exist would
be created with a gigabyte, perhaps at a mistyped path: this is refused. With `size` it is created, and removed again;
an empty file is emptied again.
"""

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvparams_connectors.store_url import StoreError, StoreURL

__all__ = ["refuse_new_file", "removed_if_new"]

_TIERS: Final = frozenset({"l1", "l2", "l3", "l4"})


def refuse_new_file(url: str) -> None:
    """Refuse a `file` URL, or one among a tiered store's tiers, that names no size and a file that is not there.

    Raises:
        StoreError: it is one; or it is no URL.
    """
    for one, path in _missing_files(url):
        if "size" not in one.settings:
            raise StoreError(f"file store: {path} does not exist. Check the path, or add size=1GiB to create it")


@contextmanager
def removed_if_new(url: str) -> Generator[None]:
    """Removes at the end the files of `file` stores that did not exist at the beginning; empty ones are empty again."""
    new = [path for _, path in _missing_files(url)]
    empty = [path for _, path in _files(url) if path.is_file() and path.stat().st_size == 0]
    try:
        yield
    finally:
        for path in new:
            path.unlink(missing_ok=True)
        for path in empty:
            os.truncate(path, 0)


def _missing_files(url: str) -> Iterator[tuple[StoreURL, Path]]:
    """Yields each `file` URL, alone or among the tiers of a store, whose file does not exist."""
    return ((one, path) for one, path in _files(url) if not path.exists())


def _files(url: str) -> Iterator[tuple[StoreURL, Path]]:
    """Yields each `file` URL, alone or among the tiers of a store, with its path."""
    parsed = StoreURL.parse(url)
    tiers = [text for name, text in parsed.settings.items() if parsed.scheme == "tiered" and name in _TIERS]
    for one in (parsed, *map(StoreURL.parse, tiers)):
        path = Path(one.path)
        if one.scheme == "file" and path.is_absolute():
            yield one, path
