"""How a connector uses its store.

The one rule: read once at construction, never changed afterwards.
"""

from dataclasses import dataclass

__all__ = ["ConnectorSettings"]


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """How a connector uses its store."""

    deadline_s: float = 5.0
    """For each job, from its submission on."""
    arena_bytes: int = 64 << 20
    """For pages on their way: a save that finds no room drops pages, a load waits for it."""
    portion_pages: int = 8
    """A load asks the store for so many pages at a time, and for the next ones while it verifies."""
    load_threads: int = 2
    """How many loads make progress at a time."""
    verify: bool = True
    """False uses whatever the store gives back. It exists to show what verification is good for."""
