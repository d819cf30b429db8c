"""Single settings as an engine's own configuration holds them: JSON values, checked one by one.

What cannot be meant is refused in words that name the setting; None is a setting that is not there.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from kvparams_connectors.store_url import StoreError

__all__ = ["SettingValues"]


class SettingValues:
    """A `SettingValues` reads one configuration; every method raises StoreError for a wrong value."""

    def __init__(self, found: Mapping[str, object], where: str) -> None:
        """`where` they stand, as an error begins before the setting's name."""
        self._found = found
        self._where = where

    def read_text(self, name: str) -> str | None:
        """A text that is not empty."""
        value = self._found.get(name)
        if value is None or (isinstance(value, str) and value):
            return value
        raise self._refused(name, "text, not empty")

    def read_path(self, name: str) -> Path | None:
        """The path of a file, which is not looked at."""
        value = self.read_text(name)
        return None if value is None else Path(value)

    def read_int(self, name: str) -> int | None:
        """A whole number above 0."""
        value = self._found.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise self._refused(name, "a whole number, at least 1")

    def read_float(self, name: str, most: float = math.inf) -> float | None:
        """A finite number above 0, at most `most`."""
        value = self._found.get(name)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most and value < math.inf:
            return float(value)
        raise self._refused(name, "a number above 0" if most == math.inf else f"a number above 0, at most {most:.0f}")

    def read_bool(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._found.get(name, default)
        if isinstance(value, bool):
            return value
        raise self._refused(name, "true or false")

    def _refused(self, name: str, wanted: str) -> StoreError:
        return StoreError(f"{self._where}{name} is {self._found.get(name)!r}; it is {wanted}")
