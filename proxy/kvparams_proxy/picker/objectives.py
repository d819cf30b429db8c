"""Finds the priorities of requests by the objective that they name.

Source: `InferenceObjective` of the Gateway API Inference Extension.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol, cast

__all__ = ["OBJECTIVE_HEADER", "ObjectiveSource", "StaticObjectives", "WatchedObjectives", "parse_objectives"]

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


class WatchedObjectives:
    """The objectives of an InferencePool, as the Kubernetes API has them: an `ObjectiveSource`.

    Source: gateway-api-inference-extension v1.0.0, `apix/v1alpha2/inferenceobjective_types.go`: an objective without a
    priority has 0.
    """

    def __init__(self, pool: str, others: Mapping[str, int]) -> None:
        """`others`: those of flags, which count more."""
        self._pool = pool
        self._others = dict(others)
        self._found: dict[str, int] = {}

    def priority(self, name: str) -> int | None:
        """See `ObjectiveSource.priority`."""
        found = self._others.get(name)
        return self._found.get(name) if found is None else found

    def replace(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Takes the objectives of all pools. One without a usable priority is none."""
        self._found = {}
        for each in objects:
            spec = _mapping(each, "spec")
            priority = spec.get("priority", 0)
            if _mapping(spec, "poolRef").get("name") == self._pool and type(priority) is int and abs(priority) < _MOST:
                self._found[str(_mapping(each, "metadata").get("name"))] = priority


def _mapping(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


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
