"""Defines the objects of a fake Kubernetes API server and their history, with the server's real semantics. Pure.

Every change has a version higher than all before it. A watch gets the changes behind its version in order, or 410 where
some of them are no longer kept. Pages of one list are of one version.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

__all__ = ["Change", "Gone", "ObjectHistory", "Page"]

Labels = Mapping[str, str]


class Gone(Exception):
    """410: the version is no longer kept."""


class Change(NamedTuple):
    """A `Change` is one event of a watch."""

    version: int
    kind: str
    object: Mapping[str, Any]


class Page(NamedTuple):
    """A `Page` is one answer to a list."""

    objects: Sequence[Mapping[str, Any]]
    version: int
    token: str
    """Empty at the end."""


class ObjectHistory:
    """The objects of one kind in one namespace."""

    def __init__(self) -> None:
        self.version = 100
        """Of the last change."""
        self.kept_from = 0
        """Changes up to this version are no longer kept."""
        self._objects: dict[str, dict[str, Any]] = {}
        self._changes: list[Change] = []
        self._lists: dict[str, tuple[list[Mapping[str, Any]], int]] = {}
        self._uids = 0

    def put(self, name: str, labels: Labels, **members: Any) -> None:
        """Creates an object or replaces what it says. `uid` is kept while it exists."""
        before = self._objects.get(name)
        if before is None:
            self._uids += 1
        uid = f"uid-{self._uids}" if before is None else before["metadata"]["uid"]
        self.version += 1
        metadata = {"name": name, "uid": uid, "labels": dict(labels), "resourceVersion": str(self.version)}
        metadata |= members.pop("metadata", {})
        self._objects[name] = {"metadata": metadata, **members}
        self._record("ADDED" if before is None else "MODIFIED", self._objects[name])

    def delete(self, name: str) -> None:
        """Deletes an object, if it is there."""
        found = self._objects.pop(name, None)
        if found is not None:
            self.version += 1
            found["metadata"]["resourceVersion"] = str(self.version)
            self._record("DELETED", found)

    def others_change(self, count: int = 1) -> None:
        """Raises the version, as changes of other objects do."""
        self.version += count

    def forget(self) -> None:
        """Forgets all changes so far: watches and pages of older versions get 410."""
        self.kept_from = self.version
        self._changes.clear()
        self._lists.clear()

    def objects(self, selector: str) -> list[Mapping[str, Any]]:
        """Returns the objects that match now."""
        return [deepcopy(each) for each in self._objects.values() if _matches(each, selector)]

    def page(self, selector: str, limit: int, token: str) -> Page:
        """Returns a page of a list. Raises Gone."""
        if token:
            key, _, start = token.partition("/")
            if key not in self._lists:
                raise Gone
            objects, version = self._lists[key]
            first = int(start)
        else:
            objects, version, first, key = self.objects(selector), self.version, 0, str(len(self._lists) + 1)
            self._lists[key] = objects, version
        end = first + limit
        return Page(objects[first:end], version, f"{key}/{end}" if end < len(objects) else "")

    def since(self, version: int, selector: str) -> Iterator[Change]:
        """Yields the changes behind a version that concern a selector. Raises Gone.

        An object whose labels no longer match is deleted, for the watch.
        """
        if version < self.kept_from:
            raise Gone
        for change in self._changes:
            if change.version > version and _matches(change.object, selector):
                yield change

    def _record(self, kind: str, found: Mapping[str, Any]) -> None:
        self._changes.append(Change(self.version, kind, deepcopy(found)))


def _matches(found: Mapping[str, Any], selector: str) -> bool:
    labels: Labels = found["metadata"]["labels"]
    wanted = [each.partition("=") for each in selector.split(",") if each]
    return all(labels.get(name) == value for name, _, value in wanted)
