"""Defines the settings by which a connector uses its store.

Read once at construction, checked there, never changed afterwards.
"""

import math
from dataclasses import dataclass
from typing import Final

from kvparams_connectors.transfer.shard_grid import ShardGrid

__all__ = ["ConnectorSettings"]

_PORTION: Final = 8 << 20
"""With less at a time a store's own questions, and handing it over, would weigh more than the pages."""
_MOST_PAGES: Final = 64


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """A `ConnectorSettings` says how a connector uses its store."""

    deadline_s: float = 5.0
    """For each job, from its submission on."""
    arena_bytes: int = 64 << 20
    """For pages on their way: a save that finds no room drops pages (unless it is required), a load waits for it."""
    portion_pages: int | None = None
    """A load asks the store for so many pages at a time, and for the next ones while it verifies and writes. None: for
    about 8 MiB, at most 64 pages."""
    save_portion_pages: int | None = None
    """A save gives the store so many pages at a time, and copies the next ones out of the blocks meanwhile. None: for
    about 8 MiB, at most 64 pages."""
    verify: bool = True
    """False uses whatever the store gives back. It exists to show what verification is good for."""
    grid: ShardGrid | None = None
    """How pages are cut, so that engines of other parallelism share them (`ShardGrid.shared`); all engines that share
    need the same one. None: each page whole, as far as this engine holds it, for engines of the same parallelism."""
    load_only: bool = False
    """Nothing is saved; then an engine may hold only a part of a unit, and loads take what it needs."""
    recompute_tokens_per_s: float | None = None
    """How fast this engine computes a prompt. A load that would take longer, by the measured rate of loads, is skipped;
    every 16th of those goes ahead, so that the measurement does not grow old. None: no load is skipped."""
    store_bytes_per_s: float | None = None
    """The rate of loads until one has been measured. None: the first loads go ahead."""
    bounce_bytes: int = 256 << 20
    """Device memory for pages on their way, for saves and again for loads; not used on a CPU."""

    def __post_init__(self) -> None:
        for name in ("arena_bytes", "portion_pages", "save_portion_pages", "bounce_bytes"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; it is at least 1")
        for name in ("deadline_s", "recompute_tokens_per_s", "store_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it is a number above 0")

    def load_portion(self, page_bytes: int) -> int:
        """Returns the number of pages of this size that a load asks for at a time."""
        return self.portion_pages or _pages_of(_PORTION, page_bytes)

    def save_portion(self, page_bytes: int) -> int:
        """Returns the number of pages of this size that a save puts at a time."""
        return self.save_portion_pages or _pages_of(_PORTION, page_bytes)


def _pages_of(portion_bytes: int, page_bytes: int) -> int:
    return min(_MOST_PAGES, -(-portion_bytes // page_bytes))
