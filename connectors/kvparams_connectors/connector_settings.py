"""How a connector uses its store.

The one rule: read once at construction, checked there, never changed afterwards.
"""

import math
from dataclasses import dataclass

from kvparams_connectors.grid import Grid

__all__ = ["ConnectorSettings"]


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """How a connector uses its store."""

    deadline_s: float = 5.0
    """For each job, from its submission on."""
    arena_bytes: int = 64 << 20
    """For pages on their way: a save that finds no room drops pages (unless it is required), a load waits for it."""
    portion_pages: int = 8
    """A load asks the store for so many pages at a time, and for the next ones while it verifies and writes."""
    save_portion_pages: int = 4
    """A save gives the store so many pages at a time, and copies the next ones out of the blocks meanwhile."""
    load_threads: int = 2
    """How many loads make progress at a time."""
    verify: bool = True
    """False uses whatever the store gives back. It exists to show what verification is good for."""
    grid: Grid | None = None
    """How pages are cut, so that engines of other parallelism share them (`Grid.shared`); all engines that share need
    the same one. None: each page whole, as far as this engine holds it, for engines of the same parallelism."""
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
        for name in ("arena_bytes", "portion_pages", "save_portion_pages", "load_threads", "bounce_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is at least 1")
        for name in ("deadline_s", "recompute_tokens_per_s", "store_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it is a number above 0")
