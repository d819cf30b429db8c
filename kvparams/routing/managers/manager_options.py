"""Holds the options of one manager: a few values, checked when they are read.

An option that no manager reads is refused, with a list of the known names.
"""

from collections.abc import Mapping, Sequence

from kvparams.settings_model import did_you_mean

__all__ = ["ManagerOptions"]


class ManagerOptions:
    """Values by name. Each is read once, by the manager that it is for."""

    __slots__ = ("_given", "_known")

    def __init__(self, given: Mapping[str, object] | None = None) -> None:
        self._given = dict(given or {})
        self._known: list[str] = []

    def read_bool(self, name: str, default: bool) -> bool:
        """True or false.

        Raises:
            ValueError: it is something else.
        """
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false")
        return value

    def read_int(self, name: str, default: int) -> int:
        """A whole number from 0.

        Raises:
            ValueError: it is something else.
        """
        value = self._take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
            raise ValueError(f"{name} must be a whole number, at least 0")
        return value

    def read_choice(self, name: str, known: Sequence[str]) -> str:
        """A word; the first one where nothing is said.

        Raises:
            ValueError: it is something else.
        """
        value = self._take(name, known[0])
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name} must be {' or '.join(known)}")
        return value

    def reject_unread(self) -> None:
        """Checks that every given option has been read.

        Raises:
            ValueError: more was given.
        """
        for name in self._given:
            nearest = did_you_mean(name, self._known)
            known = f"{nearest}known: {', '.join(self._known)}" if self._known else "it has no options"
            raise ValueError(f"{name[:64]!r} is not an option of this mode; {known}")

    def _take(self, name: str, default: object) -> object:
        self._known.append(name)
        return self._given.pop(name, default)
