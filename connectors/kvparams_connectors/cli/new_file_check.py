"""Checks whether a store would be made by opening it, before the tools open it.

A command that only looks creates nothing. A `file` store that is opened without `size` and is not there would be made,
with a gigabyte of its own; behind a mistyped path it would stay.
"""

from pathlib import Path
from typing import Final

from kvparams_connectors.store_url import StoreError, StoreURL

__all__ = ["refuse_new_file"]

_TIERS: Final = frozenset({"l1", "l2", "l3", "l4"})


def refuse_new_file(url: str) -> None:
    """Refuse a `file` URL, or one among a tiered store's tiers, that names no size and a file that is not there.

    Raises:
        StoreError: it is one; or it is no URL.
    """
    parsed = StoreURL.parse(url)
    tiers = [text for name, text in parsed.settings.items() if parsed.scheme == "tiered" and name in _TIERS]
    for one in (parsed, *map(StoreURL.parse, tiers)):
        path = Path(one.path)
        if one.scheme == "file" and "size" not in one.settings and path.is_absolute() and not path.exists():
            raise StoreError(f"file store: {path} does not exist. Check the path, or add size=1GiB to create it")
