"""Shares the operator's changes: a map of names to values in which the last writer of a name wins.

Revisions are Lamport times: one more than any revision that the writer has seen. Of two equal ones the writer with the
higher number wins, so all proxies end with the same values in whatever order they hear of them. A value that is
removed stays as None, so that an older one cannot come back.
"""

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Final

from kvparams.replication.entries import Entry, SettingChanged

__all__ = ["SettingsSync"]

_MOST_NAMES: Final = 4096
_MOST_BYTES: Final = 48 << 10
"""Of one value, as JSON."""


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
        self._digest: str | None = None
        self.apply: Callable[[str, object], None] = lambda name, value: None
        """Puts a value of a sibling to use."""

    @property
    def digest(self) -> str:
        """Tells maps apart whose values or revisions differ."""
        if self._digest is None:
            known = sorted((entry.name, entry.revision, entry.writer) for entry in self._entries.values())
            self._digest = sha256(repr(known).encode()).hexdigest()[:16]
        return self._digest

    def write(self, name: str, value: object) -> None:
        """Records a change that was made here, and tells it.

        Raises:
            ValueError: it is too long, or there are too many names.
        """
        encoded = json.dumps(value, sort_keys=True).encode()
        if len(encoded) > _MOST_BYTES or (name not in self._entries and len(self._entries) >= _MOST_NAMES):
            raise ValueError(f"{name}: the proxies of a site share {_MOST_NAMES} values of {_MOST_BYTES} bytes at most")
        revision = 1 + max((entry.revision for entry in self._entries.values()), default=0)
        entry = self._entries[name] = SettingChanged(revision, self._own_id, name, encoded)
        self._digest = None
        self._publish(entry)

    def apply_entry(self, entry: SettingChanged) -> None:
        """Applies a change of a sibling, if it is the newest of its name.

        Raises:
            ValueError: its value is not JSON, or there are too many names.
        """
        before = self._entries.get(entry.name)
        if before is not None and (before.revision, before.writer) >= (entry.revision, entry.writer):
            return
        if before is None and len(self._entries) >= _MOST_NAMES:
            raise ValueError("a sibling has changed more settings than a site may have")
        if len(entry.value) > _MOST_BYTES:
            raise ValueError("a sibling has changed a setting to a value that is too long")
        value: object = json.loads(entry.value)
        self._entries[entry.name] = entry
        self._digest = None
        if before is None or before.value != entry.value:
            self.apply(entry.name, value)

    def snapshot(self) -> Iterator[Entry]:
        """Yields all changes."""
        yield from list(self._entries.values())
