"""Shares the operator's changes: a map of names to values in which the last writer of a name wins.

Revisions are Lamport times: one more than any revision that the writer has seen. Of two equal ones the writer with the
higher number wins, so all proxies end with the same values in whatever order they hear of them. A value that is
removed stays as None, so that an older one cannot come back.
"""

import json
from collections.abc import Callable, Iterator
from typing import Final

from xxhash import xxh3_64_intdigest

from kvparams.replication.entries import Entry, SettingChanged

__all__ = ["SettingsSync"]

_MOST_NAMES: Final = 1 << 15
"""Three for each instance that a fleet may have; beyond, what was removed first is forgotten."""
_REMOVED: Final = b"null"
_MOST_BYTES: Final = 48 << 10
"""Of one value, as JSON."""
_MOST_AHEAD: Final = 1 << 32
"""A revision that is so far ahead of those that were seen is none: a message has 64 bits for it."""


class SettingsSync:
    """The operator's changes at all proxies of a site."""

    def __init__(self, own_id: int, publish: Callable[[Entry], None]) -> None:
        """Creates an empty map.

        Args:
            own_id: the number of this proxy.
            publish: tells the siblings.
        """
        self._own_id = own_id
        self._publish = publish
        self._entries: dict[str, SettingChanged] = {}
        self._digest = 0
        self._revision = 0
        """The highest that was seen."""
        self.apply: Callable[[str, object], None] = lambda name, value: None
        """Puts a value of a sibling to use."""

    @property
    def digest(self) -> str:
        """Tells maps apart whose values or revisions differ."""
        return f"{self._digest:016x}"

    def write(self, name: str, value: object) -> None:
        """Records a change that was made here, and tells it.

        Raises:
            ValueError: it is too long, or there are too many names.
        """
        encoded = json.dumps(value, sort_keys=True).encode()
        if len(encoded) > _MOST_BYTES:
            raise ValueError(f"{name}: a value that proxies share has at most {_MOST_BYTES} bytes")
        entry = SettingChanged(self._revision + 1, self._own_id, name, encoded)
        self._put(entry)
        self._publish(entry)

    def apply_entry(self, entry: SettingChanged) -> None:
        """Applies a change of a sibling, if it is the newest of its name.

        Raises:
            ValueError: its value is not JSON or too long, its revision cannot be, or there are too many names.
        """
        before = self._entries.get(entry.name)
        if before is not None and (before.revision, before.writer) >= (entry.revision, entry.writer):
            return
        if len(entry.value) > _MOST_BYTES:
            raise ValueError("a sibling has changed a setting to a value that is too long")
        if entry.revision > self._revision + _MOST_AHEAD:
            raise ValueError("a sibling has changed a setting in a revision that cannot be")
        try:
            value: object = json.loads(entry.value)
        except RecursionError:
            raise ValueError("a sibling has changed a setting to a value that is nested too deeply") from None
        self._put(entry)
        if before is None or before.value != entry.value:
            self.apply(entry.name, value)

    def _put(self, entry: SettingChanged) -> None:
        before = self._entries.get(entry.name)
        if before is None and len(self._entries) >= _MOST_NAMES:
            removed = next((each for each in self._entries.values() if each.value == _REMOVED), None)
            if removed is None:
                raise ValueError(f"the proxies of a site share at most {_MOST_NAMES} settings; remove instances first")
            self._digest ^= _mark(self._entries.pop(removed.name))
        if before is not None:
            self._digest ^= _mark(self._entries.pop(entry.name))  # the newest stand last
        self._entries[entry.name] = entry
        self._digest ^= _mark(entry)
        self._revision = max(self._revision, entry.revision)

    def snapshot(self) -> Iterator[Entry]:
        """Yields all changes."""
        yield from list(self._entries.values())


def _mark(entry: SettingChanged) -> int:
    return xxh3_64_intdigest(f"{entry.name}\n{entry.revision}\n{entry.writer}".encode())
