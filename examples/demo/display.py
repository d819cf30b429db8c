"""Prints the demo's progress and counts its failures.

No fault is forgotten; `failures` decides the exit status.
"""

import time
from typing import Final

__all__ = ["Display"]

_COLUMNS: Final = (
    ("conversation", 13),
    ("turn", 4),
    ("P", 3),
    ("D", 3),
    ("prompt", 6),
    ("cached", 6),
    ("new", 5),
    ("answer", 6),
    ("TTFT ms", 8),
    ("KV to P", 11),
    ("KV to D", 11),
    ("D new", 5),
    ("equal", 5),
)


class Display:
    """Lines with the time since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.failures: list[str] = []

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def step(self, text: str) -> None:
        """Say what happens now."""
        print(f"[{self.elapsed_s:5.1f} s] {text}", flush=True)

    def check(self, good: bool, text: str) -> None:
        """Say what was found, and remember it if it is not as it must be."""
        self.step(f"{'ok' if good else 'WRONG'}: {text}")
        if not good:
            self.failures.append(text)

    def header(self, unit: str) -> None:
        """The head of the table; `unit` is that of KV."""
        names = ((f"{name} {unit}" if name.startswith("KV") else name, width) for name, width in _COLUMNS)
        print("\n" + "  ".join(name.rjust(width) for name, width in names), flush=True)

    def row(self, *cells: object) -> None:
        """Prints one request."""
        texts = (f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
        print("  ".join(text.rjust(width) for text, (_, width) in zip(texts, _COLUMNS, strict=True)), flush=True)
