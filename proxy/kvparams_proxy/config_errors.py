"""Errors in an operator's configuration, reported together and each with its location.

A message names members and says what to do. It never repeats a value that may be a secret.
"""

from typing import Final

__all__ = ["ConfigError", "ConfigProblems"]

_SHOWN: Final = 20
"""More are counted, not listed: nobody reads them before the first ones are put right."""


class ConfigError(ValueError):
    """The configuration cannot be used. `problems` are sentences, each beginning with its location."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ConfigProblems:
    """Collects what is wrong, so that all of it is said at once."""

    __slots__ = ("_found", "_more")

    def __init__(self) -> None:
        self._found: list[str] = []
        self._more = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, where: str, what: str) -> None:
        """Adds a problem. `where` is a path such as `instances[2].url`, or empty for the whole configuration."""
        if len(self._found) < _SHOWN:
            self._found.append(f"{where}: {what}" if where else what)
        else:
            self._more += 1

    def raise_if_any(self) -> None:
        """Raises `ConfigError` with the problems, if there are any."""
        if self._found:
            raise ConfigError((*self._found, f"and {self._more} more") if self._more else tuple(self._found))
