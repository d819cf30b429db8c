"""Finds the priorities of requests by the objective that they name.

Source: `InferenceObjective` of the Gateway API Inference Extension.
"""

from collections.abc import Mapping
from typing import Final, Protocol

__all__ = ["OBJECTIVE_HEADER", "ObjectiveSource", "StaticObjectives", "parse_objectives"]

OBJECTIVE_HEADER: Final = b"x-gateway-inference-objective"
_MOST: Final = 1 << 31


class ObjectiveSource(Protocol):
    """Knows the objectives of a pool: those of flags, or of a Kubernetes API."""

    def priority(self, name: str) -> int | None:
        """Returns the priority of an objective, or None if there is none of this name.

        Requests of a priority below 0 are dropped where they would have to wait.
        """
        ...


class StaticObjectives:
    """The objectives that flags name: an `ObjectiveSource`."""

    def __init__(self, priorities: Mapping[str, int]) -> None:
        self._priorities = dict(priorities)

    def priority(self, name: str) -> int | None:
        """See `ObjectiveSource.priority`."""
        return self._priorities.get(name)


def parse_objectives(given: list[str]) -> dict[str, int]:
    """Parses flags of the form NAME=PRIORITY.

    Raises:
        ValueError: one has another form.
    """
    found: dict[str, int] = {}
    for each in given:
        name, _, priority = each.partition("=")
        try:
            found[name] = int(priority)
        except ValueError:
            name = ""
        if not name or abs(found[name]) >= _MOST:
            raise ValueError(f"{each[:200]!r} must be NAME=PRIORITY, a whole number")
    return found
