"""Keeps the objects of a list up to date with the events of a watch. Pure.

An event whose version is not newer than the object's is ignored: a watch that is begun anew may repeat events.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

__all__ = ["WatchedObjects", "name_of", "version_of"]


class WatchedObjects:
    """The objects of one kind by uid, or by name where an object has no uid."""

    def __init__(self) -> None:
        self.version = ""
        """Of the last list or event: where the next watch begins."""
        self._objects: dict[str, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def objects(self) -> Mapping[str, Mapping[str, Any]]:
        """The objects by key."""
        return self._objects

    def replace(self, objects: Iterable[Mapping[str, Any]], version: str) -> None:
        """Takes the objects of a list."""
        self._objects = {_key(each): each for each in objects}
        self.version = version

    def apply(self, kind: str, changed: Mapping[str, Any]) -> bool:
        """Applies an event, and returns whether an object has changed."""
        version = version_of(changed)
        if version:
            self.version = version
        if kind == "DELETED":
            return self._objects.pop(_key(changed), None) is not None
        if kind not in ("ADDED", "MODIFIED"):
            return False
        before = self._objects.get(_key(changed))
        if before is not None and _is_newer(before, changed):
            return False
        self._objects[_key(changed)] = changed
        return True


def version_of(document: Mapping[str, Any]) -> str:
    """Returns an object's resourceVersion; empty where it has none."""
    return str(_metadata(document).get("resourceVersion") or "")


def _is_newer(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether `one` is newer than `other`; versions that are no numbers cannot be compared."""
    first, second = version_of(one), version_of(other)
    return first.isdecimal() and second.isdecimal() and int(first[:40]) > int(second[:40])


def _metadata(document: Mapping[str, Any]) -> Mapping[str, Any]:
    found = document.get("metadata")
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def name_of(document: Mapping[str, Any]) -> str:
    """Returns an object's name."""
    return str(_metadata(document).get("name") or "")


def _key(document: Mapping[str, Any]) -> str:
    return str(_metadata(document).get("uid") or name_of(document))
