"""Errors in an operator's configuration, reported together and each with its location.

A message names members and says what to do. It never repeats a value that may be a secret.
"""

import re
from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError

from kvparams.settings_model import SettingPath, describe_setting_error, find_setting_errors, join_path

__all__ = ["SECTION_NAME", "ConfigError", "ConfigProblems"]

SECTION_NAME: Final = re.compile(r"[a-z_-]{1,32}")
"""Other keys at the top of a file are not shown: the file may be no fleet file, and hold secrets."""
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

    def add_errors(
        self, error: ValidationError, where: str = "", lines: Mapping[SettingPath, int] | None = None
    ) -> None:
        """Adds everything that a model of settings has found.

        Args:
            error: raised by a `kvparams.settings_model.SettingsModel`.
            where: the path of what was checked.
            lines: the line of each path, where it stands in a file.
        """
        found = find_setting_errors(error)
        shown = found[: max(0, _SHOWN - len(self._found))]
        self._more += len(found) - len(shown)
        for one in shown:
            path = join_path(one["loc"])
            if lines is not None and len(one["loc"]) == 1 and SECTION_NAME.fullmatch(path) is None:
                path = "a key"
            place = f"{where}{'.' if where and path and path[0] != '[' else ''}{path}"
            if lines is not None and (line := _line_of(one["loc"], lines)) is not None:
                place = f"line {line}: {place}" if place else f"line {line}"
            self.add(place, describe_setting_error(one))

    def raise_if_any(self) -> None:
        """Raises `ConfigError` with the problems, if there are any."""
        if self._found:
            raise ConfigError((*self._found, f"and {self._more} more") if self._more else tuple(self._found))


def _line_of(path: SettingPath, lines: Mapping[SettingPath, int]) -> int | None:
    """Returns the line of a path, or of what is around it where the path itself is missing."""
    around = (path[:length] for length in range(len(path), 0, -1))
    return next((lines[one] for one in around if one in lines), None)
